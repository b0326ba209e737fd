"""Statements of papers on a method beside the leaderboard: supported, contradicted or inconclusive.

A claim names a method, a column of the leaderboard's ranks, and the methods that it is better or
worse than. A claim that names no other method says that its method is better than all others. The
columns are concept_rate, attack_success, retain_error, and seconds. Seconds last until the concept
rate is below 2 %. In each column less is better.

Of two rates, one is significantly smaller if it is smaller in 97.5 % of the draws (ranks.py). A
method takes significantly fewer seconds if its slowest seed is faster than the other's fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from studies.rendering import ranks
from studies.rendering.ranks import SIGNIFICANT, Standing

NEVER = float("inf")


def columns(
    standings: Mapping[str, Standing],
    seconds: Mapping[str, Sequence[float]],
    one: str,
    others: Sequence[str],
    column: str,
) -> tuple[list[str], list[str]]:
    """Return the others that are significantly worse than `one`, and those that are significantly
    better.
    """
    if column == "seconds":
        mine = seconds[one]
        slower = [o for o in others if max(mine) < min(seconds[o])]
        return slower, [o for o in others if max(seconds[o]) < min(mine)]
    draws = ranks.draw_rates(list(standings.values()))[column]
    rates = dict(zip(standings, draws, strict=True))
    probability = {o: float((rates[one] < rates[o]).mean()) for o in others}
    worse = [o for o, p in probability.items() if p >= SIGNIFICANT]
    return worse, [o for o, p in probability.items() if p <= 1 - SIGNIFICANT]


def verdict(
    claim: Mapping[str, Any],
    others: Sequence[str],
    worse: Sequence[str],
    better: Sequence[str],
    label: Mapping[str, str],
) -> str:
    """Return the verdict on a claim, from the methods that are significantly worse or better."""
    is_reversed = "worse_than" in claim
    supporters, opponents = (better, worse) if is_reversed else (worse, better)
    if opponents:
        return f"does not hold: against {_names(opponents, label)}"
    if len(supporters) == len(others):
        return "holds"
    return f"inconclusive: significant for {len(supporters)} of {len(others)}, the reverse for none"


def _names(names: Sequence[str], label: Mapping[str, str]) -> str:
    labels = [label[name] for name in names]
    return "; ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")


def value_text(
    name: str,
    standings: Mapping[str, Standing],
    seconds: Mapping[str, Sequence[float]],
    column: str,
) -> str:
    """Return the value of a method in a column as text."""
    if column == "seconds":
        return "never" if NEVER in seconds[name] else f"{float(np.mean(seconds[name])):.0f} s"
    hits, n = standings[name].columns[column]
    return f"{100 * hits / n:.0f} %"


def rows(
    claims: Sequence[Mapping[str, Any]],
    standings: Mapping[str, Standing],
    seconds: Mapping[str, Sequence[float]],
    label: Mapping[str, str],
) -> list[list[str]]:
    """Return the rows of a table. A claim leaves out methods without a value in its column."""
    table_rows = [["claim", "measured here", "verdict"]]
    for claim in claims:
        column, one = claim["column"], claim["method"]
        measured_names = (
            set(seconds)
            if column == "seconds"
            else {k for k, s in standings.items() if column in s.columns}
        )
        claim_names = [*claim.get("better_than", []), *claim.get("worse_than", [])]
        others = [
            name
            for name in claim_names or sorted(measured_names)
            if name != one and name in measured_names
        ]
        if one not in measured_names or not others:
            table_rows.append([claim["says"], "not measured yet", "-"])
            continue
        shown_names = [one, *(name for name in claim_names if name in measured_names)]
        values = [
            f"{label[name]} {value_text(name, standings, seconds, column)}" for name in shown_names
        ]
        measured_standings = {k: standings[k] for k in standings if k in measured_names}
        worse, better = columns(
            standings=measured_standings, seconds=seconds, one=one, others=others, column=column
        )
        table_rows.append(
            [
                claim["says"],
                "; ".join(values),
                verdict(claim, others, worse=worse, better=better, label=label),
            ]
        )
    return table_rows
