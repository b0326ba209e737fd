"""One self-contained page about several runs: what they forget, what they keep, what attacks bring back, how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from concept_eraser.evaluation import overview_plots, pages, plots
from concept_eraser.evaluation.entries import Entry, interval, labels, recorded
from concept_eraser.evaluation.standing import Column, columns, dominated, point, summary
from concept_eraser.evaluation.suite import dumps
from concept_eraser.evaluation.triples import Album, Studio


@dataclass(frozen=True)
class Figure:
    """A picture as data, and what it shows for those who do not see it. wide: of several panels."""

    uri: str
    alt: str
    wide: bool = False


def _figure(content: bytes | None, alt: str, *, wide: bool = False) -> list[Figure]:
    """A figure, or none, as a list to be joined with others."""
    return [] if content is None else [Figure(pages.embed(content), alt, wide)]


def table(entries: Sequence[Entry]) -> tuple[list[Column], list[tuple[str, list[tuple[str, str]]]]]:
    """Columns, and rows of (name, [(value, interval), ...]): first each original, then the runs."""
    shown = columns(entries)
    originals = {entry.content["models"]["before"]: entry for entry in entries}
    rows = [(f"before: {told.rsplit(' (', 1)[0]}", [c.text(c.cell(e, "before")) for c in shown]) for told, e in originals.items()]  # fmt: skip
    return shown, rows + [(e.name, [c.text(c.cell(e)) for c in shown]) for e in entries]


def pareto(entries: Sequence[Entry]) -> tuple[list[Figure], set[str]]:
    """The plane of both aims, and which runs are dominated; no figure where a run was not measured in both."""
    points = [p for entry in entries if (p := point(entry))]
    if len(points) < len(entries):
        return [], set()
    told = "; ".join(f"{p.name} {100 * p.erased.value:.1f} and {100 * p.kept.value:.1f}" for p in points)
    alt = f"Erasure and retained accuracy of each run in percent: {told}"
    return _figure(overview_plots.pareto(points, point(entries[0], "before")), alt), dominated(points)


def curves(entries: Sequence[Entry]) -> list[Figure]:
    """One panel an attack."""
    ends = {label: {e.name: interval(e.attacks[label]["rates"].get("asr")) for e in entries if label in e.attacks} for label in labels(entries)}  # fmt: skip
    alts = {label: "; ".join(f"{name} {100 * rate.value:.0f} % at the end" for name, rate in rates.items() if rate) for label, rates in ends.items()}  # fmt: skip
    return [f for label, alt in alts.items() for f in _figure(overview_plots.attack_curves(entries, label), f"Prompts that fell to {label} round by round: {alt}")]  # fmt: skip


def costs(entries: Sequence[Entry]) -> list[tuple[str, str, str]]:
    """(attack, run, what it cost) of each attack on each run."""
    return [(label, e.name, ", ".join([*(f"{value:g} {what}" for what, value in a["cost"].items()), f"{a['seconds']:g} s"])) for label in labels(entries) for e in entries if (a := e.attacks.get(label))]  # fmt: skip


def nudenet(entries: Sequence[Entry]) -> list[Figure]:
    """Bars for each forget group, where NudeNet was asked."""
    found = []
    for group in entries[0].groups("forget"):
        found += _figure(overview_plots.nudenet(entries, group), f"NudeNet's counts by class in {group}, before and after each run")  # fmt: skip
    return found


def training(entry: Entry) -> list[Figure]:
    """Conflict histograms and loss curves of a run with a log."""
    conflict = _figure(plots.conflict(entry.facts.log), f"Histograms of cosine and norm ratio of the two gradients, {entry.name}", wide=True)  # fmt: skip
    return conflict + _figure(plots.curves(entry.facts.log), f"Losses and cosine of the gradients against training steps, {entry.name}", wide=True)  # fmt: skip


def repeat(entry: Entry) -> dict[str, Any]:
    """The commands that made and measured a run, its recipe and environments."""
    measured = entry.content["environment"]
    commands = [entry.facts.command, measured["command"], *(a["environment"]["command"] for a in entry.attacks.values())]  # fmt: skip
    made = recorded(entry.folder, "environment.json")
    texts = {"Recipe": entry.facts.recipe, "Environment of the training": dumps(made) if made else "", "Environment of the measuring": dumps(measured)}  # fmt: skip
    return {"commands": "\n".join(c for c in commands if c), "texts": {k: v for k, v in texts.items() if v}}


def _machines(entries: Sequence[Entry]) -> bool:
    """Whether the runs were trained on machines that differ, so that their seconds say little."""
    keys = ("device", "cpu_count", "threads", "platform")
    found = [recorded(entry.folder, "environment.json") for entry in entries]
    return len({tuple(one.get(k) for k in keys) for one in found if one}) > 1


def attacked(entry: Entry, studio: Studio) -> str:
    """The attack sections of a single report, as HTML; empty where the run was not attacked."""
    if not entry.attacks and not entry.unlike:
        return ""
    album = studio.album(entry, groups=False)
    return pages.render("attacks.html", entries=[entry], albums=[album], curves=curves([entry]), costs=costs([entry]), unlike=_unlike([entry]))  # fmt: skip


def _unlike(entries: Sequence[Entry]) -> list[str]:
    return [f"{name} in {entry.folder}" for entry in entries for name in entry.unlike]


def render(entries: Sequence[Entry], studio: Studio) -> str:
    """The whole page."""
    attribute, value = entries[0].concept
    shown, rows = table(entries)
    plane, beaten = pareto(entries)
    albums: list[Album] = [studio.album(entry) for entry in entries]
    content = entries[0].content
    refused = {name: reason for entry in entries for name, reason in entry.content.get("refused", {}).items()}
    return pages.render(
        "overview.html",
        generator=pages.generator(),
        style=pages.style(),
        title=f"Erasing {value}: {len(entries)} run{'s' if len(entries) > 1 else ''}",
        attribute=attribute,
        hiding=pages.hiding(any(entry.sensitive for entry in entries), studio.show_sensitive),
        summary=summary(entries),
        columns=shown,
        rows=rows,
        refused=refused,
        machines=_machines(entries),
        pareto=plane,
        dominated=[entry.name for entry in entries if entry.name in beaten],
        entries=entries,
        albums=albums,
        curves=curves(entries),
        costs=costs(entries),
        unlike=_unlike(entries),
        nudenet=nudenet(entries),
        training=[(entry.name, training(entry)) for entry in entries],
        repeat=[(entry, repeat(entry)) for entry in entries],
        protocol=dumps(content["protocol"]),
        protocol_hash=content["protocol_hash"],
    )
