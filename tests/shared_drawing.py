"""The figure of the two gradients, drawn once in each process of the tests.

Every run ends with this figure. matplotlib needs 0.13 seconds for it, a fifth of a short run.
Here a short log of usual numbers gets the figure that was drawn first. Long logs, logs with other
numbers and cold commands draw their own, and so do tests of damaged logs (`each_drawn`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from concept_eraser.reporting import plots

SHORT = 8  # steps
draw = plots._draw_conflict
_drawn: list[bytes] = []
_is_shared = True


@functools.wraps(draw)
def _draw_conflict(rows: Sequence[dict[str, Any]]) -> bytes:
    if len(rows) > SHORT or not all(map(_is_usual, rows)) or not _is_shared:
        return draw(rows)
    if not _drawn:
        _drawn.append(draw(rows))
    return _drawn[0]


def _is_usual(row: Mapping[str, Any]) -> bool:
    """Whether a step has a finite cosine, and positive and finite norms and weights."""
    numbers = [*row["norms"].values(), *(row.get("weights") or {}).values()]
    return (
        math.isfinite(row["cosine"])
        and bool(row.get("weights"))
        and all(0 < number < math.inf for number in numbers)
    )


def draw_first() -> None:
    """Draw the figure, for processes that are forked from this one."""
    norms = {"retain": 1.0, "forget": 2.0}
    _draw_conflict([{"cosine": 0.1, "norms": norms, "weights": norms}] * 2)


@contextmanager
def each_drawn() -> Iterator[None]:
    """Draw the figure of each log inside."""
    global _is_shared
    _is_shared = False
    try:
        yield
    finally:
        _is_shared = True


plots._draw_conflict = _draw_conflict
