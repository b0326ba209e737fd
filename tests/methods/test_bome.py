"""BOME: the quadratic programme that it solves, FORUM with one objective, and Eq. (24)."""

from __future__ import annotations

import cvxpy
import numpy as np
import pytest
import torch
from torch import Tensor

from concept_eraser.methods.bome import Bome
from concept_eraser.methods.checks import closure, pair
from concept_eraser.methods.forum import Forum
from concept_eraser.training.closure import LossClosure
from tests.methods.test_adversarial import Copies, large_problem

FLOAT = torch.float64
OPTIONS = {"inner_steps": 5, "inner_lr": 0.1, "outer_lr": 1.0}


def problem(second: bool = True) -> tuple[tuple[Tensor, Tensor], LossClosure]:
    """A lower level 1/2 ||omega - alpha||^2 on four numbers, and upper losses of both."""
    generator = torch.Generator().manual_seed(1)
    alpha, omega, a, b = (torch.randn(4, generator=generator, dtype=FLOAT) for _ in range(4))
    alpha.requires_grad_()
    omega.requires_grad_()
    losses = {"retain": [lambda: (omega - a).square().sum() + alpha @ b]}
    if second:
        losses["forget"] = [lambda: (omega @ alpha - 1) ** 2]
    losses["attack"] = [lambda: 0.5 * (omega - alpha).square().sum()]
    return (alpha, omega), LossClosure((alpha, omega), losses, inner=[1])


def both(v: tuple[Tensor, ...]) -> np.ndarray:
    return torch.cat(v).detach().numpy()


@pytest.mark.parametrize("barrier", ["norm", "gap"])
@pytest.mark.parametrize("eta", [0.05, 0.5, 5.0])
def test_against_the_quadratic_programme(barrier, eta: float) -> None:
    """min ||d - grad F||^2 subject to <d, grad q> >= phi, by cvxpy, with grad q by hand."""
    (alpha, omega), losses = problem()
    end = alpha + (omega - alpha) * 0.9**5
    gap = 0.5 * ((omega - alpha).square().sum() - (end - alpha).square().sum())
    slope = np.concatenate([(end - omega).detach().numpy(), (omega - alpha).detach().numpy()])
    first, second = (both(losses.grad(name)) for name in ("retain", "forget"))
    total = 2.0 * first + 0.5 * second
    rate = eta * (slope @ slope if barrier == "norm" else float(gap))
    d = cvxpy.Variable(8)
    cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(d - total)), [slope @ d >= rate]).solve(
        solver="CLARABEL"
    )
    method = Bome(eta=eta, barrier=barrier, retain=2.0, forget=0.5, **OPTIONS)
    direction = method.direction(losses)
    np.testing.assert_allclose(both(direction.vec), d.value, atol=1e-6)
    assert direction.notes["q"] == pytest.approx(float(gap))
    assert direction.notes["nu"] == pytest.approx(
        max(0.0, (rate - total @ slope) / (slope @ slope))
    )
    assert direction.weights.tolist() == [2.0, 0.5]
    assert direction.gram.shape == (2, 2)


def test_with_one_objective_it_is_forum() -> None:
    _, losses = problem(second=False)
    one = Bome(eta=0.4, **OPTIONS).direction(losses)
    other = Forum(rho_e=0.4, normalize=False, **OPTIONS).direction(losses)
    for a, b in zip(one.vec, other.vec, strict=True):
        torch.testing.assert_close(a, b)
    assert one.notes["nu"] == pytest.approx(other.notes["nu"])


def test_the_attack_moves_by_its_own_step_size() -> None:
    _, losses = problem()
    one = Bome(**OPTIONS).direction(losses).vec
    other = Bome(**{**OPTIONS, "outer_lr": 0.25}).direction(losses).vec
    torch.testing.assert_close(one[0], other[0])
    torch.testing.assert_close(one[1] * 0.25, other[1])


def test_a_solved_lower_level_leaves_the_sum() -> None:
    pair_closure = closure(*pair(0.2, 1.0, 3.0), Bome())
    direction = Bome().direction(pair_closure)
    assert direction.notes == {"q": 0.0, "nu": 0.0}
    assert direction.weights.tolist() == [1.0, 1.0]


def test_a_lower_level_that_diverges_is_a_skipped_step() -> None:
    _, losses = problem()
    direction = Bome(inner_steps=2000, inner_lr=1e6).direction(losses)
    assert direction.notes == {"inner_diverged": 1}
    assert all(bool(part.isnan().all()) for part in direction.vec)


def test_without_an_attack_and_bad_options_are_errors() -> None:
    with pytest.raises(ValueError, match=r"needs a lower-level problem.*found retain, forget"):
        Bome().direction(closure(*pair(0.1, 1.0, 1.0)))
    with pytest.raises(ValueError, match="one of them > 0"):
        Bome(retain=0.0, forget=0.0)
    with pytest.raises(ValueError, match="barrier must be"):
        Bome(barrier="constant")
    assert Bome(retain=0.0).retain == 0


def test_a_step_copies_the_variable_of_the_lower_level_alone() -> None:
    weights, _, losses = large_problem()
    with Copies() as copies:
        Bome(**OPTIONS).direction(losses)
    assert copies.numbers < weights.numel() / 10
