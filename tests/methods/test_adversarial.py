"""Alternating adversarial training on quadratics, where the attack and the step are known in closed
form.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from concept_eraser.methods.adversarial import Adversarial, adam_inner
from concept_eraser.methods.checks import closure, pair
from concept_eraser.methods.forum import at_inner, descend_inner
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


@pytest.mark.parametrize("steps", [0, 1, 30])
def test_the_steps_of_adam_are_torchs(steps: int) -> None:
    """omega moves as torch's Adam moves it on f alone, with its moments at 0 at the start."""
    theta, omega, losses = problem()
    direction = Adversarial(inner_steps=steps, inner_lr=0.1, inner_optimizer="adam").direction(
        losses
    )
    by_hand = torch.tensor(1.0, dtype=FLOAT, requires_grad=True)
    adam = torch.optim.Adam([by_hand], lr=0.1)
    for _ in range(steps):
        adam.zero_grad()
        (0.5 * (by_hand - 3) ** 2).backward()
        adam.step()
    after = float(by_hand.detach())
    assert float(omega.detach() - direction.vec[1]) == pytest.approx(after, abs=1e-12)
    assert float(direction.vec[0]) == pytest.approx(after + 4 * after)
    assert (theta.item(), omega.item()) == (2, 1)
    again = Adversarial(inner_steps=steps, inner_lr=0.1, inner_optimizer="adam").direction(losses)
    assert torch.equal(again.vec[1], direction.vec[1]), "Adam starts anew at each step"


class Copies(TorchDispatchMode):
    """Counts the numbers in the tensors that copies and fillings make."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.zeros_like):
            self.numbers += out.numel()
        return out


def large_problem(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, LossClosure]:
    """A problem with 10,000 weights and an attack of ten numbers."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(10_000, generator=generator).requires_grad_()
    attack = torch.randn(10, generator=generator).requires_grad_()

    def forget() -> torch.Tensor:
        return (weights.view(10, -1).mean(1) * attack).sum().square()

    losses = {
        "retain": [lambda: weights.square().mean()],
        "forget": [forget],
        "attack": [lambda: -forget() + 0.5 * attack.square().sum()],
    }
    return weights, attack, LossClosure((weights, attack), losses, inner=[1])


@pytest.mark.parametrize("descend", [descend_inner, adam_inner])
def test_a_step_of_the_attack_copies_the_attack_alone(descend: Any) -> None:
    """A copy of the weights in each of them is 3.4 GB for the UNet of Stable Diffusion 1.4."""
    weights, attack, losses = large_problem()
    with Copies() as copies:
        descend(losses, [torch.zeros_like(attack)], 5, 0.1)
    assert copies.numbers < weights.numel() / 10
    with Copies() as copies, losses.at((torch.zeros_like(weights), torch.zeros_like(attack))):
        pass
    assert copies.numbers > weights.numel(), "what `at` copies, all parameters, is counted"


def test_moving_the_attack_alone_gives_the_gradients_of_moving_all_bit_for_bit() -> None:
    weights, attack, losses = large_problem()
    before = weights.detach().clone(), attack.detach().clone()
    offset = torch.randn(10, generator=torch.Generator().manual_seed(1))
    with losses.at((torch.zeros_like(weights), offset)):
        expected = losses.grad("attack")
    with at_inner(losses, [offset]):
        found = losses.grad("attack")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(KeyError), at_inner(losses, [offset]):
        raise KeyError
    assert torch.equal(weights, before[0])
    assert torch.equal(attack, before[1])


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
