"""The page about several runs: erasure, preservation, attacks, and the commands to repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from concept_eraser.evaluation.suite import dumps
from concept_eraser.reporting import comparison_plots, control_tables, html, plots
from concept_eraser.reporting.control_tables import excess_rows, savings_rows
from concept_eraser.reporting.galleries import Album, ImageRenderer
from concept_eraser.reporting.html import Figure, figures
from concept_eraser.reporting.ranking import (
    MeasureColumn,
    columns,
    dominated_points,
    point,
    summary,
)
from concept_eraser.reporting.run_results import Entry, family_of, interval, labels, read_record
from concept_eraser.utils import rendering

EXCESS_COLUMNS = ("attack", "run", *control_tables.EXCESS_COLUMNS)
SAVINGS_COLUMNS = ("attack", "run", "control", "steps erased / never learned")


@dataclass(frozen=True)
class AttackSection:
    """The section of a page about attacks.

    Attributes:
        curves: one figure for each attack.
        costs: (attack, its family, run, cost in words).
        unlike: the attacks that are left out, on another model or for another concept.
        albums: the images of the attacks, if the page shows them in this section.
        excess: the cells of the excess recovery against controls, by EXCESS_COLUMNS.
        savings: the cells of the relearning savings, by SAVINGS_COLUMNS.
    """

    excess_columns: ClassVar[tuple[str, ...]] = EXCESS_COLUMNS
    savings_columns: ClassVar[tuple[str, ...]] = SAVINGS_COLUMNS

    curves: list[Figure]
    costs: list[tuple[str, str, str, str]]
    unlike: list[str]
    albums: list[Album]
    excess: list[list[str]] = field(default_factory=list)
    savings: list[list[str]] = field(default_factory=list)


def table(
    entries: Sequence[Entry],
) -> tuple[list[MeasureColumn], list[tuple[str, list[tuple[str, str]]]]]:
    """Return the columns, and the rows of (name, [(value, interval), ...]).

    The originals come first, then the runs.
    """
    measures = columns(entries)
    originals = {entry.content["models"]["before"]: entry for entry in entries}
    rows = [
        (f"before: {name.rsplit(' (', 1)[0]}", [c.text(c.cell(e, "before")) for c in measures])
        for name, e in originals.items()
    ]
    return measures, rows + [(e.name, [c.text(c.cell(e)) for c in measures]) for e in entries]


def pareto(entries: Sequence[Entry]) -> tuple[list[Figure], set[str]]:
    """Plot erasure against preservation, and name the dominated runs.

    There is no figure if one of the numbers is missing for a run.
    """
    points = [p for entry in entries if (p := point(entry))]
    if len(points) < len(entries):
        return [], set()
    values = [
        f"{p.name} {100 * p.erasure.value:.1f} and {100 * p.preservation.value:.1f}" for p in points
    ]
    alt = f"Erasure and retain accuracy of each run in percent: {'; '.join(values)}"
    figure = comparison_plots.pareto(points, point(entries[0], "before"))
    return figures(figure, alt), dominated_points(points)


def curves(entries: Sequence[Entry]) -> list[Figure]:
    """Plot one panel per attack."""
    panels = []
    for label in labels(entries):
        ends = []
        for entry in (entry for entry in entries if label in entry.attacks):
            if rate := interval(entry.attacks[label]["rates"].get("asr")):
                ends.append(f"{entry.name} {100 * rate.value:.0f} % at the end")
        alt = f"Attack success rate of {label} round by round: {'; '.join(ends)}"
        panels += figures(comparison_plots.attack_curves(entries, label), alt)
    return panels


def costs(entries: Sequence[Entry]) -> list[tuple[str, str, str, str]]:
    """List (attack, family, run, its cost in words) of each attack on each run."""
    rows = []
    for label in labels(entries):
        for entry in (entry for entry in entries if label in entry.attacks):
            attack = entry.attacks[label]
            parts = [f"{value:g} {unit}" for unit, value in attack["cost"].items()]
            cost = ", ".join([*parts, f"{attack['seconds']:g} s"])
            rows.append((label, family_of(attack), entry.name, cost))
    return rows


def controls(entries: Sequence[Entry]) -> tuple[list[list[str]], list[list[str]]]:
    """List the excess recovery and the relearning savings of the attacks that have a control."""
    excess, savings = [], []
    for label in labels(entries):
        for entry in (entry for entry in entries if label in entry.attacks):
            attack = entry.attacks[label]
            excess += [[label, entry.name, *row] for row in excess_rows(attack)]
            savings += [[label, entry.name, *row] for row in savings_rows(attack)]
    return excess, savings


def nudenet(entries: Sequence[Entry]) -> list[Figure]:
    """Plot NudeNet's counts of each forget group, if they were measured."""
    plots_of_groups = []
    for group in entries[0].groups("forget"):
        plots_of_groups += figures(
            comparison_plots.nudenet(entries, group),
            f"NudeNet's counts by class in {group}, before and after each run",
        )
    return plots_of_groups


def training(entry: Entry) -> list[Figure]:
    """Plot the conflict histograms and loss curves of a run with a log."""
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
    """Collect the commands that made and measured a run, its recipe and environments."""
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
    """Whether the runs were trained on different machines, whose seconds cannot be compared."""
    keys = ("device", "cpu_count", "threads", "platform")
    environments = [read_record(entry.folder, "environment.json") for entry in entries]
    return len({tuple(machine.get(k) for k in keys) for machine in environments if machine}) > 1


def attack_section(
    entries: Sequence[Entry], renderer: ImageRenderer | None = None
) -> AttackSection | None:
    """Make the section about attacks, or None if no run was attacked.

    renderer: generate the images of the attacks for this section.
    """
    if not any(entry.attacks or entry.unlike for entry in entries):
        return None
    unlike = [f"{name} in {entry.folder}" for entry in entries for name in entry.unlike]
    albums = [renderer.album(entry, groups=False) for entry in entries] if renderer else []
    excess, savings = controls(entries)
    return AttackSection(
        curves(entries),
        costs(entries),
        unlike=unlike,
        albums=albums,
        excess=excess,
        savings=savings,
    )


def render(entries: Sequence[Entry], renderer: ImageRenderer) -> str:
    """Render the whole page."""
    attribute, value = entries[0].concept
    measures, rows = table(entries)
    pareto_figures, dominated = pareto(entries)
    albums: list[Album] = [renderer.album(entry) for entry in entries]
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
        hiding=html.blur_note(any(entry.sensitive for entry in entries), renderer.show_sensitive),
        summary=summary(entries),
        columns=measures,
        rows=rows,
        refused=reasons,
        machines=_machines(entries),
        pareto=pareto_figures,
        dominated=[entry.name for entry in entries if entry.name in dominated],
        entries=entries,
        albums=albums,
        attacks=attack_section(entries),
        nudenet=nudenet(entries),
        training=[(entry.name, training(entry)) for entry in entries],
        repeat=[(entry, repeat(entry)) for entry in entries],
        protocol=dumps(content["protocol"]),
        protocol_hash=content["protocol_hash"],
    )
