"""Statistics whose unit is the training seed.

Images of one training seed are not independent: an unlucky training changes all of them. So an
interval and a test take the training seeds as their sample, and the images as a sample within each
seed. At least three seeds are needed.

The values of one training seed are an array [images] of bool or float, such as the column `broken`
of the outcomes (`concept_eraser/evaluation/outcomes.py`). The estimate is the mean of the means of
the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from concept_eraser.evaluation.statistics import Interval
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.extras import import_from_extra

LEAST_SEEDS = 3
DRAWS = 4000
LEVEL = 0.05  # of the tests
TINY = 1e-12  # a difference of means that is rounding

Samples = Sequence[np.ndarray]


@dataclass(frozen=True)
class SeedInterval(Interval):
    """A mean over training seeds with its interval. `n` is the number of images of all seeds."""

    seeds: int


@dataclass(frozen=True)
class Equivalence:
    """The result of an equivalence test.

    Attributes:
        difference: the mean difference with its 90 % interval over seeds, Student's. The test is
            positive exactly if this interval lies within the margin.
        margin: the largest difference that counts as none, in the units of the values.
        p: the larger p-value of the two one-sided tests; nan where the seeds do not scatter.
    """

    difference: SeedInterval
    margin: float
    p: float

    @property
    def is_equivalent(self) -> bool:
        """Whether the test shows equivalence at the level 5 %. False where p is nan."""
        return self.p < LEVEL


@dataclass(frozen=True)
class Comparison:
    """One row of a table of comparisons.

    Attributes:
        name: what is compared with the reference.
        difference: its mean minus that of the reference, with the interval of the cluster
            bootstrap.
        p: the p-value of Welch's t test over seeds (paired: Student's); nan where the seeds do not
            scatter.
        p_family: the p-value with Holm's correction for all rows of the table.
    """

    name: str
    difference: SeedInterval
    p: float
    p_family: float


def cluster_bootstrap(
    samples: Samples, *, confidence: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> SeedInterval:
    """A mean over training seeds with its interval, by a cluster bootstrap.

    Each draw takes seeds with replacement, and then images with replacement within each seed. The
    interval is the mean +- t s. s is the standard deviation of the draws, and t Student's quantile
    for (seeds - 1) degrees of freedom. The percentiles of the draws are too narrow for few seeds.

    In 400 simulations of 48 images a seed, this interval held the true value in 90 to 100 % (3
    seeds), 92 to 100 % (5) and 90 to 100 % (10). The percentiles held it in 78 to 98 % (3 seeds).
    The lowest numbers are of rates whose distribution over seeds is skewed, the highest of equal
    rates.

    Those seeds had images of their own. Where all seeds have the same prompts, the interval is for
    these prompts and does not cover their choice. In 200 simulations of 48 common prompts, with
    probabilities of success drawn from Beta(0.3, 0.3), it held the mean over all prompts in 100 %
    (3 seeds), 87 % (5) and 68 % (10).

    Where no draw differs from another, the interval is nan.

    Args:
        samples: the values of each training seed, [images] each.
        confidence: the share of intervals that are to hold the true value.
        draws: the number of draws.
        seed: the seed of the draws.

    Raises:
        UserError: there are fewer than three seeds, or a seed has no value or one that is not
            finite.
    """
    groups = _groups(samples)
    drawn = _drawn_means(groups, draws, np.random.default_rng(seed))
    return _interval(
        groups,
        value=_mean(groups),
        variance=float(drawn.var(ddof=1)),
        freedom=len(groups) - 1,
        confidence=confidence,
    )


def difference_of_seeds(
    after: Samples,
    before: Samples,
    *,
    paired: bool = False,
    confidence: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> SeedInterval:
    """The mean of `after` minus the mean of `before`, with its interval by a cluster bootstrap.

    The degrees of freedom are Welch and Satterthwaite's.

    Args:
        after: the values of each training seed, [images] each.
        before: those of the other method.
        paired: the i-th seeds of both belong together, and their images are of the same prompts and
            seeds. The differences are drawn then.
        confidence: the share of intervals that are to hold the true value.
        draws: the number of draws.
        seed: the seed of the draws.

    Raises:
        UserError: as `cluster_bootstrap`, and if paired values have different shapes.
    """
    if paired:
        return cluster_bootstrap(
            _paired(after, before), confidence=confidence, draws=draws, seed=seed
        )
    rng = np.random.default_rng(seed)
    parts = [_groups(after), _groups(before)]
    variances = [float(_drawn_means(groups, draws, rng).var(ddof=1)) for groups in parts]
    total = sum(variances)
    squares = sum(
        variance**2 / (len(groups) - 1) for variance, groups in zip(variances, parts, strict=True)
    )
    freedom = total**2 / squares if total else math.nan
    value = _mean(parts[0]) - _mean(parts[1])
    return _interval(
        [*parts[0], *parts[1]],
        value=value,
        variance=total,
        freedom=freedom,
        confidence=confidence,
    )


def equivalence(
    after: Samples, before: Samples, margin: float, *, paired: bool = False
) -> Equivalence:
    """Test whether two methods are equivalent, by two one-sided t tests over seeds.

    One test is of a difference above -margin, one of a difference below margin. Both must be
    positive. The numbers are those of `ttost_ind` (usevar="unequal") and `ttost_paired` of
    statsmodels on the means of the seeds; the tests themselves are scipy's.

    Args:
        after: the values of each training seed, [images] each.
        before: those of the other method.
        margin: the largest difference that counts as none. State it beside the result.
        paired: as in `difference_of_seeds`.

    Raises:
        UserError: as `difference_of_seeds`, or the margin is not positive.
    """
    if not (margin > 0 and math.isfinite(margin)):
        raise UserError(
            f"an equivalence test needs a positive margin, found {margin}; give the largest "
            "difference that counts as none, e.g. 0.05"
        )
    difference = difference_of_seeds(after, before, paired=paired, draws=2)
    lower = _t_test(after, before, paired=paired, shift=-margin, side="greater")
    upper = _t_test(after, before, paired=paired, shift=margin, side="less")
    if lower is None or upper is None:
        low, high, p = math.nan, math.nan, math.nan
    else:
        # the one-sided intervals are those of the difference minus its shift
        low = float(lower.confidence_interval(1 - LEVEL).low) - margin
        high = float(upper.confidence_interval(1 - LEVEL).high) + margin
        p = max(float(lower.pvalue), float(upper.pvalue))
    return Equivalence(replace(difference, low=low, high=high), margin, p)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Correct p-values for their number, by Holm's method (1979), with statsmodels.

    The probability of any false rejection among them is at most the level. A p-value of nan stays
    nan, and counts as one of the comparisons.

    Raises:
        UserError: a p-value is not in [0, 1], or statsmodels is missing.
    """
    values = np.asarray(p_values, float)
    if len(values) == 0:
        return values
    missing = np.isnan(values)
    if ((values < 0) | (values > 1))[~missing].any():
        least, most = np.nanmin(values), np.nanmax(values)
        raise UserError(f"p-values must be from 0 to 1, found {least} to {most}")
    with import_from_extra("statistics", "Holm's correction"):
        from statsmodels.stats.multitest import multipletests
    corrected = np.asarray(multipletests(np.where(missing, 1.0, values), method="holm")[1])
    return np.where(missing, np.nan, corrected)


def compare(
    samples: Mapping[str, Samples], reference: str, *, paired: bool = False, seed: int = 0
) -> list[Comparison]:
    """Compare all methods with one of them, with Holm's correction for the whole table.

    Args:
        samples: for each method the values of each training seed, [images] each.
        reference: the method that the others are compared with.
        paired: as in `difference_of_seeds`.
        seed: the seed of the bootstrap.

    Raises:
        UserError: as `difference_of_seeds` and `holm`, or the reference is not among the methods.
    """
    if reference not in samples:
        raise UserError(
            f"the reference {reference!r} is not among the methods {', '.join(samples)}"
        )
    names = [name for name in samples if name != reference]
    pairs = [(samples[name], samples[reference]) for name in names]
    differences = [difference_of_seeds(*pair, paired=paired, seed=seed) for pair in pairs]
    tests = [_t_test(*pair, paired=paired) for pair in pairs]
    p_values = [math.nan if test is None else float(test.pvalue) for test in tests]
    return [
        Comparison(name, difference, p, float(p_family))
        for name, difference, p, p_family in zip(
            names, differences, p_values, holm(p_values), strict=True
        )
    ]


def worst_case(broken: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return for each prompt whether at least one attack breaks it, [prompts] bool.

    Args:
        broken: for each attack whether it breaks each prompt, [prompts] bool, in the same order of
            prompts. Leave out controls: they are no attacks.

    Raises:
        UserError: there is no attack, or the attacks have different numbers of prompts.
    """
    counts = {name: len(prompts) for name, prompts in broken.items()}
    if not counts:
        raise UserError("the worst case needs at least one attack")
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise UserError(f"the worst case needs the same prompts of every attack, found {sizes}")
    result: np.ndarray = np.any([np.asarray(prompts, bool) for prompts in broken.values()], 0)
    return result


def _groups(samples: Samples) -> list[np.ndarray]:
    """Return the samples as floats.

    Raises UserError for too few seeds, no values, or values that are not finite.
    """
    if len(samples) < LEAST_SEEDS:
        raise UserError(
            f"an interval over training seeds needs at least {LEAST_SEEDS} seeds, found "
            f"{len(samples)}; train with more seeds, or report one seed with its interval over "
            "images and say so"
        )
    groups = [np.asarray(sample, float) for sample in samples]
    for number, group in enumerate(groups):
        if group.ndim != 1 or len(group) == 0 or not np.isfinite(group).all():
            raise UserError(
                f"the values of a training seed are a list of finite numbers, found shape "
                f"{group.shape} for seed number {number}"
            )
    return groups


def _paired(after: Samples, before: Samples) -> list[np.ndarray]:
    shapes = [[np.shape(sample) for sample in samples] for samples in (after, before)]
    if shapes[0] != shapes[1]:
        raise UserError(
            "paired training seeds need the same images, found "
            f"{[shape[0] for shape in shapes[0]]} and {[shape[0] for shape in shapes[1]]}"
        )
    return [one - other for one, other in zip(_groups(after), _groups(before), strict=True)]


def _seed_means(groups: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([group.mean() for group in groups])


def _t_test(
    after: Samples, before: Samples, *, paired: bool, shift: float = 0.0, side: str = "two-sided"
) -> Any:
    """Test over seeds whether the difference minus `shift` is zero.

    Returns None where the seeds do not scatter.
    """
    from scipy.stats import ttest_1samp, ttest_ind

    if paired:
        differences = _seed_means(_paired(after, before))
        if np.ptp(differences) < TINY:
            return None
        return ttest_1samp(differences - shift, 0.0, alternative=side)
    means = [_seed_means(_groups(samples)) for samples in (after, before)]
    if max(np.ptp(some) for some in means) < TINY:
        return None
    return ttest_ind(means[0] - shift, means[1], equal_var=False, alternative=side)


def _mean(groups: Sequence[np.ndarray]) -> float:
    return float(_seed_means(groups).mean())


def _drawn_means(groups: Sequence[np.ndarray], draws: int, rng: np.random.Generator) -> np.ndarray:
    """Return the mean of each draw of seeds and of images within them, [draws]."""
    chosen = rng.integers(len(groups), size=(draws, len(groups)))
    means = np.empty(chosen.shape)
    for number, group in enumerate(groups):
        places = chosen == number
        rows = rng.integers(len(group), size=(int(places.sum()), len(group)))
        means[places] = group[rows].mean(1)
    drawn: np.ndarray = means.mean(1)
    return drawn


def _interval(
    groups: Sequence[np.ndarray],
    *,
    value: float,
    variance: float,
    freedom: float,
    confidence: float,
) -> SeedInterval:
    from scipy.stats import t

    half = math.nan
    if variance >= TINY**2:
        half = float(t.ppf((1 + confidence) / 2, freedom)) * math.sqrt(variance)
    return SeedInterval(
        value, value - half, high=value + half, n=sum(map(len, groups)), seeds=len(groups)
    )
