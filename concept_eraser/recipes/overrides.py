"""What a recipe says in short: `key.path=value` changes to it, and lists that stand for
mappings.
"""

from __future__ import annotations

from typing import Any

from concept_eraser.storage.readers import parse_yaml
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError, shown

# `method: munba` is {name: munba}; all else is {prompts: ...}
DEEPEST = 10  # names in the path of an override
SHORT = {"method": "name", "finish": "name", "trainable": "select"}


def concepts(value: list[Any]) -> Any:
    """What a list under `forget` stands for: texts are one side's prompts; with a mapping among
    them it is one concept an entry, and of one entry that one. Raises ValueError for names of
    prompt sets, which may mean either."""
    if all(isinstance(item, str) for item in value):
        known = resources.names("prompts")
        if len(value) > 1 and all(item in known for item in value):
            wanted = ", ".join(f"{{prompts: {item}}}" for item in value)
            raise ValueError(
                "a list of texts is one concept's prompts, and these are names of "
                f"prompt sets; for one concept each write [{wanted}]"
            )
        return {"prompts": value}
    sides = [{"prompts": item} if isinstance(item, str | list) else item for item in value]
    for item in sides:
        if not isinstance(item, dict):
            raise ValueError(
                f"{shown(item)} is neither a text nor a mapping such as {{prompts: NAME}}"
            )
    return sides[0] if len(sides) == 1 else sides


def apply(content: dict[str, Any], text: str) -> None:
    """Apply one `training.lr=1e-4` to a recipe's mapping, in place; of a list of concepts
    `forget.n=8` means every one, and `forget.2.n=8` the second. Raises UserError where there is no
    such place."""
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path) or len(path) > DEEPEST:
        raise UserError(
            f"cannot read the override {shown(text)}; write key.path=value, e.g. training.lr=1e-4"
        )
    try:
        found = parse_yaml(value, "its value") if value else None
    except UserError as error:
        raise UserError(
            f"cannot read the override {shown(text)}: {error}; write e.g. "
            "training.lr=1e-4 or forget='{prompts: tiny_star}'"
        ) from None
    if len(path) > 1 and path[0] == "forget" and isinstance(content.get("forget"), list):
        content["forget"] = _of_concepts(content["forget"], path[1:], found)
    else:
        _set(content, path, found)


def _set(content: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    place = content
    for name in parents:
        inner = place.get(name)
        if inner is None:
            inner = {}
        elif inner == "rest":
            inner = {"data": "rest"}
        elif isinstance(inner, str):  # the shorthand `method: munba`
            inner = {SHORT.get(name, "prompts"): inner}
        if not isinstance(inner, dict):
            raise UserError(
                f"cannot set {shown('.'.join(path))}: {shown(name)} is {shown(inner)}, "
                "not a mapping; set it as a whole"
            )
        place[name] = place = dict(inner)
    place[last] = value


def _of_concepts(forget: list[Any], path: list[str], value: Any) -> Any:
    """The list under `forget` with a key set in every concept, or in the one whose number the path
    begins with.
    """
    try:
        found = concepts(forget)
    except ValueError as error:
        raise UserError(f"forget: {error}") from None
    sides = [dict(side) for side in (found if isinstance(found, list) else [found])]
    chosen = sides
    if path[0].isdecimal() and path[0].isascii():
        number = int(path[0][:10])
        if not 1 <= number <= len(sides) or len(path) == 1:
            raise UserError(
                f"forget.{number}: the concepts are numbered 1 to {len(sides)}; write "
                f"e.g. forget.{len(sides)}.n=100"
            )
        path, chosen = path[1:], [sides[number - 1]]
    for side in chosen:
        _set(side, path, value)
    return sides if isinstance(found, list) else sides[0]
