"""Certified removal against numpy, against retraining and against the natural-gradient step."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser.methods.base import EditRequest
from concept_eraser.methods.certified_removal import CertifiedRemoval, conjugate_gradients
from concept_eraser.methods.fisher import Risk
from concept_eraser.methods.natural_gradient import NaturalGradient

RIDGE, N = 0.05, 90


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(N, 4, generator=g, dtype=torch.float64)
    noise = torch.randn(N, 3, generator=g, dtype=torch.float64)
    return x, (x[:, :3] + 0.7 * noise).argmax(1)


def fit(rows: Tensor, slope: Tensor | None = None) -> nn.Linear:
    """The minimiser on some samples, by Newton's method.

    With `slope` the loss has the term <slope, w> / N.
    """
    x, y = data()
    w = torch.zeros(12, dtype=torch.float64)

    def loss(flat: Tensor) -> Tensor:
        fit = F.cross_entropy(x[rows] @ flat.view(3, 4).T, y[rows]) + RIDGE / 2 * (flat @ flat)
        return fit if slope is None else fit + slope @ flat / len(rows)

    for _ in range(30):
        gradient = torch.func.grad(loss)(w)
        w = w - torch.linalg.solve(torch.func.hessian(loss)(w), gradient)
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(w.view(3, 4))
    return model


def request(model: nn.Module, forget: int, ridge: float = RIDGE) -> EditRequest:
    x, y = data()

    def loss(rows) -> Tensor:
        decay = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(x[list(rows)]), y[list(rows)]) + ridge / 2 * decay

    return EditRequest(
        model=model,
        forget=tuple(range(forget)),
        retain=tuple(range(forget, N)),
        ridge=ridge,
        batches=lambda rows: [(x[list(rows)], y[list(rows)])],
        loss=loss,
        params=tuple(model.parameters()),
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def test_the_step_and_the_residual_by_numpy() -> None:
    """Sums over samples, a dense Hessian, and the gradients of the two weights."""
    forget = 6
    x, y = (t.numpy() for t in data())
    model = fit(torch.arange(N))
    w = model.weight.detach().numpy().reshape(-1).copy()

    def gradient(flat: np.ndarray, rows: slice) -> np.ndarray:
        error = softmax(x[rows] @ flat.reshape(3, 4).T) - np.eye(3)[y[rows]]
        return (error.T @ x[rows]).reshape(-1) + len(x[rows]) * RIDGE * flat

    p = softmax(x[forget:] @ w.reshape(3, 4).T)
    hessian = (N - forget) * RIDGE * np.eye(12)
    for probabilities, row in zip(p, x[forget:], strict=True):
        sigma = np.diag(probabilities) - np.outer(probabilities, probabilities)
        hessian += np.kron(sigma, np.outer(row, row))
    removed = gradient(w, slice(0, forget))
    expected = w + np.linalg.solve(hessian, removed)
    notes = CertifiedRemoval(sigma=2.0, delta=1e-3).edit(request(model, forget))
    np.testing.assert_allclose(model.weight.detach().numpy().reshape(-1), expected, atol=1e-9)
    residual = np.linalg.norm(gradient(expected, slice(forget, N)))
    assert notes["residual"] == pytest.approx(residual, rel=1e-6)
    assert notes["epsilon"] == pytest.approx(math.sqrt(2 * math.log(1500)) * residual / 2)
    assert notes["step"] == pytest.approx(np.linalg.norm(expected - w))


def test_it_is_nearer_to_retraining_by_an_order_of_the_deletion() -> None:
    errors = []
    for forget in (2, 8):
        model, target = fit(torch.arange(N)), fit(torch.arange(forget, N)).weight
        before = float((model.weight - target).detach().norm())
        CertifiedRemoval().edit(request(model, forget))
        errors.append((float((model.weight - target).detach().norm()), before))
    assert all(after < 0.1 * before for after, before in errors)


def test_it_is_the_natural_gradient_step_of_a_linear_model() -> None:
    x, y = data()
    one, other = fit(torch.arange(N)), fit(torch.arange(N))
    CertifiedRemoval().edit(request(one, 5))
    NaturalGradient().apply(Risk(other, ridge=RIDGE), [(x[:5], y[:5])], [(x[5:], y[5:])])
    torch.testing.assert_close(one.weight, other.weight, atol=1e-9, rtol=0)


def test_the_residual_needs_no_perturbation() -> None:
    """With b in the training loss, the residual is that of the loss with b."""
    slope = 3 * torch.randn(12, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    model = fit(torch.arange(N), slope)
    job = request(model, 5)
    notes = CertifiedRemoval(sigma=3.0).edit(job)
    (gradient,) = torch.autograd.grad(job.loss(job.retain), model.weight)
    residual = (N - 5) * gradient.flatten() + slope
    assert notes["residual"] == pytest.approx(float(residual.norm()), rel=1e-6)


def test_no_perturbation_gives_no_epsilon() -> None:
    notes = CertifiedRemoval().edit(request(fit(torch.arange(N)), 3))
    assert set(notes) == {"step", "residual"}


def test_conjugate_gradients_solve_a_system() -> None:
    g = torch.Generator().manual_seed(0)
    root = torch.randn(7, 7, generator=g, dtype=torch.float64)
    matrix, right = root @ root.T + torch.eye(7).double(), torch.randn(7, generator=g).double()
    calls = []

    def multiply(v: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        calls.append(1)
        return (matrix @ v[0],)

    (solution,) = conjugate_gradients(multiply, (right,), 50, 1e-12)
    torch.testing.assert_close(matrix @ solution, right)
    assert len(calls) <= 10
    (rough,) = conjugate_gradients(multiply, (right,), 1, 1e-12)
    assert float((matrix @ rough - right).norm()) > 1e-6
    (zero,) = conjugate_gradients(multiply, (0 * right,), 5, 1e-12)
    assert not zero.any()


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="strongly convex"):
        CertifiedRemoval().edit(request(fit(torch.arange(N)), 3, ridge=0.0))
    torch.manual_seed(0)
    deep = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    weights = [p.detach().clone() for p in deep.parameters()]
    with pytest.raises(ValueError, match="linear in their parameters"):
        CertifiedRemoval().edit(request(deep, 3))
    assert all(torch.equal(a, b) for a, b in zip(weights, deep.parameters(), strict=True))
    deep[0].requires_grad_(False)
    job = request(deep, 3)
    head = EditRequest(**{**vars(job), "params": tuple(deep[2].parameters())})
    assert CertifiedRemoval().edit(head)["step"] > 0, "a head on fixed features is linear"


class Outputs(nn.Module):
    """A function of x w^T, with the parameters of a linear layer."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(fit(torch.arange(N)).weight.detach().clone())
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x @ self.weight.T)


def bent(z: Tensor) -> Tensor:
    return z + 0.1 * z.square()


@pytest.mark.parametrize(
    "change",
    [
        bent,
        lambda z: torch.cat([z[:, :2], bent(z[:, 2:])], dim=1),  # one output of three
        lambda z: 1e-6 * bent(z),
        lambda z: 1e6 + bent(z),  # far from zero
    ],
)
def test_a_bend_is_found_in_any_output_and_at_any_size(change: Callable[[Tensor], Tensor]) -> None:
    model = Outputs(change)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match="linear in their parameters"):
        CertifiedRemoval().edit(request(model, 5))
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    "change",
    [
        lambda z: torch.cat([z[:, :2], 0 * z[:, 2:]], dim=1),  # an output that is constant
        lambda z: 5 + z,
        lambda z: z + 1e3 * F.relu(z.abs() - 300),  # linear at the size of the weights
    ],
)
def test_a_linear_model_is_accepted(change: Callable[[Tensor], Tensor]) -> None:
    notes = CertifiedRemoval().edit(request(Outputs(change), 5))
    assert notes["step"] > 0
    assert "epsilon" not in notes


def test_nothing_to_forget_and_a_small_perturbation() -> None:
    assert CertifiedRemoval().iterations == 500
    model = fit(torch.arange(N))
    assert CertifiedRemoval().edit(request(model, 0)) == {"step": 0.0, "residual": 0.0}
    notes = CertifiedRemoval(sigma=0.5).edit(request(model, 5))
    assert notes["epsilon"] == pytest.approx(2 * math.sqrt(2 * math.log(15000)) * notes["residual"])
    for delta in (-0.5, 0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match=r"delta must lie in \(0, 1\)"):
            CertifiedRemoval(delta=delta)
