"""Two real processes (gloo on the CPU) equal one process with twice the micro-batches, also after
an interruption.

`accelerate launch --cpu --num_processes 2` starts ONE process (accelerate 1.15, without mpirun).
Therefore these tests launch with --multi_gpu, which needs no GPU, and every test checks the number
of processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

import concept_eraser
from concept_eraser import UserError
from concept_eraser.models.module import build
from concept_eraser.training.distributed.sharding import owners, refuse_wrappers
from tests import processes
from tests.conftest import ROOT, short
from tests.small_model import small_sd

LIMIT = 1e-5  # the largest relative difference of a tensor, in fp32
MANY = 500  # steps, more than a test waits for


def launch(
    folder: Path, *arguments: str, how: str = "--multi_gpu", **variables: str
) -> subprocess.Popen[str]:
    """Two processes and their launcher."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [*processes.launch_command(*how.split()), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    )


def wait_for_end(process: subprocess.Popen[str], limit: float = 200) -> tuple[str, str]:
    """The output and the errors of a launch that ends by itself; after the limit it is killed."""
    try:
        return process.communicate(timeout=limit)
    finally:
        kill(process)


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The two worker processes of a launch, without its launcher."""
    return [
        p
        for p in psutil.Process(process.pid).children(recursive=True)
        if "concept_eraser" in p.cmdline()
    ]


def kill(process: subprocess.Popen[str]) -> None:
    """Kill the launcher and all processes that it started (each has a session of its own)."""
    if process.poll() is None:
        for one in [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(recursive=True),
        ]:
            one.kill()
        process.communicate()


def count_steps(folder: Path) -> int:
    path = folder / "log.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    while count_steps(folder) < steps and process.poll() is None:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[1][-2000:]


def difference(one: Path, other: Path) -> float:
    """The largest over the tensors of ||a - b|| / ||a||, NaN and infinity included."""
    a, b = load_file(one / "weights.safetensors"), load_file(other / "weights.safetensors")
    assert a.keys() == b.keys()
    return max(
        float((a[k].double() - b[k]).norm() / a[k].double().norm().clamp(min=1e-30)) for k in a
    )


def losses(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), (
        "each step is logged once"
    )
    return [row["losses"] for row in rows]


def require_equal(one: Path, two: Path) -> None:
    assert json.loads((two / "done.json").read_text())["processes"] == 2
    assert difference(one, two) <= LIMIT
    for mine, theirs in zip(losses(one), losses(two), strict=True):
        assert mine == pytest.approx(theirs, rel=LIMIT, abs=1e-7)


def relative_change(run: Path) -> float:
    """The largest relative change of a tensor by the training; a comparison needs one."""
    before = concept_eraser.load(small_sd()).denoiser.state_dict()
    return max(
        float((v - before[k]).norm() / before[k].norm())
        for k, v in load_file(run / "weights.safetensors").items()
    )


def test_killed_and_resumed(tmp_path: Path) -> None:
    """After SIGKILL of both processes, a launch that resumes has the weights of one uninterrupted
    process.
    """
    steps = 8
    changes = {
        "trainable__select": "all",
        "training__steps": steps,
        "training__save_every": 3,
        "training__lr": 1e-3,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short(**changes)))
    whole = concept_eraser.erase(
        short(**changes, training__micro_batches=2), output=tmp_path / "one"
    ).folder
    command = ["erase", "recipe.yaml", "-o", "two", "-q", "--resume"]
    folder = tmp_path / "two"
    ranks = processes.Ranks(*command, folder=tmp_path)
    ranks.commands[0].wait_until(lambda: count_steps(folder) >= 4)
    ranks.kill()
    assert torch.load(folder / "state.ckpt", weights_only=True)["step"] in (3, 6)
    process = launch(tmp_path, "-m", "concept_eraser", *command)
    assert wait_for_end(process)[0].count("erased in") == 1, "one of the two reports"
    assert process.returncode == 0
    require_equal(whole, folder)
    assert relative_change(whole) > 1e-3


MENU: dict[str, dict[str, Any]] = {
    "lora_saliency": {
        "trainable": {"select": "cross_attention", "lora": 2, "saliency": 0.5},
        "save": "changed",
    },
    "uno": {"method": {"name": "uno"}},
    "forum": {
        "method": {"name": "forum", "inner_steps": 2, "outer_lr": 1.0},
        "attack": {"n": 8},
        "retain__loss": "distill",
    },
    "free": {"forget__images": "free", "retain__images": "free", "retain__loss": "distill"},
    "sharded": {"training__shard": "optimizer", "training__weight_decay": 0.01},
    "averaged": {
        "training__shard": "optimizer",
        "training__optimizer": "sgd",
        "training__momentum": 0.9,
        "training__lr": 1e-2,
        "training__clip": 0.5,
        "training__decay": "cosine",
        "training__ema": 0.9,
    },
    "clipped": {
        "method": {"name": "weighted"},
        "training__clip": 1e-3,
        "training__clip_each": True,
        "training__optimizer": "sgd",
        "training__lr": 1.0,
    },
}
RUNNER = """
import json, sys
from pathlib import Path
from concept_eraser import erase
for name, recipe in json.loads(Path("recipes.json").read_text()).items():
    erase(recipe, output=name)
"""


def menu(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Recipes with different settings, and a classifier with running statistics."""
    torch.manual_seed(0)
    build("mlp", "classifier", inputs=64, hidden=16).save(tmp_path / "digits")
    recipes = {}
    for name, changes in MENU.items():
        recipes[name] = short(training__steps=2, training__batch_size=2, **changes)
    training = {"steps": 3, "batch_size": 8, "lr": 1e-2, "device": "cpu"}
    recipes["classifier"] = {
        "model": str(tmp_path / "digits"),
        "target": "classifier",
        "forget": {"data": "digits", "classes": [3], "loss": "relabel"},
        "retain": "rest",
        "trainable": {"select": "all", "batchnorm": "train"},
        "training": training,
    }
    return recipes


@pytest.mark.slow
def test_other_settings(tmp_path: Path) -> None:
    recipes = menu(tmp_path)
    for name, recipe in recipes.items():
        concept_eraser.erase(
            {**recipe, "training": {**recipe["training"], "micro_batches": 2}},
            output=tmp_path / f"one_{name}",
        )
    (tmp_path / "recipes.json").write_text(json.dumps(recipes))
    (tmp_path / "run.py").write_text(RUNNER)
    process = launch(tmp_path, "run.py")
    _, errors = wait_for_end(process)
    assert process.returncode == 0, errors[-3000:]
    for name in recipes:
        require_equal(tmp_path / f"one_{name}", tmp_path / name)
    weights = load_file(tmp_path / "classifier" / "weights.safetensors")
    assert any("running_mean" in name for name in weights), (
        "running statistics were trained, and are compared"
    )


def test_a_loss_that_is_not_finite_on_one_process_skips_the_step_on_all(tmp_path: Path) -> None:
    """The second process alone has an infinite loss in step 2, and alone fails in step 4."""
    (tmp_path / "recipes.json").write_text(
        json.dumps(short(training__steps=6, training__save_every=1))
    )
    (tmp_path / "run.py").write_text("""
import json, os
from pathlib import Path
from concept_eraser import erase
from concept_eraser.erasers.denoiser import Denoiser
original, calls = Denoiser.loss, 0
def loss(self, objective, draw):
    global calls
    calls += os.environ["RANK"] == "1"
    if calls == 7:
        raise MemoryError("the second process is out of memory")
    return original(self, objective, draw) * (float("inf") if calls == 3 else 1.0)
Denoiser.loss = loss
erase(json.loads(Path("recipes.json").read_text()), output="two")
""")
    start = time.monotonic()
    process = launch(tmp_path, "run.py")
    _, errors = wait_for_end(process, 150)
    assert process.returncode != 0
    assert time.monotonic() - start < 120, "nobody waits for the one that failed"
    assert "the second process is out of memory" in errors
    assert torch.load(tmp_path / "two" / "state.ckpt", weights_only=True)["step"] == 3
    rows = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    assert [row.get("skipped") for row in rows] == [None, 1, None]
    # a launch of another size is another batch
    with pytest.raises(UserError, match=r"written by 2 processes, this is a launch of 1"):
        concept_eraser.erase(
            short(training__steps=6, training__save_every=1), output=tmp_path / "two", resume=True
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whom", "how"),
    [("launcher", signal.SIGINT), ("launcher", signal.SIGTERM), ("one worker", signal.SIGINT)],
)
def test_stopped_and_resumed(tmp_path: Path, whom: str, how: signal.Signals) -> None:
    """Also if only one of the two processes gets the signal."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short(training__steps=MANY)))
    process = launch(tmp_path, "-m", "concept_eraser", "erase", "recipe.yaml", "-o", "two", "-q")
    wait_for(process, tmp_path / "two", 3)
    target = process if whom == "launcher" else workers(process)[1]
    target.send_signal(how)
    _, errors = wait_for_end(process, 60)
    last_step = torch.load(tmp_path / "two" / "state.ckpt", weights_only=True)["step"]
    assert last_step == count_steps(tmp_path / "two") < MANY, (
        "both stopped after the same step, and saved it"
    )
    assert errors.count(f"stopped after {last_step} of {MANY} steps") == 1
    assert errors.count("continue with: concept-eraser erase") == 1


@pytest.mark.slow
def test_a_folder_of_another_run_is_refused_once(tmp_path: Path) -> None:
    concept_eraser.erase(short(training__steps=1), output=tmp_path / "run")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short(training__steps=2)))
    process = launch(tmp_path, "-m", "concept_eraser", "erase", "recipe.yaml", "-o", "run")
    _, errors = wait_for_end(process)
    assert errors.count("holds another run") == 1
    assert process.returncode != 0


@pytest.mark.slow
def test_the_state_of_a_sharded_optimizer_is_that_of_a_whole_one(tmp_path: Path) -> None:
    """A run that stops with sharding, continues without it and continues with it again has the same
    weights.
    """
    changes = {"training__steps": 60, "training__save_every": 4}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short(**changes)))
    whole = concept_eraser.erase(
        short(**changes, training__micro_batches=2), output=tmp_path / "one"
    ).folder
    command = ["-m", "concept_eraser", "erase", "recipe.yaml", "-o", "two", "-q", "--resume"]
    for shard in ("optimizer", "none", "optimizer"):
        process = launch(tmp_path, *command, f"training.shard={shard}")
        if shard == "optimizer" and not count_steps(tmp_path / "two"):
            wait_for(process, tmp_path / "two", 6)
            kill(process)
        elif shard == "none":
            wait_for(process, tmp_path / "two", count_steps(tmp_path / "two") + 8)
            kill(process)
        else:
            wait_for_end(process)
    require_equal(whole, tmp_path / "two")


def test_tensors_are_dealt_evenly() -> None:
    assert owners([5, 1, 3, 3], 2) == [0, 0, 1, 1]
    assert owners([2], 4) == [0]
    sizes = [(i * 7919) % 1000 + 1 for i in range(200)]
    loads = [
        sum(s for s, owner in zip(sizes, owners(sizes, 8), strict=True) if owner == rank)
        for rank in range(8)
    ]
    assert max(loads) - min(loads) < 0.02 * max(loads)


@pytest.mark.parametrize(
    ("variable", "name"),
    [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")],
)
def test_wrappers_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, name: str
) -> None:
    """What `accelerate launch --use_fsdp` and `--use_deepspeed` set."""
    monkeypatch.setenv(variable, "true")
    with pytest.raises(
        UserError,
        match=(
            rf"launched with {name}\b.*which the training (cannot use|does not use).*"
            r"trainable\.lora"
        ),
    ):
        concept_eraser.erase(short(), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("shard", "version", "is_used"),
    [("weights", "2", True), ("weights", "1", False), ("optimizer", "2", False)],
)
def test_a_launch_with_fsdp(
    monkeypatch: pytest.MonkeyPatch, shard: str, version: str, is_used: bool
) -> None:
    """Version 2 with `shard: weights` is allowed; the error of the others says what to set."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    if is_used:
        refuse_wrappers(shard)
        assert os.environ["ACCELERATE_USE_FSDP"] == "false", "accelerate wraps nothing"
        return
    with pytest.raises(
        UserError,
        match=rf"launched with FSDP \(version {version}\).*set training\.shard=weights with a LoRA",
    ):
        refuse_wrappers(shard)


def test_where_and_with_what_is_no_other_run() -> None:
    from concept_eraser.recipes import recipe

    plain = recipe.load(short())
    aside = recipe.load(short(training__shard="optimizer", training__tracker="tensorboard"))
    assert plain.fingerprint == aside.fingerprint
    assert "tracker" not in plain.resolved()["training"]
    assert aside.resolved()["training"]["tracker"] == ["tensorboard"]
