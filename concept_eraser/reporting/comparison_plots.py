"""Figures of a page about several runs, narrow enough for a telephone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from concept_eraser.evaluation.statistics import Interval
from concept_eraser.reporting import plots
from concept_eraser.reporting.ranking import Point, dominated_points
from concept_eraser.reporting.run_results import Entry, interval

MARKS, _GREY = "osD^vPX*", "#808a93"


def run_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the colour and the mark of each run, the same in all figures.

    Runs also differ by their marks, for readers with a colour vision deficiency.
    """
    return {
        name: {"color": plots.SERIES[i % len(plots.SERIES)], "marker": MARKS[i % len(MARKS)]}
        for i, name in enumerate(names)
    }


def _bounds(interval: Interval) -> list[list[float]]:
    """Return the lengths of an error bar in percent, [2, 1]. They are 0 for missing bounds."""
    return [
        [100 * max(0.0, length if length == length else 0.0)]
        for length in (interval.value - interval.low, interval.high - interval.value)
    ]


def _legend(figure: Any, axes: Any) -> None:
    """Put the legend below the panel, where it hides nothing."""
    figure.legend(
        *axes.get_legend_handles_labels(),
        fontsize=9,
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )


def pareto(points: Sequence[Point], before: Point | None = None) -> bytes:
    """Plot erasure against preservation in percent, with 95 % intervals.

    Dominated runs are hollow and the original is grey. The first marks are the largest, so that
    equal runs do not hide each other.

    Returns:
        The figure as PNG.
    """
    figure, (axes,) = plots.new_figure(1, width=4.8, height=4.0)
    dominated = dominated_points(points)
    styles = run_styles([point.name for point in points])
    for i, point in enumerate(points):
        name, style = point.name, styles[point.name]
        fill = "white" if name in dominated else style["color"]
        axes.errorbar(
            100 * point.preservation.value,
            100 * point.erasure.value,
            _bounds(point.erasure),
            _bounds(point.preservation),
            fmt=style["marker"],
            color=style["color"],
            mfc=fill,
            ms=max(7, 13 - 2 * i),
            alpha=0.8,
            mew=1.6,
            lw=1,
            capsize=2,
            label=name + (" (dominated)" if name in dominated else ""),
        )
    if before is not None:
        axes.plot(
            100 * before.preservation.value,
            100 * before.erasure.value,
            "+",
            color=_GREY,
            ms=10,
            mew=2,
            label="before",
        )
    axes.margins(0.12)
    axes.set(
        title="Erasure and preservation, higher is better",
        xlabel="retain accuracy, %",
        ylabel="100 - concept rate, %",
    )
    axes.grid(color="#e3e8ec", lw=0.6)
    _legend(figure, axes)
    return plots.png(figure)


def success_rates(attack: Mapping[str, Any]) -> list[float]:
    """Return the attack success rate of all prompts after each round. Round 0 has no attack."""
    attempts, curves = attack["attempts"], attack["curves"]
    last = max((row["round"] for curve in curves for row in curve), default=0)
    clean = sum(attempt["pre"] for attempt in attempts)
    successes = [
        sum(max((row["fell"] for row in curve if row["round"] <= n), default=0) for curve in curves)
        for n in range(last + 1)
    ]
    return [(clean + count) / max(1, len(attempts)) for count in successes]


def attack_curves(entries: Sequence[Entry], label: str) -> bytes:
    """Plot the success rate of an attack against its rounds, one line per run.

    Returns:
        The figure with one panel as PNG.
    """
    figure, (axes,) = plots.new_figure(1, width=4.6, height=3.2)
    styles = run_styles([entry.name for entry in entries])
    lines = {
        entry.name: success_rates(entry.attacks[label])
        for entry in entries
        if label in entry.attacks
    }
    rounds = max(len(line) for line in lines.values())
    for i, (name, line) in enumerate(lines.items()):
        # extend the line of an attack that ended early because every prompt succeeded
        values = [100 * v for v in line] + [100 * line[-1]] * (rounds - len(line))
        axes.plot(
            range(rounds),
            values,
            **styles[name],
            ms=4,
            lw=1.4,
            markevery=(i, max(3, len(lines))),
            label=name,
            clip_on=False,
        )
    axes.set(
        title=label.replace("_", " "),
        xlabel="round",
        ylabel="attack success rate, %",
        ylim=(-3, 103),
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(color="#e3e8ec", lw=0.6)
    _legend(figure, axes)
    return plots.png(figure)


def nudenet_counts(entries: Sequence[Entry], group: str) -> dict[str, dict[str, int]]:
    """Return NudeNet's counts of a group by class, of the original ("before") and of each run.

    The record has means per image. Multiplied by n they are counts. A class without a record was
    not detected. Returns {} without counts.
    """
    prefix = _preset(entries)
    rows = {
        e.name: {
            r["metric"].removeprefix(prefix): r
            for r in e.content["results"]
            if r["group"] == group and r["metric"].startswith(prefix)
        }
        for e in entries
    }
    classes = [
        label
        for label in dict.fromkeys(label for counts in rows.values() for label in counts)
        if label not in ("nude", "all")
    ]

    def count(counts: dict[str, Any], label: str, when: str) -> int:
        value = interval(counts[label].get(when)) if label in counts else None
        return round(value.value * value.n) if value is not None else 0

    # a run does not record a class that was detected neither before nor after, so look for the
    # original's counts in all runs
    original = {
        label: max(count(counts, label, "before") for counts in rows.values()) for label in classes
    }
    after = {
        name: {label: count(counts, label, "after") for label in classes}
        for name, counts in rows.items()
    }
    return {"before": original, **after} if classes else {}


def _preset(entries: Sequence[Entry]) -> str:
    """Return the prefix of the metrics of the first NudeNet preset, e.g. "nudenet-strict_"."""
    metric_names = (
        r["metric"]
        for e in entries
        for r in e.content["results"]
        if r["metric"].startswith("nudenet")
    )
    return next(metric_names, "nudenet_").partition("_")[0] + "_"


def nudenet(entries: Sequence[Entry], group: str) -> bytes | None:
    """Plot the counts as bars. Returns the figure as PNG, or None without counts."""
    values = nudenet_counts(entries, group)
    if not values:
        return None
    settings = next(
        (r.get("settings") or {})
        for e in entries
        for r in e.content["results"]
        if r["metric"].startswith(_preset(entries))
    )
    return plots.counts(
        values, f"NudeNet, {group} (preset {settings.get('preset', '?')})", (_GREY, *plots.SERIES)
    )
