"""Figures without a display: conflict histograms, training curves, grids before and after."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from concept_eraser.storage.writers import write_bytes

_INK, _ACCENT, _SECOND = "#22303c", "#b3402f", "#2f6f9f"
# colours of several series, in order
SERIES = (_SECOND, _ACCENT, "#4b8b3b", "#8a5aa5", "#c98a1b", "#3aa6a0", "#7a6650", "#d0678c")


def new_figure(columns: int, width: float = 4.6, height: float = 2.9) -> Any:
    """Make a figure without a display, with its axes in one row. Sizes are inches per column."""
    return _figure(columns, width, height, layout="constrained")


def _training_figure(columns: int, width: float = 4.6, height: float = 2.9) -> Any:
    """Make a figure as `new_figure` does, with fixed margins.

    Every run draws such figures. A layout that measures the labels takes half of their time.
    """
    figure, axes = _figure(columns, width, height, layout=None)
    left, right, bottom, top = 0.65, 0.15, 0.55, 0.35  # inches
    figure.subplots_adjust(
        left=left / (width * columns),
        right=1 - right / (width * columns),
        bottom=bottom / height,
        top=1 - top / height,
        wspace=(left + right) / (width - left - right),
    )
    for axis in axes:
        axis.locator_params(nbins=6)
    return figure, axes


def _figure(
    columns: int, width: float, height: float, layout: Literal["constrained"] | None
) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def counts(
    counts_by_time: Mapping[str, Mapping[str, int]], title: str, colors: Sequence[str] = SERIES
) -> bytes:
    """Plot counts by name before and after, as horizontal bars (MUNBa's Fig. 3).

    Names without any count are left out.
    """
    names = [
        name
        for name in next(iter(counts_by_time.values()))
        if any(name_counts[name] for name_counts in counts_by_time.values())
    ]
    figure, axes = new_figure(
        1, width=6.4, height=1.4 + 0.2 * max(2, len(counts_by_time)) * max(1, len(names))
    )
    width = 0.8 / len(counts_by_time)
    for i, (when, name_counts) in enumerate(counts_by_time.items()):
        places = [j + (i - (len(counts_by_time) - 1) / 2) * width for j in range(len(names))]
        bars = axes[0].barh(
            places,
            [name_counts[name] for name in names],
            width,
            color=colors[i % len(colors)],
            label=when,
        )
        axes[0].bar_label(bars, padding=2)
    axes[0].set(
        title=title,
        yticks=range(len(names)),
        yticklabels=[n.lower().replace("_", " ") for n in names],
        xlabel="count",
    )
    axes[0].invert_yaxis()
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    # outside of the axes, because it would hide bars
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return png(figure)


def conflict(rows: Sequence[dict[str, Any]]) -> bytes | None:
    """Plot histograms of cos(g_r, g_f), the norm ratio, and the weighted norm ratio as PNG.

    The histograms are those of MUNBa's Fig. 1. Returns None for a log without two gradients.
    """
    two_gradient_rows = [
        r
        for r in rows
        if r.get("cosine") is not None and {"retain", "forget"} <= r.get("norms", {}).keys()
    ]
    return _draw_conflict(two_gradient_rows) if len(two_gradient_rows) >= 2 else None


def _draw_conflict(two_gradient_rows: Sequence[dict[str, Any]]) -> bytes:
    figure, axes = _training_figure(3)
    cosines = [r["cosine"] for r in two_gradient_rows]
    axes[0].hist(cosines, bins=30, histtype="stepfilled", color=_SECOND)
    axes[0].axvline(0, color=_INK, lw=0.8)
    axes[0].set(title="Cosine of the gradients", xlabel="cos(g_retain, g_forget)", ylabel="steps")
    norms = [r["norms"] for r in two_gradient_rows]
    _ratio(axes[1], norms, "Gradient norms", "|g_forget| / |g_retain|")
    weighted_norms = [
        {k: abs(r["norms"][k] * r["weights"][k]) for k in ("retain", "forget")}
        for r in two_gradient_rows
        if r.get("weights")
    ]
    _ratio(axes[2], weighted_norms, "Contribution to the step", "weighted |g_forget| / |g_retain|")
    return png(figure)


def _ratio(axis: Any, norms: Sequence[dict[str, float]], title: str, label: str) -> None:
    ratios = [
        n["forget"] / n["retain"] for n in norms if n["retain"] and n["forget"] and n["forget"] > 0
    ]
    if ratios:
        axis.hist(
            np.log10(ratios),
            bins=30,
            histtype="stepfilled",
            range=None if np.ptp(np.log10(ratios)) > 1e-6 else (-1, 1),
            color=_ACCENT,
        )
    axis.axvline(0, color=_INK, lw=0.8)
    axis.set(title=title, xlabel=f"log10 {label}", ylabel="steps")


def curves(rows: Sequence[dict[str, Any]]) -> bytes | None:
    """Plot the losses against the steps, and the cosine if there are two gradients, as PNG.

    Returns None without a log.
    """
    if not rows:
        return None
    has_cosine = any(r.get("cosine") is not None for r in rows)
    figure, axes = _training_figure(2 if has_cosine else 1)
    steps = [r["step"] for r in rows]
    for objective, color in (("retain", _SECOND), ("forget", _ACCENT)):
        values = [(r.get("losses") or {}).get(objective) for r in rows]
        if any(v is not None for v in values):
            axes[0].plot(
                steps,
                [np.nan if v is None else v for v in values],
                color=color,
                lw=1,
                label=objective,
            )
    axes[0].set(title="Losses", xlabel="step")
    axes[0].legend(frameon=False)
    if has_cosine:
        axes[1].plot(
            steps,
            [np.nan if r.get("cosine") is None else r["cosine"] for r in rows],
            color=_INK,
            lw=1,
        )
        axes[1].axhline(0, color=_INK, lw=0.5)
        axes[1].set(title="cos(g_retain, g_forget)", xlabel="step", ylim=(-1.05, 1.05))
    return png(figure)


def grid(before: Tensor, after: Tensor, columns: int, zoom: int = 2, gap: int = 2) -> bytes:
    """Arrange images [n, h, w, 3] uint8 in pairs of rows, before above after, as PNG."""
    return stack((before, after), columns, zoom, gap)


def stack(rows: Sequence[Tensor], columns: int, zoom: int = 2, gap: int = 2) -> bytes:
    """Arrange equally large sets of images [n, h, w, 3] uint8 one above the other, as PNG."""
    from PIL import Image

    n, height, width, _ = rows[0].shape
    lines = []
    for start in range(0, n, columns):
        for images in rows:
            line = np.full((height + gap, columns * (width + gap), 3), 255, np.uint8)
            for i, image in enumerate(images[start : start + columns].numpy()):
                line[:height, i * (width + gap) : i * (width + gap) + width] = image
            lines.append(line)
        lines.append(np.full((3 * gap, columns * (width + gap), 3), 255, np.uint8))
    sheet = Image.fromarray(np.concatenate(lines[:-1]))
    sheet = sheet.resize((sheet.width * zoom, sheet.height * zoom), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    sheet.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def save(content: bytes | None, path: Path) -> None:
    """Write a figure, if there is one. Raises the UserErrors of `writers.write_bytes`."""
    if content is not None:
        write_bytes(path, content)
