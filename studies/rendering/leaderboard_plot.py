"""The leaderboards' figures: concept rate and attack success against what is kept, a row of panels
for each task.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from concept_eraser.evaluation.statistics import wilson
from concept_eraser.reporting import plots
from studies.rendering.figures import Figure, canvas
from studies.rendering.ranks import Count, Standing

TICKS = (0, 1, 2, 5, 10, 20, 50, 100)
WIDE, HIGH = 11, 8  # of a number, in points
LINE = 70  # the longest line of a name, in letters
# in such letters: how wide a panel is, and what a mark and the gaps beside it take
ACROSS, KEYS = 105, 12
LABELS = {"share": "images that show the concept, %", "attacks": "attacks that bring it back, %"}


def of(tasks: Mapping[str, Sequence[Standing]]) -> Figure:
    """The figure of a leaderboard: of each task the standings of its methods."""
    content = {
        task: [[one.name, one.columns] for one in standings] for task, standings in tasks.items()
    }
    return Figure(content, partial(figure_of, tasks))


def figure_of(tasks: Mapping[str, Sequence[Standing]]) -> Any:
    """The rows of panels, one below the other, each with the names of its methods."""
    names = {
        task: [
            textwrap.wrap(f"{number} {one.name}", LINE) for number, one in enumerate(standings, 1)
        ]
        for task, standings in tasks.items()
    }
    columns = {
        task: [name for name in LABELS if name in standings[0].columns]
        for task, standings in tasks.items()
    }
    beside = {task: _names_beside(names[task], len(columns[task])) for task in tasks}
    lines = {task: -(-sum(len(name) for name in names[task]) // beside[task]) for task in tasks}
    heights = [5.4 + 0.14 * max(0, lines[task] - 8) for task in tasks]
    figure = canvas(6.4 * max(len(some) for some in columns.values()), sum(heights))
    rows = figure.subfigures(len(tasks), 1, height_ratios=heights, squeeze=False)[:, 0]
    marks = []
    for row, (task, standings) in zip(rows, tasks.items(), strict=True):
        axes = row.subplots(1, len(columns[task]), squeeze=False)[0]
        marks += [
            (axis, _panel(axis, standings, column))
            for axis, column in zip(axes, columns[task], strict=True)
        ]
        handles, _ = axes[0].get_legend_handles_labels()
        row.legend(
            handles,
            ["\n".join(name) for name in names[task]],
            fontsize=7,
            loc="outside lower center",
            ncols=beside[task],
        )
        if len(tasks) > 1:
            row.suptitle(task)
    figure.draw_without_rendering()  # from here on the axes lie where they will be seen
    for axis, places in marks:
        _number(axis, places)
    return figure


def _names_beside(names: Sequence[Sequence[str]], panels: int) -> int:
    """How many columns of names have room below the panels. A leaderboard has more methods than a
    panel has room.
    """
    return max(
        1, min(4, ACROSS * panels // (max(len(line) for name in names for line in name) + KEYS))
    )


def _panel(axis: Any, standings: Sequence[Standing], column: str) -> list[tuple[float, float]]:
    """One mark a method with its 95 % intervals; the methods that no other dominates are joined by
    a line. Returns the marks.
    """
    positions = {
        one.name: (_percent(one.columns["lost"]), _percent(one.columns[column]))
        for one in standings
    }
    best = {
        name
        for name, (x, y) in positions.items()
        if not any(
            u[0] <= x[0] and v[0] <= y[0] and (u[0], v[0]) != (x[0], y[0])
            for u, v in positions.values()
        )
    }
    for number, (name, (x, y)) in enumerate(positions.items(), 1):
        color = plots.SERIES[number % len(plots.SERIES)]
        axis.errorbar(
            x[0],
            y[0],
            xerr=[[x[1]], [x[2]]],
            yerr=[[y[1]], [y[2]]],
            fmt="o",
            color=color,
            mfc=color if name in best else "white",
            ms=6,
            lw=0.7,
            alpha=0.85,
            label=name,
        )
    front = sorted((positions[name][0][0], positions[name][1][0]) for name in best)
    axis.step(
        [x for x, _ in front], [y for _, y in front], where="post", color="#9aa7b1", lw=1, zorder=0
    )
    axis.set(
        xlabel="retained images that are no longer right, %",
        ylabel=LABELS[column],
        ylim=(-0.8, 130),
    )
    axis.set_xscale("symlog", linthresh=1)
    axis.set_yscale("symlog", linthresh=5)
    most = 1.2 * max(x[0] + x[2] for x, _ in positions.values())
    ticks = [tick for tick in TICKS if tick <= most]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_yticks(TICKS, [str(tick) for tick in TICKS])
    axis.minorticks_off()
    axis.set_xlim(0, most)
    axis.grid(color="#e3e8ec", lw=0.6)
    return [(x[0], y[0]) for x, y in positions.values()]


def _number(axis: Any, marks: Sequence[tuple[float, float]]) -> None:
    """Write each mark's number beside it, or, where another number stands, the next free step
    above.
    """
    positions: list[tuple[float, float]] = []
    for number, (x, y) in sorted(enumerate(marks, 1), key=lambda one: one[1]):
        # in points, as the font
        across, up = axis.transData.transform((x, y)) * 72 / axis.figure.dpi
        rise = 4
        while any(abs(across - a) < WIDE and abs(up + rise - b) < HIGH for a, b in positions):
            rise += 1
        positions.append((across, up + rise))
        color = plots.SERIES[number % len(plots.SERIES)]
        axis.annotate(
            str(number),
            (x, y),
            xytext=(5, rise),
            textcoords="offset points",
            fontsize=8,
            color=color,
        )


def _percent(count: Count) -> tuple[float, float, float]:
    """A share with how far its Wilson interval reaches down and up, in percent."""
    interval = wilson(*count)
    return (
        100 * interval.value,
        100 * (interval.value - interval.low),
        100 * (interval.high - interval.value),
    )
