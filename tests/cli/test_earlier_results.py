"""An earlier result in the folder of a command: of another model or protocol it stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

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
            "evaluation/evaluation.json is of other models or of another suite, and is not "
            "replaced; give another folder with --output"
        )
    assert file.read_bytes() == content
    elsewhere = evaluate("tiny-sd", "--suite", "suite.yaml", "--output", "tiny")
    assert elsewhere.exit_code == 0, elsewhere.output


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
