"""`erase --forget ... --anchor ...`: what it does where nothing else is asked, and that whatever is asked wins."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from concept_eraser import defaults, recipe, resources
from concept_eraser.cli.main import app

module = importlib.import_module("concept_eraser.cli.erase")  # the package has a function of that name
FLAGS = ("--forget", "tiny_star", "--anchor", "shape=circle", "--retain", "tiny_rest")


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> Callable[..., recipe.Recipe]:
    """The recipe that a command line stands for, taken where it would be run."""
    taken: list[recipe.Recipe] = []
    monkeypatch.setattr(module, "run", lambda start, overrides, *_: taken.append(recipe.load(start, overrides)))

    def of(*arguments: str) -> recipe.Recipe:
        found = CliRunner().invoke(app, ["erase", *arguments])
        assert found.exit_code == 0, found.output
        return taken[-1]

    return of


def test_the_default_is_the_recipe_that_is_measured(resolved) -> None:
    """All that decides about the weights; only the seed of the training and the recipe's own words may differ."""
    mine, measured = resolved(*FLAGS).resolved(), recipe.load("tiny_star_munba_uce").resolved()
    assert mine == measured


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--lora", "4"), None),
        (("--select", "cross_attention"), "uce"),
        (("--select", "all_but_cross_attention"), None),
        (("--loss", "esd"), None),
        (("--method", "weighted"), "uce"),
        (("finish=rece",), "rece"),
        (("finish=null",), None),
    ],
)
def test_the_closed_form_follows_where_it_can(more: tuple[str, ...], expected: str | None, resolved) -> None:
    found = resolved(*FLAGS, *more).finish
    assert (found and found.name) == expected


def test_what_is_asked_wins(resolved) -> None:
    found = resolved(*FLAGS, "--lr", "3e-5", "--steps", "7", "retain.loss=data")
    assert (found.training.lr, found.training.steps, found.retain.loss) == (3e-5, 7, "data")  # type: ignore[union-attr]


def test_without_an_anchor_it_is_esd(resolved) -> None:
    found = resolved("--forget", "tiny_star", "--retain", "tiny_rest")
    assert (found.forgotten[0].loss, found.finish) == ("esd", None)


def test_several_concepts_have_the_default_each(resolved) -> None:
    found = resolved("--forget", "tiny_star", "--anchor", "shape=circle", "--forget", "tiny_moon", "--anchor", "shape=cross", "--retain", "tiny_five_rest")  # fmt: skip
    assert [side.loss for side in found.forgotten] == ["anchor", "anchor"]
    assert found.finish.name == "uce"  # type: ignore[union-attr]


def test_a_models_family_is_read_from_its_folder(tmp_path: Path) -> None:
    for name, family in (("StableDiffusionXLPipeline", "sdxl"), ("FluxPipeline", "flux"), ("Another", None)):
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
        assert defaults.family_of(str(tmp_path)) == family
        assert defaults.family_of(f"some.safetensors@{tmp_path}") == family
    assert defaults.family_of("tiny-sd") == "sd"
    assert defaults.family_of("CompVis/stable-diffusion-v1-4") == "sd"
    assert defaults.family_of("nobody/knows") is None
    assert (resources.tiny_weights() / "tiny-sd" / "model_index.json").is_file()


def test_rates_for_the_bundled_model_are_not_taken_for_others() -> None:
    assert "training.lr=1e-5" in defaults.settings("runwayml/some", anchored=True, retained=True)
    assert not any(one.startswith("generation") for one in defaults.settings("./mine", anchored=True, retained=True))
