"""EraseDiff: the barrier, the quadratic programme that it solves, and a toy where the losses are
opposed.
"""

from __future__ import annotations

import cvxpy
import numpy as np
import pytest
import torch

from concept_eraser.methods.checks import COSINES, PAIRS, closure, flat, pair
from concept_eraser.methods.erasediff import EraseDiff
from concept_eraser.methods.vectors import dot, norm
from concept_eraser.training.closure import LossClosure


@pytest.mark.parametrize(
    "method", [EraseDiff(), EraseDiff(eta=0.1), EraseDiff(barrier="constant", eta=0.5)]
)
def test_the_forget_loss_falls_as_fast_as_the_barrier(method: EraseDiff) -> None:
    """<d, g_q> = max(a, <g_r, g_q>)."""
    for retain, forget in PAIRS:
        least_descent = method.eta * (float(norm(forget)) ** 2 if method.barrier == "norm" else 1.0)
        direction = method.direction(closure(retain, forget))
        parts = float(norm(retain) * norm(forget)) + float(direction.weights[1] * norm(forget) ** 2)
        assert float(dot(direction.vec, forget)) == pytest.approx(
            max(least_descent, float(dot(retain, forget))), rel=1e-6, abs=1e-12 * parts
        )
        assert direction.weights[0] == 1


def test_a_retain_step_that_forgets_fast_enough_is_unchanged() -> None:
    retain, forget = pair(0.9, 3.0, 1.0)
    direction = EraseDiff().direction(closure(retain, forget))
    assert direction.weights.tolist() == [1.0, 0.0]
    torch.testing.assert_close(flat(direction.vec), flat(retain), rtol=0, atol=0)


def test_opposite_gradients_give_a_forget_step() -> None:
    retain, _ = pair(0.3, 2.0, 1.0)
    forget = tuple(-0.5 * part for part in retain)
    step = EraseDiff().direction(closure(retain, forget)).vec
    # g_r is cancelled, and the barrier's part remains
    torch.testing.assert_close(flat(step), flat(forget))
    assert float(dot(step, retain)) < 0


@pytest.mark.parametrize("cosine", COSINES)
@pytest.mark.parametrize("barrier", ["norm", "constant"])
def test_against_the_quadratic_programme(cosine: float, barrier: str) -> None:
    """min 1/2 ||d - g_r||^2 subject to <d, g_q> >= a, by cvxpy."""
    retain, forget = pair(cosine, 2.0, 0.7)
    r, q = (flat(v).numpy() for v in (retain, forget))
    d = cvxpy.Variable(len(r))
    bound = 0.8 * (q @ q if barrier == "norm" else 1.0)
    cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(d - r)), [q @ d >= bound]).solve(
        solver="CLARABEL"
    )
    direction = EraseDiff(eta=0.8, barrier=barrier).direction(closure(retain, forget))
    np.testing.assert_allclose(flat(direction.vec).numpy(), d.value, atol=1e-6)


def test_golden_value() -> None:
    """lambda = (1 x 5 - (-1 x 1 + 2 x 2)) / 5 = 0.4, by hand: g_r = (-1, 2), g_q = (1, 2)."""
    retain, forget = ((torch.tensor(v, dtype=torch.float64),) for v in ([-1.0, 2.0], [1.0, 2.0]))
    direction = EraseDiff().direction(closure(retain, forget))
    assert direction.weights.tolist() == pytest.approx([1.0, 0.4])
    assert flat(direction.vec).tolist() == pytest.approx([-0.6, 2.8])


def quadratics(at: list[float]) -> tuple[torch.Tensor, LossClosure]:
    """The retain loss is 0 at (1, 0), the forget loss where the first coordinate is -1."""
    theta = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    home = torch.tensor([1.0, 0.0], dtype=torch.float64)
    losses = {
        "retain": [lambda: (theta - home).square().sum()],
        "forget": [lambda: (theta[0] + 1).square()],
    }
    return theta, LossClosure((theta,), losses)


def test_the_gap_is_what_k_steps_gain() -> None:
    """f = (x + 1)^2 shrinks by (1 - 2 lr)^2 a step."""
    theta, losses = quadratics([0.5, 0.25])
    direction = EraseDiff(barrier="gap", eta=3.0, inner_steps=3, inner_lr=0.1).direction(losses)
    assert direction.notes["gap"] == pytest.approx(1.5**2 * (1 - 0.8**6))
    assert float(
        dot(direction.vec, (torch.tensor([3.0, 0.0], dtype=torch.float64),))
    ) == pytest.approx(3 * direction.notes["gap"])
    assert theta.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("method", [EraseDiff(), EraseDiff(barrier="gap", inner_lr=0.3)])
def test_the_constraint_holds_and_the_retain_loss_is_least_under_it(method: EraseDiff) -> None:
    """It ends where the forget loss is 0 and, among those points, the retain loss is least: (-1,
    0).
    """
    theta, losses = quadratics([1.0, 2.0])
    for _ in range(400):
        (step,) = method.direction(losses).vec
        with torch.no_grad():
            theta -= 0.05 * step
    assert theta.tolist() == pytest.approx([-1.0, 0.0], abs=1e-3)


def test_wrong_objectives_and_options_are_errors() -> None:
    with pytest.raises(ValueError, match="two objectives"):
        EraseDiff().check_objectives(("retain", "forget", "forget.2"))
    with pytest.raises(ValueError, match="eta and inner_lr"):
        EraseDiff(eta=0.0)
    with pytest.raises(ValueError, match="barrier must be"):
        EraseDiff(barrier="none")


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_gap_after_any_number_of_steps(steps: int) -> None:
    """f = (x + 1)^2 at x = 0.5: each plain step of 0.1 leaves 0.8 of the distance; weights and
    notes follow.
    """
    _, losses = quadratics([0.5, 0.25])
    direction = EraseDiff(barrier="gap", inner_steps=steps, inner_lr=0.1).direction(losses)
    gap = 2.25 * (1 - 0.64**steps)
    assert direction.notes == pytest.approx({"gap": gap})
    inner, square = 3.0 * -1.0, 9.0  # g_r = (-1, 0.5), g_q = (3, 0)
    assert direction.weights.tolist() == pytest.approx([1.0, max(0.0, (gap - inner) / square)])


def test_a_loss_that_rises_has_no_gap() -> None:
    """Too long inner steps raise the loss: the barrier is 0. The retain step lowers the forget loss
    already, so nothing is added to it.
    """
    _, losses = quadratics([2.0, 0.0])  # g_r = (2, 0) and g_q = (6, 0) agree
    direction = EraseDiff(barrier="gap", inner_lr=3.0).direction(losses)
    assert direction.notes == {"gap": 0.0}
    assert direction.weights.tolist() == [1.0, 0.0]


def test_the_order_of_the_objectives_and_a_forget_loss_at_its_minimum() -> None:
    retain, forget = pair(-0.5, 2.0, 3.0)
    reversed_order = closure(retain, forget)
    reversed_order.gradients = {"forget": forget, "retain": retain}
    one, other = (
        EraseDiff().direction(closure(retain, forget)),
        EraseDiff().direction(reversed_order),
    )
    assert one.weights.tolist() == pytest.approx([1.0, 1 + 0.5 * 2 / 3])
    assert other.weights.tolist() == pytest.approx([1 + 0.5 * 2 / 3, 1.0])
    torch.testing.assert_close(flat(one.vec), flat(other.vec))
    assert one.notes == {}
    still = EraseDiff().direction(closure(retain, tuple(0 * part for part in forget)))
    assert still.weights.tolist() == [1.0, 0.0]
    torch.testing.assert_close(flat(still.vec), flat(retain))


def test_a_constant_barrier_is_eta() -> None:
    retain, forget = pair(0.0, 1.0, 2.0)
    direction = EraseDiff(barrier="constant", eta=0.5).direction(closure(retain, forget))
    assert direction.weights.tolist() == pytest.approx([1.0, 0.5 / 4])
    assert EraseDiff(eta=0.5).direction(closure(retain, forget)).weights.tolist() == pytest.approx(
        [1.0, 0.5]
    )


def test_it_refuses_other_objectives_where_it_acts_too() -> None:
    EraseDiff().check_objectives(("forget", "retain"))
    pair_closure = closure(*pair(0.1, 1.0, 1.0))
    pair_closure.gradients["replace"] = pair_closure.gradients["retain"]
    with pytest.raises(ValueError, match="two objectives"):
        EraseDiff().direction(pair_closure)
