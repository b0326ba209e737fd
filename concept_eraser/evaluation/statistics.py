"""Intervals for shares, means and paired differences; distances between two sets of features."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from concept_eraser.utils.errors import UserError


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int


def interval_text(interval: Interval | None, percent: bool) -> str:
    """A value with its interval, in percent or as a number; "-" for None."""
    if interval is None:
        return "-"
    scale, form = (100, ".1f") if percent else (1, ".3f")
    text = f"{interval.value * scale:{form}}"
    if not math.isnan(interval.low):
        text += f" [{interval.low * scale:{form}}, {interval.high * scale:{form}}]"
    return text


def wilson(hits: int, n: int) -> Interval:
    """A share with its Wilson score interval (Wilson 1927), 95 %. Raises UserError for n < 2."""
    if n < 2:
        raise UserError(f"a share of {n} images has no interval; at least 2 are needed")
    from scipy.stats import binomtest

    bounds = binomtest(hits, n).proportion_ci(confidence_level=0.95, method="wilson")
    return Interval(hits / n, float(bounds.low), float(bounds.high), n)


def paired_difference(before: np.ndarray, after: np.ndarray) -> Interval:
    """after - before for two boolean arrays over the same prompts and seeds, 95 %.

    Agresti & Min (2005): the Wald interval for matched pairs with 1/2 added to each of the four
    cells. It keeps its coverage where few pairs disagree (93.5-95 % in simulations of 100 to 500
    pairs). The value itself is the plain difference.
    """
    if before.shape != after.shape:
        raise UserError(
            "a paired difference needs the same images before and after, found "
            f"{len(before)} and {len(after)}"
        )
    n = len(before)
    if n < 2:
        raise UserError(f"a difference over {n} pairs has no interval; at least 2 are needed")
    gains, losses = int((after & ~before).sum()), int((before & ~after).sum())
    m, b, c = n + 2, gains + 0.5, losses + 0.5
    centre = (b - c) / m
    half = 1.959964 * math.sqrt(b + c - (b - c) ** 2 / m) / m  # the root's argument is at least 1
    return Interval((gains - losses) / n, max(-1.0, centre - half), min(1.0, centre + half), n)


def mcnemar(before: np.ndarray, after: np.ndarray) -> float:
    """p-value of "no change" for two boolean arrays over the same prompts and seeds.

    The test is McNemar's exact test (1947), two-sided: a sign test of the pairs that disagree. The
    p-value is 1 where no pair disagrees.
    """
    gains, losses = int((after & ~before).sum()), int((before & ~after).sum())
    if gains + losses == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(gains, gains + losses).pvalue)


def signed_rank(differences: np.ndarray) -> float:
    """p-value of "no change" for paired differences of numbers [n].

    The test is Wilcoxon's signed-rank test, two-sided. Differences of zero are ranked as in Pratt
    (1959). The p-value is 1 where all differences are zero.
    """
    if not differences.any():
        return 1.0
    from scipy.stats import wilcoxon

    return float(wilcoxon(differences, zero_method="pratt").pvalue)


def mean_interval(values: np.ndarray, least: float = -math.inf, most: float = math.inf) -> Interval:
    """A mean with Student's 95 % interval, limited to the possible values.

    Where all values are equal, the standard deviation gives no interval. For counts that are all
    zero (least = 0, most = inf) the upper end is Poisson's exact one, -ln(0.025) / n. Otherwise the
    interval is nan.
    """
    n = len(values)
    if n < 2:
        raise UserError(f"a mean of {n} values has no interval; at least 2 are needed")
    from scipy.stats import t

    mean, scatter = float(values.mean()), float(values.std(ddof=1))
    if values.min() == values.max():  # their standard deviation may be rounding
        if least == 0 and mean == 0 and most == math.inf:
            return Interval(0.0, 0.0, -math.log(0.025) / n, n)
        return Interval(mean, math.nan, math.nan, n)
    half = float(t.ppf(0.975, n - 1)) * scatter / math.sqrt(n)
    return Interval(mean, max(least, mean - half), min(most, mean + half), n)


def frechet_distance(
    mean1: np.ndarray, cov1: np.ndarray, mean2: np.ndarray, cov2: np.ndarray
) -> float:
    """Frechet distance of two Gaussians: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), float64.

    The trace of the square root is the sum of the square roots of the eigenvalues of C1^(1/2) C2
    C1^(1/2), which is symmetric. clean-fid computes the same by scipy.linalg.sqrtm with an argument
    that SciPy 1.18 removes; a test compares the two.
    """
    values, vectors = np.linalg.eigh(cov1.astype(np.float64))
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    product = np.linalg.eigvalsh(root @ cov2.astype(np.float64) @ root)
    cross = np.sqrt(product.clip(min=0)).sum()
    difference = mean1.astype(np.float64) - mean2.astype(np.float64)
    return float(difference @ difference + np.trace(cov1) + np.trace(cov2) - 2 * cross)


def frechet_of_features(a: np.ndarray, b: np.ndarray) -> float:
    """Frechet distance of two sets of features, [n, d] each, with more rows than columns."""
    for features in (a, b):
        if len(features) <= features.shape[1]:
            raise UserError(
                f"FID needs more images than feature dimensions, found {len(features)} "
                f"images and {features.shape[1]} features"
            )
    return frechet_distance(a.mean(0), np.cov(a, rowvar=False), b.mean(0), np.cov(b, rowvar=False))


def _polynomial_mmd(x: np.ndarray, y: np.ndarray) -> float:
    """Unbiased estimate of the squared distance of two sets of equal size, [m, d] each.

    The kernel is (a.b / d + 1)^3.
    """
    m, d = x.shape
    xx, yy, xy = ((one @ other.T / d + 1) ** 3 for one, other in ((x, x), (y, y), (x, y)))
    within = xx.sum() - np.trace(xx) + yy.sum() - np.trace(yy)
    return float(within / (m * (m - 1)) - 2 * xy.sum() / m**2)


def kernel_distance(
    a: np.ndarray, b: np.ndarray, *, seed: int = 0, subsets: int = 100, size: int = 1000
) -> Interval:
    """Kernel distance (KID, arXiv 1801.01401) of two sets of features, with its 95 % interval.

    The value is clean-fid's: the mean over `subsets` draws of min(n, m, size) rows of each set,
    without replacement. It is unbiased, so it may be negative.

    The interval is that of subsampling. Draws of h <= n/2 rows have a standard deviation of sqrt((n
    - h) / h) standard errors of n rows, where n is the size of the smaller set. The mean's own
    error over the draws is added. In simulations, 92 % (80 rows of 4 features) to 96 % of the
    intervals hold the true value. The share is larger, and the interval too wide, where the sets
    are alike or of unequal size. A set compared with itself has a negative distance, because each
    row also meets itself.

    Args:
        a: [n, d].
        b: [m, d].

    Raises:
        UserError: a set has fewer than 4 rows, or the widths differ.
    """
    n = min(len(a), len(b))
    if n < 4:
        raise UserError(f"KID needs at least 4 images in each set, found {len(a)} and {len(b)}")
    if a.shape[1] != b.shape[1]:
        raise UserError(
            f"the two sets have {a.shape[1]} and {b.shape[1]} features per image, so "
            "they are not compared"
        )
    a, b = a.astype(np.float64), b.astype(np.float64)
    rng = np.random.RandomState(seed)  # its draws are those of clean-fid after np.random.seed(seed)

    def draws(m: int, times: int) -> np.ndarray:
        return np.array(
            [
                _polynomial_mmd(
                    b[rng.choice(len(b), m, replace=False)], a[rng.choice(len(a), m, replace=False)]
                )
                for _ in range(times)
            ]
        )

    m, h = min(n, size), min(n // 2, size)
    # every draw of all rows gives the same value
    values = draws(m, 1 if m == len(a) == len(b) else subsets)
    scatter = values if h == m else draws(h, subsets)
    variance = scatter.var(ddof=1) * h / (n - h) + (
        values.var(ddof=1) / subsets if len(values) > 1 else 0.0
    )
    value, half = float(values.mean()), 1.959964 * math.sqrt(variance)
    return Interval(value, value - half, value + half, n)
