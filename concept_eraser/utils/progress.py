"""Progress of long work: a callback, so that library code never prints."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called as work advances.

    It receives the kind of work, the number of finished units, their total, and a remark.
    """

    def __call__(self, what: str, count: int, total: int, note: str = "") -> None: ...


def silent(what: str, count: int, total: int, note: str = "") -> None:
    """The default, which reports nothing."""
