"""Curves and scatter plots as inline SVG.

They follow the theme, can be replaced every second without a flicker, and need no library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from concept_eraser.storage.readers import MEGABYTE, read_lines
from concept_eraser.utils.errors import UserError

LOG = 64 * MEGABYTE  # largest size of a log to plot
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 390, 210, 60, 34, 26
Point = tuple[float, float]


def rows(path: Path, count: str) -> list[dict[str, Any]]:
    """Read the rows of a running job's log that have an integer under the key `count`.

    Returns [] if the log cannot be read.
    """
    try:
        return [row for row in read_lines(path, LOG) if isinstance(row.get(count), int)]
    except UserError:
        return []


def points(rows: Sequence[Mapping[str, Any]], x: str, *keys: str) -> list[Point]:
    """Return the finite numbers under a key, or a path of keys, of the rows, against `x`."""
    values = []
    for row in rows:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            values.append((float(row[x]), float(value)))
    return values


def curves(
    title: str,
    series: Mapping[str, Sequence[Point]],
    x: str,
    *,
    low: float | None = None,
    high: float | None = None,
    last: float | None = None,
    log: bool = False,
) -> str:
    """Plot lines against steps.

    Args:
        title: The title of the figure.
        series: The points of each line, by name.
        x: The label of the horizontal axis.
        low: The lower end of the vertical axis (default: from the values).
        high: The upper end of the vertical axis (default: from the values).
        last: The smallest right end of the horizontal axis.
        log: Use a logarithmic vertical axis. Values that are not positive are left out.

    Returns:
        The figure as HTML.
    """
    series = {
        name: [
            (a, math.log10(b) if log else b)
            for a, b in points
            if math.isfinite(b) and (b > 0 or not log)
        ]
        for name, points in series.items()
    }
    to_value = (lambda b: 10**b) if log else (lambda b: b)
    values = [b for points in series.values() for _, b in points]
    if not values:
        return (
            f'<figure class="ce-figure"><figcaption>{escape(title)}</figcaption><p '
            'class="ce-quiet">nothing yet</p></figure>'
        )
    bottom, top = _span(min(values), max(values))
    bottom, top = bottom if low is None else low, top if high is None else high
    right = max([a for points in series.values() for a, _ in points] + [last or 1])
    lines = []
    for i, (name, points) in enumerate(series.items()):
        path = " ".join(f"{_x(a, 0, right):.1f},{_y(b, bottom, top):.1f}" for a, b in _thin(points))
        dots = (
            f'<circle class="ce-s{i}" cx="{path.split(",")[0]}" cy="{path.split(",")[-1]}" r="3"/>'
            if len(points) == 1
            else ""
        )
        lines.append(f'<polyline class="ce-line ce-s{i}" points="{path}"/>{dots}')
        lines.append(
            (
                f'<text class="ce-key ce-s{i}" x="{LEFT + 4 + 150 * i}" y="15">● '
                f"{escape(name)} {to_value(points[-1][1]):.3g}</text>"
            )
            if points
            else ""
        )
    description = "; ".join(
        f"{name}: {len(points)} values, the last {to_value(points[-1][1]):.3g}"
        for name, points in series.items()
        if points
    )
    return _frame(
        title,
        description,
        content="".join(lines),
        x=x,
        x_range=(0, right),
        y_range=(bottom, top),
        to_value=to_value,
    )


def scatter(title: str, points: Sequence[tuple[str, float, float]], x: str, y: str) -> str:
    """Plot numbered points with a list of their names.

    Smaller x and larger y are better. The points that no other point beats on both axes are filled.
    """
    if not points:
        return (
            f'<figure class="ce-figure"><figcaption>{escape(title)}</figcaption><p '
            'class="ce-quiet">nothing measured yet</p></figure>'
        )
    x_range, y_range = (_percent([p[1] for p in points]), _percent([p[2] for p in points]))
    dots, names = [], []
    for i, (name, a, b) in enumerate(points, 1):
        best = not any((c <= a and d >= b) and (c < a or d > b) for _, c, d in points)
        px, py = _x(a, *x_range), _y(b, *y_range)
        dots.append(
            f"<g><title>{escape(name)}: {a:.1f}, {b:.1f}</title><circle "
            f'class="{"ce-best" if best else "ce-dot"}" cx="{px:.1f}" cy="{py:.1f}" '
            f'r="6"/><text class="ce-tick" x="{px + 9:.1f}" '
            f'y="{py + 4:.1f}">{i}</text></g>'
        )
        names.append(
            f"<li>{'<strong>' if best else ''}{escape(name)}{'</strong>' if best else ''} "
            f"<span>{a:.1f} / {b:.1f}</span></li>"
        )
    description = "; ".join(f"{name} {a:.1f}, {b:.1f}" for name, a, b in points)
    return (
        _frame(
            title, description, content="".join(dots), x=x, x_range=x_range, y_range=y_range, y=y
        )
        + f'<ol class="ce-names">{"".join(names)}</ol>'
    )


def _frame(
    title: str,
    description: str,
    content: str,
    x: str,
    x_range: Point,
    y_range: Point,
    y: str = "",
    to_value: Callable[[float], float] = float,
) -> str:
    """Draw axes with three ticks each around SVG content. `description` is for screen readers."""
    marks = []
    for share in (0, 0.5, 1):
        a = x_range[0] + share * (x_range[1] - x_range[0])
        b = y_range[0] + share * (y_range[1] - y_range[0])
        px, py = _x(a, *x_range), _y(b, *y_range)
        anchor = {0: "start", 0.5: "middle", 1: "end"}[share]
        marks.append(
            f'<text class="ce-tick" x="{px:.0f}" y="{HEIGHT - BOTTOM + 15}" '
            f'text-anchor="{anchor}">{a:.4g}</text>'
        )
        marks.append(
            f'<line class="ce-rule" x1="{LEFT}" x2="{WIDTH - 10}" y1="{py:.1f}" '
            f'y2="{py:.1f}"/><text class="ce-tick" x="{LEFT - 6}" y="{py + 4:.1f}" '
            f'text-anchor="end">{_short(to_value(b))}</text>'
        )
    axis = (
        f'<text class="ce-tick" x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 4}" '
        f'text-anchor="middle">{escape(x)}</text>'
    )
    y_label = f'<text class="ce-tick" x="{LEFT}" y="12">{escape(y)}</text>' if y else ""
    return (
        f'<figure class="ce-figure"><figcaption>{escape(title)}</figcaption><svg viewBox="0 '
        f'0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}. '
        f'{escape(description)}">{"".join(marks)}{axis}{y_label}{content}</svg></figure>'
    )


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (value - low) / (high - low or 1) * (WIDTH - LEFT - 12)


def _y(value: float, low: float, high: float) -> float:
    return (
        HEIGHT
        - BOTTOM
        - (min(max(value, low), high) - low) / (high - low or 1) * (HEIGHT - BOTTOM - TOP)
    )


def _span(low: float, high: float) -> Point:
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1
    return low - margin, high + margin


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def _percent(values: Sequence[float]) -> Point:
    low, high = _span(min(values), max(values))
    return max(low, min(0.0, min(values))), min(high, max(100.0, max(values)))


def _thin(points: Sequence[Point], most: int = 400) -> Sequence[Point]:
    return (
        points
        if len(points) <= most
        else [points[int(i * (len(points) - 1) / (most - 1))] for i in range(most)]
    )
