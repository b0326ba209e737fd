"""Noise that makes a one-shot deletion (epsilon, delta)-indistinguishable from training again.

Suppose the parameters after deletion lie within gamma of the retrained ones. Adding N(0, sigma^2 I)
to both before they are published hides the difference. For the natural-gradient step on a
generalised linear model with ridge, gamma is (Lev & Wilson, arXiv 2407.08169, with the factor of 2
and the Fisher made precise):

    F(R):  M m^2 C^2 / (2 mu^3 n^2)           F(S):  the same + m^2 C Q K / (mu^2 n (n - m))

M is the Lipschitz constant of the Hessian, C that of the loss with its ridge, mu the strong
convexity. Q bounds Sigma (1/2 softmax, 1/4 binary, 1 squared error), K bounds ||grad f||^2. There
are n samples, of which at most m will ever be deleted.

Deliberate differences from the paper:
* m is a fixed capacity, never the size of the present request. Else deleting nothing gets no noise,
  and an observer can distinguish the two cases.
* The classical sigma = gamma / epsilon sqrt(2 ln(1.25 / delta)) is valid for epsilon <= 1 only, and
  refused above it. The default is the analytic mechanism (Balle & Wang, arXiv 1805.06530), which is
  valid everywhere and needs less noise.
"""

from __future__ import annotations

import math
from typing import Literal


def sensitivity(
    n: int,
    m: int,
    *,
    convexity: float,
    lipschitz: float,
    hessian_lipschitz: float,
    covariance_bound: float = 0.5,
    jacobian_square_bound: float = 1.0,
    fisher_on: Literal["retain", "all"] = "retain",
) -> float:
    """Return gamma, the largest distance of the corrected step from the retrained parameters."""
    if not 0 < m < n or min(convexity, lipschitz, hessian_lipschitz) <= 0:
        raise ValueError(
            f"expected 0 < m < n and constants > 0, found n={n}, m={m}, "
            f"convexity={convexity}, lipschitz={lipschitz}, "
            f"hessian_lipschitz={hessian_lipschitz}"
        )
    gamma = hessian_lipschitz * m**2 * lipschitz**2 / (2 * convexity**3 * n**2)
    if fisher_on == "all":
        gamma += (
            m**2
            * lipschitz
            * covariance_bound
            * jacobian_square_bound
            / (convexity**2 * n * (n - m))
        )
    return gamma


def delta_of(sigma: float, gamma: float, epsilon: float) -> float:
    """Return the exact delta of the mechanism, Phi(g/2s - e s/g) - exp(e) Phi(-g/2s - e s/g)."""
    from scipy.stats import norm

    half, shift = gamma / (2 * sigma), epsilon * sigma / gamma
    return float(norm.cdf(half - shift) - math.exp(epsilon + float(norm.logcdf(-half - shift))))


def noise_scale(
    gamma: float, epsilon: float, delta: float, how: Literal["analytic", "classical"] = "analytic"
) -> float:
    """Return the standard deviation of the noise of every parameter.

    Raises ValueError outside the mechanism's range.
    """
    if gamma <= 0 or epsilon <= 0 or not 0 < delta < 1:
        raise ValueError(
            f"expected gamma > 0, epsilon > 0 and 0 < delta < 1, found {gamma}, {epsilon}, {delta}"
        )
    if how == "classical":
        if epsilon > 1:
            raise ValueError(
                "the classical Gaussian mechanism holds for epsilon <= 1 only, found "
                f"{epsilon}; use how='analytic'"
            )
        return gamma / epsilon * math.sqrt(2 * math.log(1.25 / delta))
    from scipy.optimize import brentq

    low = high = 1.0  # in units of gamma
    while delta_of(low, 1.0, epsilon) < delta:
        low /= 2
    while delta_of(high, 1.0, epsilon) > delta:
        high *= 2
    multiple = (
        brentq(lambda s: delta_of(s, 1.0, epsilon) - delta, low, high, rtol=1e-12, xtol=1e-14)
        if low < high
        else low
    )
    return float(gamma * multiple) * (1 + 1e-9)  # rounded up, so that the noise suffices


def expected_length(sigma: float, d: int) -> float:
    """Return E||v|| for v ~ N(0, sigma^2 I_d): sigma sqrt(2) Gamma((d + 1)/2) / Gamma(d/2)."""
    return sigma * math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))
