"""The measure of what guidance passes on, on models of which it is known."""

from __future__ import annotations

from collections.abc import Callable
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
    """The original, but for what it answers to some prompts."""

    def __init__(self, model: Any, answer: Callable[[Condition], Condition]) -> None:
        self.model, self.answer = model, answer

    def denoise(self, x: torch.Tensor, t: torch.Tensor, condition: Condition) -> torch.Tensor:
        return self.model.denoise(x, t, self.answer(condition))


def test_what_is_learned_and_what_guidance_passes_on(shared_tiny: Any) -> None:
    said, anchor = shared_tiny.encode(CONCEPT), shared_tiny.encode(ANCHOR)

    def concept_alone(condition: Condition) -> Condition:
        return (
            anchor
            if torch.equal(condition.tensors["states"], said.tensors["states"])
            else condition
        )

    for answer, learned, followed, left in (
        (concept_alone, 1.0, 0.0, 1.0),
        (lambda _: anchor, 1.0, None, 0.0),
    ):
        found = guidance.rows(shared_tiny, Answers(shared_tiny, answer), CONCEPT, ANCHOR, STATES)  # type: ignore[arg-type]
        assert len({row["t"] for row in found}) == STATES["steps"]
        for row in found:
            assert row["learned"] == pytest.approx(learned, abs=1e-3)
            assert row["guidance"] == pytest.approx(left, abs=1e-3)
            assert followed is None or row["followed"] == pytest.approx(followed, abs=1e-3)
    unchanged = guidance.rows(shared_tiny, shared_tiny, CONCEPT, ANCHOR, STATES)
    assert all((row["learned"], row["followed"]) == (0.0, 0.0) for row in unchanged)


def test_the_studys_cases_are_recipes() -> None:
    study = yaml.safe_load((ROOT / "studies" / "configs" / "guidance.yaml").read_text())
    found = {name: recipe_of(guidance.case(study, "blue", name), {}, 0) for name in study["cases"]}
    assert [recipe.forgotten[0].empty_prompts for recipe in found.values()] == [0.0, 0.0, 0.1, 0.25]
    assert {recipe.forgotten[0].prompts for recipe in found.values()} == {"tiny_blue"}
    assert not any(recipe.finish for recipe in found.values())
