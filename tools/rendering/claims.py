"""What papers say of a method against what a board found: holds, does not, or undecided within the intervals.

A claim names a method, a column of the board's ranks (share, attacks, lost: less is better; or seconds, until less than 2 % show
the concept), and whom it is better or worse than; with nobody named it is better than all others, or, with `no_worse`, as
good as any. Of two shares one is surely the smaller if it is in 97.5 % of the draws (ranks.py); of seconds, if its slowest seed beats the other's fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tools.rendering import ranks
from tools.rendering.ranks import SURE, Standing

NEVER = float("inf")


Rates = Mapping[str, np.ndarray]  # as ranks.drawn and ranks.together make them


def sides(standings: Mapping[str, Standing], seconds: Mapping[str, Sequence[float]], one: str, others: Sequence[str], column: str, drawn: Rates | None = None) -> tuple[list[str], list[str]]:  # fmt: skip
    """Of the others those that `one` is surely better than, and those that are surely better than it. drawn: the standings' rates,
    where they are not of one task."""
    if column == "seconds":
        mine = seconds[one]
        return [o for o in others if max(mine) < min(seconds[o])], [o for o in others if max(seconds[o]) < min(mine)]
    drawn = ranks.drawn(list(standings.values())) if drawn is None else drawn
    rates = dict(zip(standings, drawn[column], strict=True))
    better = {o: float((rates[one] < rates[o]).mean()) for o in others}
    return [o for o, p in better.items() if p >= SURE], [o for o, p in better.items() if p <= 1 - SURE]


def whole(claims: Sequence[Mapping[str, Any]], standings: Mapping[str, Standing], drawn: Rates) -> list[list[str]]:
    """A table's rows, by rates over several tasks. Only of claims that a method is as good as any: what papers say of two methods is
    told task by task. A verdict names the other that is likeliest to be better: not surely better is not the same as not better."""
    found = [["said", "here", "verdict"]]
    label = {name: one.name for name, one in standings.items()}
    for claim in claims:
        one, column = claim["method"], claim["column"]
        if not claim.get("no_worse") or column not in drawn:
            continue
        others = [name for name in standings if name != one]
        if one not in standings or not others:
            found.append([claim["says"], "not measured yet", "-"])
            continue
        rates = dict(zip(standings, drawn[column], strict=True))
        better = {name: float((rates[name] < rates[one]).mean()) for name in others}
        nearest = max(others, key=lambda name: better[name])
        said = verdict(claim, others, *sides(standings, {}, one, others, column, drawn), label)
        found.append([claim["says"], f"{label[one]} {100 * float(np.median(rates[one])):.1f} %", f"{said}; likeliest to be better: {label[nearest]} ({100 * better[nearest]:.0f} % of the draws)"])  # fmt: skip
    return found


def verdict(claim: Mapping[str, Any], others: Sequence[str], over: Sequence[str], under: Sequence[str], label: Mapping[str, str]) -> str:  # fmt: skip
    """A claim that a method is worse than others is one that those are better."""
    holds, against = (under, over) if "worse_than" in claim else (over, under)
    if claim.get("no_worse") and not against:
        return f"holds: none is surely better, {len(holds)} of {len(others)} surely worse"
    if against:
        return f"does not hold: against {_named(against, label)}"
    if len(holds) == len(others):
        return "holds"
    return f"undecided: surely so for {len(holds)} of {len(others)}, the reverse for none"


def _named(names: Sequence[str], label: Mapping[str, str]) -> str:
    shown = [label[name] for name in names]
    return "; ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def told(name: str, standings: Mapping[str, Standing], seconds: Mapping[str, Sequence[float]], column: str) -> str:
    """A method's value in a column."""
    if column == "seconds":
        return "never" if NEVER in seconds[name] else f"{float(np.mean(seconds[name])):.0f} s"
    hits, n = standings[name].columns[column]
    return f"{100 * hits / n:.0f} %"


def rows(claims: Sequence[Mapping[str, Any]], standings: Mapping[str, Standing], seconds: Mapping[str, Sequence[float]], label: Mapping[str, str]) -> list[list[str]]:  # fmt: skip
    """A table's rows; methods that are not measured in a claim's column yet are left out of it."""
    found = [["said", "here", "verdict"]]
    for claim in claims:
        column, one = claim["column"], claim["method"]
        known = set(seconds) if column == "seconds" else {k for k, s in standings.items() if column in s.columns}
        named = [*claim.get("better_than", []), *claim.get("worse_than", [])]
        others = [name for name in named or sorted(known) if name != one and name in known]
        if one not in known or not others:
            found.append([claim["says"], "not measured yet", "-"])
            continue
        shown = {one: told(one, standings, seconds, column)} | {name: told(name, standings, seconds, column) for name in named if name in known}  # fmt: skip
        over, under = sides({k: standings[k] for k in standings if k in known}, seconds, one, others, column)
        found.append([claim["says"], "; ".join(f"{label[k]} {v}" for k, v in shown.items()), verdict(claim, others, over, under, label)])  # fmt: skip
    return found
