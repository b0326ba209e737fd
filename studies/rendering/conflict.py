"""The page of the study `conflict`: cosines and norms of the two gradients, with its figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from concept_eraser.reporting.plots import SERIES
from studies.rendering.common import notes, source, table
from studies.rendering.figures import Figure, canvas
from studies.result_tables import Content, Results, figure_path

STUDY = "conflict"
COMMAND = f"python -m studies.conflict studies/configs/{STUDY}.yaml"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 40
PANELS = (
    ("cosine", "cosine of the gradients"),
    ("ratio", "log10 of |g_forget| / |g_retain|"),
    ("contribution", "log10 of a_f |g_forget| / (a_r |g_retain|)"),
)


def values(runs: Sequence[Content], kind: str) -> np.ndarray:
    """Return one number for each step of the runs.

    Args:
        runs: The results.
        kind: "cosine"; "ratio", the forget norm divided by the retain norm; or "contribution", the
            same ratio of the weighted norms. Steps with a norm or a weight of 0 are left out of a
            ratio.
    """
    if kind == "cosine":
        return np.concatenate([np.asarray(run["cosine"], float) for run in runs])
    ratios = []
    for run in runs:
        forget, retain = (np.asarray(run["norms"][name], float) for name in ("forget", "retain"))
        if kind == "contribution":
            forget = forget * np.asarray(run["weights"]["forget"], float)
            retain = retain * np.asarray(run["weights"]["retain"], float)
        is_usable = (forget > 0) & (retain > 0)
        ratios.append(forget[is_usable] / retain[is_usable])
    return np.concatenate(ratios)


def _quantiles(numbers: np.ndarray, levels: Sequence[float], spec: str) -> list[str]:
    if not len(numbers):
        return ["-"] * len(levels)
    return [format(float(value), spec) for value in np.quantile(numbers, levels)]


def distribution_table(groups: Sequence[tuple[str, Sequence[Content]]]) -> str:
    """Return a row for each group of runs: share of conflicts, quantiles of cosine and ratios."""
    head = ["run", "steps", "conflicts %", *(f"cosine {100 * q:.0f} %" for q in QUANTILES)]
    rows = [[*head, "norm ratio, median [5 %, 95 %]", "contribution, median [5 %, 95 %]"]]
    for label, runs in groups:
        cosines = values(runs, "cosine")
        row = [label, str(len(cosines)), f"{100 * float((cosines < 0).mean()):.0f}"]
        row += _quantiles(cosines, QUANTILES, ".2f")
        for kind in ("ratio", "contribution"):
            middle, low, high = _quantiles(values(runs, kind), (0.5, 0.05, 0.95), ".2f")
            row.append(f"{middle} [{low}, {high}]")
        rows.append(row)
    return table(rows)


def groups_of(results: Mapping[str, Content]) -> list[tuple[str, list[Content]]]:
    """Return the results by task and label. The seeds of a run belong to one group."""
    groups: dict[str, list[Content]] = {}
    for content in results.values():
        groups.setdefault(f"{content['task']}: {content['label']}", []).append(content)
    return sorted(groups.items())


def page() -> str:
    """Return eval/results/conflict.md."""
    results = dict(Results(STUDY))
    environments = [content["environment"] for content in results.values()]
    commits = sorted({str(environment["commit"])[:12] for environment in environments})
    seeds = sorted({content["seed"] for content in results.values()})
    machine = f"torch {environments[0]['versions']['torch']}; {environments[0]['device']}"
    return f"""# Cosines and norms of the two gradients

{source(STUDY, COMMAND)}. This is the question of MUNBa's figure 1, on the bundled model. Each
number belongs to one step of one run. The steps of a run are not independent, so there are no
intervals.

* Conflicts: the share of steps with a negative cosine of the forget and the retain gradient.
* Norm ratio: the norm of the forget gradient divided by that of the retain gradient.
* Contribution: the same ratio after the method's weights. 1 is an equal contribution.

{distribution_table(groups_of(results))}

![distributions](conflict.plots.svg)

Training seeds {", ".join(map(str, seeds))}. Commits {", ".join(commits)}; {machine}.

{notes(STUDY)}
"""


def plot(results: Mapping[str, Content]) -> Any:
    """Draw the histograms of cosine, norm ratio and contribution, one row for each task."""
    tasks = sorted({content["task"] for content in results.values()})
    figure = canvas(13, 3.4 * len(tasks))
    all_axes = figure.subplots(len(tasks), len(PANELS), squeeze=False)
    for row, task in zip(all_axes, tasks, strict=True):
        groups: dict[str, list[Content]] = {}
        for content in results.values():
            if content["task"] == task:
                groups.setdefault(content["label"], []).append(content)
        for axes, (kind, label) in zip(row, PANELS, strict=True):
            numbers = {name: values(runs, kind) for name, runs in groups.items()}
            if kind != "cosine":
                numbers = {name: np.log10(ratios) for name, ratios in numbers.items()}
            edges = _edges(list(numbers.values()))
            for (name, series), color in zip(numbers.items(), SERIES, strict=False):
                axes.hist(series, bins=edges, histtype="step", lw=1.4, color=color, label=name)
            axes.axvline(0, color="0.6", lw=0.8)
            axes.set(xlabel=label, ylabel="steps")
        row[0].set_title(task)
        row[0].legend(frameon=False)
    return figure


def _edges(series: Sequence[np.ndarray]) -> np.ndarray:
    """Return the edges of the bins that hold all numbers, and 0."""
    numbers = np.concatenate([*series, np.zeros(1)])
    low, high = float(numbers.min()), float(numbers.max())
    margin = max(0.02 * (high - low), 0.05)
    return np.linspace(low - margin, high + margin, BINS + 1)


def figures() -> dict[Path, Figure]:
    """Return the figure of conflict.md."""
    results = dict(Results(STUDY))
    if not results:
        return {}
    shown = {
        key: {name: run[name] for name in ("label", "task", "cosine", "norms", "weights")}
        for key, run in results.items()
    }
    return {figure_path(STUDY, "plots.svg"): Figure(shown, partial(plot, results))}


PAGES = {STUDY: page}
