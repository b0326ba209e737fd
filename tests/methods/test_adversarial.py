"""Alternating adversarial training on quadratics, where the attack and the step are known in closed
form.
"""

from __future__ import annotations

import pytest
import torch

from concept_eraser.methods.adversarial import Adversarial
from concept_eraser.methods.checks import closure, pair
from concept_eraser.training.closure import LossClosure

FLOAT = torch.float64


def problem(
    theta: float = 2.0, omega: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, LossClosure]:
    """f = 1/2 (omega - 3)^2; retain = theta omega + omega^2, forget = theta^2 omega."""
    t = torch.tensor(theta, dtype=FLOAT, requires_grad=True)
    w = torch.tensor(omega, dtype=FLOAT, requires_grad=True)
    losses = {
        "retain": [lambda: t * w + w**2],
        "attack": [lambda: 0.5 * (w - 3) ** 2],
        "forget": [lambda: t**2 * w],
    }
    return t, w, LossClosure((t, w), losses, inner=[1])


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_the_attack_is_moved_first_and_the_step_is_taken_under_it(steps: int) -> None:
    """omega_T = 3 - (3 - 1) 0.8^T; d retain / d theta = omega, d forget / d theta = 2 theta
    omega.
    """
    theta, omega, losses = problem()
    direction = Adversarial(inner_steps=steps, inner_lr=0.2, retain=0.5, forget=3.0).direction(
        losses
    )
    omega_after = 3 - 2 * 0.8**steps
    assert float(direction.vec[0]) == pytest.approx(0.5 * omega_after + 3 * 4 * omega_after)
    # the optimiser subtracts
    assert float(omega.detach() - direction.vec[1]) == pytest.approx(omega_after)
    assert direction.notes == pytest.approx({"attack_moved": omega_after - 1})
    assert direction.weights.tolist() == [0.5, 3.0]
    # the attack's own part is no part of the objectives' gradients
    expected = torch.tensor([[1.0, 4.0], [4.0, 16.0]], dtype=FLOAT) * omega_after**2
    torch.testing.assert_close(direction.gram, expected)
    assert (theta.item(), omega.item()) == (2, 1), "the weights stay where they are"


def test_a_third_objective_counts_like_forget() -> None:
    gradients = closure(*pair(0.2, 1.0, 1.0)).gradients
    pair_closure = closure(*pair(0.2, 1.0, 1.0))
    pair_closure.gradients = {
        **gradients,
        "replace": gradients["retain"],
        "attack": gradients["forget"],
    }
    direction = Adversarial(retain=0.25, forget=2.0).direction(pair_closure)
    assert direction.weights.tolist() == [0.25, 2.0, 2.0]
    assert direction.notes == {"attack_moved": 0.0}


def test_without_an_attack_it_is_refused() -> None:
    Adversarial().check_objectives(("retain", "forget", "attack"))
    with pytest.raises(
        ValueError, match=r"needs an attack, the objective 'attack'; found retain, forget"
    ):
        Adversarial().check_objectives(("retain", "forget"))
    with pytest.raises(ValueError, match="needs an attack"):
        Adversarial().direction(closure(*pair(0.1, 1.0, 1.0)))
