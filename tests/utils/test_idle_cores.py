"""The number of idle cores, from the counts of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from concept_eraser.cli.threads import use_idle_cores
from concept_eraser.utils import idle_cores

OWN = sorted(os.sched_getaffinity(0))


def test_a_busy_process_takes_a_core() -> None:
    """Each core of this process gets a busy loop. Then none is idle, and the count is 1."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * len(OWN))
    ]
    try:
        assert idle_cores.count(0.5) == 1
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_idle_and_busy_cores_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_cores.os, "sched_getaffinity", lambda process: {0, 1, 2})
    file = tmp_path / "stat"
    rows = [f"cpu{core} 90 0 0 10 0 0 0 0 0 0" for core in range(4)]
    file.write_text("\n".join(["cpu  0 0 0 0 0 0 0 0 0 0", *rows, "intr 5"]))
    before = dict.fromkeys((0, 1, 2), (10, 100))
    assert idle_cores._ticks(file) == before
    after = {0: (90, 200), 1: (20, 200), 2: (100, 200)}
    states = iter([before, after])
    monkeypatch.setattr(idle_cores, "_ticks", lambda statistics: next(states))
    assert idle_cores.count(0) == 2


def test_a_system_without_counts_has_no_number(tmp_path: Path) -> None:
    assert idle_cores.count(0, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("idle", "is_set", "expected"), [(1, False, 1), (1, True, 3), (None, False, 3)]
)
def test_commands_leave_busy_cores_alone(
    idle: int | None, is_set: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(idle_cores, "count", lambda: idle)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if is_set:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
    try:
        torch.set_num_threads(3)
        use_idle_cores()
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(threads)
