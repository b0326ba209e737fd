"""Who stands where: ranks with intervals, and who beats whom, from counts of images and attempts.

A share of k in n is drawn from Beta(k + 1/2, n - k + 1/2) (Jeffreys' posterior); a rank's interval
holds 95 % of the ranks over DRAWS draws of all methods at once. Attempts on one prompt are taken as
independent, which narrows the intervals. Each method's draws follow from its own name: what is said
of two does not change because a third joins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

DRAWS = 20_000  # what is sure at 97.5 % is told to a tenth of a point
SURE = 0.975  # of the draws, one side
Count = tuple[int, int]  # hits of so many


@dataclass(frozen=True)
class Standing:
    """A method's counts, each of something that should not happen: a concept shown, an attack that
    succeeds, something retained that is lost. columns: name -> (hits, n), the same names for all
    methods of a board."""

    name: str
    columns: Mapping[str, Count]


def draw_rates(standings: Sequence[Standing], seed: int = 0) -> dict[str, np.ndarray]:
    """Rates by column, [methods, DRAWS], and `loss`: the larger of all others and what is lost,
    together.
    """
    columns = list(standings[0].columns)
    rates = {
        c: np.stack([_draws(s.columns[c], seed, s.name, c) for s in standings]) for c in columns
    }
    return {
        **rates,
        "loss": np.maximum.reduce([rates[c] for c in columns if c != "lost"]) + rates["lost"],
    }


def _draws(count: Count, seed: int, *names: str) -> np.ndarray:
    hits, n = count
    stream = np.random.default_rng([seed, *(crc32(name.encode()) for name in names)])
    return stream.beta(hits + 0.5, n - hits + 0.5, DRAWS)


def together(tasks: Sequence[Sequence[Standing]]) -> dict[str, np.ndarray]:
    """Rates by column and `loss` as means over tasks, each drawn by itself, so that a task does not
    weigh more for having more images. tasks: the same methods in the same order."""
    by_task = [draw_rates(standings, seed) for seed, standings in enumerate(tasks)]
    return {c: np.mean([rates[c] for rates in by_task], axis=0) for c in by_task[0]}


def ranks(rates: np.ndarray) -> list[tuple[int, int, int]]:
    """Of [methods, draws]: each method's median rank (1: least) with its 95 % interval."""
    order = rates.argsort(axis=0).argsort(axis=0) + 1
    return [
        tuple(int(v) for v in np.quantile(row, (0.5, 0.025, 0.975), method="nearest"))
        for row in order
    ]  # type: ignore[misc]


def beaten_by(
    standings: Sequence[Standing], rates: Mapping[str, np.ndarray]
) -> dict[str, list[str]]:
    """For each method, those significantly better in one column and significantly worse in none."""
    winners: dict[str, list[str]] = {}
    for i, one in enumerate(standings):
        winners[one.name] = []
        for j, other in enumerate(standings):
            probability = [float((rates[c][j] < rates[c][i]).mean()) for c in one.columns]
            if i != j and max(probability) >= SURE and min(probability) > 1 - SURE:
                winners[one.name].append(other.name)
    return winners


def rows(
    standings: Sequence[Standing],
    labels: Mapping[str, str],
    rates: Mapping[str, np.ndarray] | None = None,
) -> list[list[str]]:
    """A table's rows: rank by loss and by each column, and who beats the method; the least loss
    first. With `rates` (of `together`) also what the ranks are of, which the tables of the tasks do
    not show."""
    is_combined = rates is not None
    rates = draw_rates(standings) if rates is None else rates
    by = {c: ranks(values) for c, values in rates.items()}
    winners = beaten_by(standings, rates)
    order = np.median(rates["loss"], axis=1).argsort()
    columns = list(standings[0].columns)
    head = [
        "method",
        *(f"{labels[c]} %" for c in columns if is_combined),
        "rank by loss",
        *(f"by {labels[c]}" for c in columns),
        "beaten by",
    ]
    body = [
        [
            standings[i].name,
            *(_rate(rates[c][i]) for c in columns if is_combined),
            *(_rank(by[c][i]) for c in ("loss", *columns)),
            _names(winners[standings[i].name]),
        ]
        for i in order
    ]
    return [head, *body]


def _rate(draws: np.ndarray) -> str:
    low, value, high = 100 * np.quantile(draws, (1 - SURE, 0.5, SURE))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def _rank(value: tuple[int, int, int]) -> str:
    return f"{value[0]} [{value[1]}, {value[2]}]"


def _names(names: Sequence[str]) -> str:
    if not names:
        return "-"
    return (
        "; ".join(names) if len(names) <= 4 else f"{'; '.join(names[:3])} and {len(names) - 3} more"
    )
