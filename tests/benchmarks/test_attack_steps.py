"""The benchmark of an attack's iteration runs, and its committed rows are near the bare passes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import attack_steps
from concept_eraser.evaluation.attacks import runner


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


def test_the_bare_passes_have_the_prompts_of_the_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four prompts is left out and one shows the concept already, so two are attacked."""
    sizes: list[Any] = []

    def passes(victim: Any, original: Any, batch: int) -> dict[str, Any]:
        sizes.append(batch)
        return {name: lambda: sum(range(10**6)) for name in ("UNet", "text encoder", "original")}

    def run(protocol: runner.Protocol, *models: Any) -> None:
        assert (protocol.n, protocol.batch) == (4, 4)
        sizes.append(getattr(protocol.build(), "batch", None))

    start = SimpleNamespace(pre=np.array([True, False, False]))
    monkeypatch.setattr(runner, "draw_start", lambda *arguments: start)
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(attack_steps, "bare_passes", passes)
    rows = attack_steps.measure(["soft_prompt", "concept_inversion"], batch=4, repetitions=1)
    assert [row["batch"] for row in rows] == [2, 2]
    assert sizes[0] == 2
    assert {size for size in sizes[1:] if size is not None} == {2}, "of concept inversion"


def test_the_committed_iterations_are_near_the_bare_passes() -> None:
    rows = json.loads(attack_steps.FILE.read_text())["rows"]
    assert {row["attack"] for row in rows} == set(attack_steps.ATTACKS)
    for row in rows:
        limit = 1.8 if row["attack"] == "unlearn_diff" else 1.15
        assert 0.9 < row["ratio"][0] < limit, row
