"""Count the cores that no other process uses.

Two threads of torch on one free core wait for each other inside its kernels. A training step of the
bundled model then took 1.6 to 4.2 s on two cores, one of them busy. With one thread it took 0.65 s,
and 0.45 s with two threads on two idle cores. The commands give GNU OpenMP a low spin count
(cli/main.py). It shortens these waits and does not end them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

STATISTICS = Path("/proc/stat")
SECONDS = 0.3


def count(seconds: float = SECONDS, statistics: Path = STATISTICS) -> int | None:
    """Return how many cores of this process are idle now, at least 1.

    Args:
        seconds: How long to watch.
        statistics: The kernel's counts of ticks, one line for each core.

    Returns:
        The cores that were idle for more than half of the time, or None where the system does not
        tell.
    """
    before = _ticks(statistics)
    time.sleep(seconds)
    after = _ticks(statistics)
    shares = [
        (after[core][0] - idle) / max(1, after[core][1] - total)
        for core, (idle, total) in before.items()
        if core in after
    ]
    return max(1, sum(share > 0.5 for share in shares)) if shares else None


def _ticks(statistics: Path) -> dict[int, tuple[int, int]]:
    """Return the idle ticks and all ticks of each core that this process may use."""
    try:
        lines = statistics.read_text().splitlines()
        own_cores = os.sched_getaffinity(0)
    except (OSError, AttributeError):
        return {}
    ticks = {}
    for line in lines:
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in own_cores:
            # user, nice, system, idle, iowait, irq, softirq, steal; later ones are in user already
            values = [int(value) for value in counts[:8]]
            ticks[int(name[3:])] = (values[3] + values[4], sum(values))
    return ticks
