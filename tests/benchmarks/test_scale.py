"""The benchmark of several processes: two real ones send one gradient for each objective."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import floor, scale, scale_worker
from studies.rendering.common import fill_blocks
from tests import processes

NUMBER = 4  # bytes of a loss, and of the question whether any process was asked to stop
LORA, ALL, ATTACK = scale.JOBS


def fork(count: int, words: Sequence[str], folder: Path) -> None:
    """Run the benchmark's command in forked processes, which have the libraries already."""
    script = Path(scale_worker.__file__)
    if count == 2:
        processes.Ranks(str(folder), *words, folder=folder, script=script).wait()
        return
    command = processes.Command(str(folder), *words, folder=folder, script=script)
    assert command.wait() == 0, command.stderr[-3000:]


@pytest.fixture(autouse=True)
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "launch", fork)
    monkeypatch.setattr(scale, "BATCH", 4)
    monkeypatch.setattr(scale, "PROMPTS", 5)  # the original shows the concept for four of them


def messages_of(trained: str) -> list[list[Any]]:
    """The messages of a step with two objectives, whose losses and gradients are averaged."""
    model = floor.build("tiny", torch.device("cpu"))
    trainable = floor.eraser_of(model, trained, batch=1).trainable().values()
    gradient = sum(4 * parameter.numel() for parameter in trainable)
    objective = [["allreduce", NUMBER], ["allreduce", gradient]]
    return [*objective, *objective, ["allreduce", NUMBER]]


def test_a_step_sends_the_gradients_and_three_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scale.json"
    options = ["--jobs", ALL, "--steps", "2", "--repetitions", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["scale", *options])
    scale.main()
    content = json.loads(output.read_text())
    (row,) = content["rows"]
    expected = messages_of("all weights")
    assert row["messages"] == expected
    assert row["floor_bytes"] == 2 * expected[1][1]
    assert row["sent_bytes"] == row["floor_bytes"] + 3 * NUMBER
    # what the operating system counted has all of it, and gloo's headers
    assert 1 < row["socket_bytes"] / row["sent_bytes"] < 1.001
    assert row["speed_up"][0] == pytest.approx(row["seconds"]["1"] / row["seconds"]["2"], rel=0.01)
    sizes = f"| {row['floor_bytes']:,} | {row['sent_bytes']:,} |"
    assert f"| 4 | - | - | - {sizes}" in scale.block(content), "one repetition is no measurement"
    assert "Seconds of fewer than five repetitions are left out" in scale.block(content)
    row |= {"n": 5, "seconds": {"1": 0.4, "2": 0.25}, "speed_up": [1.6, 1.5, 1.7]}
    assert f"| 4 | 0.400 | 0.250 | 1.60 [1.50, 1.70] {sizes}" in scale.block(content)
    assert "left out" not in scale.block(content)


def test_a_lora_sends_the_gradients_of_its_matrices() -> None:
    done = scale.run(LORA, 2, steps=3)
    assert done.messages(is_training=True) == messages_of("default LoRA, bf16")
    assert [len(one["steps"]) for one in done.records] == [3, 3]


def test_processes_share_the_batches_of_an_attack_and_send_no_tensor() -> None:
    one, two = (scale.run(ATTACK, count, steps=1) for count in scale.PROCESSES)
    assert [len(record["steps"]) for record in one.records] == [2]
    assert [len(record["steps"]) for record in two.records] == [1, 1]
    assert {tuple(message) for message in two.messages(is_training=False)} == {("barrier", 0)}
    assert two.socket_bytes(is_training=False) < 1000, "of the barriers"


def test_steps_with_other_messages_are_no_measurement() -> None:
    steps = [{"messages": [["allreduce", 4 * n]]} for n in (1, 1, 2, 1)]
    with pytest.raises(SystemExit, match="not the same in each step"):
        scale.Run([{"steps": steps}]).messages(is_training=True)
    # the last step of a training also has what follows it
    kept = scale.Run([{"steps": steps[:3]}]).messages(is_training=True)
    assert kept == [["allreduce", 4]]


def test_the_page_shows_what_was_measured() -> None:
    content, page = json.loads(scale.FILE.read_text()), scale.PAGE.read_text()
    assert fill_blocks(page, {"scale": lambda: scale.block(content)}) == page
    assert [row["job"] for row in content["rows"]] == list(scale.JOBS)
    for row in content["rows"]:
        numbers = 0 if row["job"] == ATTACK else 3
        assert row["sent_bytes"] == row["floor_bytes"] + numbers * NUMBER
