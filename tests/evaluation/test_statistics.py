"""Intervals against independent formulas and simulations, and the Frechet distance against
clean-fid.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest

from concept_eraser import UserError
from concept_eraser.evaluation import statistics


@pytest.mark.parametrize(("hits", "n"), [(0, 50), (1, 50), (25, 50), (50, 50), (493, 500)])
def test_wilson_against_its_closed_form(hits: int, n: int) -> None:
    z, p = 1.959963984540054, hits / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    interval = statistics.wilson(hits, n)
    assert (interval.value, interval.n) == (p, n)
    assert interval.low == pytest.approx(max(0, centre - half), abs=1e-9)
    assert interval.high == pytest.approx(min(1, centre + half), abs=1e-9)


def test_paired_difference_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        before = rng.random(100) < 0.9
        # truth: 0.1 * (0.5 - 0.9)
        after = np.where(rng.random(100) < 0.1, rng.random(100) < 0.5, before)
        interval = statistics.paired_difference(before, after)
        hits += interval.low <= -0.04 <= interval.high
    assert hits >= 920  # 93.5 % over 4,000 repetitions; 94-95 % with more pairs that disagree


def test_paired_difference_detects_what_an_unpaired_one_would_not() -> None:
    before = np.arange(200) < 180
    after = before & (np.arange(200) >= 10)
    assert statistics.paired_difference(before, after).high < 0
    assert (
        statistics.paired_difference(before, before).low
        < 0
        < statistics.paired_difference(before, before).high
    )


def test_an_interval_is_written_in_percent_or_as_a_number() -> None:
    interval = statistics.Interval(0.5, 0.25, 0.75, 8)
    assert statistics.interval_text(interval, percent=True) == "50.0 [25.0, 75.0]"
    assert statistics.interval_text(interval, percent=False) == "0.500 [0.250, 0.750]"
    without_ends = statistics.Interval(0.5, math.nan, math.nan, 8)
    assert statistics.interval_text(without_ends, percent=True) == "50.0"
    assert statistics.interval_text(None, percent=True) == "-"


def test_refusals() -> None:
    with pytest.raises(UserError, match="at least 2"):
        statistics.wilson(1, 1)
    with pytest.raises(UserError, match="same images before and after"):
        statistics.paired_difference(np.ones(3, bool), np.ones(4, bool))
    with pytest.raises(UserError, match="more images than feature dimensions"):
        statistics.frechet_of_features(np.ones((5, 8)), np.ones((5, 8)))


def test_frechet_distance_against_clean_fid_and_a_closed_form() -> None:
    from cleanfid.fid import frechet_distance as theirs

    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(400, 12)), rng.normal(size=(300, 12)) @ rng.normal(size=(12, 12)) + 1
    args = (a.mean(0), np.cov(a, rowvar=False), b.mean(0), np.cov(b, rowvar=False))
    ours = statistics.frechet_distance(*args)
    with contextlib.suppress(
        TypeError
    ):  # scipy >= 1.18 has no sqrtm(disp=...); the closed form below is a reference too
        assert ours == pytest.approx(float(theirs(*args)), rel=1e-6)
    # commuting covariances: sum (sqrt(d1) - sqrt(d2))^2 + |m|^2
    d1, d2, shift = rng.random(6) + 0.1, rng.random(6) + 0.1, rng.normal(size=6)
    expected = ((np.sqrt(d1) - np.sqrt(d2)) ** 2).sum() + shift @ shift
    assert statistics.frechet_distance(
        np.zeros(6), np.diag(d1), shift, np.diag(d2)
    ) == pytest.approx(expected)


def test_frechet_distance_of_a_set_with_itself_and_with_noise() -> None:
    rng = np.random.default_rng(2)
    a = rng.normal(size=(500, 10))
    assert abs(statistics.frechet_of_features(a, a)) < 1e-6
    assert statistics.frechet_of_features(a, a + 3) == pytest.approx(90, rel=1e-6)
    assert statistics.frechet_of_features(a, 5 * rng.normal(size=(500, 10))) > 50


def test_paired_tests_against_statsmodels_and_by_hand() -> None:
    """McNemar's exact test against statsmodels, and signed ranks against all 2^n signs."""
    from itertools import product

    from scipy.stats import rankdata
    from statsmodels.stats.contingency_tables import mcnemar

    rng = np.random.default_rng(3)
    for share in (0.1, 0.4, 0.9):
        before, after = rng.random(60) < 0.5, rng.random(60) < share
        table = [
            [int((before & after).sum()), int((before & ~after).sum())],
            [int((~before & after).sum()), int((~before & ~after).sum())],
        ]
        assert statistics.mcnemar(before, after) == pytest.approx(
            mcnemar(table, exact=True).pvalue, abs=1e-12
        )
    differences = rng.standard_normal(9) + 0.5
    ranks = rankdata(abs(differences))
    statistic = (ranks * np.sign(differences)).sum()
    signs = np.array([(ranks * np.array(s)).sum() for s in product((-1, 1), repeat=9)])
    assert statistics.signed_rank(differences) == pytest.approx(
        (abs(signs) >= abs(statistic) - 1e-9).mean(), abs=1e-9
    )


def test_nothing_changed_is_never_significant() -> None:
    same = np.array([True, False, True])
    assert statistics.mcnemar(same, same) == 1
    assert statistics.signed_rank(np.zeros(5)) == 1
    rejections = sum(
        statistics.mcnemar(a, b) < 0.05
        for a, b in (np.random.default_rng(i).random((2, 80)) < 0.5 for i in range(300))
    )
    assert rejections <= 24  # 5 % of 300 and three standard errors; the exact test is cautious


def test_intervals_of_means_stay_within_bounds() -> None:
    """The interval is Student's of scipy, cut at the bounds.

    Counts that are all zero have Poisson's exact end. Other values without scatter have no end.
    """
    from scipy import stats

    values = np.array([0.2, 0.9, 1.0, 1.0, 1.0])
    low, high = stats.t.interval(0.95, 4, values.mean(), stats.sem(values))
    interval = statistics.mean_interval(values)
    assert (interval.low, interval.high) == pytest.approx((low, high))
    assert high > 1
    assert statistics.mean_interval(values, 0, 1).high == 1
    zero = statistics.mean_interval(np.zeros(8), 0)
    assert stats.poisson.cdf(0, 8 * zero.high) == pytest.approx(0.025)
    assert math.isnan(statistics.mean_interval(np.ones(8), 0).high)
    assert math.isnan(statistics.mean_interval(np.zeros(8)).low)
    for value in (0.1, 2 / 3, 0.7):  # numpy's deviation of 48 such values is not always 0
        for n in (3, 7, 10, 48):
            assert math.isnan(statistics.mean_interval(np.full(n, value)).high), (value, n)


def test_two_are_enough_and_one_is_not() -> None:
    assert statistics.wilson(1, 2).n == 2
    assert statistics.paired_difference(np.array([True, False]), np.array([False, False])).n == 2
    assert statistics.mean_interval(np.array([0.0, 1.0])).n == 2
    with pytest.raises(UserError, match="difference over 1 pairs"):
        statistics.paired_difference(np.ones(1, bool), np.ones(1, bool))
    with pytest.raises(UserError, match="mean of 1 values"):
        statistics.mean_interval(np.ones(1))


@pytest.mark.parametrize(
    ("gains", "losses", "same"), [(7, 2, 31), (0, 0, 12), (3, 9, 0), (1, 0, 99)]
)
def test_paired_difference_is_a_weighted_mean_of_gains_and_losses(
    gains: int, losses: int, same: int
) -> None:
    """A pair counts +1, -1 or 0.

    Half a pair is added to each of the four cells, two of which count 0.
    """
    from scipy.stats import norm

    before = np.repeat([False, True, True, False], [gains, losses, same - same // 2, same // 2])
    after = np.repeat([True, False, True, False], [gains, losses, same - same // 2, same // 2])
    values, weights = np.array([1, -1, 0]), np.array([gains + 0.5, losses + 0.5, same + 1])
    mean = np.average(values, weights=weights)
    error = math.sqrt(np.average((values - mean) ** 2, weights=weights) / weights.sum())
    interval = statistics.paired_difference(before, after)
    assert interval.value == pytest.approx((gains - losses) / (gains + losses + same))
    assert (interval.low, interval.high) == pytest.approx(
        (mean - norm.ppf(0.975) * error, mean + norm.ppf(0.975) * error), abs=1e-6
    )


def test_a_difference_of_shares_lies_between_minus_one_and_one() -> None:
    no, yes = np.zeros(2, bool), np.ones(2, bool)
    up, down = statistics.paired_difference(no, yes), statistics.paired_difference(yes, no)
    assert (up.value, up.high) == (1, 1)
    assert (down.value, down.low) == (-1, -1)
    assert up.low == pytest.approx(-down.high)
    assert -0.5 < up.low < 0.5


def test_signed_ranks_with_zeros_among_the_differences() -> None:
    assert statistics.signed_rank(np.arange(12.0)) < 0.01
    assert statistics.signed_rank(np.array([0.0, 1, -1, 2, -2])) > 0.5


def test_a_zero_among_the_differences_has_a_rank_and_no_sign() -> None:
    """Pratt: two of 2^7 patterns of signs are as far from the middle as seven gains."""
    assert statistics.signed_rank(np.arange(8.0)) == pytest.approx(2 / 128)


def test_the_mean_of_counts_that_are_all_zero_is_zero() -> None:
    interval = statistics.mean_interval(np.zeros(4), 0)
    assert (interval.value, interval.low, interval.n) == (0, 0, 4)
    assert math.isnan(statistics.mean_interval(np.zeros(4), 0, 1).high)
    assert math.isnan(statistics.mean_interval(np.full(4, 2.0), 0).high)


def test_frechet_distance_of_singular_covariances() -> None:
    """Covariances of rank one, a a^T and b b^T, give |a|^2 + |b|^2 - 2 |a . b|.

    Rounding makes some eigenvalues negative.
    """
    rng = np.random.default_rng(4)
    for _ in range(10):
        a, b = rng.normal(size=(2, 7))
        distance = statistics.frechet_distance(
            np.zeros(7), np.outer(a, a), np.zeros(7), np.outer(b, b)
        )
        assert distance == pytest.approx(a @ a + b @ b - 2 * abs(a @ b), abs=1e-6)


def test_frechet_needs_one_row_more_than_columns() -> None:
    rng = np.random.default_rng(5)
    nine = rng.normal(size=(9, 8))
    assert math.isfinite(statistics.frechet_of_features(nine, nine))
    for pair in ((nine[:8], nine), (nine, nine[:8])):
        with pytest.raises(UserError, match="found 8 images and 8 features"):
            statistics.frechet_of_features(*pair)


@pytest.mark.parametrize(
    ("first", "second", "size"), [(30, 41, 1000), (41, 30, 12), (24, 24, 1000), (24, 24, 12)]
)
def test_kernel_distance_draw_by_draw_against_clean_fid(first: int, second: int, size: int) -> None:
    """Every subset is clean-fid's own, and the interval follows from their scatter."""
    from cleanfid.fid import kernel_distance as theirs
    from scipy.stats import norm

    rng = np.random.default_rng(6)
    a, b = rng.normal(size=(first, 5)), 1.5 * rng.normal(size=(second, 5)) + 0.3
    n, subsets = min(first, second), 40
    m, h = min(n, size), min(n // 2, size)
    np.random.seed(7)
    whole = first == second == m
    values = np.array(
        [theirs(a, b, num_subsets=1, max_subset_size=m) for _ in range(1 if whole else subsets)]
    )
    scatter = (
        values
        if h == m
        else np.array([theirs(a, b, num_subsets=1, max_subset_size=h) for _ in range(subsets)])
    )
    error = 0.0 if whole else values.std(ddof=1) / math.sqrt(subsets)
    half = norm.ppf(0.975) * math.hypot(scatter.std(ddof=1) * math.sqrt(h / (n - h)), error)
    interval = statistics.kernel_distance(a, b, seed=7, subsets=subsets, size=size)
    assert interval.value == pytest.approx(values.mean(), rel=1e-9)
    assert (interval.value - interval.low, interval.high - interval.value) == pytest.approx(
        (half, half), rel=1e-6
    )
    assert interval.n == n


def test_kernel_distance_of_two_draws_has_the_error_of_their_mean() -> None:
    """Each subset has a third of the rows.

    Both parts of the variance come from the same two values.
    """
    rng = np.random.default_rng(10)
    a, b = rng.normal(size=(12, 3)), rng.normal(size=(12, 3)) + 1
    interval = statistics.kernel_distance(a, b, subsets=2, size=4)
    draws = np.random.RandomState(0)
    rows = [[draws.choice(12, 4, replace=False) for _ in "ba"] for _ in range(2)]
    values = np.array([statistics._polynomial_mmd(b[of_b], a[of_a]) for of_b, of_a in rows])
    variance = values.var(ddof=1) * (4 / 8 + 1 / 2)
    assert interval.value == pytest.approx(values.mean())
    assert interval.high - interval.value == pytest.approx(1.959964 * math.sqrt(variance))


def test_kernel_distance_has_the_defaults_of_clean_fid() -> None:
    from inspect import signature

    from cleanfid.fid import kernel_distance as theirs

    rng = np.random.default_rng(8)
    a, b = rng.normal(size=(12, 3)), rng.normal(size=(9, 3)) + 1
    np.random.seed(0)
    assert statistics.kernel_distance(a, b).value == pytest.approx(theirs(a, b), rel=1e-9)
    ours, reference = signature(statistics.kernel_distance).parameters, signature(theirs).parameters
    assert ours["size"].default == reference["max_subset_size"].default


def test_kernel_distance_refuses_what_it_cannot_compare() -> None:
    rng = np.random.default_rng(9)
    assert (
        statistics.kernel_distance(rng.normal(size=(4, 3)), rng.normal(size=(5, 3)), subsets=3).n
        == 4
    )
    for rows in ((3, 9), (9, 3)):
        with pytest.raises(UserError, match="at least 4 images"):
            statistics.kernel_distance(*(rng.normal(size=(n, 3)) for n in rows))
    with pytest.raises(UserError, match="have 3 and 4 features"):
        statistics.kernel_distance(rng.normal(size=(5, 3)), rng.normal(size=(5, 4)))
