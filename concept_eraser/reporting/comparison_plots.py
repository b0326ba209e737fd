"""Figures of a page about several runs, narrow enough to be read on a telephone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from concept_eraser.evaluation.statistics import Interval
from concept_eraser.reporting import plots
from concept_eraser.reporting.ranking import Point, dominated_points
from concept_eraser.reporting.run_results import Entry, interval

MARKS, _GREY = "osD^vPX*", "#808a93"


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and mark of each run, the same in all figures. Marks differ too, for those who do not
    tell colours apart.
    """
    return {
        name: {"color": plots.SERIES[i % len(plots.SERIES)], "marker": MARKS[i % len(MARKS)]}
        for i, name in enumerate(names)
    }


def _bounds(interval: Interval) -> list[list[float]]:
    """Lengths of the error bar in percent, [2, 1]; none for an interval that is not there."""
    return [
        [100 * max(0.0, length if length == length else 0.0)]
        for length in (interval.value - interval.low, interval.high - interval.value)
    ]


def _legend(figure: Any, axes: Any) -> None:
    """Below the panel, where it hides nothing."""
    figure.legend(
        *axes.get_legend_handles_labels(),
        fontsize=9,
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )


def pareto(points: Sequence[Point], before: Point | None = None) -> bytes:
    """Erasure against preservation in percent with 95 % intervals, dominated runs hollow, the
    original grey, as PNG. The first marks are the largest, so that equal runs do not hide each
    other."""
    figure, (axes,) = plots.new_figure(1, width=4.8, height=4.0)
    beaten = dominated_points(points)
    style = looks([one.name for one in points])
    for i, one in enumerate(points):
        name, look = one.name, style[one.name]
        inside = "white" if name in beaten else look["color"]
        axes.errorbar(
            100 * one.kept.value,
            100 * one.erased.value,
            _bounds(one.erased),
            _bounds(one.kept),
            fmt=look["marker"],
            color=look["color"],
            mfc=inside,
            ms=max(7, 13 - 2 * i),
            alpha=0.8,
            mew=1.6,
            lw=1,
            capsize=2,
            label=name + (" (dominated)" if name in beaten else ""),
        )
    if before is not None:
        axes.plot(
            100 * before.kept.value,
            100 * before.erased.value,
            "+",
            color=_GREY,
            ms=10,
            mew=2,
            label="before",
        )
    axes.margins(0.12)
    axes.set(
        title="Up: forgets more. Right: keeps more",
        xlabel="retained accuracy, %",
        ylabel="100 - share of the concept, %",
    )
    axes.grid(color="#e3e8ec", lw=0.6)
    _legend(figure, axes)
    return plots.png(figure)


def fallen(attack: Mapping[str, Any]) -> list[float]:
    """Share of all prompts that have shown the concept after each round. Round 0 holds clean
    images.
    """
    attempts, curves = attack["attempts"], attack["curves"]
    last = max((row["round"] for curve in curves for row in curve), default=0)
    clean = sum(attempt["pre"] for attempt in attempts)
    shares = [
        sum(max((row["fell"] for row in curve if row["round"] <= n), default=0) for curve in curves)
        for n in range(last + 1)
    ]
    return [(clean + fell) / max(1, len(attempts)) for fell in shares]


def attack_curves(entries: Sequence[Entry], label: str) -> bytes:
    """One panel: share of prompts that fell against the rounds of an attack, one line a run, as
    PNG.
    """
    figure, (axes,) = plots.new_figure(1, width=4.6, height=3.2)
    style = looks([entry.name for entry in entries])
    lines = {
        entry.name: fallen(entry.attacks[label]) for entry in entries if label in entry.attacks
    }
    rounds = max(len(line) for line in lines.values())
    for i, (name, line) in enumerate(lines.items()):
        # ended early: nobody was left
        whole = [100 * v for v in line] + [100 * line[-1]] * (rounds - len(line))
        axes.plot(
            range(rounds),
            whole,
            **style[name],
            ms=4,
            lw=1.4,
            markevery=(i, max(3, len(lines))),
            label=name,
            clip_on=False,
        )
    axes.set(
        title=label.replace("_", " "), xlabel="round", ylabel="prompts that fell, %", ylim=(-3, 103)
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(color="#e3e8ec", lw=0.6)
    _legend(figure, axes)
    return plots.png(figure)


def nudenet_counts(entries: Sequence[Entry], group: str) -> dict[str, dict[str, int]]:
    """NudeNet's counts of a group by class: of the original ("before") and of each run. {} where
    nothing was counted.

    Recorded are means an image, which are counts again when multiplied by n; a class that is not
    recorded was not seen.
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

    # a run in which a class was seen neither before nor after does not record it, so any run may
    # know the original's
    original = {
        label: max(count(counts, label, "before") for counts in rows.values()) for label in classes
    }
    after = {
        name: {label: count(counts, label, "after") for label in classes}
        for name, counts in rows.items()
    }
    return {"before": original, **after} if classes else {}


def _preset(entries: Sequence[Entry]) -> str:
    """How NudeNet's metrics begin, of the first preset that was asked for: "nudenet_",
    "nudenet-strict_".
    """
    metric_names = (
        r["metric"]
        for e in entries
        for r in e.content["results"]
        if r["metric"].startswith("nudenet")
    )
    return next(metric_names, "nudenet_").partition("_")[0] + "_"


def nudenet(entries: Sequence[Entry], group: str) -> bytes | None:
    """The counts as bars, as PNG; None where nothing was counted."""
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
