"""`concept-eraser erase CONCEPT` in real processes, and the same call in Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import api
from concept_eraser.cli import concept_result, evaluate
from concept_eraser.cli.main import app
from concept_eraser.exporting import eval_results
from concept_eraser.models import base
from concept_eraser.reporting import run_results
from concept_eraser.runs import concept_job, suite_matching
from concept_eraser.storage.readers import read_json
from concept_eraser.utils.errors import UserError
from tests.conftest import short

Cli = Callable[..., CompletedProcess[str]]
SHORT = ["training.steps=2", "training.batch_size=2", "forget.n=4", "retain.n=4"]
SAMPLER = ["generation.steps=2", "trainable.lora.rank=2"]  # on all layers, as the default


def test_one_line_erases_evaluates_and_says_where_everything_is(cli: Cli, tmp_path: Path) -> None:
    process = cli("erase", "star", "--images", "8", *SHORT, *SAMPLER, "-q")
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0] == "concept:  star (object); anchor concept: circle"
    assert "repeat with: concept-eraser erase runs/star/recipe.yaml" in process.stdout
    assert "the model generates 'star' in 7 of 8 images" in process.stdout
    folder = tmp_path / "runs" / "star"
    for name in ("recipe.yaml", "suite.yaml", "evaluation.json", "report.html", "before_after.png"):
        assert (folder / name).is_file(), name
    assert (folder / "lora").is_dir()
    assert not (folder / "pipeline").exists(), "the LoRA is enough"
    assert "concept-eraser export runs/star --to diffusers" in process.stdout
    assert (folder / "exports" / "star-kohya.safetensors").is_file()
    assert "concept-eraser attack runs/star" in process.stdout
    groups = read_json(folder / "evaluation.json")["protocol"]["groups"]
    assert [group["n"] for group in groups.values()] == [8] * 4

    # an attack is in the page that `report` writes again, with the images that need no model
    attack = ["attack", "runs/star", "-a", "random_tokens", "--set", "tries=1", "-n", "2"]
    process = cli(*attack, "-q", "--allow-pickle")
    assert process.returncode == 0, process.stderr
    assert "report:  concept-eraser report runs/star --allow-pickle\n" in process.stdout
    process = cli("report", "runs/star", "--allow-pickle", "-q")
    assert process.returncode == 0, process.stderr
    assert "random_tokens" in (folder / "report.html").read_text()

    # the card names the concept, and knows that its suite is about it; random tokens are a control
    card = concept_eraser.card(folder)
    assert "after erasing **star (shape)** with" in card
    assert "| forget | `prompts that name 'star'` |" in card
    assert "was not evaluated" not in card
    assert "This erasure was not attacked." in card

    # the recipe of the run repeats it, with its suite
    process = cli("erase", "runs/star/recipe.yaml", "-o", "again", "-q")
    assert process.returncode == 0, process.stderr
    again = tmp_path / "again"
    assert (again / "suite.yaml").read_text() == (folder / "suite.yaml").read_text()
    file = Path("lora") / "pytorch_lora_weights.safetensors"
    assert (again / file).read_bytes() == (folder / file).read_bytes()

    # the same command again finds the run finished; other settings do not replace it
    process = cli("erase", "star", *SHORT, *SAMPLER, "-q", "--no-evaluate")
    assert process.returncode == 0, process.stderr
    assert "finished before" in process.stdout
    # a number of images that the suite there does not have is not ignored
    command = ("erase", "star", *SHORT, *SAMPLER, "-q", "--no-evaluate", "--images")
    assert cli(*command, "8").returncode == 0
    process = cli(*command, "2")
    assert process.returncode == 2
    assert "runs/star/suite.yaml has 8 images of each group, not 2" in process.stderr
    suite = folder / "suite.yaml"
    suite.write_text(suite.read_text().replace("n: 8", "n: 2"))
    process = cli("evaluate", "runs/star", "--suite", "runs/star/suite.yaml", "-q")
    assert process.returncode == 0, process.stderr
    groups = read_json(folder / "evaluation.json")["protocol"]["groups"]
    assert [group["n"] for group in groups.values()] == [2] * 4
    assert cli(*command, "2").returncode == 0
    process = cli("erase", "star", *SAMPLER, "training.steps=3", "-q")
    assert process.returncode == 2
    assert "holds another run" in process.stderr


def test_printed_commands_can_be_pasted(cli: Cli, tmp_path: Path) -> None:
    """The name of the run folder has a space, and the commands keep what the user permitted."""
    process = cli(
        *("erase", "star", "-o", "my runs/star", "--images", "2", "--no-evaluate", "-q"),
        *("--allow-pickle", *SHORT, *SAMPLER),
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    commands = [
        shlex.split(line[line.index("concept-eraser ") :].split("    ")[0])
        for line in lines
        if "concept-eraser " in line
    ]
    by_verb = {words[1]: words for words in commands}
    assert set(by_verb) == {"erase", "export", "evaluate", "attack"}
    assert by_verb["erase"][2:] == ["my runs/star/recipe.yaml", "--output", "my runs/star_again"]
    for verb in ("export", "evaluate", "attack"):
        assert by_verb[verb][2] == "my runs/star"
        assert "--allow-pickle" in by_verb[verb]
    for file, verb in (("recipe.yaml", "erase"), ("suite.yaml", "evaluate")):
        first = (tmp_path / "my runs" / "star" / file).read_text().splitlines()[0]
        assert shlex.split(first)[1:4] == [
            *("concept-eraser", verb),
            "my runs/star/recipe.yaml" if verb == "erase" else "my runs/star",
        ]
    process = cli(*by_verb["evaluate"][1:], "-q")
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("family", "has_gate", "verbs"),
    [
        ("sd", False, ["attack", "export", "push"]),
        ("pixart", False, ["attack", "push"]),
        ("sd", True, ["attack"]),
    ],
)
def test_no_printed_command_refuses_the_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    family: str,
    has_gate: bool,
    verbs: list[str],
) -> None:
    """A gate has no other format, and some families have no single file."""
    recipe = SimpleNamespace(method=SimpleNamespace(adds_gate=has_gate))
    run = SimpleNamespace(folder=tmp_path, recipe=recipe, model=SimpleNamespace(family=family))
    concept_result.show(run, measure=True, quiet=True)
    files, commands = capsys.readouterr().out.split("next:")
    assert re.findall(r"concept-eraser (\w+)", commands) == verbs
    assert ("export" in files) is not has_gate
    assert (f"gate:     {tmp_path}/weights.safetensors" in files) is has_gate


@pytest.mark.parametrize("family", ["sd", "pixart"])
def test_too_little_memory_to_evaluate_is_no_error_of_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    family: str,
) -> None:
    """The files are named before, and the model of the training does not stay on the GPU."""
    moves: list[str] = []
    model = SimpleNamespace(family=family, device=SimpleNamespace(type="cuda"), to=moves.append)
    recipe = SimpleNamespace(method=SimpleNamespace(adds_gate=False))
    run = SimpleNamespace(folder=tmp_path, recipe=recipe, model=model)

    def evaluate_run(*_: Any, **__: Any) -> None:
        assert moves == ["cpu"]
        assert "pipeline: " in capsys.readouterr().out
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(evaluate, "evaluate_run", evaluate_run)
    monkeypatch.setattr(suite_matching, "own_suites", lambda _: [str(tmp_path / "suite.yaml")])
    concept_result.show(run, measure=True, quiet=True, allow_pickle=True)
    command = f"concept-eraser evaluate {tmp_path} --suite {tmp_path}/suite.yaml --allow-pickle"
    output = capsys.readouterr().out
    assert output.startswith(f"not evaluated: not enough memory; try again with: {command}\nnext: ")


def test_whether_a_model_can_sample_leaves_it_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large:
        device = torch.device("cpu")
        denoiser = torch.nn.Linear(concept_job.SMALL, 1, device="meta")

    model: Any = Large()
    assert not concept_job.can_sample(model)
    for module in (base, concept_job):
        monkeypatch.setattr(module, "find_gpu", lambda: torch.device("cuda"))
    assert concept_job.can_sample(model)


def test_the_file_for_other_programs_has_the_permissions_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    permissions: list[bool] = []

    def export(*_: Any, allow_pickle: bool) -> Any:
        permissions.append(allow_pickle)
        return SimpleNamespace(ignored=[])

    monkeypatch.setattr(api, "export", export)
    (tmp_path / "lora").mkdir()
    recipe = SimpleNamespace(method=SimpleNamespace(adds_gate=False))
    run = SimpleNamespace(folder=tmp_path, recipe=recipe, model=SimpleNamespace(family="sd"))
    for is_given in (False, True):
        concept_result.show(run, measure=False, quiet=True, allow_pickle=is_given)
    assert permissions == [False, True]


def test_a_run_without_a_suite_is_evaluated_by_one_that_the_user_names(tmp_path: Path) -> None:
    """The next step, the card and the errors name --suite, which such a run needs."""
    file, recipe = tmp_path / "my_forget.txt", tmp_path / "own.yaml"
    file.write_text("a green star\n")
    run = tmp_path / "own"
    settings: dict[str, Any] = {"training__steps": 1, "forget__anchor": "a circle"}
    recipe.write_text(yaml.safe_dump(short(forget__prompts=str(file), **settings)))
    result = CliRunner().invoke(app, ["erase", str(recipe), "-o", str(run), "-q"])
    assert result.exit_code == 0, result.output
    command = f"concept-eraser evaluate {run} --suite SUITE"
    assert f"next: {command}    (" in result.output
    assert "evaluate runs/own --suite SUITE\n" in concept_eraser.card(run)
    permitted = concept_eraser.card(run, allow_pickle=True)
    assert "evaluate runs/own --suite SUITE --allow-pickle\n" in permitted
    for read in (run_results.read_evaluation, lambda run: eval_results.model_files(run, "me/x")):
        with pytest.raises(UserError, match=re.escape(f"`{command}` first")):
            read(run)


def test_a_dry_run_shows_the_plan_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    process = cli("erase", "blue", "--anchor", "red", "--dry-run", "--no-two-steps")
    assert process.returncode == 0, process.stderr
    assert "anchor concept: red" in process.stdout
    assert "# runs/blue/suite.yaml" in process.stdout
    assert "would write runs/blue" in process.stdout
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_a_model_on_the_hub_asks_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of the hub was imported before, with a network."""
    import huggingface_hub

    asked: list[Any] = []
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: asked.append(_))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: asked.append(_))
    arguments = ["erase", "Van Gogh", "--model", "owner/name", "--dry-run"]
    result = CliRunner().invoke(app, arguments)
    assert "does not hold it" in str(result.exception or result.output)
    assert not asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["giraffe"], "does not know 'giraffe'"),
        (["star", "tiny_star_munba"], "not both"),
        (["star", "--forget", "tiny_star"], "not both"),
        (["star", "--kind", "person"], "is of the kind object"),
        (["tiny_star_munba", "--kind", "object"], "--kind goes with concepts"),
        (["tiny_star_munba", "--images", "8"], "--images goes with concepts"),
        (["tiny_star_mumba"], "did you mean 'tiny_star_munba'"),
        (["star", "--anchor", "star"], "is no other shape"),
        (["star", "--anchor", "shape=moon", "--anchor", "tree"], "2 anchors for 1 concepts"),
    ],
)
def test_one_sentence_for_each_mistake(cli: Cli, arguments: list[str], message: str) -> None:
    process = cli("erase", *arguments)
    assert process.returncode == 2
    assert message in process.stderr
    assert process.stderr.count("\n") <= 2


def test_several_concepts_in_python(tmp_path: Path) -> None:
    """Lines of the plan, one suite each, and an evaluation that asks which one is meant."""
    lines: list[str] = []
    folder = tmp_path / "run"
    run = concept_eraser.erase(
        ["star", "dotted"],
        training={"steps": 1, "batch_size": 1},
        trainable={"select": "cross_attention", "lora": 2},
        generation={"steps": 1},
        overrides=["forget.n=2", "retain.n=2"],
        output=folder,
        images=2,
        notify=lines.append,
    )
    assert [spec.anchor for spec in run.recipe.forgotten] == [
        {"shape": "circle"},
        {"style": "flat"},
    ]
    assert sorted(path.name for path in (folder / "suites").iterdir()) == [
        "dotted.yaml",
        "star.yaml",
    ]
    assert sum("the model generates" in line for line in lines) == 2
    with pytest.raises(UserError, match=r"suites/dotted\.yaml"):
        concept_eraser.evaluate(folder)
    evaluation = concept_eraser.evaluate(folder, folder / "suites" / "dotted.yaml", n=2)
    assert evaluation.suite.concept == {"style": "dotted"}


def test_a_suite_of_a_run_folder_reads_no_files(tmp_path: Path) -> None:
    """A run folder may be a stranger's: its own suite names no file of this machine."""
    (tmp_path / "secret.txt").write_text("a secret\n")
    run = tmp_path / "run"
    concept_eraser.erase(
        "star",
        training={"steps": 1, "batch_size": 1},
        trainable={"select": "cross_attention", "lora": 2},
        generation={"steps": 1},
        overrides=["forget.n=2", "retain.n=2"],
        output=run,
        images=2,
    )
    text = (run / "suite.yaml").read_text()
    (run / "suite.yaml").write_text(
        "concept: {shape: star}\ngroups:\n"
        f"  direct: {{prompts: {tmp_path / 'secret.txt'}, role: forget, n: 2}}\n"
    )
    with pytest.raises(UserError, match="give the suite with --suite if you trust it"):
        concept_eraser.evaluate(run)
    assert "secret" not in text
