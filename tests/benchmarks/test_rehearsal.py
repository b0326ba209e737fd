"""The benchmark on the rehearsal device, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, rehearsal, rehearsal_device


def test_a_job_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rehearsal_device.is_possible():
        pytest.skip("this torch has no backends that are written in Python")
    output = tmp_path / "rehearsal.json"
    options = ["--device", "rehearsal", "--jobs", "munba, LoRA", "--batches", "1", "--steps", "4"]
    monkeypatch.setattr(sys, "argv", ["gpu", *options, "--output", str(output)])
    gpu.main()
    content = json.loads(output.read_text())
    (row,) = content["rows"]
    assert (row["job"], row["family"], row["batch"], row["n"]) == ("munba, LoRA 4", "tiny", 1, 4)
    assert row["syncs"] == 1
    latents = 4 * 8 * 8 * 4  # bytes of one example
    assert 2 * 2 * latents <= row["bytes_to_device"] < 100_000
    assert 0 < row["bytes_to_host"] < 10_000
    assert 1_000_000 < row["peak_bytes"] < 100_000_000
    assert f"| munba, LoRA 4 | 1 | 1 | {row['bytes_to_device'] / 1e3:.1f} | " in rehearsal.table(
        content
    )


def test_the_page_shows_the_counts_as_they_are() -> None:
    page, content = rehearsal.PAGE.read_text(), json.loads(rehearsal.FILE.read_text())
    assert rehearsal.render(page, content) == page
    assert {row["job"] for row in content["rows"]} == set(gpu.JOBS)
