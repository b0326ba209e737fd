"""An earlier result in the folder of a command: of another model or protocol it stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

import concept_eraser
from concept_eraser.cli.main import app
from concept_eraser.evaluation import suite as suites
from concept_eraser.reporting import run_results
from concept_eraser.utils.errors import UserError
from tests.small_model import small_sd

SUITE = {
    "concept": {"shape": "star"},
    "sampling": {"steps": 1},
    "groups": {"direct": {"prompts": ["a green star"], "role": "forget", "n": 2}},
    "metrics": ["concept_rate"],
}


def evaluate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["evaluate", *arguments, "-q"])


def test_the_evaluation_of_another_model_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("suite.yaml").write_text(yaml.safe_dump(SUITE))
    Path("other.yaml").write_text(yaml.safe_dump({**SUITE, "seed": 8}))
    first = (small_sd(), "--before", "tiny-sd", "--suite", "suite.yaml")
    for n in ("2", "3"):
        assert evaluate(*first, "-n", n).exit_code == 0, "the same model by the same suite"
    file = Path("evaluation", "evaluation.json")
    content = file.read_bytes()
    for other in (
        ("tiny-sd", "--before", "tiny-sd", "--suite", "suite.yaml"),
        (small_sd(), "--before", small_sd(), "--suite", "suite.yaml"),
        (small_sd(), "--before", "tiny-sd", "--suite", "other.yaml"),
        (*first, "--guard", "negative:a star"),
        ("tiny-sd", "--suite", "suite.yaml", "--output", "evaluation"),
    ):
        refusal = evaluate(*other)
        assert isinstance(refusal.exception, UserError), other
        assert str(refusal.exception) == (
            "evaluation/evaluation.json is of other models, of another suite or of prompts that "
            "were edited since, and is not replaced; give another folder with --output"
        )
    assert file.read_bytes() == content
    elsewhere = evaluate("tiny-sd", "--suite", "suite.yaml", "--output", "tiny")
    assert elsewhere.exit_code == 0, elsewhere.output


def test_the_evaluation_of_a_run_against_another_original_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("suite.yaml").write_text(yaml.safe_dump(SUITE))
    overrides = ["training.steps=1", "training.batch_size=1"]
    concept_eraser.erase("tiny_star_esd", overrides=overrides, output="run")
    assert evaluate("run", "--suite", "suite.yaml").exit_code == 0
    content = Path("run/evaluation.json").read_bytes()
    refusal = evaluate("run", "--suite", "suite.yaml", "--before", small_sd())
    assert isinstance(refusal.exception, UserError), refusal.output
    assert "compares the run with tiny-sd, not with" in str(refusal.exception)
    assert Path("run/evaluation.json").read_bytes() == content
    assert evaluate("run", "--suite", "suite.yaml", "--before", "tiny-sd").exit_code == 0
    assert (
        evaluate("run", "--suite", "suite.yaml", "--before", small_sd(), "-o", "other").exit_code
        == 0
    )


def test_python_does_not_replace_the_evaluation_of_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("green.txt").write_text("a green star\na red star\n")
    groups = {"direct": {"prompts": "green.txt", "role": "forget", "n": 2}}
    suite = {**SUITE, "groups": groups}
    one, two = concept_eraser.load(small_sd()), concept_eraser.load("tiny-sd")
    in_memory = [cast("Any", model).pipeline for model in (one, two)]
    first = concept_eraser.evaluate(one, suite, before=two, output="check")
    content = Path("check/evaluation.json").read_bytes()
    again = concept_eraser.evaluate(small_sd(), suite, before="tiny-sd", n=2, output="check")
    assert again.models == first.models
    concept_eraser.evaluate(in_memory[0], suite, before="tiny-sd", output="memory")

    def refused(model: Any, folder: str = "check", before: Any = "tiny-sd", **changes: Any) -> None:
        with pytest.raises(UserError, match=r"evaluation\.json is of .*is not replaced"):
            concept_eraser.evaluate(
                model, {**suite, **changes}, before=before, guard=guard, output=folder
            )

    guard = None
    refused("tiny-sd")
    refused(one, before=one)
    refused(one, seed=8)
    refused(in_memory[1], folder="memory")
    guard = "negative:a star"
    refused(one.source)
    guard = None
    Path("green.txt").write_text("a green star\na blue star\n")
    refused(one)
    Path("green.txt").write_text("a green star\na red star\n")
    assert json.loads(content)["models"] == first.models
    assert json.loads(Path("check/evaluation.json").read_text())["models"] == first.models
    concept_eraser.evaluate(in_memory[0], suite, before=two, output="memory")


def test_an_evaluation_of_labelled_data_is_replaced_by_one_of_the_same_run_only(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    data: dict[Any, Any] = {
        name: (rng.standard_normal((20, 4)).astype(np.float32), np.arange(20) % 3)
        for name in ("forget", "retain")
    }
    for name, steps in (("a", 1), ("b", 2)):
        run = concept_eraser.erase(
            model=nn.Linear(4, 3),
            target="classifier",
            forget={"data": data["forget"], "loss": "relabel"},
            retain={"data": data["retain"]},
            training={"steps": steps, "batch_size": 8},
            output=tmp_path / name,
        )
        assert run.model is not None
    after = run.load()
    for _ in range(2):
        concept_eraser.evaluate(tmp_path / "a", after=after, data=data, output=tmp_path / "check")
    with pytest.raises(UserError, match="of another run, and is not replaced"):
        concept_eraser.evaluate(tmp_path / "b", after=after, data=data, output=tmp_path / "check")


@pytest.mark.parametrize(
    ("after", "inside", "is_same"),
    [
        ("runs/b (0a1c)", True, True),
        ("runs/b (0a1c)", False, False),
        ("runs/b (0a1b)", False, True),
        ("runs/a under negative:a star (0a1b)", False, False),
        ("runs/a under negative:a star (0a1b)", True, False),
    ],
)
def test_a_loaded_model_is_known_by_its_weights_too(
    tmp_path: Path, *, after: str, inside: bool, is_same: bool
) -> None:
    suite = suites.load(SUITE)
    models = {"before": "tiny-sd (0a1b)", "after": "runs/a (0a1b)"}
    content = {"protocol": suite.model_dump(mode="json"), "models": models}
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    new = {**models, "after": after}
    if is_same:
        run_results.require_same_models(tmp_path, suite, new, inside=inside)
        return
    with pytest.raises(UserError, match="not replaced"):
        run_results.require_same_models(tmp_path, suite, new, inside=inside)
    if inside:
        return
    other_weights = {**models, "after": "runs/a (0a1c)"}
    run_results.require_same_models(tmp_path, suite, other_weights)
    with pytest.raises(UserError, match="not replaced"):
        run_results.require_same_models(tmp_path, suite, other_weights, objects=["after"])


def test_an_evaluation_of_a_run_by_edited_prompts_has_a_folder_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "green.txt"
    file.write_text("a green star\n")
    groups = {"direct": {"prompts": str(file), "role": "forget", "n": 3}}
    suite = suites.load({**SUITE, "groups": groups})
    content = {
        "protocol": suite.model_dump(mode="json"),
        "prompt_hashes": {"direct": suites.group_prompts(suite, "direct").hash},
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    assert run_results.place_for(tmp_path, suite.with_at_most(2), "star") == tmp_path
    file.write_text("a green moon\n")
    place = run_results.place_for(tmp_path, suite, "star")
    assert place == tmp_path / "evaluations" / "star"


@pytest.mark.parametrize(
    ("recorded", "name", "guard", "is_same"),
    [
        ("lora.safetensors on tiny-sd (0a1b)", "./lora.safetensors", None, True),
        ("lora.safetensors on tiny-sd (0a1b)", "lora.safetensors@tiny-sd", None, True),
        ("checkpoint.safetensors (0a1b)", "checkpoint.safetensors@tiny-sd", None, True),
        ("lora.safetensors on tiny-sd (0a1b)", "lora", None, False),
        ("owner/name@v2 (0a1b)", "owner/name@v2", None, True),
        ("owner/name@v2 (0a1b)", "owner/name", None, False),
        ("a (1) (0a1b)", "a (1)", None, True),
        ("runs/a on tiny-sd under negative:a star (0a1b)", "runs/a/", "negative: a star", True),
        ("runs/a on tiny-sd under negative:a star (0a1b)", "runs/a", None, False),
        ("runs/a on tiny-sd (0a1b)", "runs/a", "negative:a star", False),
    ],
)
def test_a_model_is_known_by_its_name_and_its_safeguard(
    tmp_path: Path, *, recorded: str, name: str, guard: str | None, is_same: bool
) -> None:
    suite = suites.load(SUITE)
    content = {
        "protocol": suite.model_dump(mode="json"),
        "models": {"before": "tiny-sd (0a1b)", "after": recorded},
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    if is_same:
        run_results.require_same(tmp_path, suite, before="tiny-sd", after=name, guard=guard)
        return
    with pytest.raises(UserError, match="is not replaced"):
        run_results.require_same(tmp_path, suite, before="tiny-sd", after=name, guard=guard)
