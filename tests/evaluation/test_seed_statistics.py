"""Statistics over training seeds: known answers, other libraries, and simulations of coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from concept_eraser import UserError
from concept_eraser.evaluation import seed_statistics as statistics
from concept_eraser.evaluation.statistics import wilson


def seeds_of(rates: list[float], n: int = 48, seed: int = 0) -> list[np.ndarray]:
    """Images of training seeds with these rates, [n] bool each."""
    rng = np.random.default_rng(seed)
    return [rng.random(n) < rate for rate in rates]


def test_the_bootstrap_has_the_variance_of_the_two_stages() -> None:
    """Its variance is known for the mean of equally large samples.

    With means m of S seeds and variances v of their n images, it is var(m) / S + mean(v) / (n S).
    """
    samples = seeds_of([0.1, 0.4, 0.7, 0.5])
    means = np.array([sample.mean() for sample in samples])
    variances = np.array([sample.var() for sample in samples])
    expected = means.var() / 4 + variances.mean() / (48 * 4)
    interval = statistics.cluster_bootstrap(samples, draws=20_000)
    from scipy.stats import t

    error = (interval.high - interval.value) / t.ppf(0.975, 3)
    assert error**2 == pytest.approx(expected, rel=0.03)
    assert interval.value == pytest.approx(means.mean())
    assert interval.value - interval.low == pytest.approx(interval.high - interval.value)
    assert (interval.n, interval.seeds) == (192, 4)


def test_equal_images_within_seeds_leave_the_scatter_of_the_seeds() -> None:
    samples = [np.full(10, value) for value in (0.0, 1.0, 2.0)]
    interval = statistics.cluster_bootstrap(samples, draws=20_000)
    # the variance of the mean of three draws out of 0, 1, 2
    assert interval.high - 1 == pytest.approx(4.302653 * math.sqrt(2 / 3 / 3), rel=0.03)


@pytest.mark.parametrize(("count", "least"), [(3, 0.93), (6, 0.93)])
def test_the_interval_holds_the_true_value(count: int, least: float) -> None:
    """The seeds have normal rates. An interval over pooled images holds it far less often."""
    rng = np.random.default_rng(count)
    hits, pooled_hits, runs = 0, 0, 200
    for _ in range(runs):
        rates = rng.normal(0.4, 0.12, count).clip(0, 1)
        samples = [rng.random(48) < rate for rate in rates]
        interval = statistics.cluster_bootstrap(samples, draws=300)
        hits += interval.low <= 0.4 <= interval.high
        pooled = wilson(int(sum(s.sum() for s in samples)), 48 * count)
        pooled_hits += pooled.low <= 0.4 <= pooled.high
    assert hits / runs >= least
    assert pooled_hits / runs < 0.8


def test_a_difference_of_paired_seeds_is_narrower() -> None:
    before = seeds_of([0.1, 0.5, 0.9])
    after = [sample.copy() for sample in before]
    for sample, count in zip(after, (2, 3, 4), strict=True):
        sample[np.flatnonzero(sample)[:count]] = False
    paired = statistics.difference_of_seeds(after, before, paired=True)
    unpaired = statistics.difference_of_seeds(after, before)
    assert paired.value == pytest.approx(-9 / 144)
    assert unpaired.value == pytest.approx(-9 / 144)
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 4
    assert (paired.n, unpaired.n) == (144, 288)


def test_the_degrees_of_freedom_are_welchs() -> None:
    """With equal images within the seeds only the scatter of the seeds counts, as for Welch."""
    from scipy.stats import ttest_ind

    one, other = [0.1, 0.4, 0.3, 0.2, 0.6], [0.5, 0.9, 0.8, 0.4, 0.9]
    interval = statistics.difference_of_seeds(
        [np.full(4, value) for value in one],
        [np.full(4, value) for value in other],
        draws=40_000,
    )
    welch = ttest_ind(one, other, equal_var=False).confidence_interval()
    # the bootstrap divides by S, Welch by S - 1
    factor = math.sqrt(5 / 4)
    assert interval.value - interval.low == pytest.approx(
        (welch.high - welch.low) / 2 / factor, rel=0.03
    )


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("margin", [0.02, 0.1, 0.4])
def test_equivalence_is_that_of_statsmodels(paired: bool, margin: float) -> None:
    from statsmodels.stats.weightstats import ttost_ind, ttost_paired

    one, other = seeds_of([0.2, 0.25, 0.3, 0.22]), seeds_of([0.24, 0.27, 0.28, 0.3], seed=1)
    result = statistics.equivalence(one, other, margin, paired=paired)
    means = [np.array([sample.mean() for sample in samples]) for samples in (one, other)]
    if paired:
        p = ttost_paired(*means, -margin, margin)[0]
    else:
        p = ttost_ind(*means, -margin, margin, usevar="unequal")[0]
    assert result.p == pytest.approx(p, rel=1e-6)
    assert result.is_equivalent == (p < 0.05)
    inside = -margin < result.difference.low and result.difference.high < margin
    assert inside == result.is_equivalent
    assert result.margin == margin


def test_equal_means_of_few_seeds_are_not_equivalent_without_evidence() -> None:
    """No difference in the data is no evidence of equivalence."""
    wide = seeds_of([0.0, 0.5, 1.0])
    assert not statistics.equivalence(wide, wide, 0.05).is_equivalent
    assert statistics.equivalence(wide, wide, 5.0).is_equivalent
    constant = [np.zeros(48, bool)] * 3
    result = statistics.equivalence(constant, constant, 0.05)
    assert math.isnan(result.p)
    assert not result.is_equivalent
    assert math.isnan(statistics.cluster_bootstrap(constant).low)


def test_equivalence_is_rarely_claimed_at_the_margin() -> None:
    """If the true difference is the margin, the test is positive in at most 5 %."""
    rng = np.random.default_rng(0)
    positive = 0
    for _ in range(400):
        one = [rng.normal(0.1, 0.01, 1) for _ in range(4)]
        other = [rng.normal(0.0, 0.01, 1) for _ in range(4)]
        positive += statistics.equivalence(one, other, 0.1).is_equivalent
    assert 0.01 < positive / 400 < 0.08


def test_holm_has_the_known_answers() -> None:
    """Sorted p-values times the number of those left, never below an earlier one."""
    assert statistics.holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.5, 0.9]).tolist() == pytest.approx([1.0, 1.0])
    assert statistics.holm([]).tolist() == []
    first, second = statistics.holm([0.01, math.nan])
    assert first == pytest.approx(0.02)
    assert math.isnan(second)
    with pytest.raises(UserError, match="from 0 to 1"):
        statistics.holm([1.2, 0.1])
    with pytest.raises(UserError, match=r"found -0\.5 to 0\.1"):
        statistics.holm([-0.5, math.nan, 0.1])


def test_a_table_is_corrected_for_all_its_rows() -> None:
    table = {
        "none": seeds_of([0.8, 0.82, 0.84]),
        "strong": seeds_of([0.02, 0.06, 0.1], seed=1),
        "same": seeds_of([0.8, 0.86, 0.78], seed=2),
        "constant": [np.zeros(48)] * 3,
    }
    rows = statistics.compare(table, "none")
    assert [row.name for row in rows] == ["strong", "same", "constant"]
    strong, same, constant = rows
    assert strong.p < strong.p_family == pytest.approx(3 * strong.p)
    assert strong.difference.high < 0
    assert strong.p_family < 0.05 < same.p
    assert constant.p < 0.05  # the other method's seeds scatter
    assert [row.p for row in statistics.compare(table, "none", paired=True)] != [
        row.p for row in rows
    ]
    with pytest.raises(UserError, match="not among the methods none, strong"):
        statistics.compare(table, "esd")


def test_the_worst_case_is_that_of_any_attack() -> None:
    broken = {
        "a": np.array([1, 0, 0, 1], bool),
        "b": np.array([0, 0, 1, 1], bool),
    }
    assert statistics.worst_case(broken).tolist() == [True, False, True, True]
    assert statistics.worst_case({"a": broken["a"]}).tolist() == broken["a"].tolist()
    with pytest.raises(UserError, match="a: 4, b: 3"):
        statistics.worst_case({"a": broken["a"], "b": broken["b"][:3]})
    with pytest.raises(UserError, match="at least one attack"):
        statistics.worst_case({})


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_seeds_are_refused(count: int) -> None:
    few, three = seeds_of([0.3] * count), seeds_of([0.3] * 3)
    for request in (
        lambda: statistics.cluster_bootstrap(few),
        lambda: statistics.difference_of_seeds(three, few),
        lambda: statistics.difference_of_seeds(few, few, paired=True),
        lambda: statistics.equivalence(few, three, 0.1),
        lambda: statistics.compare({"a": three, "b": few}, "a"),
    ):
        with pytest.raises(UserError, match=f"at least 3 seeds, found {count}"):
            request()


def test_values_that_are_no_samples_are_refused() -> None:
    three = seeds_of([0.3] * 3)
    for wrong in (np.array([]), np.array([1.0, math.nan]), np.ones((2, 2))):
        with pytest.raises(UserError, match="seed number 2"):
            statistics.cluster_bootstrap([*three[:2], wrong])
    with pytest.raises(UserError, match="the same images"):
        statistics.difference_of_seeds(three, [s[:40] for s in three], paired=True)
    for margin in (0.0, -0.1, math.inf, math.nan):
        with pytest.raises(UserError, match="positive margin"):
            statistics.equivalence(three, three, margin)
