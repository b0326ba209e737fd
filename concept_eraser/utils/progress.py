"""How long work reports itself: a callback, so that library code never prints."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called as work advances: what is being done, how many units are done, of how many, and a
    remark.
    """

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None: ...


def silent(what: str, done: int, total: int, note: str = "") -> None:
    """The default: report nothing."""
