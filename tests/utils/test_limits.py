"""Bounds of numbers: the same in recipes, suites, prompt sets and on the command line. All numbers
of the shipped files are within them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from concept_eraser import registry
from concept_eraser.cli import merge
from concept_eraser.cli.main import app
from concept_eraser.data import prompts
from concept_eraser.evaluation import suite
from concept_eraser.recipes import recipe
from concept_eraser.utils import limits, resources
from concept_eraser.utils.errors import UserError, mistakes_message, names_text
from tests.conftest import ROOT, short

FLOATS = {  # every setting of a recipe that is no whole number
    "training.lr": {},
    "training.weight_decay": {},
    "training.momentum": {"training__optimizer": "sgd"},
    "training.decay_factor": {"training__decay": "step", "training__milestones": [2]},
    "training.clip": {},
    "training.ema": {},
    "generation.guidance": {},
    "forget.scale": {},
    "forget.eta": {"forget__loss": "esd"},
    "forget.beta": {"forget__loss": "npo"},
    "forget.empty_prompts": {},
    "forget.elastic.weight": {},
    "forget.trajectory.guidance": {},
    "forget.trajectory.log_beta": {},
    "forget.trajectory.log_z": {},
    "attack.decay": {"method": "adversarial"},
    "trainable.lora.alpha": {},
    "trainable.saliency": {},
    "trainable.negate": {},
    "trainable.reinitialise": {},
    "histogram.alpha": {"method": "uno-hat"},
    "watch.below": {},
    "model_options.size": {},
    "method.xi": {},
    "finish.lamb": {"finish": "uce"},
}
WHOLE = {
    "training.steps": limits.TRAINING_STEPS,
    "training.batch_size": limits.BATCH,
    "training.micro_batches": limits.BATCH,
    "training.warmup": limits.TRAINING_STEPS,
    "training.cycles": limits.TRAINING_STEPS,
    "training.save_every": limits.TRAINING_STEPS,
    "training.seed": limits.SEED,
    "generation.steps": limits.SAMPLER_STEPS,
    "generation.batch_size": limits.BATCH,
    "generation.seed": limits.SEED,
    "forget.n": limits.IMAGES,
    "forget.elastic.n": limits.IMAGES,
    "forget.trajectory.steps": limits.SAMPLER_STEPS,
    "forget.trajectory.early": limits.SAMPLER_STEPS,
    "forget.trajectory.late": limits.SAMPLER_STEPS,
    "trainable.lora.rank": limits.RANK,
    "method.every": limits.COUNT,
    "rewinding.every": limits.TRAINING_STEPS,
}


def _base(changes: dict[str, Any]) -> dict[str, Any]:
    content = short(**changes)
    for name in ("method", "finish"):
        if isinstance(content.get(name), str):
            content[name] = {"name": content[name]}
    return content


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e400", "9" * 400])
@pytest.mark.parametrize("key", FLOATS)
def test_no_setting_of_a_recipe_is_infinite(key: str, value: str) -> None:
    with pytest.raises(UserError, match=r"finite|less than|greater than|number|integer") as error:
        recipe.load(_base(FLOATS[key]), [f"{key}={value}"])
    assert key.rpartition(".")[2] in str(error.value)
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize("key", WHOLE)
def test_whole_numbers_have_an_upper_bound(key: str) -> None:
    for value in (WHOLE[key] + 1, 10**12, 10**30):
        with pytest.raises(UserError, match=f"{key}|{key.rpartition('.')[2]}"):
            recipe.load(
                _base({}),
                [f"{key}={value}"] + (["forget.elastic.weight=1"] if "elastic" in key else []),
            )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.steps", limits.TRAINING_STEPS),
        ("training.seed", limits.SEED),
        ("generation.guidance", limits.GUIDANCE),
        ("generation.steps", limits.SAMPLER_STEPS),
        ("forget.n", limits.IMAGES),
        ("trainable.lora.rank", limits.RANK),
    ],
)
def test_the_bound_itself_is_allowed(key: str, value: float) -> None:
    recipe.load(short(), [f"{key}={value}"])


def _suite(**sampling: Any) -> dict[str, Any]:
    return {
        "concept": {"shape": "star"},
        "sampling": sampling,
        "groups": {"direct": {"prompts": "tiny_star", "role": "forget"}},
        "metrics": ["accuracy"],
    }


@pytest.mark.parametrize("key", ["steps", "guidance", "batch_size"])
def test_suites_have_the_bounds_of_recipes(key: str) -> None:
    most = {"steps": limits.SAMPLER_STEPS, "guidance": limits.GUIDANCE, "batch_size": limits.BATCH}[
        key
    ]
    assert getattr(suite.load(_suite(**{key: most})).sampling, key) == most
    for value in (most + 1, float("inf"), float("nan"), 10**30):
        with pytest.raises(UserError, match=rf"sampling\.{key}"):
            suite.load(_suite(**{key: value}))


def test_suites_bound_seeds_groups_and_metrics() -> None:
    for change in ({"seed": -1}, {"seed": 2**32}, {"metrics": ["accuracy"] * 101}):
        with pytest.raises(UserError, match=next(iter(change))):
            suite.load({**_suite(), **change})
    with pytest.raises(UserError, match=r"groups.direct.n"):
        suite.load(
            {
                **_suite(),
                "groups": {"direct": {"prompts": "tiny_star", "role": "forget", "n": 10**30}},
            }
        )


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"seed": -1}, "from 0 to"),
        ({"seed": 2**32}, "from 0 to"),
        ({"seed": 1.5}, "whole"),
        ({"seed": True}, "number"),
        ({"guidance": float("nan")}, "number"),
        ({"guidance": float("inf")}, "number"),
        ({"guidance": 1001}, "from 0 to"),
    ],
)
def test_rows_of_prompts_have_the_bounds_of_the_command_line(
    row: dict, word: str, tmp_path: Path
) -> None:
    (tmp_path / "set.yaml").write_text(yaml.safe_dump({"prompts": [{"text": "a", **row}]}))
    with pytest.raises(UserError, match=word):
        prompts.load(str(tmp_path / "set.yaml"))
    ((key, value),) = row.items()
    (tmp_path / "set.csv").write_text(f"prompt,{key}\na,{value}\n")
    with pytest.raises(UserError, match=f"line 2: {key} is"):
        prompts.load(str(tmp_path / "set.csv"))


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "tiny-sd", "-p", "a", "--guidance", "nan"],
        ["generate", "tiny-sd", "-p", "a", "--guidance", "1001"],
        ["generate", "tiny-sd", "-p", "a", "--seed", str(2**32)],
        ["generate", "tiny-sd", "-p", "a", "-n", str(10**30)],
        ["erase", "tiny_star_munba", "--lr", "nan"],
        ["erase", "tiny_star_munba", "--lr", "inf"],
        ["erase", "tiny_star_munba", "--steps", str(10**30)],
        ["erase", "tiny_star_munba", "--lora", str(10**12)],
        ["erase", "tiny_star_munba", "--seed", "-1"],
        ["evaluate", "tiny-sd", "-n", str(10**30)],
        ["attack", "tiny-sd", "--batch", str(10**30)],
        ["attack", "tiny-sd", "--seed", str(10**30)],
        ["export", "runs/x", "--to", "lora", "--strength", "nan"],
        ["export", "runs/x", "--to", "lora", "--strength", "inf"],
        ["export", "runs/x", "--to", "lora", "--max-error", "nan"],
        ["quickstart", "-n", str(10**30)],
    ],
)
def test_the_command_line_refuses_what_is_out_of_bounds(
    words: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert words[-2].lstrip("-") in result.output
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("weights", ["inf", "1,nan", "1e308", "x", "1,,2", "9" * 500])
def test_weights_of_a_merge_are_finite(weights: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read --weights"):
        merge.merge(["a", "b"], tmp_path / "out", weights)


@pytest.mark.parametrize(
    ("kind", "name", "option", "value"),
    [
        ("method", "weighted", "retain", float("inf")),
        ("method", "weighted", "retain", "nan"),
        ("method", "weighted", "retain", 10**400),
        ("method", "uno", "strength", float("inf")),
        ("method", "scrub", "rounds", 10**30),
        ("method", "mini_unlearning", "history", {"a": 1}),
        ("attack", "relearning", "rank", 10**12),
        ("attack", "relearning", "lr", ".inf"),
        ("attack", "p4d", "steps", 10**30),
        ("attack", "p4d", "variant", ["N"]),
        ("dataset", "fonts", "n", 10**12),
        ("dataset", "painted", "seed", 2**32),
    ],
)
def test_options_of_plugins_are_finite_and_bounded(
    kind: str, name: str, option: str, value: Any
) -> None:
    with pytest.raises(UserError, match=option if option != "variant" else "unknown value"):
        registry.build(kind, name, {option: value})


def test_numbers_of_prompt_sets_are_read_as_they_are_written() -> None:
    assert limits.whole("17.0", 0, 20) == limits.whole(17, 0, 20) == limits.whole(17.0, 0, 20) == 17
    assert limits.number("7.5", 0, 10) == 7.5
    for value in (None, True, [1], "1" * 101, "", "1_0x", 21, -1, 3.5, float("nan")):
        with pytest.raises(ValueError, match="expected a"):
            limits.whole(value, 0, 20)


def _numbers(content: Any, path: str = "") -> list[tuple[str, float]]:
    if isinstance(content, dict):
        return [item for key, inner in content.items() for item in _numbers(inner, f"{path}.{key}")]
    if isinstance(content, list):
        return [item for inner in content for item in _numbers(inner, path)]
    number = isinstance(content, int | float) and not isinstance(content, bool)
    return [(path.rpartition(".")[2], content)] if number else []


def test_every_setting_of_a_study_lies_within_the_bounds() -> None:
    """Recipes and suites are loaded; the grids of studies are compared with the bounds."""
    bounds = {
        "lr": limits.LEARNING_RATE,
        "weight": limits.FACTOR,
        "scale": limits.FACTOR,
        "rank": limits.RANK,
        "steps": limits.TRAINING_STEPS,
        "n": limits.IMAGES,
        "guidance": limits.GUIDANCE,
        "batch_size": limits.BATCH,
        "seed": limits.SEED,
        "negate": limits.PORTION,
    }
    numbers = [
        item
        for path in (ROOT / "studies" / "configs").glob("*.yaml")
        for item in _numbers(yaml.safe_load(path.read_text()))
    ]
    assert len(numbers) > 500
    assert not [(name, value) for name, value in numbers if value > bounds.get(name, limits.COUNT)]
    for name in resources.names("pipelines"):
        recipe.load(name)
    for name in resources.names("eval"):
        suite.load(name)


def test_messages_stay_short_whatever_was_given(tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text(
        "forget: tiny_star\nmethod: " + "x" * 100_000 + "\n" + "y" * 900 + ": 1\n"
    )
    many = {"forget": {"prompts": "tiny_star"}, **{f"key{i}" * 30: "v" * 5000 for i in range(500)}}
    for source, overrides in (
        (str(tmp_path / "long.yaml"), []),
        (many, []),
        ("tiny_star_munba", ["x" * 50_000]),
    ):
        with pytest.raises(UserError) as error:
            recipe.load(source, overrides)
        assert len(str(error.value)) <= 4000
    assert mistakes_message(["a"], "here") == "a mistake in here:\n  a"
    assert mistakes_message(map(str, range(30)), "here").endswith("\n  19\n  ... and 10 more")
    assert names_text(range(5), 3) == "0, 1, 2, and 2 more"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("forget: tiny_star\nmemory: [8gb]\n", "memory: expected the name of a preset"),
        (
            "forget: tiny_star\nmethod: {name: munba, every: 2020-01-01}\n",
            "method: every: expected int",
        ),
        ("forget: {prompts: !!set {a, b}}\n", "marked !!set"),
        ("model: !!binary aGVsbG8=\n", "marked !!binary"),
        (
            "forget: {prompts: [2020-01-01]}\n",
            r"forget\.prompts\.0: input should be a valid string",
        ),
        ("1: 2\nforget: tiny_star\n", "1: keys should be strings, found 1"),
        ("forget: {? [a] : b}\n", "no valid YAML"),
        (
            "a: &a [x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 8)}]\n"
                for i in range(9)
            ),
            "more than",
        ),
        ("forget: tiny_star\nmodel_options: {size: .inf}\n", "should be a finite number"),
        ("forget: {prompts: tiny_star, anchor: '{a.b}'}\n", "in braces"),
        ("forget: " + "[" * 200, "nested deeper"),
    ],
)
def test_hostile_recipes_are_refused_in_one_message(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UserError, match=word) as error:
        recipe.load(str(tmp_path / "recipe.yaml"))
    assert len(str(error.value)) <= 4000


@pytest.mark.parametrize(
    "override",
    [
        "=1",
        "a..b=1",
        ".a=1",
        "training.=1",
        ".".join("a" * 11) + "=1",
        "training.lr=[",
        "forget.²=1",
        "training.lr=!!python/object:x {}",
        "training.lr.x=1",
    ],
)
def test_hostile_overrides_are_refused(override: str) -> None:
    with pytest.raises(UserError):
        recipe.load("tiny_star_munba", [override])


def test_a_number_out_of_bounds_is_an_error_without_a_traceback(
    cli: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    result = cli(
        "erase", "tiny_star_munba", "training.lr=.inf", "trainable.lora.rank=1000000000000"
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "training.lr" in result.stderr
    assert "trainable.lora.rank" in result.stderr
