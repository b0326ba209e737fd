"""The schemas of evaluation.json and attack.json, and their check.

The files may come from a stranger or a failing disk, so they are checked when they are read. A
shape is a type, a tuple of types, `Each(shape)` for a mapping from texts to the shape, `[shape]`
for a list, or a mapping of keys to shapes. A key that ends with `?` may be missing, one that ends
with `~` may be null, one with `?~` either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concept_eraser.utils.errors import UserError, quote

LARGEST = 1e15  # of any number in these files; counts, seeds and metrics are far below it


@dataclass(frozen=True)
class Each:
    """A mapping whose values have one shape. single: the mapping has exactly one entry."""

    shape: Any
    single: bool = False


@dataclass(frozen=True)
class Count:
    """A whole number from 0 to a limit, for a number of repetitions."""

    limit: int


NUMBER = (int, float)
ANY = object
INTERVAL = {"value~": NUMBER, "low?~": NUMBER, "high?~": NUMBER, "n": int}
GROUP = {"role": str, "prompts": (str, list, dict), "n?~": int}
SUITE = {
    "concept": Each(str, single=True),
    "groups": Each(GROUP),
    "judge": (str, dict),
    "seed": int,
    "sampling": dict,
}
ROW = {
    "metric": str,
    "group": str,
    "better?": str,
    "before?~": INTERVAL,
    "after?~": INTERVAL,
    "difference?~": INTERVAL,
    "settings?~": dict,
}
MEASURED = {"command?": str, "commit?~": str, "concept_eraser?": str}
# keys of any file with metrics: an evaluation, or a distance of two folders of images
METRICS = {
    "protocol": {"groups?": Each(dict)},
    "protocol_hash?": str,
    "results?": [ROW],
    "rates?": Each((dict, type(None))),
    "models?": Each(str),
    "environment?": MEASURED,
}
EXCESS = {"victim": INTERVAL, "control": INTERVAL, "difference": INTERVAL, "p?~": NUMBER}
SAVINGS = {
    "budget": int,
    "n": int,
    "mean~": INTERVAL,
    "broken_on_both": int,
    "broken_on_victim_only": int,
    "broken_on_control_only": int,
    "broken_on_neither": int,
}
CONTROL_ATTACKS = {  # the same attack on models that never learned the concept
    "models": [
        {
            "model": str,
            "record": dict,
            "rates": Each(INTERVAL),
            "excess": Each(EXCESS),
            "families?": Each(EXCESS),
            "attacks?": Each(EXCESS),
            "savings?": Each(SAVINGS),
        }
    ],
    "excess_over_controls?": {**INTERVAL, "seeds": int},
}
RETRAINING = {  # the gap to models that never learned the concept
    "models": [str],
    "records": [dict],
    "predictions": [
        {
            "group": str,
            "role": str,
            "erased": INTERVAL,
            "original": INTERVAL,
            "between_controls~": INTERVAL,
            "relative_to_original~": INTERVAL,
            "relative_to_controls~": INTERVAL,
        }
    ],
    "results": [{**ROW, "control": int, "after": INTERVAL}],
    "distances": [
        {
            "control": int,
            "metric": str,
            "group": str,
            "erased": INTERVAL,
            "original": INTERVAL,
            "between_controls~": INTERVAL,
        }
    ],
    "refused": Each(str),
}
EVALUATION = {
    "protocol": SUITE,
    "protocol_hash": str,
    "models": {"before": str, "after": str},
    "results": [{**ROW, "better": str, "after": INTERVAL}],
    "environment": {**MEASURED, "command": str},
    "refused?": Each(str),
    "prompt_hashes?": Each(str),
    "judge?": str,
    "second_judge?": {
        "name": (str, dict),
        "judge": str,
        "agreement": [
            {
                "attribute": str,
                "group": str,
                "stage": str,
                "agreed": INTERVAL,
                "kappa": INTERVAL,
            }
        ],
        "concept_rate": Each(Each(INTERVAL)),
        "images_that_differ": int,
    },
    "model_options?": dict,
    "control?": RETRAINING,
}
ATTEMPT = {
    "prompt": str,
    "seed": int,
    "round~": int,
    "text~": str,
    "pre": (bool, int),
    "success": (bool, int),
    "by_seed~": int,
    "guidance?": NUMBER,
}
ATTACK = {
    "protocol": {
        "attack": str,
        "group": str,
        "options?": dict,
        "suite": {**SUITE, "groups?": Each(GROUP)},
    },
    "protocol_hash": str,
    "family?": str,
    "models": Each(str),
    "rates": Each(INTERVAL),
    "cost": Each(NUMBER),
    "seconds": NUMBER,
    "environment": {**MEASURED, "command": str},
    "attempts": [ATTEMPT],
    "curves": [[{"round": Count(100_000), "fell": int}]],
    "control?": CONTROL_ATTACKS,
}
# on labelled data: when -> metric -> group -> number or interval
LABELLED = {"results": {"before?~": dict, "after": dict}}
DONE = {"seconds": NUMBER, "trained_parameters?": int, "trained_tensors?": int}
ENVIRONMENT = {**MEASURED, "prompts?": Each({"rows?": int, "hash?": str})}


def require(content: Any, shape: Any, path: Path) -> None:
    """Check the content of a file against a shape.

    Raises:
        UserError: the content does not match. The error names the first mismatch.
    """
    problem = _mistake(content, shape, "")
    if problem is not None:
        raise UserError(
            f"{path} is damaged, or of another version: {problem}; run the command that "
            "wrote it again"
        )


def _mistake(value: Any, shape: Any, place: str) -> str | None:
    if isinstance(shape, type | tuple):
        return _mistake_of_type(value, shape if isinstance(shape, tuple) else (shape,), place)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _wrong(place, "a list", value)
        return next(
            (m for i, one in enumerate(value) if (m := _mistake(one, shape[0], f"{place}[{i}]"))),
            None,
        )
    if isinstance(shape, Count):
        whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= shape.limit
        return None if whole else _wrong(place, f"a whole number from 0 to {shape.limit:,}", value)
    if not isinstance(value, Mapping):
        return _wrong(place, "a mapping", value)
    if isinstance(shape, Each):
        if shape.single and len(value) != 1:
            return _wrong(place, "a mapping of one entry", value)
        return next(
            (
                m
                for key, one in value.items()
                if (m := _mistake(one, shape.shape, f"{place}.{key[:60]}"))
            ),
            None,
        )
    for key, inner in shape.items():
        name = key.rstrip("?~")
        entry = value.get(name)
        if (name not in value and "?" in key) or (name in value and entry is None and "~" in key):
            continue
        if name not in value:
            return f"{(place + '.' + name).lstrip('.')} is missing"
        if problem := _mistake(entry, inner, f"{place}.{name}"):
            return problem
    return None


def _mistake_of_type(value: Any, types: tuple[type, ...], place: str) -> str | None:
    if not isinstance(value, types) or (
        isinstance(value, bool) and bool not in types and object not in types
    ):
        names = {
            "int": "a whole number",
            "float": "a number",
            "str": "a text",
            "dict": "a mapping",
            "list": "a list",
        }
        return _wrong(
            place, " or ".join(names.get(one.__name__, one.__name__) for one in types), value
        )
    if isinstance(value, int | float) and math.isfinite(value) and abs(value) > LARGEST:
        return _wrong(place, "a number below 1e15", value)
    return None


def _wrong(place: str, expectation: str, value: Any) -> str:
    return f"{place.lstrip('.')[:200] or 'the whole'} is {quote(value, 60)}, not {expectation}"
