"""The measurement of how much of the change guidance passes on, on models with a known answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from concept_eraser.models.base import Condition
from studies import guidance
from studies.runs import recipe_of
from tests.conftest import ROOT

STATES = {"n": 2, "steps": 3, "guidance": 5.0, "seed": 0}
CONCEPT, ANCHOR = ["a blue circle", "a blue heart"], ["a green circle", "a green heart"]


class Answers:
    """The original model with other conditions for some prompts."""

    def __init__(self, model: Any, answer: Callable[[Condition], Condition]) -> None:
        self.model, self.answer = model, answer

    def denoise(self, x: torch.Tensor, t: torch.Tensor, condition: Condition) -> torch.Tensor:
        return self.model.denoise(x, t, self.answer(condition))


def test_what_is_learned_and_what_guidance_passes_on(shared_tiny: Any) -> None:
    concept, anchor = shared_tiny.encode(CONCEPT), shared_tiny.encode(ANCHOR)

    def concept_alone(condition: Condition) -> Condition:
        return (
            anchor
            if torch.equal(condition.tensors["states"], concept.tensors["states"])
            else condition
        )

    for answer, expected_learned, expected_followed, expected_guidance in (
        (concept_alone, 1.0, 0.0, 1.0),
        (lambda _: anchor, 1.0, None, 0.0),
    ):
        rows = guidance.rows(shared_tiny, Answers(shared_tiny, answer), CONCEPT, ANCHOR, STATES)  # type: ignore[arg-type]
        assert len({row["t"] for row in rows}) == STATES["steps"]
        for row in rows:
            assert row["learned"] == pytest.approx(expected_learned, abs=1e-3)
            assert row["guidance"] == pytest.approx(expected_guidance, abs=1e-3)
            assert expected_followed is None or row["followed"] == pytest.approx(
                expected_followed, abs=1e-3
            )
    rows_of_original = guidance.rows(shared_tiny, shared_tiny, CONCEPT, ANCHOR, STATES)
    assert all((row["learned"], row["followed"]) == (0.0, 0.0) for row in rows_of_original)


def test_the_studys_cases_are_recipes() -> None:
    study = yaml.safe_load((ROOT / "studies" / "configs" / "guidance.yaml").read_text())
    recipes = {
        name: recipe_of(guidance.case(study, "blue", name), {}, 0) for name in study["cases"]
    }
    assert [recipe.forgotten[0].empty_prompts for recipe in recipes.values()] == [
        0.0,
        0.0,
        0.1,
        0.25,
    ]
    assert {recipe.forgotten[0].prompts for recipe in recipes.values()} == {"tiny_blue"}
    assert not any(recipe.finish for recipe in recipes.values())


def test_stored_results_count_as_made_and_other_settings_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their recipes lack the keys that later versions added."""
    study = yaml.safe_load((ROOT / "studies" / "configs" / "guidance.yaml").read_text())
    measured: list[Path] = []

    def run_one(*_: Any, folder: Path, **__: Any) -> None:
        measured.append(folder)
        raise RuntimeError

    monkeypatch.setattr(guidance, "run_one", run_one)
    for task in study["tasks"]:
        for name in study["cases"]:
            guidance.measure(study, task, name, tmp_path)
    assert not measured
    states = {**study["states"], "seed": study["states"]["seed"] + 1}
    for changes in ({"n": study["n"] - 1}, {"seed": study["seed"] + 1}, {"states": states}):
        with pytest.raises(RuntimeError):
            guidance.measure({**study, **changes}, "star", "all", tmp_path)
    assert len(measured) == 3
