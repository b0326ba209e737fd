"""Runs whose recipe names prompt files: in another working folder, and after a change of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError
from concept_eraser.cli.main import app
from concept_eraser.data import prompts
from concept_eraser.demo.presets import read_recipe
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils.errors import Interrupted
from tests.conftest import short

STAR = ["a flat red star", "a blue star"]
OTHER = ["a large red star", "two blue stars"]
SUITE = {
    "concept": {"shape": "star"},
    "sampling": {"steps": 2},
    "groups": {"direct": {"prompts": ["a green star"], "role": "forget", "n": 2}},
    "metrics": ["concept_rate"],
}


def prompt_file(*lines: str, name: str = "star.txt") -> Path:
    path = Path(name)
    path.write_text("\n".join(lines) + "\n")
    return path


def recipe(**changes: Any) -> dict[str, Any]:
    return short(
        **{
            "forget__prompts": "star.txt",
            "forget__anchor": "a circle",
            "trainable__lora": 2,
            "training__steps": 2,
            **changes,
        }
    )


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, named from another working folder that has none of its prompt files."""
    work, other = tmp_path / "work", tmp_path / "other"
    work.mkdir()
    other.mkdir()
    monkeypatch.chdir(work)
    prompt_file(*STAR)
    concept_eraser.erase(recipe(), output="run")
    monkeypatch.chdir(other)
    return Path("../work/run")


def test_a_finished_run_is_used_in_another_working_folder(elsewhere: Path) -> None:
    Path("suite.yaml").write_text(yaml.safe_dump(SUITE))
    run = str(elsewhere)
    for command in (
        ["export", run, "--to", "lora", "-o", "lora.safetensors"],
        ["evaluate", run, "--suite", "suite.yaml", "-q"],
        ["report", run, "-q"],
        ["card", run],
        ["merge", run, "--output", "merged"],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, (command, result.output)
    assert read_recipe(elsewhere) == recipes.load_run(elsewhere)


def test_what_needs_the_prompts_names_the_missing_file(elsewhere: Path) -> None:
    for command in (
        ["erase", f"{elsewhere}/recipe.yaml", "-o", str(elsewhere)],
        ["erase", f"{elsewhere}/recipe.yaml", "-o", "again"],
        ["check", f"{elsewhere}/recipe.yaml"],
    ):
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, UserError), result.output
        assert (
            "no such prompt set file: star.txt; check the path, or give the command in the folder "
            "where it begins" in str(result.exception)
        )
    content = yaml.safe_load((elsewhere / "recipe.yaml").read_text())
    content["forget"] = [content["forget"], {**content["forget"], "prompts": OTHER}]
    (elsewhere / "recipe.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(
        UserError, match=r"prompts that this run forgot: .*star\.txt; check the path"
    ):
        concept_eraser.evaluate(elsewhere, SUITE)


@pytest.mark.parametrize(
    "name",
    ["hf://stranger/set/prompts.csv", "https://host/prompts.txt", "\x1b[2Jprompts.txt", "tiny_sta"],
)
def test_a_run_folder_names_no_address_and_no_unknown_set(elsewhere: Path, name: str) -> None:
    content = yaml.safe_load((elsewhere / "recipe.yaml").read_text())
    content["forget"]["prompts"] = name
    (elsewhere / "recipe.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"no such prompt set|unknown prompt set"):
        recipes.load_run(elsewhere)


def test_the_watched_suite_of_a_finished_run_may_be_missing(tmp_path: Path) -> None:
    content = recipe(forget__prompts=STAR, watch={"suite": "missing/suite.yaml"})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    watch = recipes.load_run(tmp_path).watch
    assert watch is not None
    assert watch.suite == "missing/suite.yaml"
    with pytest.raises(UserError, match="no such evaluation suite file"):
        recipes.load(tmp_path / "recipe.yaml")


def test_a_finished_run_notices_that_its_prompt_file_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = prompt_file(*STAR)
    run = concept_eraser.erase(recipe(), output="run")
    prompt_file("", *STAR, "")
    assert concept_eraser.erase(recipe(), output="run").seconds == run.seconds, "the same prompts"
    prompt_file(*OTHER)
    with pytest.raises(
        UserError, match=r"run holds this run with other prompts or data: star\.txt"
    ) as one:
        concept_eraser.erase(recipe(), output="run")
    assert "--overwrite" in str(one.value)
    # the record of an early version has no prompts
    record = json.loads(Path("run/environment.json").read_text())
    del record["prompts"]
    Path("run/environment.json").write_text(json.dumps(record))
    assert concept_eraser.erase(recipe(), output="run").seconds == run.seconds
    Path("run/environment.json").unlink()
    assert concept_eraser.erase(recipe(), output="run").seconds == run.seconds
    new = concept_eraser.erase(recipe(), output="run", overwrite=True).folder
    record = json.loads((new / "environment.json").read_text())
    assert record["prompts"]["forget"]["hash"] == prompts.load(file).hash


def test_an_interrupted_run_is_resumed_with_its_own_prompts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = prompt_file(*STAR)
    first = prompts.load(file).hash
    long = recipe(training__steps=4, training__save_every=1)

    def edit_and_stop(step: int, _: float) -> None:
        if step == 2:
            prompt_file(*OTHER)
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        concept_eraser.erase(long, output="run", on_step=edit_and_stop)
    with pytest.raises(UserError, match=r"other prompts or data: star\.txt \(forget\) was changed"):
        concept_eraser.erase(long, output="run", resume=True)
    prompt_file(*STAR)

    def edit(step: int, _: float) -> None:
        prompt_file(*OTHER)

    run = concept_eraser.erase(long, output="run", resume=True, on_step=edit)
    record = json.loads((run.folder / "environment.json").read_text())
    assert record["prompts"]["forget"]["hash"] == first, "of the prompts that were used"
