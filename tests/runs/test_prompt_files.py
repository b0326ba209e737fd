"""Runs whose recipe names prompt files: in another working folder, and after a change of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError
from concept_eraser.cli.main import app
from concept_eraser.demo.presets import read_recipe
from concept_eraser.recipes import recipe as recipes
from tests.conftest import short

STAR = ["a flat red star", "a blue star"]
MOON = ["a flat red moon", "a blue moon"]
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
    content["forget"] = [content["forget"], {**content["forget"], "prompts": MOON}]
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
