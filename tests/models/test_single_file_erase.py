"""A single-file checkpoint as the model of a run: FILE.safetensors on a folder of its architecture,
without conversion.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError
from concept_eraser.cli.main import app
from concept_eraser.exporting import model_card
from concept_eraser.models import hub, single_file
from concept_eraser.models.loading import load
from concept_eraser.recipes import recipe
from concept_eraser.utils.path_redaction import is_place, last, shorten

FEW = [
    "training.steps=2",
    "training.batch_size=2",
    "forget.n=2",
    "retain.n=2",
    "generation.steps=1",
    "training.device=cpu",
    "-q",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.safetensors, the bundled pipeline as one file, and bare/, its architecture without
    weights.
    """
    folder, model = tmp_path_factory.mktemp("single"), load("tiny-sd")
    single_file.write(model, folder / "model.safetensors")
    model.save(folder / "bare")
    for weights in (folder / "bare").rglob("*.safetensors"):
        weights.unlink()
    return folder


def test_erase_takes_the_file_itself(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run as on the model that the file was written from. The recipe is enough to find the
    model of the run.
    """
    monkeypatch.chdir(place)
    for words in (
        ["--model", "model.safetensors", "--base", "bare", "-o", "one"],
        ["--model", "tiny-sd", "-o", "other"],
    ):
        result = CliRunner().invoke(
            app, ["erase", "tiny_star_munba", *words, *FEW], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
    one, other = (load_file(place / run / "weights.safetensors") for run in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert recipe.load(str(place / "one" / "recipe.yaml")).model == "model.safetensors@bare"
    file = concept_eraser.export("one", "tensors").path  # needs the original model
    assert load_file(file).keys() <= one.keys()
    again = CliRunner().invoke(app, ["erase", "one/recipe.yaml", "-o", "one", "-q"])
    assert "finished before" in again.output
    header = model_card.header(recipe.load(str(place / "one" / "recipe.yaml")), "mit")
    assert "base_model" not in header, "a file is no repository of the hub"
    assert (
        concept_eraser.erase(
            "tiny_star_munba",
            model=Path("model.safetensors"),
            base="bare",
            overrides=FEW[:-1],
            output="api",
        ).recipe.model
        == "model.safetensors@bare"
    )


def test_a_dry_run_of_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    words = [
        "erase",
        "tiny_star_munba",
        "--model",
        "model.safetensors",
        "--base",
        "bare",
        *FEW[:-1],
        "--dry-run",
        "--two-steps",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "stands in" not in result.output
    assert "time (from two steps" in result.output


def test_each_mistake_is_an_error(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    shutil.copytree("bare", tmp_path / "not_one")
    (tmp_path / "not_one" / "model_index.json").unlink()

    def get_message(*words: str) -> str:
        result = CliRunner().invoke(
            app, ["erase", "tiny_star_munba", *words, *FEW, "-o", str(tmp_path / "run")]
        )
        assert isinstance(result.exception, UserError | SystemExit)
        return " ".join((result.output + str(result.exception)).split())

    alone = get_message("--model", "model.safetensors")
    assert "--base (erase)" in alone
    assert "concept-eraser export model.safetensors --before FOLDER --to diffusers" in alone
    assert "no such model: modle.safetensors" in get_message(
        "--model", "modle.safetensors", "--base", "bare"
    )
    assert "no such model: modle.safetensors" in get_message("model=modle.safetensors@bare")
    assert "one .safetensors file, found the model bare" in get_message(
        "--model", "bare", "--base", "bare"
    )
    assert "--base belongs to --model" in get_message("--base", "bare")
    assert "holds no configuration" in get_message(
        "--model", "model.safetensors", "--base", str(tmp_path / "not_one")
    )
    with pytest.raises(UserError, match="found a Module"):
        concept_eraser.erase("tiny_star_munba", model="model.safetensors", base=torch.nn.Module())  # type: ignore[arg-type]


def test_its_name_shows_no_path_of_this_machine() -> None:
    assert not hub.is_id("models/x.safetensors@tiny-sd")
    assert hub.is_id("owner/name@main")
    for name in (
        "/home/me/x.safetensors@/home/me/sd",
        "x.safetensors@/home/me/sd",
        "~/x.safetensors@sd",
    ):
        assert is_place(name)
        assert last(name) == "x.safetensors@sd" == shorten(name)
    assert last("/home/me/x.safetensors@owner/name") == "x.safetensors@owner/name"
    assert not is_place("models/x.safetensors@owner/name")
