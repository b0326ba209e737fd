"""Ranks of methods with intervals, and which methods are significantly better, from counts.

A rate of k in n is drawn from Beta(k + 1/2, n - k + 1/2), which is Jeffreys' posterior. The
interval of a rank holds 95 % of its ranks over DRAWS draws of all methods at once. The draws treat
all images and all attempts as independent, also those of one prompt and of one training seed. This
makes the intervals too narrow. The draws of a method follow from its name alone, so that further
methods do not change the comparison of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

DRAWS = 20_000  # enough for a tenth of a point at the 97.5 % quantile
SIGNIFICANT = 0.975  # share of the draws, one-sided
TOTAL_ERROR = "total_error"
SUMMARY = "summary"
# The word that the draws of a column follow from. A changed word changes the last digit of a page.
STREAMS = {"concept_rate": "share", "attack_success": "attacks", "retain_error": "lost"}
Count = tuple[int, int]  # hits, number


@dataclass(frozen=True)
class Standing:
    """The counts of a method by column. In every column fewer hits are better.

    Args:
        name: The label of the method.
        columns: Column to (hits, number). All methods of a leaderboard have the same columns.
    """

    name: str
    columns: Mapping[str, Count]


def draw_rates(standings: Sequence[Standing], seed: int = 0) -> dict[str, np.ndarray]:
    """Return rates by column, each [methods, DRAWS], the total error and the summary.

    The total error is the retain error plus the largest of the other rates. The summary is
    `harmonic_mean` of what each rate leaves: the shares that are erased, robust and retained.
    """
    columns = list(standings[0].columns)
    rates = {
        column: np.stack([_draws(one.columns[column], seed, one.name, column) for one in standings])
        for column in columns
    }
    others = [rates[column] for column in columns if column != "retain_error"]
    return {
        **rates,
        TOTAL_ERROR: np.maximum.reduce(others) + rates["retain_error"],
        SUMMARY: harmonic_mean([1 - values for values in rates.values()]),
    }


def harmonic_mean(shares: Sequence[np.ndarray]) -> np.ndarray:
    """Return the harmonic mean of shares of one shape; 0 where one of them is 0.

    The aggregate of OpenUnlearning (arXiv 2506.12618): `hm_aggregate` of
    src/evals/metrics/utility.py, locuslab/open-unlearning at commit d3d7cf9. It takes a method's
    own shares only, so it does not depend on which other methods are compared.
    """
    values = np.stack(shares)
    with np.errstate(divide="ignore"):
        return np.asarray(len(values) / (1 / values).sum(axis=0))


def _draws(count: Count, seed: int, name: str, column: str) -> np.ndarray:
    hits, n = count
    words = (name, STREAMS[column])
    stream = np.random.default_rng([seed, *(crc32(word.encode()) for word in words)])
    return stream.beta(hits + 0.5, n - hits + 0.5, DRAWS)


def together(tasks: Sequence[Sequence[Standing]]) -> dict[str, np.ndarray]:
    """Return rates by column, the total error and the summary, as means over tasks.

    Each task is drawn by itself. So a task has no more weight for having more images.

    Args:
        tasks: The standings of each task, of the same methods in the same order.
    """
    by_task = [draw_rates(standings, seed) for seed, standings in enumerate(tasks)]
    return {c: np.mean([rates[c] for rates in by_task], axis=0) for c in by_task[0]}


def ranks(rates: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the median rank of each method with its 95 % interval. Rank 1 is the least rate.

    Args:
        rates: [methods, draws]
    """
    order = rates.argsort(axis=0).argsort(axis=0) + 1
    result = []
    for row in order:
        median, low, high = np.quantile(row, (0.5, 0.025, 0.975), method="nearest")
        result.append((int(median), int(low), int(high)))
    return result


def beaten_by(
    standings: Sequence[Standing], rates: Mapping[str, np.ndarray]
) -> dict[str, list[str]]:
    """Return for each method those that are significantly better in one column and significantly
    worse in none.
    """
    winners: dict[str, list[str]] = {}
    for i, one in enumerate(standings):
        winners[one.name] = []
        for j, other in enumerate(standings):
            probability = [float((rates[c][j] < rates[c][i]).mean()) for c in one.columns]
            is_better = max(probability) >= SIGNIFICANT
            if i != j and is_better and min(probability) > 1 - SIGNIFICANT:
                winners[one.name].append(other.name)
    return winners


def rows(
    standings: Sequence[Standing],
    labels: Mapping[str, str],
    rates: Mapping[str, np.ndarray] | None = None,
) -> list[list[str]]:
    """Return the rows of a table, least total error first: the summary and the ranks of each
    method, and the methods that are significantly better.

    Args:
        standings: The methods.
        labels: The title of each column.
        rates: The result of `together`. The table then shows the rates too.
    """
    is_combined = rates is not None
    rates = draw_rates(standings) if rates is None else rates
    by = {c: ranks(rates[c]) for c in (TOTAL_ERROR, *standings[0].columns)}
    winners = beaten_by(standings, rates)
    order = np.median(rates[TOTAL_ERROR], axis=1).argsort()
    columns = list(standings[0].columns)
    head = [
        "method",
        *(f"{labels[c]} %" for c in columns if is_combined),
        "summary %",
        "rank by total error",
        *(f"by {labels[c]}" for c in columns),
        "beaten by",
    ]
    body = [
        [
            standings[i].name,
            *(rate_text(rates[c][i]) for c in columns if is_combined),
            rate_text(rates[SUMMARY][i]),
            *(_rank(by[c][i]) for c in (TOTAL_ERROR, *columns)),
            _names(winners[standings[i].name]),
        ]
        for i in order
    ]
    return [head, *body]


def rate_interval(draws: np.ndarray) -> tuple[float, float, float]:
    """Return the median of a rate and its 95 % interval, in percent: value, low, high."""
    low, value, high = 100 * np.quantile(draws, (1 - SIGNIFICANT, 0.5, SIGNIFICANT))
    return float(value), float(low), float(high)


def rate_text(draws: np.ndarray) -> str:
    """Return a rate with its interval as text, in percent."""
    value, low, high = rate_interval(draws)
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def _rank(value: tuple[int, int, int]) -> str:
    return f"{value[0]} [{value[1]}, {value[2]}]"


def _names(names: Sequence[str]) -> str:
    if not names:
        return "-"
    return (
        "; ".join(names) if len(names) <= 4 else f"{'; '.join(names[:3])} and {len(names) - 3} more"
    )
