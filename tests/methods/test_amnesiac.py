"""Amnesiac unlearning: sums of recorded updates by hand, and its distance from retraining."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from concept_eraser.methods.amnesiac import Amnesiac
from concept_eraser.methods.base import EditRequest
from concept_eraser.methods.history import History
from tests.methods.test_mini_unlearning import ridge


def test_the_updates_of_affected_batches_are_subtracted() -> None:
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    history = History((w,), 4)
    batches = [[0, 1], [2, 3], [0, 2], [1, 3]]
    updates = [[1.0, 0.0], [0.0, 10.0], [5.0, -1.0], [100.0, 100.0]]
    for batch, update in zip(batches, updates, strict=True):
        history.record(batch, 0.1)
        with torch.no_grad():
            w += torch.tensor(update, dtype=torch.float64)
    outcome = Amnesiac().apply(history, [0])
    assert w.tolist() == [100.0, 110.0], "the first and the third update are gone"
    assert outcome.touched_share == 0.5
    assert outcome.lengths == pytest.approx((1.0, 1.0, 37**0.5, 37**0.5))


def test_the_last_iterations_alone() -> None:
    training = ridge()
    history = History(training.params, 40)
    final = training.run(history=history)
    steps = history.last(2)
    forget = set(steps[0].indices) - set(steps[1].indices)
    assert Amnesiac(k=2).apply(history, sorted(forget)).touched_share == 0.5
    expected = final - (steps[1].weights[0] - steps[0].weights[0])
    torch.testing.assert_close(training.w.detach(), expected)


def test_it_is_not_retraining_where_every_batch_is_affected() -> None:
    """All updates are subtracted then, which leaves the start."""
    training = ridge()
    target = training.run(range(30))
    history = History(training.params, 40)
    final = training.run(history=history)
    assert Amnesiac().apply(history, range(30)).touched_share == 1
    torch.testing.assert_close(training.w.detach(), training.start, atol=1e-12, rtol=0)
    assert float((training.w.detach() - target).norm()) > float((final - target).norm())


def test_as_an_edit_it_reads_the_folder(tmp_path: Path) -> None:
    training = ridge()
    history = History(training.params, 40, tmp_path)
    training.run(history=history)
    request = EditRequest(
        model=torch.nn.Identity(),
        forget=(1,),
        retain=(0,),
        ridge=0.0,
        batches=lambda rows: [],
        loss=training.mean_loss,
        params=training.params,
    )
    notes = Amnesiac(history=str(tmp_path)).edit(request)
    assert notes["step"] > 0
    assert 0 < notes["touched"] < 1
    with pytest.raises(ValueError, match="Amnesiac unlearning needs the recorded history"):
        Amnesiac().edit(request)
