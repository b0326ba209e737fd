"""The result of `make quickstart` in the README: its numbers and a figure, from one JSON file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from concept_eraser.evaluation.statistics import Interval
from studies.rendering.common import results, share
from studies.rendering.figures import Figure, canvas
from studies.rendering.leaderboard_plot import OKABE_ITO
from studies.result_tables import ROOT, TABLES

FILE = TABLES / "quickstart.json"
FIGURE = ROOT / "docs" / "quickstart.svg"
ROWS = (
    ("concept_rate", "direct"),
    ("concept_rate", "synonyms"),
    ("no_object_rate", "direct"),
    ("accuracy_shape", "neighbours"),
    ("accuracy_shape", "retained"),
    ("accuracy_color", "retained"),
)


def block() -> str:
    """Return what the command printed: six rows, the verdict and the seconds."""
    facts = json.loads(FILE.read_text())
    lines = ["metric            group         before                after                 n"]
    for metric, group, row in _rows(facts):
        cells = (share(Interval(**row[when])) for when in ("before", "after"))
        lines.append(
            f"{metric:<17} {group:<13} "
            + "".join(f"{cell:<22}" for cell in cells)
            + str(row["after"]["n"])
        )
    seconds = facts["seconds"]
    times = (
        f"erasing {seconds['erasing']:.0f} s (of which training {seconds['training']:.0f} s), "
        f"measuring {seconds['measuring']:.0f} s"
    )
    if "installing" in seconds:
        times += f"; installing took {seconds['installing']:.0f} s, once"
    return "```text\n" + "\n".join([*lines, "...", facts["verdict"], "", times]) + "\n```"


def _rows(facts: Any) -> list[tuple[str, str, Any]]:
    rows = [(metric, group, results(facts, metric, group)) for metric, group in ROWS]
    return [row for row in rows if row[2]]


def figures() -> dict[Path, Figure]:
    """Return the figure of the README."""
    rows = _rows(json.loads(FILE.read_text()))
    content = [
        [f"{metric.replace('_', ' ')}, {group}", *(_values(row[when]) for when in WHEN)]
        for metric, group, row in rows
    ]
    return {FIGURE: Figure(content, partial(_draw, content))}


WHEN = ("before", "after")


def _values(interval: Any) -> list[float]:
    return [100 * interval[key] for key in ("low", "value", "high")]


def _draw(content: list[Any]) -> Any:
    """Draw each share as a point with its interval, before and after, in percent."""
    figure = canvas(7.5, 3.0)
    axes = figure.add_subplot()
    for place, (_, *intervals) in enumerate(content):
        for (low, value, high), when, offset in zip(intervals, WHEN, (-0.14, 0.14), strict=True):
            color = OKABE_ITO[0] if when == "before" else OKABE_ITO[1]
            axes.plot([low, high], [place + offset] * 2, color=color, linewidth=1.5)
            axes.plot(
                value,
                place + offset,
                "o",
                color=color,
                markerfacecolor="white" if when == "before" else color,
                label=when if place == 0 else None,
            )
    axes.set_yticks(range(len(content)), [name for name, *_ in content])
    axes.invert_yaxis()
    axes.set_xlim(-2, 102)
    axes.set_xlabel("share of images, %")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure
