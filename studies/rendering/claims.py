"""What papers say of a method against what a leaderboard found: holds, does not, or undecided
within the intervals.

A claim names a method, a column of the leaderboard's ranks (share, attacks, lost: less is better;
or seconds, until less than 2 % show the concept), and whom it is better or worse than; with nobody
named it is better than all others, or, with `no_worse`, as good as any. Of two shares, one is
significantly smaller if it is smaller in 97.5 % of the draws (ranks.py). Of seconds, one is
significantly smaller if its slowest seed beats the other's fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from studies.rendering import ranks
from studies.rendering.ranks import SURE, Standing

NEVER = float("inf")


Rates = Mapping[str, np.ndarray]  # as ranks.drawn and ranks.together make them


def columns(
    standings: Mapping[str, Standing],
    seconds: Mapping[str, Sequence[float]],
    one: str,
    others: Sequence[str],
    column: str,
    drawn: Rates | None = None,
) -> tuple[list[str], list[str]]:
    """The others that are significantly worse than `one`, and those that are significantly better.

    drawn: the standings' rates, where they are not of one task.
    """
    if column == "seconds":
        mine = seconds[one]
        return [o for o in others if max(mine) < min(seconds[o])], [
            o for o in others if max(seconds[o]) < min(mine)
        ]
    drawn = ranks.draw_rates(list(standings.values())) if drawn is None else drawn
    rates = dict(zip(standings, drawn[column], strict=True))
    probability = {o: float((rates[one] < rates[o]).mean()) for o in others}
    return [o for o, p in probability.items() if p >= SURE], [
        o for o, p in probability.items() if p <= 1 - SURE
    ]


def whole(
    claims: Sequence[Mapping[str, Any]], standings: Mapping[str, Standing], drawn: Rates
) -> list[list[str]]:
    """A table's rows, by rates over several tasks. Only of claims that a method is as good as any:
    what papers say of two methods is told task by task. A verdict names the other that is likeliest
    to be better: not significantly better is not the same as not better."""
    table_rows = [["said", "here", "verdict"]]
    label = {name: one.name for name, one in standings.items()}
    for claim in claims:
        one, column = claim["method"], claim["column"]
        if not claim.get("no_worse") or column not in drawn:
            continue
        others = [name for name in standings if name != one]
        if one not in standings or not others:
            table_rows.append([claim["says"], "not measured yet", "-"])
            continue
        rates = dict(zip(standings, drawn[column], strict=True))
        probability = {name: float((rates[name] < rates[one]).mean()) for name in others}
        nearest = max(others, key=lambda name: probability[name])
        verdict_text = verdict(
            claim, others, *columns(standings, {}, one, others, column, drawn), label
        )
        table_rows.append(
            [
                claim["says"],
                f"{label[one]} {100 * float(np.median(rates[one])):.1f} %",
                (
                    f"{verdict_text}; likeliest to be better: {label[nearest]} "
                    f"({100 * probability[nearest]:.0f} % of the draws)"
                ),
            ]
        )
    return table_rows


def verdict(
    claim: Mapping[str, Any],
    others: Sequence[str],
    over: Sequence[str],
    under: Sequence[str],
    label: Mapping[str, str],
) -> str:
    """A claim that a method is worse than others is one that those are better."""
    supporters, opponents = (under, over) if "worse_than" in claim else (over, under)
    if claim.get("no_worse") and not opponents:
        return (
            f"holds: none is significantly better, {len(supporters)} of {len(others)} "
            "significantly worse"
        )
    if opponents:
        return f"does not hold: against {_named(opponents, label)}"
    if len(supporters) == len(others):
        return "holds"
    return f"undecided: significant for {len(supporters)} of {len(others)}, the reverse for none"


def _named(names: Sequence[str], label: Mapping[str, str]) -> str:
    labels = [label[name] for name in names]
    return "; ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")


def value_text(
    name: str,
    standings: Mapping[str, Standing],
    seconds: Mapping[str, Sequence[float]],
    column: str,
) -> str:
    """A method's value in a column."""
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
    """A table's rows; methods that are not measured in a claim's column yet are left out of it."""
    table_rows = [["said", "here", "verdict"]]
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
        values = {one: value_text(one, standings, seconds, column)} | {
            name: value_text(name, standings, seconds, column)
            for name in claim_names
            if name in measured_names
        }
        over, under = columns(
            {k: standings[k] for k in standings if k in measured_names},
            seconds,
            one,
            others,
            column,
        )
        table_rows.append(
            [
                claim["says"],
                "; ".join(f"{label[k]} {v}" for k, v in values.items()),
                verdict(claim, others, over, under, label),
            ]
        )
    return table_rows
