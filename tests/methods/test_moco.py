"""MoCo: its three updates against a loop in numpy, the projection against cvxpy, and the limit of
its weights.
"""

from __future__ import annotations

import cvxpy
import numpy as np
import pytest
import torch

from concept_eraser.methods.checks import closure, flat, pair
from concept_eraser.methods.moco import Moco, project_on_simplex
from concept_eraser.methods.moml import Moml, min_norm_weights
from concept_eraser.training.closure import LossClosure

FLOAT = torch.float64


@pytest.mark.parametrize("seed", range(6))
def test_the_projection_against_cvxpy(seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=4) * (seed + 0.1)
    nearest = cvxpy.Variable(4)
    cvxpy.Problem(
        cvxpy.Minimize(cvxpy.sum_squares(nearest - x)), [nearest >= 0, cvxpy.sum(nearest) == 1]
    ).solve(solver="CLARABEL")
    point = project_on_simplex(torch.from_numpy(x))
    np.testing.assert_allclose(point.numpy(), nearest.value, atol=1e-6)
    torch.testing.assert_close(project_on_simplex(point), point)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("simplex", ["projection", "softmax"])
def test_four_steps_by_hand(simplex, normalize: bool) -> None:
    """y, lam and the step of the authors' code, with gradients that change from step to step."""
    options = {"beta": 0.7, "gamma": 0.3, "beta_decay": 0.5, "gamma_decay": 0.25, "rho": 0.2}
    method = Moco(simplex=simplex, normalize=normalize, **options)
    y, lam, losses = np.zeros((2, 12)), np.full(2, 0.5), (1.5, 1.5)
    for step in range(4):
        gradients = pair(0.3 - 0.2 * step, 1.0 + step, 0.5, seed=step)
        pair_closure = closure(*gradients, method)
        pair_closure.step, pair_closure.last_loss = step, losses[0]
        direction = method.direction(pair_closure)
        h = np.stack([flat(g).numpy() for g in gradients])
        if normalize:
            h = h / (np.linalg.norm(h, axis=1, keepdims=True) + 1e-8) * losses[0]
        y = y - 0.7 / (step + 1) ** 0.5 * (y - h)
        moved = lam - 0.3 / (step + 1) ** 0.25 * (y @ y.T + 0.2 * np.eye(2)) @ lam
        if simplex == "softmax":
            lam = np.exp(moved) / np.exp(moved).sum()
        else:  # two numbers: shift both until they sum to 1, then to the nearer end
            first = min(max((1 + moved[0] - moved[1]) / 2, 0.0), 1.0)
            lam = np.array([first, 1 - first])
        np.testing.assert_allclose(direction.weights.numpy(), lam, atol=1e-12)
        np.testing.assert_allclose(flat(direction.vec).numpy(), lam @ y, atol=1e-12)
        np.testing.assert_allclose(direction.gram.numpy(), y @ y.T, atol=1e-12)


def test_a_loss_below_zero_turns_no_gradient_around() -> None:
    """Ascent has such a loss. Its length scales the gradient like that of a loss above zero."""
    steps = []
    for loss in (1.5, -1.5):
        method = Moco(normalize=True)
        pair_closure = closure(*pair(0.3, 1.0, 0.5), method)
        pair_closure.last_loss = loss
        steps.append(flat(method.direction(pair_closure).vec))
    torch.testing.assert_close(steps[1], steps[0])


def test_its_weights_go_to_the_min_norm_point() -> None:
    """With fixed gradients y is h after many steps, and lam minimises ||Y lam||^2."""
    retain, forget = pair(0.2, 1.0, 0.6)
    method = Moco(beta=1.0, beta_decay=0.0, gamma=0.2, gamma_decay=0.0)
    for step in range(400):
        pair_closure = closure(retain, forget, method)
        pair_closure.step = step
        direction = method.direction(pair_closure)
    expected = min_norm_weights(direction.gram)
    torch.testing.assert_close(direction.weights, expected, atol=1e-6, rtol=0)
    assert 0.1 < float(expected[0]) < 0.4


def test_the_gradients_are_those_of_moml() -> None:
    """The first step with beta = 1 tracks the hypergradients; the attack moves to w_T."""
    generator = torch.Generator().manual_seed(3)
    alpha, omega = (torch.randn(3, generator=generator, dtype=FLOAT) for _ in range(2))
    alpha.requires_grad_()
    omega.requires_grad_()
    losses = {
        "retain": [lambda: omega.exp().sum() + alpha.square().sum()],
        "forget": [lambda: (omega * alpha).sum().square()],
        "attack": [lambda: 0.5 * (omega - torch.tanh(alpha)).square().sum()],
    }
    problem = LossClosure((alpha, omega), losses, inner=[1])
    options = {"inner_steps": 4, "inner_lr": 0.3, "hvp": "exact"}
    moml, moco = Moml(**options).direction(problem), Moco(beta=1.0, **options).direction(problem)
    torch.testing.assert_close(moco.gram, moml.gram)
    torch.testing.assert_close(moco.vec[1], moml.vec[1])
    rough = Moco(beta=1.0, **{**options, "hvp": "difference"}).direction(problem)
    torch.testing.assert_close(rough.gram, moml.gram, rtol=1e-3, atol=1e-3)


def test_its_state_is_a_checkpoint() -> None:
    method = Moco()
    gradients = pair(0.2, 1.0, 2.0)
    method.direction(closure(*gradients, method))
    state = method.state_dict()
    assert set(state) == {"lam", *(f"y_{n}_{i}" for n in ("retain", "forget") for i in range(3))}
    copy = Moco()
    copy.load_state_dict(state)
    step = closure(*gradients, method)
    step.step = 1
    torch.testing.assert_close(
        flat(copy.direction(step).vec), flat(method.direction(step).vec), rtol=0, atol=0
    )


def test_a_lower_level_that_diverges_is_a_skipped_step() -> None:
    w = torch.ones((), dtype=FLOAT, requires_grad=True)
    losses = {name: [lambda: w**2] for name in ("retain", "forget", "attack")}
    method = Moco(inner_steps=2000, inner_lr=1e6)
    direction = method.direction(LossClosure((w,), losses, inner=[0]))
    assert direction.notes == {"inner_diverged": 1}
    assert not method.state_dict(), "a skipped step leaves the tracked gradients as they are"


def test_without_an_attack_and_bad_options_are_errors() -> None:
    with pytest.raises(ValueError, match=r"needs a lower-level problem.*found retain, forget"):
        Moco().direction(closure(*pair(0.1, 1.0, 1.0)))
    with pytest.raises(ValueError, match="simplex must be"):
        Moco(simplex="clamp")
