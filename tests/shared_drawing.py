"""The figure of the two gradients, drawn once in each process of the tests.

Every run ends with this figure. matplotlib needs 0.13 seconds for it, a fifth of a short run.
Here a short log gets the figure that was drawn first. Long logs and cold commands draw their own,
and so do tests of damaged logs (`each_drawn`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from concept_eraser.reporting import plots

SHORT = 8  # steps
draw = plots._draw_conflict
_drawn: list[bytes] = []
_is_shared = True


@functools.wraps(draw)
def _draw_conflict(rows: Sequence[dict[str, Any]]) -> bytes:
    if len(rows) > SHORT or not _is_shared:
        return draw(rows)
    if not _drawn:
        _drawn.append(draw(rows))
    return _drawn[0]


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
