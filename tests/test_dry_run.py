"""`erase --dry-run`: every recipe makes two steps offline, on its own model or on one that stands in."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from concept_eraser import UserError, recipe, resources, trials
from concept_eraser.cli.main import app

FILES = sorted(path for path in resources.folder("pipelines").rglob("*") if path.suffix in (".yaml", ".yml"))
NEEDS_DATA = {"celeba_hq_munba", "cifar10_class_munba", "imagenette_class_munba", "pets_clip_munba", "svhn_class_munba"}
TWINS = {path.stem for path in FILES if path.stem.startswith("sd14_imagenette_") and "golf_ball" not in path.stem}
TRIED = [path.stem for path in FILES if path.stem not in NEEDS_DATA | TWINS]


def test_the_recipes_are_there() -> None:
    assert len(TRIED) >= 40


@pytest.mark.parametrize("name", TRIED)
def test_two_steps_of_every_recipe(name: str) -> None:
    """At tiny sizes: FEW examples a side, whatever stands for the model."""
    asked = recipe.load(name)
    if trials.edits(asked):
        pytest.skip("an edit has no steps; its own tests run it")
    found = trials.load(asked)
    model, options = (found.model, found.options) if isinstance(found, trials.StandIn) else (found, asked.model_options)
    assert trials.two_steps(asked, model, options=options) > 0


def test_a_model_that_is_not_at_hand_is_stood_in_for_and_counted() -> None:
    shown = CliRunner().invoke(app, ["erase", "sd14_nudity_munba", "--memory", "8gb", "--select", "cross_attention", "--dry-run"])  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert "CompVis/stable-diffusion-v1-4 is not on this machine" in shown.output
    assert "two steps of this recipe ran on it" in shown.output
    assert "of 859,520,964 weights" in shown.output
    assert "memory (an estimate, not measured): " in shown.output
    assert "checkpointing: true" in shown.output


def test_a_model_at_hand_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("concept_eraser").level
    few = ["training.batch_size=2", "generation.batch_size=2", "training.device=cpu"]
    shown = CliRunner().invoke(app, ["erase", "tiny_star_munba", *few, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "for 100 steps + about" in shown.output
    assert "for generating 800 pictures" in shown.output
    assert not list(tmp_path.iterdir())
    assert logging.getLogger("concept_eraser").level == level, "later warnings of the process are not muted"
    assert "no trial was made" in CliRunner().invoke(app, ["erase", "tiny_star_munba", "--dry-run", "--no-trial"]).output  # fmt: skip


def test_a_broken_recipe_is_found() -> None:
    asked = recipe.load("sd14_nudity_munba", ["trainable.select=re:nothing_of_that_name"])
    found = trials.load(asked)
    with pytest.raises(UserError, match="matches none"):
        trials.two_steps(asked, found.model, options=found.options)


def test_an_unknown_model_has_no_stand_in() -> None:
    with pytest.raises(UserError, match="cannot load nobody/nothing"):
        trials.load(recipe.load("sd14_nudity_munba", ["model=nobody/nothing"]))
