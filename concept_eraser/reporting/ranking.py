"""Comparison of several runs: the table's columns, the dominated runs, and a summary in words.

A difference is stated only where the 95 % intervals of two shares do not overlap. That is stricter
than a test at 5 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from concept_eraser.evaluation.statistics import Interval, interval_text
from concept_eraser.reporting.run_results import Entry, interval, labels

_DISTANCES = {"fid": ("FID", "lower"), "kid": ("KID", "lower"), "score": ("CLIP score", "higher")}


@dataclass(frozen=True)
class MeasureColumn:
    """One number of each run: a metric of a group; an attack's success rate (metric asr, group its
    label); or seconds.
    """

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
            return (
                interval(entry.attacks.get(self.group, {}).get("rates", {}).get("asr"))
                if when == "after"
                else None
            )
        return entry.value(self.metric, self.group, when)

    def text(self, interval: Interval | None) -> tuple[str, str]:
        """The value, and its interval (empty where it has none)."""
        if interval is not None and self.metric == "seconds":
            return f"{interval.value:.0f}", ""
        value, _, bounds = interval_text(interval, self.percent).partition(" ")
        return value, bounds


def columns(entries: Sequence[Entry]) -> list[MeasureColumn]:
    """The numbers that at least one run has, in order: forgotten, retained, attacked, cost."""
    first = entries[0]
    attribute, value = first.concept
    metrics = dict.fromkeys(r["metric"] for entry in entries for r in entry.content["results"])
    measures = [
        MeasureColumn(f"{value}, {g}", "concept_rate", g, True, "lower")
        for g in first.groups("forget")
    ]
    measures += [
        MeasureColumn(f"NudeNet, {g}", "nudenet_nude", g, True, "lower")
        for g in first.groups("forget")
    ]
    for role in ("neighbour", "retain"):
        measures += [
            MeasureColumn(f"{attribute}, {g}", f"accuracy_{attribute}", g, True, "higher")
            for g in first.groups(role)
        ]
    for metric in metrics:
        # clip_score, fid_judge, kid_inception
        kind, _, remainder = metric.removeprefix("clip_").partition("_")
        if kind in _DISTANCES:
            title, direction = _DISTANCES[kind]
            title += f" ({remainder.replace('_', ' ')})" if remainder else ""
            measures += [
                MeasureColumn(f"{title}, {g}", metric, g, False, direction)
                for g in first.groups("retain")
            ]
    measures += [
        MeasureColumn(f"attack {label.replace('_', ' ')}", "asr", label, True, "lower")
        for label in labels(entries)
    ]
    measures.append(MeasureColumn("training, s", "seconds"))
    return [column for column in measures if any(column.cell(entry) for entry in entries)]


@dataclass(frozen=True)
class Point:
    """A run in the plane of both aims, each a share, more being better."""

    name: str
    erased: Interval
    kept: Interval


def point(entry: Entry, when: str = "after") -> Point | None:
    """erased: one minus the worst forget group's share; kept: the retained accuracy. None where one
    was not measured.
    """
    concept_rate, retain_accuracy = entry.shown(when), entry.kept(when)
    if concept_rate is None or retain_accuracy is None:
        return None
    return Point(
        entry.name,
        Interval(
            1 - concept_rate.value, 1 - concept_rate.high, 1 - concept_rate.low, concept_rate.n
        ),
        retain_accuracy,
    )


def dominated_points(points: Sequence[Point]) -> set[str]:
    """The points that another one beats: at least as good in both, better in one. By the values,
    whatever the intervals.
    """

    def beats(one: Point, other: Point) -> bool:
        gains = (one.erased.value - other.erased.value, one.kept.value - other.kept.value)
        return min(gains) >= 0 and max(gains) > 0

    return {other.name for other in points if any(beats(one, other) for one in points)}


def leaders(intervals: Mapping[str, Interval], better: str) -> list[str]:
    """The best run, and the runs whose intervals overlap with its own, best first."""
    sign = 1 if better == "higher" else -1
    names = sorted(intervals, key=lambda name: -sign * intervals[name].value)
    best = intervals[names[0]]
    return [
        names[0],
        *(n for n in names[1:] if intervals[n].high >= best.low and intervals[n].low <= best.high),
    ]


def summary(entries: Sequence[Entry]) -> list[str]:
    """Sentences about erasure, retention and attacks, as far as the intervals allow."""
    attribute, value = entries[0].concept
    before = max((v.value for e in entries if (v := e.shown("before"))), default=None)
    sentences = []
    if before is not None and before < 0.5:
        sentences.append(
            f"The original hardly shows {value!r} itself ({before:.0%}), so nothing can "
            "be said about erasing it."
        )
    elif before is not None:
        sentences.append(
            f"The original shows {value!r} in {before:.0%} of the images that ask for it."
        )
        sentences.append(
            _rank(
                "erases most",
                {e.name: v for e in entries if (v := e.shown())},
                "lower",
                f"share of {value!r} in its worst group",
            )
        )
    sentences += [_smear_warning(entry) for entry in entries]
    sentences.append(
        _rank(
            "keeps most",
            {e.name: v for e in entries if (v := e.kept())},
            "higher",
            f"{attribute} as asked in retained prompts",
        )
    )
    sentences.append(_attack_sentence(entries, value))
    return [text for text in sentences if text]


def _rank(verb: str, intervals: Mapping[str, Interval], better: str, what: str) -> str:
    if not intervals:
        return ""
    first, *ties = leaders(intervals, better)
    if len(intervals) == 1:
        return f"{first}: {what} {interval_text(intervals[first], True)} %."
    if ties:
        names_text = ", ".join(
            f"{name} {interval_text(intervals[name], True)}" for name in (first, *ties)
        )
        return (
            f"No run {verb}: {'all' if len(ties) + 1 == len(intervals) else 'the best'} "
            f"intervals overlap ({what}, %: {names_text})."
        )
    names = sorted(intervals, key=lambda name: intervals[name].value, reverse=better == "higher")
    return (
        f"{first} {verb}: {what} {interval_text(intervals[first], True)} %, next {names[1]} "
        f"with {interval_text(intervals[names[1]], True)} %."
    )


def _smear_warning(entry: Entry) -> str:
    """A concept that is gone because nothing can be made out any more. A judge of nudity says none
    of what is not nude.
    """
    rates = {g: v for g in entry.groups("forget") if (v := entry.value("no_object_rate", g))}
    worst = max(rates, key=lambda group: rates[group].value, default=None)
    if worst is None or rates[worst].value <= 0.1 or entry.concept[0] == "nudity":
        return ""
    return (
        f"{entry.name} shows nothing clear in {interval_text(rates[worst], True)} % of the "
        f"images of {worst!r}."
    )


def _attack_sentence(entries: Sequence[Entry], value: str) -> str:
    sentences = []
    for entry in entries:
        rates = {
            label: rate
            for label, a in entry.attacks.items()
            if (rate := interval(a["rates"].get("asr")))
        }
        if rates:
            worst = max(rates, key=lambda label: rates[label].value)
            sentences.append(
                f"{interval_text(rates[worst], True)} % for {entry.name} "
                f"({worst.replace('_', ' ')}, worst of {len(rates)})"
            )
    return (
        (
            f"Attacked, {value!r} shows in this share of the prompts that were attacked: "
            f"{'; '.join(sentences)}."
        )
        if sentences
        else ""
    )
