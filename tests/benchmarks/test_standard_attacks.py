"""The benchmark of the leaderboard's attacks runs two versions and compares their seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from benchmarks import standard_attacks
from studies.rendering.common import fill_blocks

SMALL = {
    "tasks": {"star": {"suite": "tiny_star"}},
    "attack": {"group": "direct", "n": 2, "seed": 0},
    "attacks": {
        "seed_search": {"tries": 1},
        "ring_a_bell": {"generations": 2, "every": 2, "population": 4},
    },
}


def test_it_runs_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study, output = tmp_path / "study.yaml", tmp_path / "seconds.json"
    study.write_text(yaml.safe_dump(SMALL, sort_keys=False))
    monkeypatch.setattr(standard_attacks, "STUDY", study)
    root = standard_attacks.HERE.parent
    words = ["--former", str(root), "--repetitions", "1", "--output", str(output)]
    monkeypatch.setattr("sys.argv", ["standard_attacks", *words])
    standard_attacks.main()
    rows = {row["attack"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == [
        "seed_search",
        "ring_a_bell",
        "ring_a_bell, next model",
        "all",
        "all, next model",
    ]
    assert all(row["cpu_seconds"] > 0 and row["n"] == 1 for row in rows.values())
    assert "| ring_a_bell, next model |" in capsys.readouterr().out


def test_the_next_model_has_its_own_ring_a_bell() -> None:
    seconds = {"soft_prompt": 10.0, "ring_a_bell": 20.0, standard_attacks.NEXT: 1.0}
    totals = standard_attacks.with_totals(seconds)
    assert totals["all"] == 30.0
    assert totals["all, next model"] == 11.0


def test_a_row_has_the_ratios_within_a_repetition() -> None:
    before, after = [{"a": 10.0}, {"a": 20.0}, {"a": 40.0}], [{"a": 5.0}, {"a": 20.0}, {"a": 10.0}]
    (row,) = standard_attacks.rows_of(before, after)
    assert row["ratio"] == [0.5, 0.25, 1.0]
    assert (row["former_cpu_seconds"], row["cpu_seconds"]) == (20.0, 10.0)


def test_it_names_an_unknown_attack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["standard_attacks", "--former", ".", "--attacks", "sofa"])
    with pytest.raises(SystemExit):
        standard_attacks.main()
    assert "unknown attack 'sofa'; there are: seed_search, " in capsys.readouterr().err


def test_a_failing_version_shows_its_error() -> None:
    attacks = {"seed_search": ("no-such-model", "seed_search", {})}
    with pytest.raises(SystemExit, match="no-such-model"):
        standard_attacks.cpu_seconds(
            standard_attacks.HERE.parent, {"suite": "tiny_star", "n": 2}, attacks
        )


def test_the_page_shows_the_measurements_as_they_are() -> None:
    page = standard_attacks.PAGE.read_text()
    content = json.loads(standard_attacks.FILE.read_text())
    blocks = {"standard-attacks": lambda: standard_attacks.block(content)}
    assert fill_blocks(page, blocks) == page
    assert standard_attacks.block(content) in page
