"""The benchmark of an attack's iteration runs, and its committed rows are near the bare passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import attack_steps


def test_it_measures_and_renders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "steps.json"
    monkeypatch.setattr(attack_steps, "FEW", 1)
    monkeypatch.setattr(attack_steps, "MORE", 2)
    options = ["--attacks", "soft_prompt", "--batch", "2", "--repetitions", "1"]
    monkeypatch.setattr("sys.argv", ["attack_steps", *options, "--output", str(output)])
    attack_steps.main()
    (row,) = json.loads(output.read_text())["rows"]
    assert row["passes"] == ["UNet"]
    assert row["bare_cpu_seconds"] > 0
    assert "| soft_prompt | 2 | UNet |" in attack_steps.block(json.loads(output.read_text()))


def test_the_committed_iterations_are_near_the_bare_passes() -> None:
    rows = json.loads(attack_steps.FILE.read_text())["rows"]
    assert {row["attack"] for row in rows} == set(attack_steps.ATTACKS)
    for row in rows:
        limit = 1.8 if row["attack"] == "unlearn_diff" else 1.15
        assert 0.9 < row["ratio"][0] < limit, row
