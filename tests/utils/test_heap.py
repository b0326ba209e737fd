"""Memory of converted weights goes back to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from concept_eraser.utils import heap

# 200 blocks of 4 MB become blocks of 2 MB, as fp32 weights become bf16
CONVERT = """
import contextlib, re, sys
import torch
from concept_eraser.utils.heap import own_pages

def resident():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmRSS:\\s+(\\d+)", file.read())[1]) / 1024

first = torch.ones(2**22)  # after a freed block of 16 MB, glibc serves such from its heap
del first
with own_pages() if sys.argv[1] == "own" else contextlib.nullcontext():
    weights = [torch.ones(2**20) for _ in range(200)]
    before = resident()
    for number, weight in enumerate(weights):
        weights[number] = weight.to(torch.bfloat16)
    del weight
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other rules")
def test_narrower_weights_free_memory() -> None:
    """Without the context most of the freed half stays in the process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    freed = {}
    for kind in ("own", "heap"):
        command = [sys.executable, "-c", CONVERT, kind]
        freed[kind] = float(subprocess.check_output(command, text=True, env=environment))
    assert freed["own"] == pytest.approx(400, abs=20)
    assert freed["heap"] < 300


def test_a_threshold_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(heap, "_mallopt", lambda: lambda *pair: calls.append(pair))
    with heap.own_pages():
        assert len(calls) == 1
    assert len(calls) == 3
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, "65536")
        with heap.own_pages():
            pass
        assert len(calls) == 3
        monkeypatch.delenv(name)
