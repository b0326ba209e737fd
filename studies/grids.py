"""Grids of settings: their points, and chosen settings that lie at an edge of their grid.

A method whose best setting is the last one of its grid could be better beyond it. So the pages mark
such a value. Options without an order, such as names of layers, have no edge: a number is compared
with the numbers that were tried with the same names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Point = Mapping[str, Any]

LARGEST, LEAST = "▲", "▼"
NOTE = (
    f"{LARGEST} marks a chosen value that is the largest of its grid, {LEAST} one that is the "
    "least. A wider grid could give that method another setting."
)
# Numbers that name a variant of a method. They have no order.
VARIANTS = frozenset({"method.batch"})
# The least and the largest value that an option can have. No grid can go beyond.
LIMITS = {
    "method.damping": (0.0, math.inf),
    "retain.l1": (0.0, math.inf),
    "retain.distill": (0.0, 1.0),
}


def points(grid: Mapping[str, Sequence[Any]] | Sequence[Any]) -> list[Any]:
    """Return the settings of a grid.

    Args:
        grid: A list of settings, or a mapping from options to their values. A mapping stands for
            all combinations.
    """
    if not isinstance(grid, Mapping):
        return list(grid)
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def edges(point: Point, tried: Iterable[Point]) -> dict[str, str]:
    """Return the marks of the values of a setting that lie at an edge, by option.

    A value that was the only one of its variant has both marks, if other variants had others.

    Args:
        point: The chosen setting.
        tried: All settings of its grid, those that failed included.
    """
    everything = list(tried)
    variant = _variant(point)
    alike = [other for other in everything if _variant(other) == variant]
    marks = {}
    for key, value in point.items():
        if key in variant or len({other[key] for other in everything if key in other}) < 2:
            continue
        values = [other[key] for other in alike if key in other] or [value]
        least, largest = LIMITS.get(key, (-math.inf, math.inf))
        mark = (LEAST if least < value <= min(values) else "") + (
            LARGEST if max(values) <= value < largest else ""
        )
        if mark:
            marks[key] = mark
    return marks


def named(point: Any) -> Point:
    """Return a setting as options. A number stands for a learning rate."""
    result: Point = point if isinstance(point, Mapping) else {"training.lr": point}
    return result


def of_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the marks of a stored result with its `point` and its scored `grid`."""
    return edges(point_of(row), [point_of(one) for one in row.get("grid") or []])


def point_of(row: Mapping[str, Any]) -> Point:
    """Return the setting of a stored row. Early rows have a learning rate only, as `lr`."""
    if "point" in row:
        point: Point = row["point"]
        return point
    return {"training.lr": row["lr"]} if "lr" in row else {}


def with_note(text: str) -> str:
    """Return a table with the meaning of the marks below it, where it has any."""
    return f"{text}\n\n{NOTE}" if LARGEST in text or LEAST in text else text


def _variant(point: Point) -> dict[str, Any]:
    return {key: value for key, value in point.items() if not _has_order(key, value)}


def _has_order(key: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and key not in VARIANTS
