"""Overrides of a recipe (`key.path=value`), and lists that stand for mappings."""

from __future__ import annotations

import json
import re
from typing import Any

from concept_eraser.storage.readers import parse_yaml
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError, quote

# `method: munba` is {name: munba}; all else is {prompts: ...}
DEEPEST = 10  # names in the path of an override
SHORT = {"method": "name", "finish": "name", "trainable": "select", "rewinding": "data"}
# characters that JSON writes as they are, but YAML refuses or folds into a space
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufffe\uffff]")


def concepts(value: list[Any]) -> Any:
    """Return the objective or objectives that a list under `forget` stands for.

    A list of texts is one objective's prompts. With a mapping among its entries, each entry is one
    concept; a single entry is the objective itself. Raises ValueError for a list of names of prompt
    sets, which may mean either.
    """
    if all(isinstance(item, str) for item in value):
        set_names = resources.names("prompts")
        if len(value) > 1 and all(item in set_names for item in value):
            example = ", ".join(f"{{prompts: {item}}}" for item in value)
            raise ValueError(
                "a list of texts is one concept's prompts, and these are names of "
                f"prompt sets; for one concept each write [{example}]"
            )
        return {"prompts": value}
    objectives = [{"prompts": item} if isinstance(item, str | list) else item for item in value]
    for item in objectives:
        if not isinstance(item, dict):
            raise ValueError(
                f"{quote(item)} is neither a text nor a mapping such as {{prompts: NAME}}"
            )
    return objectives[0] if len(objectives) == 1 else objectives


def as_text(value: Any) -> str:
    """Return a value as the right side of an override, from which `apply` reads the same value.

    It is JSON without escapes of surrogates, which YAML refuses. Raises TypeError or ValueError for
    a value that JSON cannot hold.
    """
    text = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def anchor(text: str) -> str | dict[str, str]:
    """Read an anchor: `shape=circle` replaces the shape of the prompt, all else is a text.

    Raises UserError for a field without a value.
    """
    if re.fullmatch(r"\w+=\s*", text):
        raise UserError(f"the anchor {quote(text)} has no value; write e.g. shape=circle")
    match = re.fullmatch(r"(\w+)=(.+)", text)
    return {match[1]: match[2]} if match else text


def apply(content: dict[str, Any], text: str) -> None:
    """Apply one override such as `training.lr=1e-4` to a recipe's mapping, in place.

    For a list of concepts, `forget.n=8` changes all of them, and `forget.2.n=8` the second. Raises
    UserError if there is no such place.
    """
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path) or len(path) > DEEPEST:
        raise UserError(
            f"cannot read the override {quote(text)}; write key.path=value, e.g. training.lr=1e-4"
        )
    try:
        parsed_value = parse_yaml(value, "its value") if value else None
    except UserError as error:
        raise UserError(
            f"cannot read the override {quote(text)}: {error}; write e.g. "
            "training.lr=1e-4 or forget='{prompts: tiny_star}'"
        ) from None
    if len(path) > 1 and path[0] == "forget" and isinstance(content.get("forget"), list):
        content["forget"] = _of_concepts(content["forget"], path[1:], parsed_value)
    else:
        _set(content, path, parsed_value)


def _set(content: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    place = content
    for name in parents:
        inner = place.get(name)
        if inner is None:
            inner = {}
        elif inner == "rest":
            inner = {"data": "rest"}
        elif name == "lora" and not isinstance(inner, dict):  # a rank, or on or off
            inner = {} if isinstance(inner, bool) or inner == "none" else {"rank": inner}
        elif isinstance(inner, str):  # the shorthand `method: munba`
            inner = {SHORT.get(name, "prompts"): inner}
        if not isinstance(inner, dict):
            raise UserError(
                f"cannot set {quote('.'.join(path))}: {quote(name)} is {quote(inner)}, "
                "not a mapping; set it as a whole"
            )
        place[name] = place = dict(inner)
    place[last] = value


def _of_concepts(forget: list[Any], path: list[str], value: Any) -> Any:
    """Return the list under `forget` with a key set in every concept.

    If the path begins with a number, only that concept changes.
    """
    try:
        items = concepts(forget)
    except ValueError as error:
        raise UserError(f"forget: {error}") from None
    all_objectives = [
        dict(objective) for objective in (items if isinstance(items, list) else [items])
    ]
    objectives = all_objectives
    if path[0].isdecimal() and path[0].isascii():
        number = int(path[0][:10])
        if not 1 <= number <= len(all_objectives) or len(path) == 1:
            raise UserError(
                f"forget.{number}: the concepts are numbered 1 to {len(all_objectives)}; write "
                f"e.g. forget.{len(all_objectives)}.n=100"
            )
        path, objectives = path[1:], [all_objectives[number - 1]]
    for objective in objectives:
        _set(objective, path, value)
    return all_objectives if isinstance(items, list) else all_objectives[0]
