"""The boards' pictures: concept share and attack success against what is kept. Each PNG carries the numbers it was drawn from,
so that it is told to be old without being drawn again."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from concept_eraser.evaluation import plots
from concept_eraser.evaluation.statistics import wilson
from tools.rendering.ranks import Count, Standing

KEY = "points"
TICKS = (0, 1, 2, 5, 10, 20, 50, 100)
WIDE, HIGH = 11, 8  # of a number, in points
LINE = 70  # the longest line of a name, in letters
ACROSS, KEYS = 105, 12  # in such letters: how wide a panel is, and what a mark and the gaps beside it take
LABELS = {"share": "pictures that show the concept, %", "attacks": "attacks that bring it back, %"}


def points(standings: Sequence[Standing]) -> str:
    """What a plot shows, as text."""
    return json.dumps({one.name: {column: list(count) for column, count in one.columns.items()} for one in standings})


def is_current(path: Path, standings: Sequence[Standing]) -> bool:
    return path.exists() and Image.open(path).info.get(KEY) == points(standings)


def draw(standings: Sequence[Standing], path: Path) -> None:
    found = io.BytesIO()
    figure_of(standings).savefig(found, format="png", dpi=110, metadata={KEY: points(standings)})
    path.write_bytes(found.getvalue())


def figure_of(standings: Sequence[Standing]) -> Any:
    """The panels and, below both, the names, since a board has more methods than a panel has room; as many columns of them as
    the longest leaves room for, and the figure as much higher as they need."""
    columns = [name for name in LABELS if name in standings[0].columns]
    names = [textwrap.wrap(f"{number} {one.name}", LINE) for number, one in enumerate(standings, 1)]
    beside = max(1, min(4, ACROSS * len(columns) // (max(len(line) for name in names for line in name) + KEYS)))
    lines = -(-sum(len(name) for name in names) // beside)
    figure, axes = plots.new_figure(len(columns), width=6.4, height=5.4 + 0.14 * max(0, lines - 8))
    marks = [_panel(axis, standings, column) for axis, column in zip(axes, columns, strict=True)]
    handles, _ = axes[0].get_legend_handles_labels()
    figure.legend(handles, ["\n".join(name) for name in names], fontsize=7, loc="outside lower center", ncols=beside)
    figure.draw_without_rendering()  # from here on the axes lie where they will be seen
    for axis, places in zip(axes, marks, strict=True):
        _number(axis, places)
    return figure


def _panel(axis: Any, standings: Sequence[Standing], column: str) -> list[tuple[float, float]]:
    """One mark a method with its 95 % intervals; the methods that no other dominates are joined by a line. Returns the marks."""
    placed = {one.name: (_percent(one.columns["lost"]), _percent(one.columns[column])) for one in standings}
    best = {name for name, (x, y) in placed.items() if not any(u[0] <= x[0] and v[0] <= y[0] and (u[0], v[0]) != (x[0], y[0]) for u, v in placed.values())}  # fmt: skip
    for number, (name, (x, y)) in enumerate(placed.items(), 1):
        color = plots.SERIES[number % len(plots.SERIES)]
        axis.errorbar(x[0], y[0], xerr=[[x[1]], [x[2]]], yerr=[[y[1]], [y[2]]], fmt="o", color=color, mfc=color if name in best else "white", ms=6, lw=0.7, alpha=0.85, label=name)  # fmt: skip
    front = sorted((placed[name][0][0], placed[name][1][0]) for name in best)
    axis.step([x for x, _ in front], [y for _, y in front], where="post", color="#9aa7b1", lw=1, zorder=0)
    axis.set(xlabel="retained pictures that are no longer right, %", ylabel=LABELS[column], ylim=(-0.8, 130))
    axis.set_xscale("symlog", linthresh=1)
    axis.set_yscale("symlog", linthresh=5)
    most = 1.2 * max(x[0] + x[2] for x, _ in placed.values())
    ticks = [tick for tick in TICKS if tick <= most]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_yticks(TICKS, [str(tick) for tick in TICKS])
    axis.minorticks_off()
    axis.set_xlim(0, most)
    axis.grid(color="#e3e8ec", lw=0.6)
    return [(x[0], y[0]) for x, y in placed.values()]


def _number(axis: Any, marks: Sequence[tuple[float, float]]) -> None:
    """Write each mark's number beside it, or, where another number stands, the next free step above."""
    taken: list[tuple[float, float]] = []
    for number, (x, y) in sorted(enumerate(marks, 1), key=lambda one: one[1]):
        across, up = axis.transData.transform((x, y)) * 72 / axis.figure.dpi  # in points, as the font
        rise = 4
        while any(abs(across - a) < WIDE and abs(up + rise - b) < HIGH for a, b in taken):
            rise += 1
        taken.append((across, up + rise))
        color = plots.SERIES[number % len(plots.SERIES)]
        axis.annotate(str(number), (x, y), xytext=(5, rise), textcoords="offset points", fontsize=8, color=color)


def _percent(count: Count) -> tuple[float, float, float]:
    """A share with how far its Wilson interval reaches down and up, in percent."""
    found = wilson(*count)
    return 100 * found.value, 100 * (found.value - found.low), 100 * (found.high - found.value)
