"""RACE on losses where the attack is known, and against projected gradient steps written anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from concept_eraser.methods.checks import closure, pair
from concept_eraser.methods.race import Race, attack_in_box
from concept_eraser.recipes import recipe
from concept_eraser.training.closure import LossClosure
from concept_eraser.utils.errors import UserError

FLOAT = torch.float64
CENTRE = torch.tensor([0.03, 4.0, -4.0, -0.02], dtype=FLOAT)


def problem(step: int = 3) -> tuple[torch.Tensor, torch.Tensor, LossClosure]:
    """f = theta^2/2 ||omega - centre||^2; retain = theta sum omega; forget = theta^2 sum omega."""
    t = torch.tensor(2.0, dtype=FLOAT, requires_grad=True)
    w = torch.full((4,), 0.5, dtype=FLOAT, requires_grad=True)
    losses = {
        "retain": [lambda: t * w.sum()],
        "attack": [lambda: 0.5 * t**2 * (w - CENTRE).square().sum()],
        "forget": [lambda: t**2 * w.sum()],
    }
    return t, w, LossClosure((t, w), losses, inner=[1], step=step)


def reference(start: np.ndarray, steps: int, lr: float, box: float) -> np.ndarray:
    """Projected steps of the sign, element by element."""
    values = start.copy()
    for _ in range(steps):
        for i, centre in enumerate(CENTRE.tolist()):
            slope = 4.0 * (values[i] - centre)
            values[i] -= lr if slope > 0 else -lr
            values[i] = min(max(values[i], -box), box)
    return values


@pytest.mark.parametrize("steps", [0, 1, 7, 30])
def test_the_attack_is_that_of_projected_steps_of_the_sign(steps: int) -> None:
    _, omega, losses = problem()
    start = omega.detach() + attack_in_box(losses, 0, 0.03, 0.2)[0]
    assert float(start.abs().max()) <= 0.2
    assert len(set(start.tolist())) == 4, "the start is random"
    found = omega.detach() + attack_in_box(losses, steps, 0.03, 0.2)[0]
    expected = reference(start.numpy(), steps, 0.03, 0.2)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)


def test_it_ends_at_the_corner_or_near_the_minimum() -> None:
    """Where the minimum lies outside of the box, the end is the box's side, else within a step."""
    _, omega, losses = problem()
    end = omega.detach() + attack_in_box(losses, 40, 0.02, 0.1)[0]
    assert end[1:3].tolist() == pytest.approx([0.1, -0.1], abs=1e-12)
    assert (end[[0, 3]] - CENTRE[[0, 3]]).abs().max() <= 0.02


def test_the_start_is_drawn_from_the_step() -> None:
    starts = [attack_in_box(problem(step)[2], 0, 1.0, 0.1)[0] for step in (5, 5, 6)]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_the_starts_fill_the_box() -> None:
    starts = torch.cat([0.5 + attack_in_box(problem(n)[2], 0, 1.0, 0.1)[0] for n in range(200)])
    assert -0.1 <= float(starts.min()) < -0.099
    assert 0.099 < float(starts.max()) <= 0.1
    assert abs(float(starts.mean())) < 0.01  # its standard deviation is 0.002


def test_the_step_is_taken_under_the_attack() -> None:
    """d retain / d theta = sum omega, d forget / d theta = 2 theta sum omega, at omega_T."""
    theta, omega, losses = problem()
    total = float((omega.detach() + attack_in_box(losses, 10, 0.025, 0.1)[0]).sum())
    direction = Race(retain=0.5, forget=3.0).direction(losses)
    assert float(direction.vec[0]) == pytest.approx((0.5 + 3 * 4) * total)
    assert direction.weights is not None
    assert direction.weights.tolist() == [0.5, 3.0]
    # the optimiser subtracts the adversary's part, which moves omega to the end of the attack
    assert float((omega.detach() - direction.vec[1]).sum()) == pytest.approx(total)
    assert float((omega.detach() - direction.vec[1]).abs().max()) <= 0.1 + 1e-12
    assert (theta.item(), omega.tolist()) == (2, [0.5] * 4), "the weights stay where they are"


def test_a_retain_set_is_needed_for_its_weight_and_an_attack_always() -> None:
    assert not Race().needs_retain
    assert Race(retain=0.1).needs_retain
    Race().check_objectives(("forget", "attack"))
    with pytest.raises(ValueError, match=r"needs an attack, the objective 'attack'; found forget"):
        Race().check_objectives(("forget",))
    with pytest.raises(ValueError, match="needs an attack"):
        Race().direction(closure(*pair(0.1, 1.0, 1.0)))


def test_a_box_is_for_an_offset_and_not_for_learned_tokens() -> None:
    race = "method={name: race, retain: 0.3}"
    with pytest.raises(UserError, match=r"leave attack\.tokens out"):
        recipe.load("tiny_star_advunlearn", [race])
    assert recipe.load("tiny_star_advunlearn", [race, "attack.tokens=0"]).attack is not None
