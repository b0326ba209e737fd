"""End-to-end tests of trust: no file of a user is lost, no code of a stranger runs, and no damaged
file is used.

The writers, manifests and locks behind it have tests of their own in tests/storage.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import concept_eraser
from concept_eraser.storage import manifest
from concept_eraser.utils.errors import UserError
from tests.conftest import short
from tests.processes import Command

Cli = Callable[..., subprocess.CompletedProcess[str]]


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests copy it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    concept_eraser.erase(short(), output=folder)
    return folder


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished_run, tmp_path / "runs" / "star"))


# 1: a file writer deletes folders


def test_a_card_never_replaces_the_folder_of_all_runs(cli: Cli, run: Path, tmp_path: Path) -> None:
    before = tree(run.parent)
    result = cli("card", "runs/star", "-o", "runs", "--overwrite")
    assert result.returncode == 2
    assert "is a folder" in result.stderr
    assert tree(run.parent) == before


def test_evaluate_writes_into_a_folder(run: Path, tmp_path: Path) -> None:
    """`output` is a folder, as for erase and attack; a run there keeps its weights."""
    suite = {
        "concept": {"shape": "star"},
        "groups": {"direct": {"prompts": "tiny_star", "role": "forget", "n": 2}},
        "metrics": ["concept_rate"],
        "sampling": {"steps": 2},
    }
    before = tree(run)
    concept_eraser.evaluate(str(run), suite, output=run)
    after = tree(run)
    assert json.loads(after.pop("evaluation.json"))["protocol"]["concept"] == {"shape": "star"}
    assert after.pop("evaluation.csv.xz")
    before.pop(manifest.MARK), after.pop(manifest.MARK)
    assert after == before
    with pytest.raises(UserError, match="output is a folder"):
        concept_eraser.evaluate(str(run), suite, output=tmp_path / "numbers.json")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "evaluation.json").write_text("mine")
    with pytest.raises(UserError, match="was not written by concept_eraser"):
        concept_eraser.evaluate(str(run), suite, output=tmp_path / "mine")
    assert (tmp_path / "mine" / "evaluation.json").read_text() == "mine"


# 2: data can name code

PAYLOAD = """
from pathlib import Path
Path(__file__).with_name("CANARY").write_text("imported")
from torch import nn
def go():
    Path(__file__).with_name("CANARY").write_text("called")
    return nn.Linear(64, 10)
"""


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A stranger's run folder below the working directory. Its recipe names code in that folder."""
    folder = tmp_path / "runs" / "stranger"
    folder.mkdir(parents=True)
    (folder / "payload.py").write_text(PAYLOAD)
    recipe = {
        "model": "runs.stranger.payload:go",
        "target": "classifier",
        "forget": {"data": "digits", "classes": [3], "loss": "ascent"},
        "retain": "rest",
        "method": "munba",
        "training": {"steps": 1, "batch_size": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "done.json").write_text('{"seconds": 1.0}')
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ("evaluate", "runs/stranger"),
        ("erase", "runs/stranger/recipe.yaml", "--dry-run"),
        ("erase", "runs/stranger/recipe.yaml", "-o", "mine"),
        ("check", "runs/stranger/recipe.yaml"),
        ("card", "runs/stranger"),
        ("generate", "runs.stranger.payload:go", "-p", "a star"),
    ],
    ids=lambda a: " ".join(a[:1]),
)
def test_a_recipe_of_a_stranger_runs_no_code(
    cli: Cli, stranger: Path, arguments: tuple[str, ...]
) -> None:
    result = cli(*arguments)
    assert not (stranger / "CANARY").exists()
    assert "Traceback" not in result.stderr
    if arguments[0] in ("evaluate", "erase"):
        assert result.returncode == 2
        assert "--allow-code" in result.stderr


def test_code_that_the_user_names_is_called(cli: Cli, stranger: Path) -> None:
    result = cli("erase", "runs/stranger/recipe.yaml", "--allow-code", "-o", "mine", "-q")
    assert result.returncode == 0, result.stderr
    assert (stranger / "CANARY").read_text() == "called"
    (stranger / "CANARY").unlink()
    assert cli("evaluate", "mine").returncode == 2
    assert not (stranger / "CANARY").exists()
    assert cli("evaluate", "mine", "--allow-code").returncode == 0
    (stranger / "CANARY").unlink()
    result = cli(
        "erase",
        "runs/stranger/recipe.yaml",
        "--model",
        "runs.stranger.payload:go",
        "-o",
        "mine",
        "-q",
        "--overwrite",
    )
    assert result.returncode == 0, result.stderr
    assert (stranger / "CANARY").read_text() == "called"


def test_from_python_a_recipe_runs_no_code_either(
    stranger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load((stranger / "recipe.yaml").read_text())
    for call in (
        lambda: concept_eraser.erase(content, output=tmp_path / "x"),
        lambda: concept_eraser.erase(str(stranger / "recipe.yaml"), output=tmp_path / "x"),
        lambda: concept_eraser.evaluate(stranger),
    ):
        with pytest.raises(UserError, match="allow_code"):
            call()
    assert not (stranger / "CANARY").exists()
    assert not (tmp_path / "x").exists()


# 3: own files destroyed


@pytest.fixture
def project(tmp_path: Path) -> dict[str, bytes]:
    """A user's project, in which the names of a run's files are in use."""
    for name in (
        "recipe.yaml",
        "README.md",
        "report.html",
        "log.jsonl",
        "model/keep.txt",
        "pipeline/keep.txt",
        "exports/keep.txt",
        "attacks/keep.txt",
        "weights.safetensors",
        "done.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short(training__steps=1)))
    return tree(tmp_path)


@pytest.mark.parametrize(
    "flags", [(), ("--overwrite",), ("--resume",), ("--resume", "--overwrite")]
)
def test_a_run_never_goes_into_a_users_project(
    cli: Cli, tmp_path: Path, project: dict[str, bytes], flags: tuple[str, ...]
) -> None:
    result = cli("erase", "recipe.yaml", "-o", ".", "-q", *flags)
    assert result.returncode == 2
    assert "concept_eraser did not make it" in result.stderr
    assert tree(tmp_path) == project


def test_overwrite_leaves_what_the_user_added_or_changed(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    (run / "notes.txt").write_text("mine")
    (run / "exports").mkdir()
    (run / "exports" / "mine.safetensors").write_text("mine")
    (run / "report.html").write_text("mine")
    (run / "conflict.png").write_text("mine")  # in place of the run's file
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short(training__seed=3)))
    result = cli("erase", "recipe.yaml", "-o", "runs/star", "--overwrite", "-q")
    assert result.returncode == 0, result.stderr
    assert [
        (run / n).read_text() for n in ("notes.txt", "exports/mine.safetensors", "report.html")
    ] == ["mine"] * 3
    assert (run / ".replaced-1" / "conflict.png").read_text() == "mine"
    assert {p.name for p in (run / ".replaced-1").iterdir()} == {"conflict.png", manifest.MARK}
    assert yaml.safe_load((run / "recipe.yaml").read_text())["training"]["seed"] == 3


def test_a_file_of_the_user_inside_the_model_is_an_error_before_any_work(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    (run / "pipeline" / "mine.txt").write_text("mine")
    before = tree(run)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short(training__seed=5)))
    result = cli("erase", "recipe.yaml", "-o", "runs/star", "--overwrite", "-q")
    assert result.returncode == 2
    assert "mine.txt was not written by concept_eraser" in result.stderr
    assert tree(run) == before


def test_an_overwrite_that_is_stopped_leaves_the_earlier_run_whole(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    before = tree(run)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short(training__steps=4000)))
    arguments = ("erase", "recipe.yaml", "-o", "runs/star", "--overwrite", "-q")
    process = Command(*arguments, folder=tmp_path)
    try:
        process.wait_until(lambda: has_text(run / ".replaced-1" / "done.json"))
        process.wait_until(lambda: has_text(run / "log.jsonl"))
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "is in runs/star/.replaced-1" in process.stderr
    aside = tree(run / ".replaced-1")
    before.pop(manifest.MARK), aside.pop(manifest.MARK)
    assert aside == before
    assert not (run / "done.json").exists()
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short()))
    assert cli("erase", "recipe.yaml", "-o", "runs/star", "--overwrite", "-q").returncode == 0
    assert not list(run.glob(".replaced*"))
    assert (run / "weights.safetensors").read_bytes() == before["weights.safetensors"]


# 4: results that are not finite


def test_a_run_whose_steps_were_all_skipped_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concept_eraser.training import closure

    monkeypatch.setattr(closure.LossClosure, "is_finite", lambda self, direction: False)
    with pytest.raises(UserError, match=r"all 4 steps were skipped.*nothing was trained"):
        concept_eraser.erase(short(), output=tmp_path / "run")
    assert not (tmp_path / "run" / "done.json").exists()
    assert not (tmp_path / "run" / "weights.safetensors").exists()


def test_weights_that_are_not_finite_are_no_run(tmp_path: Path, tiny: Any) -> None:
    """Every loss and step is finite, and a weight is not: the test sets it between two steps."""
    before = {name: value.clone() for name, value in tiny.parts["denoiser"].state_dict().items()}

    def spoil(step: int, seconds: float) -> None:
        if step == 4:
            tiny.pipeline.unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_q.weight.data[
                0, 0
            ] = torch.inf

    with pytest.raises(UserError, match=r"the erased weights are not finite \(1 values"):
        concept_eraser.erase(short(), model=tiny.pipeline, output=tmp_path / "run", on_step=spoil)
    assert not (tmp_path / "run" / "done.json").exists()
    after = tiny.pipeline.unet.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_merge_that_is_not_finite_is_not_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not finite.*smaller --weights"):
        concept_eraser.merge(str(run), weights=[1e308], output=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    for strength in (1e300, float("inf"), float("nan")):
        with pytest.raises(UserError, match="from -10000 to 10000"):
            concept_eraser.export(
                str(run), "tensors", strength=strength, output=tmp_path / "x.safetensors"
            )
        with pytest.raises(UserError, match="from -10000 to 10000"):
            concept_eraser.export(str(run), "diffusers", strength=strength, output=tmp_path / "x")
    assert not (tmp_path / "x.safetensors").exists()
    assert not (tmp_path / "x").exists()


# 5: two processes


def test_two_processes_in_one_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short(training__steps=400)))
    arguments = ("erase", "recipe.yaml", "-o", "run", "-q")
    first = Command(*arguments, folder=tmp_path)
    try:
        first.wait_until(lambda: has_text(tmp_path / "run" / "log.jsonl"))
        second = cli(*arguments, "--resume")
        third = cli(*arguments, "--overwrite")
        fourth = cli("evaluate", "tiny-sd", "--suite", "tiny_star", "-n", "2", "-o", "run")
        for other in (second, third, fourth):
            assert other.returncode == 2
            assert f"run is in use by process {first.pid}" in other.stderr
            assert other.stderr.count("\n") == 1
        first.send_signal(signal.SIGINT)
        assert first.wait(120) == 130
    finally:
        first.kill()
    assert not (tmp_path / "run" / ".concept_eraser.lock").exists()


def has_text(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


# 6: damaged files


def flip(path: Path, place: int) -> None:
    """Change one bit and keep the size and time of the file, like a fault of a disk or memory."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= 64
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "name",
    [
        "pipeline/unet/diffusion_pytorch_model.safetensors",
        "pipeline/scheduler/scheduler_config.json",
    ],
)
def test_a_flipped_bit_of_a_finished_run_is_noticed(
    cli: Cli, run: Path, name: str, tmp_path: Path
) -> None:
    assert cli("verify", "runs/star").returncode == 0
    flip(run / name, -20)
    for arguments in (
        ("generate", "runs/star", "-p", "a star"),
        ("evaluate", "runs/star"),
        ("verify", "runs/star"),
        ("export", "runs/star", "--to", "tensors"),
        ("merge", "runs/star", "-o", "both"),
    ):
        result = cli(*arguments)
        assert result.returncode == 2, arguments
        assert Path(name).name in result.stderr + result.stdout
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "images").exists()
    assert "1 of" in cli("verify", "runs/star", "--accept").stdout
    assert cli("verify", "runs/star").returncode == 0


def test_damaged_images_of_the_cache_are_generated_again(tmp_path: Path) -> None:
    runs = [concept_eraser.erase(short(), output=tmp_path / "a", cache=tmp_path / "cache")]
    chunks = sorted((tmp_path / "cache" / "images").rglob("*.safetensors"))
    assert chunks
    for chunk in chunks:
        flip(chunk, -100)
    runs.append(concept_eraser.erase(short(), output=tmp_path / "b", cache=str(tmp_path / "cache")))
    one, other = ((run.folder / "weights.safetensors").read_bytes() for run in runs)
    assert one == other


def test_a_damaged_state_costs_the_steps_since_the_one_before(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(short(training__steps=8, training__save_every=2))
    )
    whole = concept_eraser.erase(
        short(training__steps=8, training__save_every=2), output=tmp_path / "whole"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import os, concept_eraser\n"
        "def stop(step, seconds):\n"
        "    if step == 5: os._exit(9)\n"
        "concept_eraser.erase('recipe.yaml', output='run', on_step=stop)"
    )
    assert Command(folder=tmp_path, script=script).wait() == 9
    state = tmp_path / "run" / "state.ckpt"
    flip(state, state.stat().st_size // 2)
    result = cli("erase", "recipe.yaml", "-o", "run", "--resume", "-q")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "weights.safetensors").read_bytes() == (
        whole.folder / "weights.safetensors"
    ).read_bytes()
    assert [
        json.loads(line)["step"]
        for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    ] == list(range(1, 9))
    assert not list((tmp_path / "run").glob("*state.ckpt"))
    assert cli("verify", "run").returncode == 0


# links in a stranger's run folder


def test_links_in_a_strangers_run_folder_are_not_followed(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes((run / "weights.safetensors").read_bytes())
    weights = run / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    weights.symlink_to(secret)
    result = cli("generate", "runs/star", "-p", "a star")
    assert result.returncode == 2
    assert "link" in result.stderr
    (tmp_path / "elsewhere").mkdir()
    (run / "attacks").symlink_to(tmp_path / "elsewhere")
    result = cli("attack", "runs/star", "-n", "2")
    assert result.returncode == 2
    assert "leads out of" in result.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []


# images


def test_images_of_an_earlier_call_are_replaced_only_on_demand(cli: Cli, tmp_path: Path) -> None:
    call = ("generate", "tiny-sd", "-p", "a red star", "--steps", "1", "-q")
    assert cli(*call, "-n", "3").returncode == 0
    (tmp_path / "images" / "mine.png").write_text("mine")
    before = tree(tmp_path / "images")
    again = cli(*call, "-n", "1")
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    assert tree(tmp_path / "images") == before
    assert cli(*call, "-n", "1", "--overwrite").returncode == 0
    assert {p.name for p in (tmp_path / "images").iterdir()} == {
        manifest.MARK,
        "00000.png",
        "metadata.jsonl",
        "mine.png",
    }
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "00000.png").write_text("mine")
    for flags in ((), ("--overwrite",)):
        assert cli(*call, "-n", "1", "-o", "photos", *flags).returncode == 2
    assert tree(tmp_path / "photos") == {"00000.png": b"mine"}


def test_a_full_cache_costs_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the cache should be")
    run = concept_eraser.erase(
        short(training__steps=1), output=tmp_path / "run", cache=tmp_path / "cache"
    )
    assert (run.folder / "done.json").exists()
