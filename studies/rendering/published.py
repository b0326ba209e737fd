"""The end of tiny_leaderboard.md: published leaderboards beside ours, with rank correlations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from studies.rendering import leaderboard, ranks
from studies.rendering.common import table

FOLDER = Path(__file__).parents[1] / "published"
STUDY = "tiny_leaderboard"
LEAST = 8  # methods of a rank correlation
LEVEL = 0.05
# A column there, the column here, and whether a larger number there is a smaller one here.
PAIRS = (
    ("Pre-ASR", "concept_rate", False),
    ("Post-ASR", "attack_success", False),
    ("Post-ASR", "one_attack", False),
    ("CLIP-Score", "retain_error", True),
)
ATTACK = "unlearn_diff"  # the attack of the published leaderboard
LABELS = {
    **leaderboard.LABELS,
    "one_attack": f"success rate of {ATTACK} alone",
    ranks.SUMMARY: "summary",
}


@dataclass(frozen=True)
class Correlation:
    """The rank correlation of one column of a published table with one column here.

    Attributes:
        theirs: The published column.
        ours: The column here.
        names: The common methods, by their published names.
        rho: Spearman's coefficient. 1: the same order, from good to bad.
        tau: Kendall's coefficient.
        p: The p-value of Kendall's test, exact without ties.
    """

    theirs: str
    ours: str
    names: tuple[str, ...]
    rho: float
    tau: float
    p: float


def benchmarks() -> list[dict[str, Any]]:
    """Return the published leaderboards, as their files have them."""
    return [yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))]


def our_rates() -> dict[str, dict[str, float]]:
    """Return the rates of our leaderboard in percent, by method and column: means over its tasks.

    Only methods with all attacks on every task have a place.
    """
    by_task = leaderboard.complete_by_task(STUDY)
    rates = ranks.together([list(one.values()) for one in by_task])
    runs, attacks = leaderboard.reports(STUDY), leaderboard.attack_runs(STUDY)
    entries = [
        [f"{task}_{name}" for name in by_task[0]]
        for task in leaderboard.leaderboard_of(STUDY)["tasks"]
    ]
    alone = ranks.together(
        [[leaderboard.standing(runs[e], attacks[e], [ATTACK]) for e in row] for row in entries]
    )
    rates = {**rates, "one_attack": alone["attack_success"]}
    return {
        name: {column: ranks.rate_interval(rates[column][place])[0] for column in LABELS}
        for place, name in enumerate(by_task[0])
    }


def common(
    benchmark: Mapping[str, Any], task: str, ours: Mapping[str, Mapping[str, float]]
) -> dict[str, str]:
    """Return the methods of a published table that our leaderboard has: their name, our name."""
    names = {
        name: benchmark["methods"][name].get("ours") for name in benchmark["tasks"][task]["rows"]
    }
    return {name: own for name, own in names.items() if own in ours}


def correlations(
    benchmark: Mapping[str, Any], task: str, ours: Mapping[str, Mapping[str, float]]
) -> list[Correlation]:
    """Return the rank correlations of a published table with ours.

    Args:
        benchmark: A published leaderboard.
        task: One of its tasks.
        ours: The result of `our_rates`.

    Returns:
        One for each of `PAIRS`; [] with fewer than `LEAST` common methods.
    """
    from scipy.stats import kendalltau, spearmanr

    names = common(benchmark, task, ours)
    if len(names) < LEAST:
        return []
    rows, found = benchmark["tasks"][task]["rows"], []
    for theirs, column, is_opposite in PAIRS:
        place = benchmark["columns"].index(theirs)
        values = np.array([rows[name][place] for name in names], float)
        own = np.array([ours[name][column] for name in names.values()])
        values = -values if is_opposite else values
        rho, (tau, p) = spearmanr(values, own).statistic, kendalltau(values, own)
        found.append(
            Correlation(theirs, column, tuple(names), rho=float(rho), tau=float(tau), p=float(p))
        )
    return found


def verdict(found: list[tuple[str, Correlation]]) -> str:
    """Return the first sentence of the section: whether the orders agree.

    Args:
        found: The correlations, each with the name of its task.
    """
    if not found:
        return f"No published table has {LEAST} methods of ours, so no order is compared."
    agreeing = [one for _, one in found if one.p < LEVEL and one.tau > 0]
    negative = [one for _, one in found if one.rho < 0]
    numbers = "; ".join(
        f"{task}, {one.theirs} with our {LABELS[one.ours]}: {one.rho:.2f}" for task, one in found
    )
    start = (
        f"{len(agreeing)} of {len(found)} rank correlations are significantly positive"
        if agreeing
        else f"No agreement is shown: none of {len(found)} correlations is significantly positive"
    )
    verb = "is" if len(negative) == 1 else "are"
    end = f", and {len(negative)} {verb} negative" if negative else ""
    return f"**{start}{end}.** Spearman's rho: {numbers}."


def section() -> str:
    """Return the section of the leaderboard's page about published leaderboards."""
    ours, sections, found = our_rates(), [], []
    for benchmark in benchmarks():
        for task in benchmark["tasks"]:
            found += [(task, one) for one in correlations(benchmark, task, ours)]
        sections.append(_benchmark_text(benchmark, ours))
    body = "\n\n".join(sections)
    return f"""## Published leaderboards

{verdict(found)}

The rows are those of `studies/published/*.yaml`. They were read, not measured. Ours are means over
the tasks above.

A rank correlation needs {LEAST} common methods. Model, concepts, judge, attack and settings differ
in every row, so a low correlation does not say which of the two is right. With few methods the
test misses most correlations. The p-values have no correction for their number.

{body}
"""


def _benchmark_text(benchmark: Mapping[str, Any], ours: Mapping[str, Mapping[str, float]]) -> str:
    facts = [
        f"Source: {benchmark['source']}, read on {benchmark['read']}. Date: {benchmark['date']}.",
        f"Licence: {benchmark['licence']}.",
        f"Protocol: {benchmark['protocol'].strip()}",
        f"Left out: {benchmark['left_out'].strip()}",
    ]
    differences = [
        f"{name}: {how['differs']}"
        for name, how in benchmark["methods"].items()
        if "differs" in how
    ]
    parts = [
        f"### {benchmark['title']}",
        "\n".join(f"* {fact}" for fact in facts),
        f"What differs here: {'; '.join(differences)}.",
    ]
    for task in benchmark["tasks"]:
        parts += [f"#### {task}", _task_text(benchmark, task, ours)]
    return "\n\n".join(parts)


def _task_text(
    benchmark: Mapping[str, Any], task: str, ours: Mapping[str, Mapping[str, float]]
) -> str:
    content = benchmark["tasks"][task]
    names = common(benchmark, task, ours)
    rows = [["method", *benchmark["columns"], *(f"our {label} %" for label in LABELS.values())]]
    for name, values in content["rows"].items():
        own = ours.get(names.get(name, ""))
        cells = [f"{own[column]:.1f}" if own else "-" for column in LABELS]
        rows.append([name, *(f"{value:g}" for value in values), *cells])
    found = correlations(benchmark, task, ours)
    if found:
        lines = [["theirs", "ours", "methods", "Spearman's rho", "Kendall's tau", "p (tau)"]]
        for one in found:
            label = LABELS[one.ours]
            numbers = [f"{one.rho:.2f}", f"{one.tau:.2f}", f"{one.p:.3f}"]
            lines.append([one.theirs, label, str(len(one.names)), *numbers])
        end = (
            "A positive coefficient is the same order, from good to bad. A high CLIP score is "
            f"good there, as a low retain error is here.\n\n{table(lines)}"
        )
    else:
        end = f"{len(names)} methods are common to both, too few for a rank correlation."
    return f"`{content['file']}` at `{content['commit'][:12]}`.\n\n{table(rows)}\n\n{end}"
