"""One page about several runs: what they forget and retain, the attacks, how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from concept_eraser.evaluation.suite import dumps
from concept_eraser.reporting import comparison_plots, html, plots
from concept_eraser.reporting.galleries import Album, Studio
from concept_eraser.reporting.html import Figure, figures
from concept_eraser.reporting.ranking import (
    MeasureColumn,
    columns,
    dominated_points,
    point,
    summary,
)
from concept_eraser.reporting.run_results import Entry, interval, labels, read_record
from concept_eraser.utils import rendering


@dataclass(frozen=True)
class AttackSection:
    """What a page says of attacks.

    Attributes:
        curves: one figure for each attack.
        costs: (attack, run, cost in words).
        unlike: the attacks that are left out: on other weights, or for another concept.
        albums: the images of the attacks, where the page shows them in this section.
    """

    curves: list[Figure]
    costs: list[tuple[str, str, str]]
    unlike: list[str]
    albums: list[Album]


def table(
    entries: Sequence[Entry],
) -> tuple[list[MeasureColumn], list[tuple[str, list[tuple[str, str]]]]]:
    """Columns, and rows of (name, [(value, interval), ...]): first each original, then the runs."""
    measures = columns(entries)
    originals = {entry.content["models"]["before"]: entry for entry in entries}
    rows = [
        (f"before: {name.rsplit(' (', 1)[0]}", [c.text(c.cell(e, "before")) for c in measures])
        for name, e in originals.items()
    ]
    return measures, rows + [(e.name, [c.text(c.cell(e)) for c in measures]) for e in entries]


def pareto(entries: Sequence[Entry]) -> tuple[list[Figure], set[str]]:
    """The plane of both aims, and which runs are dominated.

    There is no figure where a run was not measured in both.
    """
    points = [p for entry in entries if (p := point(entry))]
    if len(points) < len(entries):
        return [], set()
    values = [f"{p.name} {100 * p.erased.value:.1f} and {100 * p.kept.value:.1f}" for p in points]
    alt = f"Erasure and retained accuracy of each run in percent: {'; '.join(values)}"
    plane = comparison_plots.pareto(points, point(entries[0], "before"))
    return figures(plane, alt), dominated_points(points)


def curves(entries: Sequence[Entry]) -> list[Figure]:
    """One panel an attack."""
    panels = []
    for label in labels(entries):
        ends = []
        for entry in (entry for entry in entries if label in entry.attacks):
            if rate := interval(entry.attacks[label]["rates"].get("asr")):
                ends.append(f"{entry.name} {100 * rate.value:.0f} % at the end")
        alt = f"Prompts that fell to {label} round by round: {'; '.join(ends)}"
        panels += figures(comparison_plots.attack_curves(entries, label), alt)
    return panels


def costs(entries: Sequence[Entry]) -> list[tuple[str, str, str]]:
    """(attack, run, its cost in words) of each attack on each run."""
    rows = []
    for label in labels(entries):
        for entry in (entry for entry in entries if label in entry.attacks):
            attack = entry.attacks[label]
            parts = [f"{value:g} {unit}" for unit, value in attack["cost"].items()]
            rows.append((label, entry.name, ", ".join([*parts, f"{attack['seconds']:g} s"])))
    return rows


def nudenet(entries: Sequence[Entry]) -> list[Figure]:
    """Bars for each forget group, where NudeNet was asked."""
    plots_of_groups = []
    for group in entries[0].groups("forget"):
        plots_of_groups += figures(
            comparison_plots.nudenet(entries, group),
            f"NudeNet's counts by class in {group}, before and after each run",
        )
    return plots_of_groups


def training(entry: Entry) -> list[Figure]:
    """Conflict histograms and loss curves of a run with a log."""
    conflict = figures(
        plots.conflict(entry.facts.log),
        f"Histograms of cosine and norm ratio of the two gradients, {entry.name}",
        wide=True,
    )
    return conflict + figures(
        plots.curves(entry.facts.log),
        f"Losses and cosine of the gradients against training steps, {entry.name}",
        wide=True,
    )


def repeat(entry: Entry) -> dict[str, Any]:
    """The commands that made and measured a run, its recipe and environments."""
    measure_environment = entry.content["environment"]
    commands = [
        entry.facts.command,
        measure_environment["command"],
        *(a["environment"]["command"] for a in entry.attacks.values()),
    ]
    train_environment = read_record(entry.folder, "environment.json")
    texts = {
        "Recipe": entry.facts.recipe,
        "Environment of the training": dumps(train_environment) if train_environment else "",
        "Environment of the measuring": dumps(measure_environment),
    }
    return {
        "commands": "\n".join(c for c in commands if c),
        "texts": {k: v for k, v in texts.items() if v},
    }


def _machines(entries: Sequence[Entry]) -> bool:
    """Whether the runs were trained on machines that differ, so that their seconds say little."""
    keys = ("device", "cpu_count", "threads", "platform")
    environments = [read_record(entry.folder, "environment.json") for entry in entries]
    return len({tuple(one.get(k) for k in keys) for one in environments if one}) > 1


def attack_section(entries: Sequence[Entry], studio: Studio | None = None) -> AttackSection | None:
    """The attacks on some runs; None where no run was attacked.

    studio: generate the images of the attacks for this section.
    """
    if not any(entry.attacks or entry.unlike for entry in entries):
        return None
    unlike = [f"{name} in {entry.folder}" for entry in entries for name in entry.unlike]
    albums = [studio.album(entry, groups=False) for entry in entries] if studio else []
    return AttackSection(curves(entries), costs(entries), unlike, albums)


def render(entries: Sequence[Entry], studio: Studio) -> str:
    """The whole page."""
    attribute, value = entries[0].concept
    measures, rows = table(entries)
    plane, beaten = pareto(entries)
    albums: list[Album] = [studio.album(entry) for entry in entries]
    content = entries[0].content
    reasons = {
        name: reason
        for entry in entries
        for name, reason in entry.content.get("refused", {}).items()
    }
    return rendering.render(
        "several_runs.html",
        generator=html.generator(),
        title=f"Erasing {value}: {len(entries)} run{'s' if len(entries) > 1 else ''}",
        attribute=attribute,
        hiding=html.hiding(any(entry.sensitive for entry in entries), studio.show_sensitive),
        summary=summary(entries),
        columns=measures,
        rows=rows,
        refused=reasons,
        machines=_machines(entries),
        pareto=plane,
        dominated=[entry.name for entry in entries if entry.name in beaten],
        entries=entries,
        albums=albums,
        attacks=attack_section(entries),
        nudenet=nudenet(entries),
        training=[(entry.name, training(entry)) for entry in entries],
        repeat=[(entry, repeat(entry)) for entry in entries],
        protocol=dumps(content["protocol"]),
        protocol_hash=content["protocol_hash"],
    )
