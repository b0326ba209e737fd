"""Progress bars with rates and remaining time, for every callback named `progress`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from concept_eraser.utils import distributed
from concept_eraser.utils.progress import Progress, silent


@contextmanager
def bars(quiet: bool = False) -> Iterator[Progress]:
    """Yield a progress callback that shows one bar for each kind of work.

    If stderr is not a terminal, it prints plain lines.
    """
    if quiet or not distributed.is_first():  # only the first of several processes shows bars
        yield silent
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, markup=False, emoji=False)
    if not console.is_terminal:
        yield _lines(console)
        return
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Bars(*columns, console=console) as display:
        tasks: dict[str, Any] = {}

        def report(what: str, count: int, total: int, note: str = "") -> None:
            if what not in tasks:
                tasks[what] = display.add_task(what, total=total, note="", rate="")
            task = display.tasks[display.task_ids.index(tasks[what])]
            rate = f"{task.speed:.1f}/s" if task.speed else ""
            display.update(tasks[what], completed=count, total=total, note=note, rate=rate)

        yield report


def _lines(console: Any) -> Progress:
    """Make a callback for logs and pipes. It prints the start, the end, and a line every 10 s."""
    import time

    last: dict[str, float] = {}
    start_times: dict[str, float] = {}

    def report(what: str, count: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if what not in last or count == total or now - last[what] > 10:
            start_times.setdefault(what, now)
            rate = count / (now - start_times[what]) if now > start_times[what] and count else 0.0
            speed = (
                f"  {rate:.1f}/s  {(total - count) / rate:.0f} s left"
                if rate and count < total
                else ""
            )
            last[what] = now
            console.print(
                f"{what}: {count}/{total}{speed}  {note}".rstrip(), highlight=False, soft_wrap=True
            )

    return report
