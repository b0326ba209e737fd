"""A run that is killed at random steps and resumed equals an uninterrupted one bit for
bit (CPU).
"""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import concept_eraser
from concept_eraser import UserError
from concept_eraser.training import checkpoint
from tests.conftest import short
from tests.processes import Command

STEPS, KILLS = 40, 10


def start(recipe: Path, folder: Path, *flags: str) -> Command:
    arguments = ("erase", str(recipe), "-o", str(folder), "-q", *flags)
    return Command(*arguments, folder=recipe.parent)


def count_steps(folder: Path) -> int:
    path = folder / "log.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(short(training__steps=STEPS, training__save_every=3)))
    return path


def test_sigkill_at_ten_random_steps(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path)
    whole = concept_eraser.erase(str(recipe), output=tmp_path / "whole").folder
    folder, rng, kills = tmp_path / "killed", random.Random(0), 0
    targets = sorted(rng.sample(range(1, STEPS), KILLS))
    for target in targets:
        process = start(recipe, folder, "--resume")
        process.wait_until(lambda target=target: count_steps(folder) >= target)
        time.sleep(rng.uniform(0, 0.05))  # anywhere within a step, or while a state is written
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills == KILLS
    last = start(recipe, folder, "--resume")
    assert last.wait() == 0, last.stderr
    expected, tensors = (
        load_file(whole / "weights.safetensors"),
        load_file(folder / "weights.safetensors"),
    )
    assert expected.keys() == tensors.keys()
    assert all(torch.equal(expected[k], tensors[k]) for k in expected)
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "each step is logged once"
    once = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    assert [row["losses"] for row in rows] == [row["losses"] for row in once]


def test_ctrl_c_saves_and_prints_how_to_continue(tmp_path: Path) -> None:
    recipe, folder = recipe_file(tmp_path), tmp_path / "run"
    process = start(recipe, folder)
    process.wait_until(lambda: count_steps(folder) >= 4)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "Traceback" not in process.stderr
    assert f"--output {folder} --resume" in process.stderr
    last_step = torch.load(folder / "state.ckpt", weights_only=True)["step"]
    assert 3 <= last_step <= STEPS
    second = start(recipe, folder)
    assert second.wait(60) == 2
    assert "continue with --resume" in second.stderr
    with pytest.raises(UserError, match="pass one of the two"):
        concept_eraser.erase(recipe, output=folder, resume=True, overwrite=True)
    assert torch.load(folder / "state.ckpt", weights_only=True)["step"] == last_step
    command = next(line for line in (folder / "recipe.yaml").read_text().splitlines())
    assert command.startswith("# concept-eraser erase")
    again = start(folder / "recipe.yaml", folder, "--resume")
    assert again.wait() == 0, again.stderr
    assert count_steps(folder) == STEPS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {"a"}}, "trained other tensors"),
        ({"params": {"a", "b", "c"}}, "trained other tensors"),
        ({"params": {"a", "c"}}, "trained other tensors"),
        ({"origin": "other"}, "started from other weights"),
        ({"processes": 1}, "written by 2 processes, this is a launch of 1"),
        ({"processes": 3}, "written by 2 processes, this is a launch of 3"),
    ],
)
def test_a_state_of_another_run_is_refused(change: dict[str, Any], message: str) -> None:
    state = {"params": {"a": 1, "b": 2}, "origin": "weights", "ranks": 2}
    run: dict[str, Any] = {"params": {"a", "b"}, "origin": "weights", "processes": 2}
    checkpoint.require_same_run(Path("state.ckpt"), state, **run)
    with pytest.raises(UserError, match=message):
        checkpoint.require_same_run(Path("state.ckpt"), state, **{**run, **change})


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    recipe, folder = recipe_file(tmp_path), tmp_path / "run"
    process = start(recipe, folder)
    process.wait_until((folder / "state.ckpt").exists)
    process.kill()
    process.wait()
    (folder / "state.ckpt").write_bytes(b"garbage")
    again = start(recipe, folder, "--resume")
    assert again.wait(60) == 2
    assert "is damaged" in again.stderr
