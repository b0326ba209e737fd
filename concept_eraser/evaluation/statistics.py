"""Intervals for shares, means and paired differences; distances between two sets of features."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from concept_eraser.errors import UserError


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int


def wilson(hits: int, n: int) -> Interval:
    """A share with its Wilson score interval (Wilson 1927), 95 %. Raises UserError for n < 2."""
    if n < 2:
        raise UserError(f"a share of {n} pictures says nothing; at least 2 are needed")
    from scipy.stats import binomtest

    bounds = binomtest(hits, n).proportion_ci(confidence_level=0.95, method="wilson")
    return Interval(hits / n, float(bounds.low), float(bounds.high), n)


def paired_difference(before: np.ndarray, after: np.ndarray) -> Interval:
    """after - before for two boolean arrays over the same prompts and seeds, 95 %.

    Agresti & Min (2005): the Wald interval for matched pairs with 1/2 added to each of the four cells, which keeps
    its coverage where few pairs disagree (93.5-95 % in simulations of 100 to 500 pairs). The value itself is the plain difference.
    """
    if before.shape != after.shape:
        raise UserError(
            f"a paired difference needs the same pictures before and after, found {len(before)} and {len(after)}"
        )
    n = len(before)
    if n < 2:
        raise UserError(f"a difference over {n} pairs says nothing; at least 2 are needed")
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    m, b, c = n + 2, gained + 0.5, lost + 0.5
    centre = (b - c) / m
    half = 1.959964 * math.sqrt(max(0.0, b + c - (b - c) ** 2 / m)) / m
    return Interval((gained - lost) / n, max(-1.0, centre - half), min(1.0, centre + half), n)


def mcnemar(before: np.ndarray, after: np.ndarray) -> float:
    """p of "nothing changed" for two boolean arrays over the same prompts and seeds: the exact test of McNemar (1947),
    two-sided, a sign test of the pairs that disagree; 1 where none does."""
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    if gained + lost == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost).pvalue)


def signed_rank(differences: np.ndarray) -> float:
    """p of "nothing changed" for paired differences of numbers [n]: Wilcoxon's signed-rank test, two-sided, ties as Pratt
    (1959) treats them; 1 where all are zero."""
    if not differences.any():
        return 1.0
    from scipy.stats import wilcoxon

    return float(wilcoxon(differences, zero_method="pratt").pvalue)


def mean_interval(values: np.ndarray, least: float = -math.inf, most: float = math.inf) -> Interval:
    """A mean with Student's 95 % interval, cut at what the values can be. Where all are equal the scatter says nothing: of
    counts that are all zero (least = 0, most = inf) the upper end is Poisson's exact one, -ln(0.025) / n; else there is
    no interval (nan)."""
    n = len(values)
    if n < 2:
        raise UserError(f"a mean of {n} values has no interval; at least 2 are needed")
    from scipy.stats import t

    mean, scatter = float(values.mean()), float(values.std(ddof=1))
    if scatter == 0:
        if least == 0 and mean == 0 and most == math.inf:
            return Interval(0.0, 0.0, -math.log(0.025) / n, n)
        return Interval(mean, math.nan, math.nan, n)
    half = float(t.ppf(0.975, n - 1)) * scatter / math.sqrt(n)
    return Interval(mean, max(least, mean - half), min(most, mean + half), n)


def frechet_distance(mean1: np.ndarray, cov1: np.ndarray, mean2: np.ndarray, cov2: np.ndarray) -> float:
    """Frechet distance of two Gaussians: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), float64.

    The trace of the square root is the sum of the square roots of the eigenvalues of C1^(1/2) C2 C1^(1/2), which
    is symmetric. clean-fid computes the same by scipy.linalg.sqrtm with an argument that SciPy 1.18 removes; a
    test compares the two.
    """
    values, vectors = np.linalg.eigh(cov1.astype(np.float64))
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    product = np.linalg.eigvalsh(root @ cov2.astype(np.float64) @ root)
    cross = np.sqrt(product.clip(min=0)).sum()
    difference = mean1.astype(np.float64) - mean2.astype(np.float64)
    return float(difference @ difference + np.trace(cov1) + np.trace(cov2) - 2 * cross)


def frechet_of_features(a: np.ndarray, b: np.ndarray) -> float:
    """Frechet distance of two sets of features, [n, d] each; each set needs more rows than columns."""
    for features in (a, b):
        if len(features) <= features.shape[1]:
            raise UserError(f"FID needs more pictures than feature dimensions, found {len(features)} pictures and {features.shape[1]} features")  # fmt: skip
    return frechet_distance(a.mean(0), np.cov(a, rowvar=False), b.mean(0), np.cov(b, rowvar=False))


def _polynomial_mmd(x: np.ndarray, y: np.ndarray) -> float:
    """Unbiased estimate of the squared distance of two sets of as many rows, [m, d] each, under the kernel (a.b / d + 1)^3."""
    m, d = x.shape
    xx, yy, xy = ((one @ other.T / d + 1) ** 3 for one, other in ((x, x), (y, y), (x, y)))
    within = xx.sum() - np.trace(xx) + yy.sum() - np.trace(yy)
    return float(within / (m * (m - 1)) - 2 * xy.sum() / m**2)


def kernel_distance(a: np.ndarray, b: np.ndarray, *, seed: int = 0, subsets: int = 100, size: int = 1000) -> Interval:
    """Kernel distance (KID, arXiv 1801.01401) of two sets of features, [n, d] and [m, d], with its 95 % interval.

    The value is clean-fid's: the mean over `subsets` draws without replacement, min(n, m, size) rows of each set. As it
    is unbiased it may fall below zero. The interval is that of subsampling: draws of h <= n/2 rows scatter by
    sqrt((n - h) / h) standard errors of n rows, n being the smaller set; the mean's own error over the draws is added. Of simulated truths 92 % (80 rows of 4 features)
    to 96 % lay inside, and more where the sets are alike or of unlike sizes: there it is wider than it need be. A set
    compared with itself is below zero, as its rows meet themselves across the two sets.
    Raises UserError for fewer than 4 rows or for sets of unlike width.
    """
    n = min(len(a), len(b))
    if n < 4:
        raise UserError(f"KID needs at least 4 pictures in each set, found {len(a)} and {len(b)}")
    if a.shape[1] != b.shape[1]:
        raise UserError(f"the two sets have {a.shape[1]} and {b.shape[1]} features a picture, so they are not compared")
    a, b = a.astype(np.float64), b.astype(np.float64)
    rng = np.random.RandomState(seed)  # its draws are those of clean-fid after np.random.seed(seed)

    def draws(m: int, times: int) -> np.ndarray:
        return np.array([_polynomial_mmd(b[rng.choice(len(b), m, replace=False)], a[rng.choice(len(a), m, replace=False)]) for _ in range(times)])  # fmt: skip

    m, h = min(n, size), min(n // 2, size)
    values = draws(m, 1 if m == len(a) == len(b) else subsets)  # every draw of all rows gives the same value
    scatter = values if h == m else draws(h, subsets)
    variance = scatter.var(ddof=1) * h / (n - h) + (values.var(ddof=1) / subsets if len(values) > 1 else 0.0)
    value, half = float(values.mean()), 1.959964 * math.sqrt(variance)
    return Interval(value, value - half, value + half, n)
