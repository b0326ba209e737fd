"""The end of tiny_leaderboard.md: published leaderboards beside ours, with rank correlations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from concept_eraser.evaluation.seed_statistics import holm
from studies.rendering import leaderboard, ranks
from studies.rendering.common import table

FOLDER = Path(__file__).parents[1] / "published"
UNREAD = FOLDER / "unread.yaml"
STUDY = "tiny_leaderboard"
LEAST = 8  # methods of a rank correlation
LEVEL = 0.05
ATTACKS = ("unlearn_diff", "p4d-k", "ring_a_bell", "concept_inversion")  # of published tables
LABELS = {
    **leaderboard.LABELS,
    **{attack: f"success rate of {attack} alone" for attack in ATTACKS},
    ranks.SUMMARY: "summary",
}


@dataclass(frozen=True)
class Correlation:
    """The rank correlation of two columns.

    Attributes:
        theirs: The published column.
        ours: The column here, or another published one.
        names: The common methods, by their names here.
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

    def interval(self) -> tuple[float, float]:
        """Return an approximate 95 % interval of Spearman's coefficient: low, high.

        Fisher's transformation, with the variance (1 + rho^2 / 2) / (n - 3) of n methods (Bonett
        and Wright 2000).
        """
        deviation = 1.96 * np.sqrt((1 + self.rho**2 / 2) / (len(self.names) - 3))
        with np.errstate(divide="ignore"):
            middle = np.arctanh(self.rho)
        return float(np.tanh(middle - deviation)), float(np.tanh(middle + deviation))


@dataclass(frozen=True)
class Finding:
    """A correlation, with the names of the published tables.

    Attributes:
        title: The short title of the published leaderboard, or those of two.
        task: The task, or those of two.
        correlation: The correlation.
    """

    title: str
    task: str
    correlation: Correlation


def benchmarks() -> list[dict[str, Any]]:
    """Return the published leaderboards, as their files have them."""
    paths = [path for path in sorted(FOLDER.glob("*.yaml")) if path != UNREAD]
    return [yaml.safe_load(path.read_text()) for path in paths]


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
    for attack in ATTACKS:
        tasks = [
            [leaderboard.standing(runs[e], attacks[e], [attack]) for e in row] for row in entries
        ]
        rates = {**rates, attack: ranks.together(tasks)["attack_success"]}
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


def short_title(benchmark: Mapping[str, Any]) -> str:
    """Return the title of a published leaderboard up to its comma."""
    return str(benchmark["title"].partition(",")[0])


def published_values(
    benchmark: Mapping[str, Any], task: str, pair: Mapping[str, Any]
) -> dict[str, float]:
    """Return a compared column of a published table, by the names of the methods here.

    A column whose larger numbers are smaller ones here has its sign changed. Methods without a
    number or without a row here are left out.
    """
    place = benchmark["columns"].index(pair["theirs"])
    sign = -1.0 if pair.get("opposite") else 1.0
    numbers = {
        benchmark["methods"][name].get("ours"): row[place]
        for name, row in benchmark["tasks"][task]["rows"].items()
    }
    return {name: sign * value for name, value in numbers.items() if name and value is not None}


def correlate(
    theirs: tuple[str, Mapping[str, float]], ours: tuple[str, Mapping[str, float]]
) -> Correlation | None:
    """Return the rank correlation of two columns, or None with fewer than `LEAST` common methods.

    Args:
        theirs: The name of the published column, and its values by method.
        ours: The same of the other column.
    """
    from scipy.stats import kendalltau, spearmanr

    (column, values), (other_column, others) = theirs, ours
    names = tuple(name for name in values if name in others)
    if len(names) < LEAST:
        return None
    pair = [values[name] for name in names], [others[name] for name in names]
    rho, (tau, p) = spearmanr(*pair).statistic, kendalltau(*pair)
    return Correlation(column, other_column, names, rho=float(rho), tau=float(tau), p=float(p))


def correlations(
    benchmark: Mapping[str, Any], task: str, ours: Mapping[str, Mapping[str, float]]
) -> list[Correlation]:
    """Return the rank correlations of a published table with ours.

    Args:
        benchmark: A published leaderboard.
        task: One of its tasks.
        ours: The result of `our_rates`.

    Returns:
        One for each of its `compared` with `LEAST` common methods that have a number there.
    """
    found = [
        correlate(
            (pair["theirs"], published_values(benchmark, task, pair)),
            (pair["ours"], {name: rates[pair["ours"]] for name, rates in ours.items()}),
        )
        for pair in benchmark["compared"]
    ]
    return [one for one in found if one]


def between(contents: list[dict[str, Any]]) -> list[Finding]:
    """Return the rank correlations of published tables with one another.

    Compared are columns of two leaderboards that one column here is compared with. Methods are
    matched by their row here.
    """
    columns = [
        (one, task, pair) for one in contents for task in one["tasks"] for pair in one["compared"]
    ]
    found = []
    for (one, task, pair), (other, other_task, other_pair) in itertools.combinations(columns, 2):
        if one is other or pair["ours"] != other_pair["ours"]:
            continue
        correlation = correlate(
            (pair["theirs"], published_values(one, task, pair)),
            (other_pair["theirs"], published_values(other, other_task, other_pair)),
        )
        if correlation:
            titles = f"{short_title(one)} and {short_title(other)}"
            found.append(Finding(titles, f"{task} and {other_task}", correlation))
    return found


def verdict(found: list[Finding]) -> str:
    """Return the first sentences of the section: whether the orders agree."""
    if not found:
        return f"No published table has {LEAST} methods of ours, so no order is compared."
    correlations = [one.correlation for one in found]
    corrected = holm([one.p for one in correlations])
    agreeing = sum(
        p < LEVEL and one.tau > 0 for p, one in zip(corrected, correlations, strict=True)
    )
    rhos = [one.rho for one in correlations]
    negative = sum(rho < 0 for rho in rhos)
    start = (
        f"{agreeing} of {len(found)} rank correlations are significantly positive"
        if agreeing
        else f"No agreement is shown: none of {len(found)} correlations is significantly positive"
    )
    verb = "is" if negative == 1 else "are"
    end = f", and {negative} {verb} negative" if negative else ""
    return (
        f"**{start}{end}.** Spearman's rho lies between {min(rhos):.2f} and {max(rhos):.2f}, with "
        f"the median {np.median(rhos):.2f}."
    )


def correlation_table(found: list[Finding], heads: tuple[str, str]) -> str:
    """Return correlations as a table.

    Args:
        found: The correlations.
        heads: The heads of the two compared columns.
    """
    if not found:
        return ""
    head = ["published", "task", *heads, "methods", "Spearman's rho", "Kendall's tau"]
    rows = [[*head, "p (tau)", "corrected p"]]
    corrected = holm([one.correlation.p for one in found])
    for one, p in zip(found, corrected, strict=True):
        values = one.correlation
        low, high = values.interval()
        rows.append(
            [
                one.title,
                one.task,
                values.theirs,
                LABELS.get(values.ours, values.ours),
                str(len(values.names)),
                f"{values.rho:.2f} [{low:.2f}, {high:.2f}]",
                f"{values.tau:.2f}",
                f"{values.p:.3f}",
                f"{p:.3f}",
            ]
        )
    return table(rows)


def section() -> str:
    """Return the section of the leaderboard's page about published leaderboards."""
    contents, ours = benchmarks(), our_rates()
    found: list[Finding] = []
    few: dict[tuple[str, int], list[str]] = {}  # tasks by title and number of common methods
    for benchmark in contents:
        title = short_title(benchmark)
        for task in benchmark["tasks"]:
            new = correlations(benchmark, task, ours)
            found += [Finding(title, task, one) for one in new]
            if not new:
                few.setdefault((title, len(common(benchmark, task, ours))), []).append(task)
    others = between(contents)
    body = "\n\n".join(_benchmark_text(benchmark, ours) for benchmark in contents)
    return f"""## Published leaderboards

{verdict(found)} {_between_text(others)}

{correlation_table(found, ("theirs", "ours"))}

{_too_few(few)}

The rows below are those of `studies/published/*.yaml`. They were read, not measured. Ours are
means over the tasks above.

A positive coefficient is the same order, from good to bad: a high CLIP score is good there, as a
low retain error is here. The interval is approximate, at 95 %. The corrected p has Holm's
correction for all rows of its table, and significance is by it. A rank correlation needs {LEAST}
common methods. Model, concepts, judge, attack and settings differ in every row, so a low
correlation does not say which of the two is right. With few methods the test misses most
correlations. The tables share methods, so that their correlations are not independent.

### Published tables with one another

Compared are the columns of two tables that one column here is compared with. Rows are matched by
the row here, so that the strength or the trained parameters of a method may differ. Some papers
take rows from others, which makes the tables alike.

{correlation_table(others, ("one", "other"))}

{body}

{unread_text()}
"""


def unread_text() -> str:
    """Return the part about published tables that were looked for and not read."""
    content = yaml.safe_load(UNREAD.read_text())
    lines = "\n".join(f"* {one['name']}: {one['found'].strip()}" for one in content["tables"])
    start = f"Looked for on {content['read']}, with what was found:"
    return f"### Tables without rows here\n\n{start}\n\n{lines}"


def _between_text(found: list[Finding]) -> str:
    if not found:
        return ""
    rhos = [one.correlation.rho for one in found]
    return (
        f"Between two published tables it lies between {min(rhos):.2f} and {max(rhos):.2f}, with "
        f"the median {np.median(rhos):.2f}, in {len(rhos)} comparisons."
    )


def _too_few(tasks: Mapping[tuple[str, int], list[str]]) -> str:
    parts = [f"{title} ({', '.join(names)}): {n}" for (title, n), names in tasks.items()]
    return f"Too few common methods for a correlation: {'; '.join(parts)}." if parts else ""


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
    compared = {pair["ours"] for pair in benchmark["compared"]} | {ranks.SUMMARY}
    labels = {column: label for column, label in LABELS.items() if column in compared}
    rows = [["method", *benchmark["columns"], *(f"our {label} %" for label in labels.values())]]
    for name, values in content["rows"].items():
        own = ours.get(names.get(name, ""))
        cells = [f"{own[column]:.1f}" if own else "-" for column in labels]
        theirs = ["-" if value is None else f"{value:g}" for value in values]
        rows.append([name, *theirs, *cells])
    few = "" if len(names) >= LEAST else ", too few for a rank correlation"
    end = f"{len(names)} methods are common to both{few}."
    return f"`{content['file']}` at `{content['commit'][:12]}`.\n\n{table(rows)}\n\n{end}"
