"""DeltaGrad against a loop of its paper, against retraining, and its limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from concept_eraser.methods.base import EditRequest
from concept_eraser.methods.deltagrad import DeltaGrad
from concept_eraser.methods.history import History
from concept_eraser.methods.mini_unlearning import lbfgs_product, rewind
from tests.methods.test_mini_unlearning import Training, ridge


def logistic(n: int = 60, steps: int = 40, **options) -> Training:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    y = (x[:, 0] + 0.5 * torch.randn(n, generator=g, dtype=torch.float64) > 0).double()

    def loss(w: Tensor, indices) -> Tensor:
        rows = list(indices)
        logits = x[rows] @ w
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, y[rows]) + 0.02 * (
            w @ w
        )

    return Training(loss, torch.zeros(4, dtype=torch.float64), n, steps=steps, **options)


def recorded(training: Training) -> tuple[History, Tensor]:
    history = History(training.params, len(training.batches))
    return history, training.run(history=history)


@pytest.mark.parametrize("make", [ridge, logistic])
def test_with_exact_gradients_it_is_retraining(make) -> None:
    training = make(steps=40)
    target = training.run(range(6))
    for options in ({"period": 1}, {"burn_in": 40, "period": 7}):
        history, final = recorded(training)
        DeltaGrad(**options).apply(history, training.mean_loss, range(6))
        torch.testing.assert_close(training.w.detach(), target, atol=1e-11, rtol=0)
    assert float((final - target).norm()) > 1e-3


@pytest.mark.parametrize(("period", "burn_in", "pairs"), [(5, 10, 2), (3, 0, 1), (4, 6, 3)])
def test_against_the_papers_loop(period: int, burn_in: int, pairs: int) -> None:
    """v itself, with gradients of sums, as in the paper's Algorithm 1."""
    training, forget = logistic(), set(range(6))
    history, final = recorded(training)
    steps = history.last(40)
    path = [*(step.weights[0] for step in steps), final]

    def gradient(at: Tensor, rows) -> Tensor:
        w = at.clone().requires_grad_()
        return torch.autograd.grad(training.loss(w, rows), w)[0]

    v, s, y = path[0].clone(), [], []
    for t, step in enumerate(steps):
        batch, lost = step.indices, [j for j in step.indices if j in forget]
        b, cached = len(batch), (path[t] - path[t + 1]) / step.lr
        if t < burn_in or (t - burn_in) % period == 0:
            whole = gradient(v, batch)
            s.append(v - path[t])
            y.append(whole - cached)
        else:
            used = [([a], [c]) for a, c in zip(s[-pairs:], y[-pairs:], strict=True)]
            curved = lbfgs_product([a for a, _ in used], [c for _, c in used], (v - path[t],))[0]
            whole = cached + curved
        sum_lost = len(lost) * gradient(v, lost) if lost else 0
        v = v - step.lr / (b - len(lost)) * (b * whole - sum_lost)
    DeltaGrad(period=period, burn_in=burn_in, pairs=pairs).apply(
        history, training.mean_loss, sorted(forget)
    )
    torch.testing.assert_close(training.w.detach(), v, atol=1e-9, rtol=0)


def test_it_is_near_retraining_for_a_small_share() -> None:
    training = logistic(n=200, steps=60)
    target = training.run(range(10))
    history, final = recorded(training)
    outcome = DeltaGrad().apply(history, training.mean_loss, range(10))
    assert float((training.w.detach() - target).norm()) < 0.2 * float((final - target).norm())
    assert len(outcome.lengths) == 60


def test_a_batch_that_is_wholly_forgotten_leaves_the_path_where_it_is() -> None:
    training = ridge()
    forget = training.batches[20]
    target = training.run(forget)
    history, _ = recorded(training)
    rewind(history, training.mean_loss, forget, 40)
    torch.testing.assert_close(training.w.detach(), target)
    history, _ = recorded(training)
    DeltaGrad(period=1).apply(history, training.mean_loss, forget)
    torch.testing.assert_close(training.w.detach(), target, atol=1e-11, rtol=0)


def test_momentum_is_refused() -> None:
    training = ridge(momentum=0.5)
    history, _ = recorded(training)
    with pytest.raises(ValueError, match="plain SGD, and the recorded training has momentum"):
        DeltaGrad().apply(history, training.mean_loss, [1])


def test_gradients_before_the_first_forgotten_sample_are_not_computed() -> None:
    training = ridge()
    history, _ = recorded(training)
    last = set(training.batches[-1]) - {j for batch in training.batches[:-1] for j in batch}
    requests: list[int] = []

    def loss(rows) -> Tensor:
        requests.append(len(rows))
        return training.mean_loss(rows)

    outcome = DeltaGrad(period=1).apply(history, loss, sorted(last) or training.batches[-1][:1])
    np.testing.assert_array_less(0, outcome.lengths[-1])
    first = next(i for i, length in enumerate(outcome.lengths) if length > 0)
    assert len(requests) <= 2 * (40 - first)


def test_as_an_edit_it_reads_the_folder_and_checks_the_loss(tmp_path: Path) -> None:
    training = ridge()
    history = History(training.params, 40, tmp_path)
    training.run(history=history)
    request = EditRequest(
        model=torch.nn.Identity(),
        forget=(1, 2),
        retain=(0,),
        ridge=0.0,
        batches=lambda rows: [],
        loss=training.mean_loss,
        params=training.params,
    )
    assert DeltaGrad(history=str(tmp_path)).edit(request)["step"] > 0
    with pytest.raises(ValueError, match="DeltaGrad needs the recorded history"):
        DeltaGrad().edit(request)
