"""Statements of MUNBa's paper (arXiv 2411.15537, version 4) on the bargain: sections 2.2 and 6."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from concept_eraser.methods.munba import exact_weights, printed_weights


def pair(cosine: float, size: int = 6) -> tuple[Tensor, Tensor]:
    """Two gradients of different lengths with this cosine, in a random plane."""
    generator = torch.Generator().manual_seed(0)
    plane = torch.randn(size, 2, generator=generator, dtype=torch.float64)
    first, second = torch.linalg.qr(plane).Q.T
    return 3.0 * first, 0.2 * (cosine * first + math.sqrt(1 - cosine**2) * second)


def gram(retain: Tensor, forget: Tensor) -> Tensor:
    both = torch.stack([retain, forget])
    return both @ both.T


def combine(weights: Tensor, retain: Tensor, forget: Tensor) -> Tensor:
    return weights[0] * retain + weights[1] * forget


def cosine_of(first: Tensor, second: Tensor) -> float:
    return float(first @ second / first.norm() / second.norm())


@pytest.mark.parametrize("cosine", [-0.99, -0.4, -0.05])
def test_lemmas_2_1_and_2_2_the_feasible_set_is_a_cone_that_is_not_empty(cosine: float) -> None:
    """Eqs. 9 to 13: a point of the segment between the unit gradients improves both losses exactly
    from -c / (1 - c) to 1 / (1 - c). So does the bargain, at any length.
    """
    retain, forget = pair(cosine)
    units = torch.stack([retain / retain.norm(), forget / forget.norm()])
    low, high = -cosine / (1 - cosine), 1 / (1 - cosine)
    margin = 0.1 * (high - low)
    for alpha, is_feasible in (
        (low - margin, False),
        (low + margin, True),
        (high - margin, True),
        (high + margin, False),
    ):
        point = alpha * units[0] + (1 - alpha) * units[1]
        assert bool((units @ point > 0).all()) == is_feasible
    weights, _ = exact_weights(gram(retain, forget), 1e-6)
    bargain = combine(weights, retain, forget)
    for length in (1e-3, 1.0, 1e3):
        assert bool((units @ (length * bargain) > 0).all())


@pytest.mark.parametrize("cosine", [-0.95, -0.4, 0.3, 0.9])
def test_theorem_2_3_the_bargain_maximises_the_utilities_on_its_ball(cosine: float) -> None:
    """Eqs. 4, 5 and 14 to 22: f(g) = log <g_r, g> + log <g_f, g> has the gradient g at the bargain,
    and no point of the ball of radius sqrt(2) has a larger f. The printed Eq. 8 has a smaller one.
    """
    retain, forget = pair(cosine)

    def utility(points: Tensor) -> Tensor:
        return (points @ retain).log() + (points @ forget).log()

    weights, _ = exact_weights(gram(retain, forget), 1e-6)
    bargain = combine(weights, retain, forget).requires_grad_()
    value = utility(bargain)
    (slope,) = torch.autograd.grad(value, bargain)
    value = value.detach()
    assert torch.allclose(slope, bargain.detach(), atol=1e-9)
    noise = torch.randn(
        2000, len(bargain), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    distances = torch.logspace(-4, 1, 2000, dtype=torch.float64)[:, None]
    points = bargain.detach() + distances * noise
    others = utility(math.sqrt(2) * points / points.norm(dim=1, keepdim=True))
    others = others[others.isfinite()]  # the others improve one loss at most
    assert len(others) > 300
    assert float(others.max()) <= float(value) + 1e-12
    printed = combine(printed_weights(gram(retain, forget)), retain, forget)
    assert not float(utility(math.sqrt(2) * printed / printed.norm())) > float(value) - 1e-4


def losses(seed: int, size: int = 4) -> tuple[list[Tensor], list[Tensor], float]:
    """Hessians and minima of two convex quadratics, and their smoothness L."""
    generator = torch.Generator().manual_seed(seed)
    hessians, minima = [], []
    for _ in range(2):
        factor = torch.randn(size, size, generator=generator, dtype=torch.float64)
        hessians.append(factor @ factor.T + torch.eye(size, dtype=torch.float64))
        minima.append(torch.randn(size, generator=generator, dtype=torch.float64))
    return hessians, minima, max(float(torch.linalg.eigvalsh(h)[-1]) for h in hessians)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_lemma_2_4_gradients_are_dependent_at_a_pareto_stationary_point(
    seed: int, share: float
) -> None:
    """The minimum of a weighted sum of two convex losses is such a point (Eqs. 23 and 24)."""
    hessians, minima, _ = losses(seed)
    first, second = share * hessians[0], (1 - share) * hessians[1]
    point = torch.linalg.solve(first + second, first @ minima[0] + second @ minima[1])
    gradients = [h @ (point - m) for h, m in zip(hessians, minima, strict=True)]
    assert min(float(g.norm()) for g in gradients) > 0.1
    assert cosine_of(*gradients) == pytest.approx(-1, abs=1e-12)
    aside = [h @ (point + 0.1 - m) for h, m in zip(hessians, minima, strict=True)]
    assert cosine_of(*aside) > -0.999


@pytest.mark.parametrize("seed", range(3))
def test_theorem_2_10_the_losses_fall_to_a_pareto_stationary_point(seed: int) -> None:
    """With the steps of Theorem 2.9 both losses fall at every step, and the gradients end opposed.

    The proof asserts the last limit (after Eq. 43). Here it is measured, for two quadratics.
    """
    hessians, minima, smoothness = losses(seed)
    point = 3 * torch.ones(4, dtype=torch.float64)
    values, cosines = [], []
    for _ in range(400):
        gradients = [h @ (point - m) for h, m in zip(hessians, minima, strict=True)]
        values.append([float((point - m) @ g) / 2 for g, m in zip(gradients, minima, strict=True)])
        cosines.append(cosine_of(*gradients))
        weights, _ = exact_weights(gram(*gradients), 1e-15)
        point = point - combine(weights, *gradients) / (smoothness * float(weights.max()))
    for before, after in itertools.pairwise(values):
        assert after[0] <= before[0] + 1e-12
        assert after[1] <= before[1] + 1e-12
    assert cosines[0] > 0
    assert cosines[-1] < -0.999
