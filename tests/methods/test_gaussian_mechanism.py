"""The Gaussian mechanism: exact delta, its range, and what the certified noise costs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from concept_eraser.methods.gaussian_mechanism import (
    delta_of,
    expected_length,
    noise_scale,
    sensitivity,
)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("delta", [1e-6, 1e-5, 1e-2])
def test_n8_the_analytic_scale_meets_delta_exactly(epsilon: float, delta: float) -> None:
    sigma = noise_scale(2.0, epsilon, delta)
    assert delta_of(sigma, 2.0, epsilon) == pytest.approx(delta, rel=1e-6)
    assert delta_of(1.01 * sigma, 2.0, epsilon) < delta < delta_of(0.99 * sigma, 2.0, epsilon)


def test_delta_by_monte_carlo() -> None:
    """P(x in A) - e^eps P'(x in A) for the worst set A, the half-line where the likelihood ratio
    exceeds e^eps.
    """
    gamma, sigma, epsilon = 1.0, 1.3, 0.6
    rng = np.random.default_rng(0)
    x = rng.normal(size=2_000_000) * sigma
    edge = sigma**2 * epsilon / gamma + gamma / 2
    delta = float((x + gamma > edge).mean() - math.exp(epsilon) * (x > edge).mean())
    assert delta == pytest.approx(delta_of(sigma, gamma, epsilon), abs=2e-3)


def test_n8_the_classical_scale_is_safe_up_to_one_and_wrong_at_twelve() -> None:
    for epsilon in (0.1, 0.5, 1.0):
        classical = noise_scale(1.0, epsilon, 1e-5, how="classical")
        assert delta_of(classical, 1.0, epsilon) < 1e-5
        assert 0.6 < noise_scale(1.0, epsilon, 1e-5) / classical < 0.8
    with pytest.raises(ValueError, match="epsilon <= 1"):
        noise_scale(1.0, 12.0, 1e-5, how="classical")
    printed_sigma = math.sqrt(2 * math.log(1.25e5)) / 12
    assert delta_of(printed_sigma, 1.0, 12.0) == pytest.approx(5.9e-5, rel=0.02)


def test_expected_length_of_the_noise() -> None:
    """Monte Carlo: 9.15 for d = 50 and sigma = 1.3; the paper's formula lacks sqrt(2) and gives
    6.47.
    """
    sample = 1.3 * np.random.default_rng(0).normal(size=(20000, 50))
    assert expected_length(1.3, 50) == pytest.approx(
        float(np.linalg.norm(sample, axis=1).mean()), rel=0.005
    )
    assert expected_length(1.3, 50) == pytest.approx(9.15, abs=0.01)


def test_the_printed_sensitivity_dominates_ours() -> None:
    constants = {
        "convexity": 0.02,
        "lipschitz": 6.0,
        "hessian_lipschitz": 3.0,
        "covariance_bound": 0.5,
        "jacobian_square_bound": 20.0,
    }
    n = 720
    for m in (1, 16, 360):
        printed_sensitivity = 3.0 * m**2 * 36 / (0.02**3 * n**2) + 2 * m**2 * 6 * 0.5 * 20 / (
            0.02**2 * n**2
        )
        assert (
            sensitivity(n, m, **constants)
            <= sensitivity(n, m, fisher_on="all", **constants)
            <= printed_sensitivity * (1 + 1e-9)
        )


@pytest.mark.parametrize(
    "bad", [(0.0, 1.0, 0.1), (1.0, 0.0, 0.1), (1.0, 1.0, 0.0), (1.0, 1.0, 1.0)]
)
def test_values_out_of_range_are_refused(bad: tuple) -> None:
    with pytest.raises(ValueError, match="expected gamma"):
        noise_scale(*bad)


def test_a_capacity_is_needed() -> None:
    with pytest.raises(ValueError, match="0 < m < n"):
        sensitivity(100, 0, convexity=1, lipschitz=1, hessian_lipschitz=1)


def test_the_sensitivity_by_hand() -> None:
    """n = 10, m = 3: M m^2 C^2 / (2 mu^3 n^2) = 4 x 9 x 9 / (2 / 8 x 100) = 12.96, and of F(S)
    beside m^2 C Q K / (mu^2 n (n - m)) = 27 Q K / 17.5."""
    constants = {"convexity": 0.5, "lipschitz": 3.0, "hessian_lipschitz": 4.0}
    assert sensitivity(10, 3, **constants) == pytest.approx(12.96)
    more = sensitivity(
        10, 3, **constants, covariance_bound=0.25, jacobian_square_bound=7.0, fisher_on="all"
    )
    assert more == pytest.approx(12.96 + 2.7)
    softmax = sensitivity(10, 3, **constants, fisher_on="all")  # Q = 1/2, K = 1
    assert softmax == pytest.approx(12.96 + 13.5 / 17.5)


@pytest.mark.parametrize("name", ["convexity", "lipschitz", "hessian_lipschitz"])
@pytest.mark.parametrize("value", [0.0, -0.5])
def test_every_constant_must_be_positive(name: str, value: float) -> None:
    constants = {"convexity": 0.5, "lipschitz": 3.0, "hessian_lipschitz": 4.0}
    assert sensitivity(100, 99, **constants) > 0
    for n, m in ((100, 100), (100, 101), (100, -1)):
        with pytest.raises(ValueError, match="0 < m < n"):
            sensitivity(n, m, **constants)
    with pytest.raises(ValueError, match="constants > 0"):
        sensitivity(100, 1, **{**constants, name: value})


def test_the_classical_scale_by_hand() -> None:
    """2 / 0.5 sqrt(2 ln 125000) = 4 x 4.84480; its proof ends at epsilon = 1."""
    assert noise_scale(2.0, 0.5, 1e-5, how="classical") == pytest.approx(19.37922, rel=1e-6)
    with pytest.raises(ValueError, match="epsilon <= 1"):
        noise_scale(2.0, 1.5, 1e-5, how="classical")


@pytest.mark.parametrize("epsilon", [0.05, 0.7, 3.0, 20.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-3, 0.3, 0.9])
def test_the_analytic_scale_is_rounded_to_the_safe_side(epsilon: float, delta: float) -> None:
    assert delta * (1 - 1e-6) < delta_of(noise_scale(3.0, epsilon, delta), 3.0, epsilon) <= delta
