"""Freed memory of the heap goes back to the system."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

from concept_eraser.utils import heap


def resident() -> int:
    """Return the resident private memory of this process, in MB."""
    text = Path("/proc/self/status").read_text()
    match = re.search(r"RssAnon:\s+(\d+) kB", text)
    assert match is not None
    return int(match[1]) // 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other heaps")
def test_holes_are_returned_where_there_are_enough_of_them() -> None:
    bytearray(31 << 20)  # freed at once; blocks of up to its size are in the heap from now on
    blocks = [bytearray(b"1") * (1 << 20) for _ in range(600)]
    before = heap.free_bytes()
    del blocks[::2]  # 300 MB, in holes
    holes = (heap.free_bytes() - before) >> 20
    assert 290 <= holes <= 310
    full = resident()
    assert not heap.return_free(least=heap.free_bytes() + (100 << 20))
    assert full - resident() < 10
    assert heap.return_free()
    assert full - resident() > 280
    assert all(block[-1:] == b"1" for block in blocks)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_functions", lambda: None)
    assert heap.free_bytes() == 0
    assert not heap.return_free(least=0)
