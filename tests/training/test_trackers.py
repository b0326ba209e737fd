"""Trackers: TensorBoard and W&B get the values of log.jsonl, also in a resumed run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import concept_eraser
from concept_eraser import UserError
from concept_eraser.training import log as logs
from concept_eraser.training import trackers
from concept_eraser.utils.errors import Interrupted
from tests.conftest import HANG, short


def events(folder: Path) -> Any:
    """The event files of a run by TensorBoard's own reader, which leaves out repeated steps."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    (place,) = {
        path.parent
        for path in folder.rglob("events.out.tfevents*")
        if path.parent.name == trackers.PROJECT
    }
    return accumulator(str(place)).Reload()


def scalars(folder: Path, name: str) -> dict[int, float]:
    return {event.step: event.value for event in events(folder).Scalars(name)}


def test_tensorboard_has_every_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    recipe = short(
        training__steps=6,
        training__save_every=2,
        training__decay="linear",
        training__tracker="tensorboard",
    )
    stop: dict[str, Any] = {"at": 5}

    def on_step(step: int, seconds: float) -> None:
        if step == stop["at"]:
            raise stop["by"]

    stop["by"] = RuntimeError("killed")  # after step 5; the state is of step 4
    with pytest.raises(RuntimeError, match="killed"):
        concept_eraser.erase(recipe, output=tmp_path / "run", on_step=on_step)
    assert set(scalars(tmp_path / "run", "losses/forget")) == {1, 2, 3, 4, 5}
    stop["by"] = KeyboardInterrupt()
    with pytest.raises(Interrupted, match="stopped after 5 of 6 steps"):
        concept_eraser.erase(recipe, output=tmp_path / "run", resume=True, on_step=on_step)
    concept_eraser.erase(recipe, output=tmp_path / "run", resume=True)
    rows = logs.read(tmp_path / "run" / "log.jsonl")
    for name, value in (
        ("losses/forget", lambda r: r["losses"]["forget"]),
        ("weights/retain", lambda r: r["weights"]["retain"]),
        ("cosine", lambda r: r["cosine"]),
        ("seconds", lambda r: r["seconds"]),
        ("memory_mb", lambda r: r["memory_mb"]),
    ):
        points = [(event.step, event.value) for event in events(tmp_path / "run").Scalars(name)]
        assert [step for step, _ in points] == [1, 2, 3, 4, 5, 6], name
        assert [v for _, v in points] == pytest.approx([value(row) for row in rows], rel=1e-6), name
    assert scalars(tmp_path / "run", "lr")[4] == pytest.approx(1e-4 * (1 - 3 / 6))
    settings = next((tmp_path / "run").rglob("hparams.yml"))
    assert yaml.safe_load(settings.read_text())["method.name"] == "munba"


def test_overwriting_takes_the_old_events_away(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for steps in (3, 1):
        concept_eraser.erase(
            short(training__steps=steps, training__tracker=["tensorboard"]),
            output=tmp_path / "run",
            overwrite=True,
        )
    assert set(scalars(tmp_path / "run", "losses/retain")) == {1}


def test_a_tracker_changes_no_weight(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from safetensors.torch import load_file

    for name, tracker in (("without", "none"), ("with", "tensorboard")):
        concept_eraser.erase(
            short(training__steps=2, training__tracker=tracker), output=tmp_path / name
        )
    one, other = (
        load_file(tmp_path / name / "weights.safetensors") for name in ("without", "with")
    )
    assert all(torch.equal(one[k], other[k]) for k in one)
    assert not (tmp_path / "without" / trackers.FOLDER).exists()


def history(path: Path) -> list[dict[str, Any]]:
    """The steps in a file of wandb: after 7 bytes LevelDB's log format, blocks of 32 KiB with
    records in pieces (4 bytes checksum, 2 length, 1 kind: whole, first, middle, last), each a
    protocol buffer."""
    from wandb.proto import wandb_internal_pb2

    content, place, record, rows = path.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record = (b"" if kind in (1, 2) else record) + content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            message = wandb_internal_pb2.Record.FromString(record)
            if message.WhichOneof("record_type") == "history":
                rows.append(
                    {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in message.history.item
                    }
                )
    return rows


def test_wandb_offline(tmp_path: Path) -> None:
    """In a separate process, since wandb starts a service. The test reads the file of wandb."""
    pytest.importorskip("wandb")
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(short(training__steps=2, training__tracker="wandb"))
    )
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "concept_eraser", "erase", "recipe.yaml", "-o", "run", "-q"]
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG
    )
    assert process.returncode == 0, process.stderr[-2000:]
    (path,) = (tmp_path / "run" / trackers.FOLDER).rglob("*.wandb")
    steps = history(path)
    rows = logs.read(tmp_path / "run" / "log.jsonl")
    assert [row["losses/forget"] for row in steps] == pytest.approx(
        [row["losses"]["forget"] for row in rows]
    )
    assert [row["_step"] for row in steps] == [1, 2]


def test_a_tracker_that_is_not_installed_is_an_error_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else find(name, *a)
    )
    with pytest.raises(
        UserError,
        match=r"tracker wandb needs the package wandb.*pip install 'concept-eraser\[trackers\]'",
    ):
        concept_eraser.erase(short(training__tracker=["wandb"]), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_by_a_wrong_name() -> None:
    from concept_eraser.recipes import recipe

    with pytest.raises(UserError, match=r"training\.tracker"):
        recipe.load(short(training__tracker="tensorbord"))
    assert recipe.load(short(training__tracker="none")).training.tracker == []


def test_nested_rows_and_recipes_become_flat() -> None:
    assert trackers.flat({"a": {"b": 1, "c": {"d": [1, 2]}}, "e": None}) == {
        "a.b": 1,
        "a.c.d": "[1, 2]",
        "e": "None",
    }
