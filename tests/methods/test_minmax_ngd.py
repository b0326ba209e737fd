"""Algorithm 2: turns, the pull's sign, and the axis-wise preconditioner against its definition."""

from __future__ import annotations

import pytest
import torch

from concept_eraser.methods.checks import closure, pair
from concept_eraser.methods.minmax_ngd import LONGEST, MinMaxNGD, axis_covariance, precondition_axis
from concept_eraser.training.closure import LossClosure


def test_one_objective_a_step_in_turn() -> None:
    method = MinMaxNGD(forget_steps=2, retain_steps=3)
    requests = []
    for step in range(7):
        pair_closure = closure(*pair(0.2, 1.0, 1.0))
        pair_closure.step = step
        method.direction(pair_closure)
        requests += pair_closure.requests
    assert requests == ["forget", "forget", "retain", "retain", "retain", "forget", "forget"]


def test_fine_tuning_has_no_forget_steps_and_updates_the_fisher_at_its_period() -> None:
    method = MinMaxNGD(forget_steps=0, retain_steps=2, period=3)
    requests, factors = [], []
    for step in range(7):
        pair_closure = closure(*pair(0.2, 1.0 + step, 1.0))
        pair_closure.step = step
        method.direction(pair_closure)
        requests += pair_closure.requests
        factors.append({key: value.clone() for key, value in method.state_dict().items()})
    assert requests == ["retain"] * 7
    changed = [
        step
        for step in range(1, 7)
        if any(not torch.equal(factors[step][k], factors[step - 1][k]) for k in factors[step])
    ]
    assert changed == [3, 6]


def test_the_length_of_the_gradient_is_kept() -> None:
    g = torch.Generator().manual_seed(0)
    grad = torch.randn(5, 7, 3, generator=g, dtype=torch.float64)
    for axis in range(3):
        step = precondition_axis(grad, axis_covariance(grad, axis), axis, 4.0)
        assert step.shape == grad.shape
        assert float(step.norm()) == pytest.approx(float(grad.norm()))
        assert float((step * grad).sum()) > 0, "a positive definite matrix keeps descent"


def test_against_the_dense_definition() -> None:
    """(F + 4 tr(F)/d I)^-1 X on the rows of a matrix, up to length."""
    g = torch.Generator().manual_seed(1)
    grad = torch.randn(4, 6, generator=g, dtype=torch.float64)
    factor = grad @ grad.T / 6
    expected = (
        torch.linalg.inv(factor + 4 * factor.diagonal().mean() * torch.eye(4, dtype=torch.float64))
        @ grad
    )
    step = precondition_axis(grad, axis_covariance(grad, 0), 0, 4.0)
    assert float(
        torch.nn.functional.cosine_similarity(step.flatten(), expected.flatten(), dim=0)
    ) == pytest.approx(1)


def test_much_smoothing_is_the_gradient() -> None:
    g = torch.Generator().manual_seed(2)
    grad = torch.randn(4, 6, generator=g, dtype=torch.float64)
    torch.testing.assert_close(precondition_axis(grad, axis_covariance(grad, 0), 0, 1e12), grad)


def test_the_pull_is_towards_the_smoothed_weights_in_both_phases() -> None:
    """a13: with the printed sign of the ascent the weights drift away. After a jump the step leads
    back in both phases.
    """
    for objective_turn in (0, 1):
        w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        method = MinMaxNGD(pull=1.0, average=0.1, retain_steps=1, smoothing=1e12)
        flat = {"retain": [lambda w=w: 0.0 * w.sum()], "forget": [lambda w=w: 0.0 * w.sum()]}
        losses = LossClosure((w,), flat, step=objective_turn)
        method.direction(losses)
        with torch.no_grad():
            w += 1.0
        step = method.direction(losses).vec[0]
        assert torch.all(step > 0), "the optimiser subtracts: back towards 0"


def test_long_axes_are_left_alone() -> None:
    w = torch.zeros(LONGEST + 1, requires_grad=True)
    losses = {"retain": [lambda: w.sum()], "forget": [lambda: (w * torch.arange(len(w))).sum()]}
    step = MinMaxNGD().direction(LossClosure((w,), losses)).vec[0]
    torch.testing.assert_close(step, torch.arange(len(w), dtype=torch.float32))


def test_state_is_carried_over_a_resume() -> None:
    def closure_at(step: int):
        pair_closure = closure(*pair(0.1, 1.0, 2.0, seed=step))
        pair_closure.step = step
        return pair_closure

    whole, first = MinMaxNGD(period=2, pull=0.5), MinMaxNGD(period=2, pull=0.5)
    for step in range(3):
        whole.direction(closure_at(step))
        first.direction(closure_at(step))
    second = MinMaxNGD(period=2, pull=0.5)
    second.load_state_dict(first.state_dict())
    for a, b in zip(
        whole.direction(closure_at(3)).vec, second.direction(closure_at(3)).vec, strict=True
    ):
        assert torch.equal(a, b)


def test_every_objective_reaches_the_running_fisher() -> None:
    """Also where the period divides the round."""
    method = MinMaxNGD(period=4, forget_steps=1, retain_steps=3)
    objectives = set()
    for step in range(20):
        pair_closure = closure(*pair(0.1, 1.0, 2.0, seed=step))
        pair_closure.step = step
        before = method.state_dict()
        method.direction(pair_closure)
        if any(
            not torch.equal(before[k], v) for k, v in method.state_dict().items() if k in before
        ):
            objectives.add(pair_closure.requests[0])
    assert objectives == {"retain", "forget"}


@pytest.mark.parametrize(
    "bad",
    [
        {"forget_steps": -1},
        {"retain_steps": 0},
        {"pull": -1.0},
        {"average": 0.0},
        {"smoothing": 0.0},
    ],
)
def test_options_are_checked(bad: dict) -> None:
    with pytest.raises(ValueError, match=r"must be|expected"):
        MinMaxNGD(**bad)


def test_the_smoothed_weights_and_the_pull_by_hand() -> None:
    """theta_sm <- theta_sm + 0.25 (theta - theta_sm); the gradient is 0, so the step is 2 gamma
    (theta - theta_sm).
    """
    # no axis, so nothing is preconditioned
    w = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    losses = {"retain": [lambda: 0 * w], "forget": [lambda: 0 * w]}
    method, smooth = MinMaxNGD(pull=3.0, average=0.25), 0.0
    for step, value in enumerate([0.0, 4.0, 4.0, -2.0]):
        with torch.no_grad():
            w.fill_(value)
        smooth += 0.25 * (value - smooth)
        direction = method.direction(LossClosure((w,), losses, step=step))
        assert float(direction.vec[0].detach()) == pytest.approx(2 * 3 * (value - smooth))
    assert set(method.state_dict()) == {"smooth_0"}
    assert MinMaxNGD().direction(LossClosure((w,), losses)).vec[0] == 0


def test_the_running_fisher_by_its_recursion() -> None:
    """F <- (1 - rho) F + rho X X^T / N where (step + round) is a multiple of the period; the first
    gradient starts it.
    """
    method = MinMaxNGD(memory=0.3, period=3, forget_steps=1, retain_steps=1)
    fisher = None
    for step in range(12):
        rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        pair_closure = closure((rows,), (rows,))
        pair_closure.step = step
        direction = method.direction(pair_closure)
        mean = rows @ rows.T / 5
        if fisher is None:
            fisher = mean
        elif (step + step // 2) % 3 == 0:
            fisher = 0.7 * fisher + 0.3 * mean
        torch.testing.assert_close(method.state_dict()["fisher_0_0"], fisher)
        assert float(direction.vec[0].norm()) == pytest.approx(float(rows.norm()))
        # both axes, one after the other, each a solve with F + 4 tr(F)/d I
        first = torch.linalg.solve(
            fisher + 4 * fisher.trace() / 3 * torch.eye(3, dtype=torch.float64), rows
        )
        first = first * rows.norm() / first.norm()
        columns = method.state_dict()["fisher_0_1"]
        second = torch.linalg.solve(
            columns + 4 * columns.trace() / 5 * torch.eye(5, dtype=torch.float64), first.T
        ).T
        torch.testing.assert_close(direction.vec[0], second * rows.norm() / second.norm())


def test_axes_of_one_entry_and_of_the_limit() -> None:
    """An axis of one entry needs no factor; the longest axis with a dense factor has LONGEST
    entries.
    """
    rows = torch.randn(1, LONGEST, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    method = MinMaxNGD()
    method.direction(closure((rows,), (rows,)))
    assert set(method.state_dict()) == {"fisher_0_1"}
    longer = torch.ones(2, LONGEST + 1, dtype=torch.float64)
    method = MinMaxNGD()
    method.direction(closure((longer,), (longer,)))
    assert set(method.state_dict()) == {"fisher_0_0"}
    assert LONGEST == 512, "what the docstring says"


def test_what_is_logged_of_a_turn() -> None:
    retain, forget = pair(0.3, 2.0, 5.0)
    for step, place, square in ((0, 1, 25.0), (1, 0, 4.0)):
        pair_closure = closure(retain, forget)
        pair_closure.step = step
        direction = MinMaxNGD().direction(pair_closure)
        assert direction.notes == {"forget_turn": float(place)}
        assert direction.weights is None
        assert float(direction.gram[place, place]) == pytest.approx(square)
        assert int(torch.isnan(direction.gram).sum()) == 3


def test_a_gradient_of_zero_stays_zero() -> None:
    zeros = torch.zeros(3, 4, dtype=torch.float64)
    assert torch.equal(precondition_axis(zeros, axis_covariance(zeros, 0), 0, 4.0), zeros)
    tiny = 1e-12 * torch.ones(3, 4, dtype=torch.float64)
    assert float(precondition_axis(tiny, axis_covariance(tiny, 0), 0, 4.0).norm()) == pytest.approx(
        float(tiny.norm())
    )


def test_a_short_gradient_in_single_precision_is_turned_like_a_long_one() -> None:
    """Its squares are 1e-24, and the squares of these are below the least number of float32."""
    grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    turned = precondition_axis(grad, axis_covariance(grad, 0), 0, 4.0)
    short = 1e-12 * grad
    also_turned = precondition_axis(short, axis_covariance(short, 0), 0, 4.0)
    torch.testing.assert_close(1e12 * also_turned, turned)


def test_it_takes_turns_between_two() -> None:
    MinMaxNGD().check_objectives(("forget", "retain"))
    for objectives in (("forget",), ("retain", "forget", "replace")):
        with pytest.raises(ValueError, match="between retain and forget; found"):
            MinMaxNGD().check_objectives(objectives)
    pair_closure = closure(*pair(0.1, 1.0, 1.0))
    pair_closure.gradients["replace"] = pair_closure.gradients["retain"]
    with pytest.raises(ValueError, match="between retain and forget; found"):
        MinMaxNGD().direction(pair_closure)
