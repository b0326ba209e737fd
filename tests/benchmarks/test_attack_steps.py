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


# An iteration / its bare passes: the medians of benchmarks/README.md, corrected for their prompts.
EXPECTED = {"soft_prompt": 1.02, "concept_inversion": 0.98, "unlearn_diff": 1.21, "p4d": 1.15}


def test_the_committed_iterations_have_no_further_pass() -> None:
    """Each limit is half a forward pass of the UNet above the expected ratio.

    P4D's bare passes have one forward pass more than those of UnlearnDiffAtk. It takes 33 to 52 %
    of the time of an attack's bare passes.
    """
    rows = {row["attack"]: row for row in json.loads(attack_steps.FILE.read_text())["rows"]}
    assert rows.keys() == set(attack_steps.ATTACKS) == EXPECTED.keys()
    bare = {attack: row["bare_cpu_seconds"] for attack, row in rows.items()}
    forward = bare["p4d"] - bare["unlearn_diff"]
    for attack, row in rows.items():
        ratio, share = row["ratio"][0], forward / bare[attack]
        limit = EXPECTED[attack] + share / 2
        assert 0.9 < ratio < limit, row
        assert ratio + share > limit, f"{attack}: the limit allows a second forward pass"
