"""The benchmark of the training step: the plain loop takes the engine's step, and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import floor
from concept_eraser.erasers.denoiser import Denoiser


@pytest.mark.parametrize("trained", ["cross-attention", "LoRA, rank 64"])
def test_the_plain_loop_takes_the_step_of_the_engine(trained: str, tmp_path: Path) -> None:
    """All three steps change the parameters in the same way, from the same values."""
    eraser, runs = floor.steps_of(floor.build("tiny", torch.device("cpu")), trained, 1, tmp_path)
    params = list(eraser.trainable().values())
    floor.move_apart(params)
    start = [value.detach().clone() for value in params]
    changes: dict[str, torch.Tensor] = {}
    for step in floor.STEPS:
        with torch.no_grad():
            for parameter, value in zip(params, start, strict=True):
                parameter.copy_(value)
        runs["drawing"](0)
        runs[step](0)
        changes[step] = torch.cat(
            [(p.detach() - s).flatten() for p, s in zip(params, start, strict=True)]
        )
    for step in floor.STEPS:
        change = changes[step]
        # Adam's first step has the size of the learning rate, in the direction of the sign
        assert float(change.abs().median()) == pytest.approx(floor.LR, rel=0.01)
        same = (change.sign() == changes["floor"].sign()).float().mean()
        assert float(same) > 0.999, step


def test_the_steps_can_share_what_takes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop and both engines have one state of Adam, and the teachers have the same tensors."""
    made: list[Any] = []
    for name in ("Floor", "Engine"):
        kind = getattr(floor, name)
        monkeypatch.setattr(
            floor, name, lambda *words, kind=kind: made.append(kind(*words)) or made[-1]
        )
    model = floor.build("tiny", torch.device("cpu"))
    eraser, runs = floor.steps_of(model, "all weights", 1, tmp_path, shared=True)
    floor.move_apart(list(eraser.trainable().values()))
    for step in ("drawing", *floor.STEPS):
        runs[step](0)
    loop, *engines = made
    assert len(engines) == 2
    for parameter in loop.params:
        state = loop.optimizer.state[parameter]
        assert float(state["step"]) == 3
        assert all(one.optimizer.state[parameter] is state for one in engines)
    for name, original in eraser.originals.items():
        assert loop.teacher.get_parameter(name).data_ptr() == original.data_ptr()


def test_a_step_that_changes_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the original's weights the loop divides zero by zero, and the engine skips its step."""
    monkeypatch.setattr(floor, "move_apart", lambda params: None)
    with pytest.raises(SystemExit, match="took no step"):
        floor.measure("tiny", "cross-attention", 1, repetitions=1, device=torch.device("cpu"))


SLACK = 1.25  # of a ratio of medians that 9 repetitions put at 1.00 to 1.03


@pytest.mark.parametrize("trained", ["cross-attention", "default LoRA, bf16"])
def test_the_engine_takes_the_time_of_the_loop(trained: str) -> None:
    """CPU time of this process, in which the steps take turns: a busy machine changes it little."""
    row = floor.measure("tiny", trained, 4, repetitions=5, device=torch.device("cpu"))
    assert row["ratio"]["engine"][0] < SLACK


def test_a_slower_engine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: an engine that computes each gradient twice."""
    real = Denoiser.loss

    def twice(self: Denoiser, objective: str, draw: Any) -> torch.Tensor:
        real(self, objective, draw).backward()
        return real(self, objective, draw)

    monkeypatch.setattr(Denoiser, "loss", twice)
    row = floor.measure("tiny", "cross-attention", 4, repetitions=3, device=torch.device("cpu"))
    assert row["ratio"]["engine"][0] > SLACK


def test_a_row_has_the_times_and_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "floor.json"
    command = "floor --trained cross-attention --batches 1 --repetitions 3 --state idle --output"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(output)])
    floor.main()
    content = json.loads(output.read_text())
    (row,) = content["rows"]
    assert row["cpu_seconds"].keys() == set(floor.STEPS)
    assert min(row["cpu_seconds"].values()) > 0
    for step in ("engine", "one pass"):
        median, smallest, largest = row["ratio"][step]
        assert 0 < smallest <= median <= largest
    assert f"| cross-attention | 1 | {row['cpu_seconds']['floor']:.3f} |" in floor.table(content)
    assert "state of the machine: idle" in floor.table(content)


def test_the_page_shows_the_measurements_as_they_are() -> None:
    page, content = floor.PAGE.read_text(), json.loads(floor.FILE.read_text())
    assert floor.render(page, content) == page
    ours: list[dict[str, Any]] = [row for row in content["rows"] if row["model"] == "tiny"]
    assert {row["trained"] for row in ours} == set(floor.TRAINED)
    assert all(row["n"] >= 7 for row in content["rows"])
