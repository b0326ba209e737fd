"""The recorded history of a training: its content and order, in memory and on disk."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from concept_eraser.methods.history import History, Iteration


def record(history: History, steps: range) -> None:
    """Step i: weights i and 10 i, samples i and i + 1, learning rate i / 10."""
    for i in steps:
        with torch.no_grad():
            history.params[0].fill_(i)
            history.params[1].fill_(10 * i)
        history.record([i, i + 1], i / 10, 0.5, (torch.full((2,), -1.0 * i), torch.zeros(3)))


def params() -> tuple[torch.Tensor, ...]:
    return torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_the_last_iterations_oldest_first(steps: int, on_disk: bool, tmp_path: Path) -> None:
    history = History(params(), 3, folder=tmp_path / "a" / "b" if on_disk else None)
    record(history, range(steps))
    available = min(3, steps)
    for k in range(1, available + 1):
        last = history.last(k)
        assert [i.indices for i in last] == [(i, i + 1) for i in range(steps - k, steps)]
        assert [float(i.weights[1][2]) for i in last] == [10.0 * i for i in range(steps - k, steps)]
        assert [i.lr for i in last] == [i / 10 for i in range(steps - k, steps)]
        assert [float(i.velocity[0][1]) for i in last] == [
            -1.0 * i for i in range(steps - k, steps)
        ]
        assert all(i.momentum == 0.5 for i in last)
    with pytest.raises(
        ValueError, match=f"{available + 1} iterations were requested, {available} are recorded"
    ):
        history.last(available + 1)


def test_another_process_goes_on_recording(tmp_path: Path) -> None:
    record(History(params(), 3, folder=tmp_path), range(4))
    history = History.open(params(), tmp_path)
    assert (history.recorded_count, history.k) == (4, 3)
    record(history, range(4, 6))
    assert [i.indices[0] for i in history.last(3)] == [3, 4, 5]
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["0.pt", "1.pt", "2.pt"]
    assert (tmp_path / "seen.txt").read_text() == "6 of 3"


def test_what_is_recorded_is_a_copy() -> None:
    history = History(params(), 2)
    velocity = (torch.ones(2), torch.ones(3))
    history.record([0], 0.1, 0.9, velocity)
    with torch.no_grad():
        history.params[0].fill_(5)
        velocity[0].fill_(5)
    (step,) = history.last(1)
    assert step.weights[0].tolist() == [0, 0]
    assert step.velocity[0].tolist() == [1, 1]
    assert not step.weights[0].requires_grad


def test_plain_sgd_has_no_momentum() -> None:
    history = History(params(), 1)
    history.record(torch.tensor([3, 4]), 0.1)
    (step,) = history.last(1)
    assert (step.indices, step.momentum, step.velocity) == ((3, 4), 0.0, None)
    with pytest.raises(ValueError, match="at least one iteration, found k = 0"):
        History(params(), 0)


def test_memory_holds_k_iterations_and_no_more() -> None:
    history = History(params(), 3)
    record(history, range(10))
    assert len(history._iterations) == 3
    assert Iteration((), (), 0.1) == Iteration((), (), 0.1, momentum=0.0, velocity=None)


class Payload:
    """Unpickling it creates a file, as the history of an untrusted source could."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_strangers_history_runs_nothing(tmp_path: Path) -> None:
    history = History(params(), 1, folder=tmp_path)
    record(history, range(1))
    trace = tmp_path / "trace"
    torch.save({"weights": Payload(trace)}, tmp_path / "0.pt")
    with pytest.raises(pickle.UnpicklingError):
        history.last(1)
    assert not trace.exists()
