"""Intervals against independent formulas, coverage by simulation, and the Frechet distance against clean-fid."""

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
    found = statistics.wilson(hits, n)
    assert (found.value, found.n) == (p, n)
    assert found.low == pytest.approx(max(0, centre - half), abs=1e-9)
    assert found.high == pytest.approx(min(1, centre + half), abs=1e-9)


def test_paired_difference_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        before = rng.random(100) < 0.9
        after = np.where(rng.random(100) < 0.1, rng.random(100) < 0.5, before)  # truth: 0.1 * (0.5 - 0.9)
        found = statistics.paired_difference(before, after)
        covered += found.low <= -0.04 <= found.high
    assert covered >= 920  # 93.5 % over 4,000 repetitions; 94-95 % with more pairs that disagree


def test_paired_difference_sees_what_an_unpaired_one_would_not() -> None:
    before = np.arange(200) < 180
    after = before & (np.arange(200) >= 10)
    assert statistics.paired_difference(before, after).high < 0
    assert statistics.paired_difference(before, before).low < 0 < statistics.paired_difference(before, before).high


def test_refusals() -> None:
    with pytest.raises(UserError, match="at least 2"):
        statistics.wilson(1, 1)
    with pytest.raises(UserError, match="same pictures before and after"):
        statistics.paired_difference(np.ones(3, bool), np.ones(4, bool))
    with pytest.raises(UserError, match="more pictures than feature dimensions"):
        statistics.frechet_of_features(np.ones((5, 8)), np.ones((5, 8)))


def test_frechet_distance_against_clean_fid_and_a_closed_form() -> None:
    from cleanfid.fid import frechet_distance as theirs

    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(400, 12)), rng.normal(size=(300, 12)) @ rng.normal(size=(12, 12)) + 1
    args = (a.mean(0), np.cov(a, rowvar=False), b.mean(0), np.cov(b, rowvar=False))
    ours = statistics.frechet_distance(*args)
    with contextlib.suppress(
        TypeError
    ):  # scipy >= 1.18 has no sqrtm(disp=...); the closed form below is witness enough
        assert ours == pytest.approx(float(theirs(*args)), rel=1e-6)
    # commuting covariances: sum (sqrt(d1) - sqrt(d2))^2 + |m|^2
    d1, d2, shift = rng.random(6) + 0.1, rng.random(6) + 0.1, rng.normal(size=6)
    expected = ((np.sqrt(d1) - np.sqrt(d2)) ** 2).sum() + shift @ shift
    assert statistics.frechet_distance(np.zeros(6), np.diag(d1), shift, np.diag(d2)) == pytest.approx(expected)


def test_frechet_distance_of_a_set_with_itself_and_with_noise() -> None:
    rng = np.random.default_rng(2)
    a = rng.normal(size=(500, 10))
    assert abs(statistics.frechet_of_features(a, a)) < 1e-6
    assert statistics.frechet_of_features(a, a + 3) == pytest.approx(90, rel=1e-6)
    assert statistics.frechet_of_features(a, 5 * rng.normal(size=(500, 10))) > 50


def test_paired_tests_against_statsmodels_and_by_hand() -> None:
    """McNemar's exact test by statsmodels; signed ranks by all 2^n signs."""
    from itertools import product

    from scipy.stats import rankdata
    from statsmodels.stats.contingency_tables import mcnemar

    rng = np.random.default_rng(3)
    for share in (0.1, 0.4, 0.9):
        before, after = rng.random(60) < 0.5, rng.random(60) < share
        table = [[int((before & after).sum()), int((before & ~after).sum())], [int((~before & after).sum()), int((~before & ~after).sum())]]  # fmt: skip
        assert statistics.mcnemar(before, after) == pytest.approx(mcnemar(table, exact=True).pvalue, abs=1e-12)
    differences = rng.standard_normal(9) + 0.5
    ranks = rankdata(abs(differences))
    told = (ranks * np.sign(differences)).sum()
    signs = np.array([(ranks * np.array(s)).sum() for s in product((-1, 1), repeat=9)])
    assert statistics.signed_rank(differences) == pytest.approx((abs(signs) >= abs(told) - 1e-9).mean(), abs=1e-9)


def test_nothing_changed_is_never_significant() -> None:
    same = np.array([True, False, True])
    assert statistics.mcnemar(same, same) == 1
    assert statistics.signed_rank(np.zeros(5)) == 1
    changed = sum(statistics.mcnemar(a, b) < 0.05 for a, b in (np.random.default_rng(i).random((2, 80)) < 0.5 for i in range(300)))  # fmt: skip
    assert changed <= 24  # 5 % of 300 and three standard errors; the exact test is cautious


def test_intervals_of_means_stay_where_values_can_be() -> None:
    """Student's by scipy; cut at the bounds; counts that are all zero have Poisson's exact end, others without scatter none."""
    from scipy import stats

    values = np.array([0.2, 0.9, 1.0, 1.0, 1.0])
    low, high = stats.t.interval(0.95, 4, values.mean(), stats.sem(values))
    found = statistics.mean_interval(values)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert high > 1
    assert statistics.mean_interval(values, 0, 1).high == 1
    zero = statistics.mean_interval(np.zeros(8), 0)
    assert stats.poisson.cdf(0, 8 * zero.high) == pytest.approx(0.025)
    assert math.isnan(statistics.mean_interval(np.ones(8), 0).high)
    assert math.isnan(statistics.mean_interval(np.zeros(8)).low)
