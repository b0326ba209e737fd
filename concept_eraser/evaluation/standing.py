"""How several runs stand to each other: the table's columns, who is dominated, and what may be said in words.

Nobody is called better by a hair: of two shares whose 95 % intervals overlap neither wins. (That is stricter than a
test at 5 %, and needs none.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from concept_eraser.evaluation.entries import Entry, interval, labels
from concept_eraser.evaluation.report import show
from concept_eraser.evaluation.statistics import Interval

_DISTANCES = {"fid": ("FID", "lower"), "kid": ("KID", "lower"), "score": ("CLIP score", "higher")}


@dataclass(frozen=True)
class Column:
    """One number of each run: a metric of a group; an attack's success rate (metric asr, group its label); or seconds."""

    title: str
    metric: str
    group: str = ""
    percent: bool = False
    better: str = ""

    def cell(self, entry: Entry, when: str = "after") -> Interval | None:
        if self.metric == "seconds":
            seconds = entry.facts.seconds if when == "after" else None
            return None if seconds is None else Interval(seconds, float("nan"), float("nan"), 1)
        if self.metric == "asr":
            return interval(entry.attacks.get(self.group, {}).get("rates", {}).get("asr")) if when == "after" else None
        return entry.value(self.metric, self.group, when)

    def text(self, found: Interval | None) -> tuple[str, str]:
        """The value, and its interval (empty where it has none)."""
        if found is not None and self.metric == "seconds":
            return f"{found.value:.0f}", ""
        value, _, bounds = show(found, self.percent).partition(" ")
        return value, bounds


def columns(entries: Sequence[Entry]) -> list[Column]:
    """What at least one run has a number for, in the order in which it is read: forgotten, kept, attacked, paid."""
    first = entries[0]
    attribute, value = first.concept
    measured = dict.fromkeys(r["metric"] for entry in entries for r in entry.content["results"])
    asked = [Column(f"{value}, {g}", "concept_share", g, True, "lower") for g in first.groups("forget")]
    asked += [Column(f"NudeNet, {g}", "nudenet_nude", g, True, "lower") for g in first.groups("forget")]
    for role in ("neighbour", "retain"):
        asked += [Column(f"{attribute}, {g}", f"accuracy_{attribute}", g, True, "higher") for g in first.groups(role)]
    for metric in measured:
        kind, _, rest = metric.removeprefix("clip_").partition("_")  # clip_score, fid_judge, kid_inception
        if kind in _DISTANCES:
            title, better = _DISTANCES[kind]
            title += f" ({rest.replace('_', ' ')})" if rest else ""
            asked += [Column(f"{title}, {g}", metric, g, False, better) for g in first.groups("retain")]
    asked += [Column(f"attack {label.replace('_', ' ')}", "asr", label, True, "lower") for label in labels(entries)]
    asked.append(Column("training, s", "seconds"))
    return [column for column in asked if any(column.cell(entry) for entry in entries)]


@dataclass(frozen=True)
class Point:
    """A run in the plane of both aims, each a share, more being better."""

    name: str
    erased: Interval
    kept: Interval


def point(entry: Entry, when: str = "after") -> Point | None:
    """erased: one minus the worst forget group's share; kept: the retained accuracy. None where one was not measured."""
    shown, kept = entry.shown(when), entry.kept(when)
    if shown is None or kept is None:
        return None
    return Point(entry.name, Interval(1 - shown.value, 1 - shown.high, 1 - shown.low, shown.n), kept)


def dominated(points: Sequence[Point]) -> set[str]:
    """The points that another one beats: at least as good in both, better in one. By the values, whatever the intervals."""

    def beats(one: Point, other: Point) -> bool:
        gains = (one.erased.value - other.erased.value, one.kept.value - other.kept.value)
        return min(gains) >= 0 and max(gains) > 0

    return {other.name for other in points if any(beats(one, other) for one in points)}


def leaders(found: Mapping[str, Interval], better: str) -> list[str]:
    """The best run, and those whose intervals overlap with its own, best first."""
    sign = 1 if better == "higher" else -1
    ranked = sorted(found, key=lambda name: -sign * found[name].value)
    best = found[ranked[0]]
    return [ranked[0], *(n for n in ranked[1:] if found[n].high >= best.low and found[n].low <= best.high)]


def summary(entries: Sequence[Entry]) -> list[str]:
    """Plain sentences: who erases and who keeps most, as far as the intervals allow, and what attacks bring back."""
    attribute, value = entries[0].concept
    before = max((v.value for e in entries if (v := e.shown("before"))), default=None)
    said = []
    if before is not None and before < 0.5:
        said.append(f"The original hardly shows {value!r} itself ({before:.0%}), so nothing can be said about erasing it.")  # fmt: skip
    elif before is not None:
        said.append(f"The original shows {value!r} in {before:.0%} of the pictures that ask for it.")
        said.append(_ranked("erases most", {e.name: v for e in entries if (v := e.shown())}, "lower", f"share of {value!r} in its worst group"))  # fmt: skip
    said += [_smeared(entry) for entry in entries]
    said.append(_ranked("keeps most", {e.name: v for e in entries if (v := e.kept())}, "higher", f"{attribute} as asked in retained prompts"))  # fmt: skip
    said.append(_attacked(entries, value))
    return [text for text in said if text]


def _ranked(verb: str, found: Mapping[str, Interval], better: str, what: str) -> str:
    if not found:
        return ""
    first, *tied = leaders(found, better)
    if len(found) == 1:
        return f"{first}: {what} {show(found[first], True)} %."
    if tied:
        told = ", ".join(f"{name} {show(found[name], True)}" for name in (first, *tied))
        return f"No run {verb}: {'all' if len(tied) + 1 == len(found) else 'the best'} intervals overlap ({what}, %: {told})."  # fmt: skip
    ranked = sorted(found, key=lambda name: found[name].value, reverse=better == "higher")
    return f"{first} {verb}: {what} {show(found[first], True)} %, next {ranked[1]} with {show(found[ranked[1]], True)} %."  # fmt: skip


def _smeared(entry: Entry) -> str:
    """A concept that is gone because nothing can be made out any more. A judge of nudity says none of what is not nude."""
    found = {g: v for g in entry.groups("forget") if (v := entry.value("none_share", g))}
    worst = max(found, key=lambda group: found[group].value, default=None)
    if worst is None or found[worst].value <= 0.1 or entry.concept[0] == "nudity":
        return ""
    return f"{entry.name} shows nothing clear in {show(found[worst], True)} % of the pictures of {worst!r}."


def _attacked(entries: Sequence[Entry], value: str) -> str:
    told = []
    for entry in entries:
        rates = {label: rate for label, a in entry.attacks.items() if (rate := interval(a["rates"].get("asr")))}
        if rates:
            worst = max(rates, key=lambda label: rates[label].value)
            told.append(f"{show(rates[worst], True)} % for {entry.name} ({worst.replace('_', ' ')}, worst of {len(rates)})")  # fmt: skip
    return (
        f"Attacked, {value!r} shows in this share of the prompts that were attacked: {'; '.join(told)}." if told else ""
    )
