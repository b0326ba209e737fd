"""The figures of the leaderboards: concept rate and attack success rate against the retain error.

Each method has its name at its point. A label stands at the free place nearest to its point: places
are tried from near to far, in a fixed order, and a line joins a label that stands apart.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.patheffects import withStroke

from studies.rendering.figures import Figure, canvas
from studies.rendering.marks import Mark, Panel

# Okabe and Ito's colours, distinct for colour-blind readers. Their yellow is too light on white.
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SHAPES = ("o", "s")
LABELS = {
    "concept_rate": "concept rate, %",
    "attack_success": "attack success rate, %",
    "retain_error": "retain error, %",
}
TICKS = (0, 1, 2, 5, 10, 20, 50, 100)
LINEAR = 1.0  # percent; the axes of concept rate and retain error are logarithmic above
GREY, TEXT = "#5f6b76", "#1c2329"
FONT = 8.5  # points
LETTERS = 34  # the longest line of a label
GAP = 3.0  # points, free room around labels and marks
DIRECTIONS = 16
DISTANCES = (5, 9, 14, 20, 28, 38, 50, 64, 80, 100, 120)  # points, from a mark to its label

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top; in points


def of(panel: Panel, columns: Sequence[str] | None = None) -> Figure:
    """Return the figure of a panel.

    Args:
        panel: The methods.
        columns: The columns against the retain error, one axis each. All by default.
    """
    shown_columns = list(columns or panel.columns())
    content = {"drawing": "names at their points", "columns": shown_columns, **panel.as_dict()}
    return Figure(content, partial(draw, panel, shown_columns))


def draw(panel: Panel, columns: Sequence[str]) -> Any:
    """Return the matplotlib figure of a panel."""
    figure = canvas(6.6 * len(columns), 5.6)
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    figure.suptitle(panel.title, fontsize=10, color=TEXT)
    for axis, column in zip(axes, columns, strict=True):
        _draw_marks(axis, panel, column)
    figure.draw_without_rendering()  # the axes have their final places from here on
    figure.set_layout_engine("none")
    for axis, column in zip(axes, columns, strict=True):
        write_names(axis, [*panel.marks, panel.original], column)
    return figure


def _draw_marks(axis: Any, panel: Panel, column: str) -> None:
    for number, mark in enumerate(panel.marks):
        color = OKABE_ITO[number % len(OKABE_ITO)]
        shape = SHAPES[number // len(OKABE_ITO) % len(SHAPES)]
        _draw_mark(axis, mark, column, fmt=shape, color=color, ms=6)
    _draw_mark(axis, panel.original, column, fmt="D", color=GREY, ms=7, mfc="white", mew=1.6)
    axis.plot(0, 0, marker="*", ms=12, color="white", mec=GREY, mew=1.4, clip_on=False, zorder=4)
    axis.annotate(
        "ideal", (0, 0), (11, 9), textcoords="offset points", fontsize=FONT, color=GREY, zorder=5
    )
    axis.set(xlabel=LABELS["retain_error"], ylabel=LABELS[column])
    axis.set_xscale("symlog", linthresh=LINEAR, linscale=0.5)
    if column == "concept_rate":
        axis.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
    every = [*panel.marks, panel.original]
    limits = [1.35 * max(mark.rates[c][2] for mark in every) for c in ("retain_error", column)]
    limits[1] = min(limits[1], 108 if column == "attack_success" else 135)
    for which, limit, all_ticks in (
        (axis.xaxis, limits[0], TICKS),
        (axis.yaxis, limits[1], TICKS if column == "concept_rate" else range(0, 101, 20)),
    ):
        ticks = [tick for tick in all_ticks if tick <= limit]
        which.set_ticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlim(0, limits[0])
    axis.set_ylim(0, limits[1])
    axis.grid(color="#e3e8ec", lw=0.6, zorder=0)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=TEXT, labelsize=FONT, pad=7, length=0)


def _draw_mark(axis: Any, mark: Mark, column: str, **style: Any) -> None:
    x, y = mark.rates["retain_error"], mark.rates[column]
    reach = [[[rate[0] - rate[1]], [rate[2] - rate[0]]] for rate in (x, y)]
    _, _, bars = axis.errorbar(
        x[0], y[0], xerr=reach[0], yerr=reach[1], elinewidth=0.9, zorder=3, **style
    )
    for bar in bars:
        bar.set(alpha=0.55, zorder=2)


def write_names(axis: Any, marks: Sequence[Mark], column: str) -> list[Any]:
    """Write the name of each mark near its point, so that no name covers a mark or a name."""
    points = [
        _in_points(axis, mark.rates["retain_error"][0], mark.rates[column][0]) for mark in marks
    ]
    inside = _box_of(axis.get_window_extent().padded(-4), axis)
    blocked = [_around(point, 5) for point in points]
    bars = [bar for mark in marks for bar in _bars(axis, mark, column)]
    blocked.append((inside[0] - 9, inside[1] - 9, inside[0] + 36, inside[1] + 20))  # the ideal
    texts = []
    crowded_first = sorted(range(len(marks)), key=lambda i: (-_crowd(points, i), i))
    for place in crowded_first:
        text = axis.annotate(
            textwrap.fill(marks[place].name, LETTERS),
            _value(marks[place], column),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=FONT,
            color=TEXT,
            ha="left",
            va="bottom",
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            zorder=6,
        )
        extent = _box_of(text.get_window_extent(), axis)
        size = (extent[2] - extent[0], extent[3] - extent[1])
        box, distance = _free_place(points[place], size, inside, _Obstacles(blocked, bars, points))
        offset = (box[0] - points[place][0], box[1] - points[place][1])
        text.set_position(offset)
        if distance > DISTANCES[1]:
            _join(axis, mark=marks[place], column=column, point=points[place], box=box)
        blocked.append(box)
        texts.append(text)
    return texts


class _Obstacles(NamedTuple):
    """What a label should not cover, in points."""

    boxes: Sequence[Box]  # first the marks, then labels
    bars: Sequence[Box]  # error bars
    points: Sequence[Point]  # the marks, which the line to a label should not pass


def _free_place(point: Point, size: Point, inside: Box, obstacles: _Obstacles) -> tuple[Box, float]:
    """Return the place of a label with the least overlap, the nearest of equal ones."""

    others = [other for other in obstacles.points if other != point]
    labels = obstacles.boxes[len(obstacles.points) :]
    best_cost, best = math.inf, next(_places(point, size))
    for box, distance in _places(point, size):
        cost = 0.2 * distance + 3 * _outside(box, inside)
        cost += 5 * sum(_overlap(box, other) for other in obstacles.boxes)
        cost += 0.3 * sum(_overlap(box, bar) for bar in obstacles.bars)
        own = math.dist(point, _nearest(point, box))
        cost += 60 * sum(math.dist(other, _nearest(other, box)) < own + 2 for other in others)
        if cost >= best_cost:
            continue
        cost += 60 * sum(_passes(point, box, _around(other, 6)) for other in others)
        cost += 60 * sum(_passes(point, box, label) for label in labels)
        if cost < best_cost:
            best_cost, best = cost, (box, distance)
    return best


def _passes(point: Point, box: Box, other: Box) -> bool:
    """Return whether the line from a mark to its label passes another box."""
    end = _nearest(point, box)
    steps = [step / 20 for step in range(21)]
    line = [tuple(a + step * (b - a) for a, b in zip(point, end, strict=True)) for step in steps]
    return any(other[0] < x < other[2] and other[1] < y < other[3] for x, y in line)


def _around(point: Point, radius: float) -> Box:
    """Return the square around a point."""
    return point[0] - radius, point[1] - radius, point[0] + radius, point[1] + radius


def _nearest(point: Point, box: Box) -> Point:
    """Return the point of a box that is nearest to a point."""
    x = min(max(point[0], box[0]), box[2])
    return x, min(max(point[1], box[1]), box[3])


def _places(point: Point, size: Point) -> Iterator[tuple[Box, float]]:
    """Yield the places of a label around a point, from near to far, to the right first."""
    width, height = size
    for distance in DISTANCES:
        for turn in range(DIRECTIONS):
            step = (turn + 1) // 2 * (1 if turn % 2 else -1)
            angle = 2 * math.pi * step / DIRECTIONS
            across, up = math.cos(angle), math.sin(angle)
            x = point[0] + across * distance + (across - 1) / 2 * width
            y = point[1] + up * distance + (up - 1) / 2 * height
            yield (x, y, x + width, y + height), distance


def _overlap(box: Box, other: Box) -> float:
    """Return the common area of two boxes, the first with a gap around it."""
    width = min(box[2] + GAP, other[2]) - max(box[0] - GAP, other[0])
    height = min(box[3] + GAP / 2, other[3]) - max(box[1] - GAP / 2, other[1])
    return max(width, 0.0) * max(height, 0.0)


def _outside(box: Box, inside: Box) -> float:
    """Return the area of a box that lies outside another one."""
    area = (box[2] - box[0]) * (box[3] - box[1])
    width = min(box[2], inside[2]) - max(box[0], inside[0])
    height = min(box[3], inside[3]) - max(box[1], inside[1])
    return area - max(width, 0.0) * max(height, 0.0)


def _join(axis: Any, mark: Mark, column: str, point: Point, box: Box) -> None:
    """Draw a thin line from a mark to the nearest point of its label."""
    end = _nearest(point, box)
    nearest = (end[0] - point[0], end[1] - point[1])
    axis.annotate(
        "",
        xy=_value(mark, column),
        xytext=nearest,
        textcoords="offset points",
        arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.6, "shrinkA": 0, "shrinkB": 3},
        zorder=2,
    )


def _crowd(points: Sequence[Point], place: int) -> int:
    """Return how many marks lie near a mark."""
    x, y = points[place]
    return sum(abs(x - a) < 70 and abs(y - b) < 14 for a, b in points) - 1


def _bars(axis: Any, mark: Mark, column: str) -> list[Box]:
    """Return the boxes of the error bars of a mark."""
    x, y = mark.rates["retain_error"], mark.rates[column]
    left, bottom = _in_points(axis, x[1], y[1])
    right, top = _in_points(axis, x[2], y[2])
    across, up = _in_points(axis, x[0], y[0])
    return [(left, up - 1, right, up + 1), (across - 1, bottom, across + 1, top)]


def _value(mark: Mark, column: str) -> tuple[float, float]:
    return mark.rates["retain_error"][0], mark.rates[column][0]


def _in_points(axis: Any, x: float, y: float) -> tuple[float, float]:
    across, up = axis.transData.transform((x, y)) * 72 / axis.figure.dpi
    return float(across), float(up)


def _box_of(extent: Any, axis: Any) -> Box:
    scale = 72 / axis.figure.dpi
    return extent.x0 * scale, extent.y0 * scale, extent.x1 * scale, extent.y1 * scale
