"""The Python interface for editors and type checkers: keywords, types, documentation."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import typing
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

import concept_eraser
from concept_eraser import api
from concept_eraser.recipes import (
    keywords,
    objective_fields,
    recipe,
    trainable_fields,
    training_fields,
)
from concept_eraser.recipes.memory_presets import PRESETS
from concept_eraser.utils.errors import UserError
from tests import families
from tests.conftest import ROOT

FUNCTIONS = (
    "attack",
    "card",
    "erase",
    "evaluate",
    "export",
    "load",
    "merge",
    "plug",
    "push_to_hub",
    "report",
)
SETTINGS = {
    keywords.AttackSettings: objective_fields.AttackSpec,
    keywords.ElasticSettings: objective_fields.ElasticSpec,
    keywords.TrajectorySettings: objective_fields.TrajectorySpec,
    keywords.GenerationSettings: training_fields.GenerationSpec,
    keywords.HistogramSettings: objective_fields.HistogramSpec,
    keywords.LoraSettings: trainable_fields.LoraSpec,
    keywords.ObjectiveSettings: objective_fields.ObjectiveSpec,
    keywords.RewindingSettings: training_fields.RewindingSpec,
    keywords.TrainableSettings: trainable_fields.TrainableSpec,
    keywords.TrainingSettings: training_fields.TrainingSpec,
    keywords.WatchSettings: training_fields.WatchSpec,
}
# imported for type checkers only
NAMES = {"JudgeSource": Any, "LabelledData": Any, "LossSource": Any, "nn": nn}

CORRECT = """
from pathlib import Path

import torch

import concept_eraser
from concept_eraser.recipes import keywords

run = concept_eraser.erase(
    model="tiny-sd",
    target="denoiser",
    forget={"prompts": "tiny_star", "loss": "anchor", "anchor": {"shape": "circle"}, "n": 4},
    retain=["a red house", "a blue house"],
    method={"name": "munba", "normalize": True},
    trainable={"select": "cross_attention", "lora": {"rank": 4}},
    training={"steps": 2, "optimizer": "adamw", "tracker": ["wandb"]},
    memory="24gb",
    output=Path("runs/typed"),
)
training: keywords.TrainingSettings = {"steps": 2}
concept_eraser.erase("tiny_star_munba", overrides=["training.steps=2"])
concept_eraser.erase({"forget": "tiny_star", "retain": "tiny_rest"}, resume=True)
concept_eraser.erase(
    forget=["tiny_star", {"prompts": "tiny_blue"}], concepts="rotate", training=training
)
concept_eraser.erase(
    model=torch.nn.Linear(4, 2),
    target="classifier",
    forget={"data": (torch.zeros(3, 4), torch.zeros(3)), "indices": [1]},
    retain="rest",
)
prompted = concept_eraser.evaluate(run.folder, "tiny_star", n=100)
reveal_type(prompted)
images = prompted.groups["direct"].images
either = concept_eraser.evaluate(run.folder, before=run.load())
reveal_type(either)
number = either.find("accuracy", "forget")
campaign = concept_eraser.attack(run.folder, "ring_a_bell", n=20, options={"k": 3})
judged = concept_eraser.evaluate(
    run.folder, "tiny_star", judge="tiny", metrics=["accuracy", {"name": "fid"}]
)
page: Path = concept_eraser.report(prompted, "report.html", run=run.folder)
concept_eraser.report([run.folder, "runs/other"], attacks=["more"], show_sensitive=True)
"""
# each line has one mistake
WRONG = """
import concept_eraser
concept_eraser.erase(forgett="tiny_star")
concept_eraser.erase(forget={"promts": "tiny_star"})
concept_eraser.erase(forget="tiny_star", retain={"prompts": "tiny_rest", "steps": 3})
concept_eraser.erase(forget="tiny_star", training={"step": 100})
concept_eraser.erase(forget="tiny_star", training={"steps": "100"})
concept_eraser.erase(forget="tiny_star", training={"optimizer": "adamm"})
concept_eraser.erase(forget="tiny_star", target="denoisr")
concept_eraser.erase(forget="tiny_star", trainable={"lora": {"rnk": 4}})
concept_eraser.erase(forget="tiny_star", memory="23gb")
concept_eraser.evaluate("runs/star", sute="tiny_star")
concept_eraser.evaluate("runs/star", n="100")
concept_eraser.evaluate("runs/star").groups
concept_eraser.evaluate("runs/star", judge=3)
concept_eraser.evaluate("runs/star", metrics=[3])
concept_eraser.erase(forget={"prompts": "tiny_star", "loss": 3})
concept_eraser.attack("runs/star", grup="direct")
concept_eraser.attack("runs/star", 3)
concept_eraser.report("runs/star", show_sensitve=True)
concept_eraser.report(3)
concept_eraser.overview(["runs/star"])
"""
# mypy does not follow foreign packages: this takes seconds instead of a minute, and the messages
# for these lines are the same.
CONFIGURATION = """
[mypy]
ignore_missing_imports = true
follow_imports = silent
[mypy-torch.*,numpy.*,scipy.*,sklearn.*,matplotlib.*,PIL.*,diffusers.*,transformers.*]
follow_imports = skip
[mypy-accelerate.*,open_clip.*,pydantic.*,huggingface_hub.*]
follow_imports = skip
"""


def check_types(folder: Path, **files: str) -> dict[str, list[tuple[int, str]]]:
    """The messages of mypy for some files: (line, message) by name of the file."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "mypy.ini").write_text(CONFIGURATION)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "mypy.ini",
        *(f"{name}.py" for name in files),
    ]
    environment = {"MYPYPATH": str(ROOT), "PATH": ""}
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert not process.stderr, process.stderr
    messages = defaultdict(list)
    for line in process.stdout.splitlines():
        if place := re.match(r"(\w+)\.py:(\d+): (?:error|note): (.*)", line):
            messages[place[1]].append((int(place[2]), place[3]))
    return messages


def test_a_type_checker_reports_a_misspelt_keyword(tmp_path: Path) -> None:
    """Also the examples of the docstrings are checked."""
    examples = "\n".join(example(name) for name in FUNCTIONS)
    messages = check_types(tmp_path, correct=CORRECT, wrong=WRONG, examples=examples)
    types = [text for _, text in messages["correct"]]
    assert len(types) == 2, types
    assert re.search(r"\.PromptEvaluation\"$", types[0])
    assert re.search(r"PromptEvaluation.*LabelledEvaluation", types[1])
    assert not messages["examples"]
    lines = {line for line, _ in messages["wrong"]}
    assert lines == set(range(3, len(WRONG.splitlines()) + 1)), messages["wrong"]
    errors = " ".join(text for _, text in messages["wrong"])
    assert 'Unexpected keyword argument "forgett" for "erase"; did you mean "forget"?' in errors


def example(name: str) -> str:
    """The code of a function's example."""
    documentation = inspect.getdoc(getattr(concept_eraser, name)) or ""
    return "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) ?(.*)$", documentation, flags=re.M))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_documentation_names_every_argument(name: str) -> None:
    function = getattr(concept_eraser, name)
    documentation = inspect.getdoc(function) or ""
    for heading in ("Args:", "Returns:", "Raises:", "Example:"):
        assert f"\n{heading}\n" in documentation, heading
    arguments = documentation.partition("\nArgs:\n")[2].partition("\n\n")[0]
    parameters = inspect.signature(function).parameters.values()
    assert re.findall(r"^    (\w+): ", arguments, flags=re.M) == [one.name for one in parameters]
    assert not any(one.kind is one.VAR_KEYWORD for one in parameters)
    assert ast.parse(example(name)).body


def test_the_keywords_of_erase_are_the_keys_of_a_recipe() -> None:
    parameters = set(inspect.signature(api.erase).parameters)
    assert set(recipe.Recipe.model_fields) | {"memory"} <= parameters


def literals(annotation: Any) -> set[Any]:
    """All values that an annotation lists."""
    if typing.get_origin(annotation) is Literal:
        return set(typing.get_args(annotation))
    return {value for one in typing.get_args(annotation) for value in literals(one)}


@pytest.mark.parametrize(("settings", "section"), SETTINGS.items(), ids=lambda one: one.__name__)
def test_the_types_of_settings_are_those_of_the_recipe(settings: Any, section: Any) -> None:
    hints = typing.get_type_hints(settings, localns=NAMES, include_extras=True)
    assert hints.keys() == section.model_fields.keys()
    required_keys = {
        name for name, hint in hints.items() if typing.get_origin(hint) is typing.Required
    }
    assert required_keys == {
        name for name, field in section.model_fields.items() if field.is_required()
    }
    for name, field in section.model_fields.items():
        assert literals(field.annotation) <= literals(hints[name]), name


def test_the_lists_of_names_are_those_of_the_recipe() -> None:
    assert literals(keywords.Target) == literals(recipe.Recipe.model_fields["target"].annotation)
    assert literals(keywords.MemoryPreset) == set(PRESETS)


def test_every_public_name_is_there_and_listed() -> None:
    assert all(getattr(concept_eraser, name) is not None for name in concept_eraser.__all__)
    assert set(concept_eraser.__all__) <= set(dir(concept_eraser))
    assert set(FUNCTIONS) <= set(concept_eraser.__all__)
    with pytest.raises(AttributeError, match="overview"):
        _ = concept_eraser.overview


def test_a_recipe_or_its_keys() -> None:
    with pytest.raises(UserError, match="not both: found a recipe and method, training"):
        api.erase("tiny_star_munba", method="munba", training={"steps": 1})
    with pytest.raises(TypeError, match="forgett"):
        api.erase(forgett="tiny_star")


def test_a_model_of_unknown_origin_is_not_compared_with_the_bundled_one(tmp_path: Path) -> None:
    folder = families.build("sdxl", tmp_path / "theirs")
    for measure in (api.evaluate, api.attack):
        with pytest.raises(UserError, match=r"original model of .*theirs is not known.*--before"):
            measure(folder, suite="tiny_star", n=2)
    api.load("tiny-sd").save(tmp_path / "ours")
    groups = {"direct": {"prompts": "tiny_star", "role": "forget", "n": 2}}
    suite = {"concept": {"shape": "star"}, "sampling": {"steps": 2}, "groups": groups}
    evaluation = api.evaluate(tmp_path / "ours", suite, metrics=["concept_rate"])
    assert evaluation.models["before"].startswith("tiny-sd (")


def test_what_belongs_to_other_calls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="for the folder of a run on labelled data"):
        api.evaluate("tiny-sd", data={"test": None})
    with pytest.raises(UserError, match="run goes with an evaluation"):
        api.report(tmp_path, run=tmp_path)
    with pytest.raises(UserError, match="--suite goes with one run"):
        api.report([tmp_path, tmp_path], suite="tiny_star")


def test_the_cache_may_be_named_by_a_string(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    evaluation = concept_eraser.evaluate("tiny-sd", "tiny_star", n=2, cache=cache)
    written = set((tmp_path / "cache" / "images").rglob("*.safetensors"))
    assert written
    concept_eraser.attack(
        "tiny-sd", "seed_search", "tiny_star", n=2, options={"tries": 1}, cache=cache
    )
    page = concept_eraser.report(evaluation, tmp_path / "report.html", cache=cache)
    assert page.exists()
