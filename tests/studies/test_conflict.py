"""The study of the gradients' cosines and norms: from a log to the table and the figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from concept_eraser.methods.munba import exact_weights
from concept_eraser.utils import provenance
from studies import conflict, render_results
from studies.rendering import conflict as rendering
from studies.rendering import figures
from studies.result_tables import Results

COSINES = [-0.5, -0.25, 0.0, 0.25, 0.5]


def write_log(folder: Path, weights: tuple[float, float] | None = None) -> Path:
    """A run with five steps of two gradients, after one without a forget gradient."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [{"step": 1, "norms": {"retain": 2.0}, "cosine": None}]
    for i, cosine in enumerate(COSINES):
        retain, forget = 2.0, 2.0 * 10**i
        gram = conflict_gram(cosine, retain, forget)
        a = weights or tuple(exact_weights(gram, 1e-6)[0].tolist())
        rows.append(
            {
                "step": i + 2,
                "cosine": cosine,
                "norms": {"retain": retain, "forget": forget},
                "weights": {"retain": a[0], "forget": a[1]},
            }
        )
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def conflict_gram(cosine: float, retain: float, forget: float) -> Any:
    import torch

    inner = cosine * retain * forget
    return torch.tensor([[retain**2, inner], [inner, forget**2]], dtype=torch.float64)


def result(folder: Path, label: str) -> dict[str, Any]:
    return {
        "label": label,
        "task": "a task",
        "seed": 0,
        "seconds": 1.0,
        **conflict.steps_of(folder),
        "settings": {"seed": 0},
        "environment": provenance.describe(),
    }


def test_the_numbers_of_a_log(tmp_path: Path) -> None:
    """Steps without both gradients are left out. MUNBa's contributions are equal at every step, and
    those of a sum are the ratio of the norms (MUNBa, figure 1).
    """
    munba = conflict.steps_of(write_log(tmp_path / "munba"))
    plain_sum = conflict.steps_of(write_log(tmp_path / "sum", (1.0, 1.0)))
    assert munba["steps"] == 6
    assert munba["cosine"] == COSINES
    ratios = np.array([1.0, 10.0, 100.0, 1e3, 1e4])
    assert rendering.values([munba], "ratio") == pytest.approx(ratios)
    assert rendering.values([munba], "contribution") == pytest.approx(np.ones(5), rel=1e-4)
    assert rendering.values([plain_sum], "contribution") == pytest.approx(ratios)
    assert len(rendering.values([munba, plain_sum], "cosine")) == 10
    table = rendering.distribution_table([("MUNBa", [munba]), ("sum", [plain_sum])])
    assert "| MUNBa | 5 | 40 | -0.45 | -0.25 | 0.00 | 0.25 | 0.45 | 100.00 [" in table
    assert table.count("| 1.00 [1.00, 1.00] |") == 1


def test_a_log_with_one_gradient_and_a_folder_without_a_log(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "log.jsonl").write_text('{"step": 1, "norms": {"retain": 2.0}, "cosine": null}\n')
    with pytest.raises(ValueError, match="both objectives"):
        conflict.steps_of(folder)


def test_logs_of_other_runs_are_printed_and_not_stored(
    tmp_path: Path, no_results: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = write_log(tmp_path / "a_run")
    monkeypatch.setattr(sys, "argv", ["conflict", "--logs", str(folder)])
    conflict.main()
    assert "| a_run | 5 | 40 |" in capsys.readouterr().out
    assert not Results("conflict")
    for words, arguments in (
        ("give either", []),
        ("no step of log.jsonl", ["--logs", str(tmp_path)]),
    ):
        monkeypatch.setattr(sys, "argv", ["conflict", *arguments])
        with pytest.raises(SystemExit):
            conflict.main()
        assert words in capsys.readouterr().err


def test_the_page_and_its_figure(tmp_path: Path, no_results: Path) -> None:
    Results("conflict")["a_seed0"] = result(write_log(tmp_path / "a"), "MUNBa")
    Results("conflict")["b_seed0"] = result(write_log(tmp_path / "b", (1.0, 1.0)), "plain sum")
    page = rendering.page()
    assert "| a task: MUNBa | 5 | 40 |" in page
    assert "![distributions](conflict.plots.svg)" in page
    ((path, figure),) = rendering.figures().items()
    assert path.name == "conflict.plots.svg"
    drawing = figure.draw()
    assert len(drawing.axes) == 3
    # a histogram holds every step of both runs
    assert [sum(len(p.get_xy()) > 0 for p in axes.patches) for axes in drawing.axes] == [2, 2, 2]
    assert [text.get_text() for text in drawing.axes[0].get_legend().get_texts()] == [
        "MUNBa",
        "plain sum",
    ]
    before = figures.digest(figure)
    Results("conflict")["b_seed0"] = result(write_log(tmp_path / "c", (1.0, 2.0)), "plain sum")
    assert figures.digest(next(iter(rendering.figures().values()))) != before
    assert any(path.name == "conflict.md" for path in render_results.pages())


def test_the_configuration_trains_with_its_recipes_and_finished_runs_stay(
    tmp_path: Path, no_results: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Each run of the configuration is a valid recipe. The pairs differ in the method only."""
    import yaml

    from studies.runs import recipe_of
    from tests.conftest import ROOT

    path = ROOT / "studies" / "configs" / "conflict.yaml"
    runs = yaml.safe_load(path.read_text())["runs"]
    recipes = {name: recipe_of(entry, {}, 0).resolved() for name, entry in runs.items()}
    for task in ("paper", "ours"):
        munba, plain_sum = recipes[f"{task}_munba"], recipes[f"{task}_sum"]
        assert munba.pop("method")["name"] == "munba"
        assert plain_sum.pop("method")["name"] == "weighted"
        assert munba == plain_sum
    trained = []

    def measure(entry: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
        trained.append(folder.name)
        content = result(write_log(folder), entry["label"])
        return {**content, "settings": {"recipe": recipe_of(entry, {}, seed).resolved()}}

    monkeypatch.setattr(conflict, "measure", measure)
    arguments = ["conflict", str(path), "--work", str(tmp_path / "work"), "--runs", "paper_sum"]
    monkeypatch.setattr(sys, "argv", arguments)
    conflict.main()
    conflict.main()
    assert trained == ["paper_sum_seed0"]
    content = yaml.safe_load(path.read_text())
    content["runs"]["paper_sum"].setdefault("set", {})["training.lr"] = 9e-9
    changed = tmp_path / "conflict.yaml"
    changed.write_text(yaml.safe_dump(content))
    again = ["conflict", str(changed), "--work", str(tmp_path / "again"), "--runs", "paper_sum"]
    monkeypatch.setattr(sys, "argv", again)
    conflict.main()
    assert len(trained) == 2, "a run of another recipe is trained again"
    monkeypatch.setattr(sys, "argv", [*arguments[:-1], "paper"])
    with pytest.raises(SystemExit):
        conflict.main()
    assert "the study has no 'paper'" in capsys.readouterr().err
