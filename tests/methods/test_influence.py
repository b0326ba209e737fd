"""The influence step against dense algebra, leave-one-out of a small problem, and its fixed
point.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from concept_eraser.methods.base import EditRequest
from concept_eraser.methods.fisher import flatten
from concept_eraser.methods.influence import Influence, woodbury


def problem(n: int = 80) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    y = (x[:, 0] + 0.8 * torch.randn(n, generator=g, dtype=torch.float64) > 0).long()
    model = nn.Linear(4, 2, dtype=torch.float64)
    fit(model, x, y)
    return model, x, y


def fit(model: nn.Module, x: torch.Tensor, y: torch.Tensor, decay: float = 0.005) -> None:
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + decay * sum(
            p.square().sum() for p in model.parameters()
        )
        loss.backward()
        return loss

    optimizer.step(closure)


def request(model: nn.Module, x: torch.Tensor, y: torch.Tensor, forget: list[int]) -> EditRequest:
    retain = tuple(i for i in range(len(x)) if i not in forget)
    return EditRequest(
        model,
        tuple(forget),
        retain,
        0.0,
        lambda rows: [(x[list(rows)], y[list(rows)])],
        lambda rows: F.cross_entropy(model(x[list(rows)]), y[list(rows)]),
        tuple(model.parameters()),
    )


def test_woodbury_is_the_dense_solution() -> None:
    g = torch.Generator().manual_seed(1)
    gradients, v = (
        torch.randn(12, 5, generator=g, dtype=torch.float64),
        torch.randn(12, generator=g, dtype=torch.float64),
    )
    dense = 0.3 * torch.eye(12, dtype=torch.float64) + gradients @ gradients.T / 5
    torch.testing.assert_close(woodbury(gradients, v, 0.3), torch.linalg.solve(dense, v))


def test_the_step_is_that_of_the_formula() -> None:
    model, x, y = problem()
    forget = [3, 8, 21]
    retain = [i for i in range(len(x)) if i not in forget]
    params = tuple(model.parameters())
    columns = torch.stack(
        [
            flatten(torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), params))
            for i in retain
        ],
        1,
    )
    push = push_of(model, x, y, forget)
    matrix = columns @ columns.T / len(retain) + 0.05 * torch.eye(len(push), dtype=push.dtype)
    expected = flatten(tuple(p.detach() for p in params)) + torch.linalg.solve(matrix, push)
    Influence(damping=0.05, samples=1000).edit(request(model, x, y, forget))
    torch.testing.assert_close(flatten(tuple(p.detach() for p in params)), expected)


def push_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, forget: list) -> torch.Tensor:
    """v of the docstring: the mean over all samples of the forgotten and the retained gradients."""
    is_forgotten = torch.zeros(len(x), dtype=torch.bool)
    is_forgotten[forget] = True
    forgotten, retained = (
        flatten(
            torch.autograd.grad(
                F.cross_entropy(model(x[rows]), y[rows], reduction="sum"), tuple(model.parameters())
            )
        )
        for rows in (is_forgotten, ~is_forgotten)
    )
    share = int(is_forgotten.sum()) / int((~is_forgotten).sum())
    return (forgotten - share * retained) / len(x)


def test_where_all_gradients_sum_to_zero_the_retained_samples_do_not_matter() -> None:
    """There the step is the forgotten samples' gradient over the number of retained ones."""
    model, x, y = problem()
    fit(model, x, y, decay=0.0)
    forget = [0, 1, 2]
    gradient = flatten(
        torch.autograd.grad(
            F.cross_entropy(model(x[:3]), y[:3], reduction="sum"), tuple(model.parameters())
        )
    )
    torch.testing.assert_close(
        push_of(model, x, y, forget), gradient / (len(x) - 3), rtol=1e-3, atol=1e-6
    )


def test_it_moves_towards_the_model_trained_without_the_samples() -> None:
    model, x, y = problem()
    start = flatten(tuple(p.detach().clone() for p in model.parameters()))
    # wrong labels, which have the largest influence
    forget = [i for i in range(len(x)) if int(y[i]) != int(x[i, 0] > 0)][:5]
    retain = [i for i in range(len(x)) if i not in forget]
    other = nn.Linear(4, 2, dtype=torch.float64)
    fit(other, x[retain], y[retain])
    target = flatten(tuple(p.detach() for p in other.parameters()))
    Influence(damping=0.05, samples=1000).edit(request(model, x, y, forget))
    weights = flatten(tuple(p.detach() for p in model.parameters()))
    assert float((weights - target).norm()) < 0.8 * float((start - target).norm())


def test_nothing_to_forget_moves_nothing() -> None:
    model, x, y = problem()
    before = [p.detach().clone() for p in model.parameters()]
    assert Influence().edit(request(model, x, y, []))["step"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"damping": 0.0}, {"samples": 0}])
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(ValueError, match="damping must be > 0"):
        Influence(**options)


def test_strength_scales_the_step_and_its_length_is_reported() -> None:
    steps, (fresh, x, y) = [], problem()
    for strength in (1.0, 2.5):
        model = copy.deepcopy(fresh)
        before = flatten(tuple(p.detach().clone() for p in model.parameters()))
        figures = Influence(strength=strength).edit(request(model, x, y, [3, 8]))
        steps.append(flatten(tuple(p.detach() for p in model.parameters())) - before)
        assert figures == {"step": pytest.approx(float(steps[-1].norm())), "samples": 78}
    torch.testing.assert_close(steps[1], 2.5 * steps[0])


def test_the_sampled_gradients_are_those_of_the_seed() -> None:
    """torch's own permutation of the retained samples, the first `samples` of it."""
    model, x, y = problem()
    other = copy.deepcopy(model)
    edit_request = request(model, x, y, [0, 1])
    figures = Influence(samples=5, seed=4, damping=0.05).edit(edit_request)
    assert figures["samples"] == 5
    order = torch.randperm(78, generator=torch.Generator().manual_seed(4))[:5].tolist()
    params = tuple(other.parameters())
    start = flatten(tuple(p.detach().clone() for p in params))
    rows = [edit_request.retain[i] for i in order]
    columns = torch.stack(
        [
            flatten(torch.autograd.grad(F.cross_entropy(other(x[i : i + 1]), y[i : i + 1]), params))
            for i in rows
        ],
        1,
    )
    push = push_of(other, x, y, [0, 1])
    dense = columns @ columns.T / 5 + 0.05 * torch.eye(len(push), dtype=push.dtype)
    step = flatten(tuple(p.detach() for p in model.parameters())) - start
    torch.testing.assert_close(step, torch.linalg.solve(dense, push))


def test_batches_add_up_and_a_parameter_without_a_gradient_stays() -> None:
    fresh, x, y = problem()

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.spare = (
                copy.deepcopy(fresh),
                nn.Parameter(torch.ones(2, dtype=torch.float64)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    whole, parts = Spare(), Spare()
    one, other = request(whole, x, y, [3, 8, 21]), request(parts, x, y, [3, 8, 21])
    split_request = replace(other, batches=lambda rows: [(x[[i]], y[[i]]) for i in rows])
    Influence().edit(one)
    Influence().edit(split_request)
    for p, q in zip(one.params, split_request.params, strict=True):
        torch.testing.assert_close(p, q)
    assert parts.spare.tolist() == [1, 1]
