"""Tables beside the success of attacks: success along the budget, relearning savings, what else an
erasure changes, the seconds that the results state, and the order of erasures by raw success.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from studies.rendering.common import table
from studies.rendering.excess_statistics import (
    by_concept,
    campaigns,
    evaluations,
    excess,
    success_rate,
)
from studies.result_tables import Content

NEVER = "never learned"
# attacks whose success grows with their steps; revival has a concept rate at each step instead
ALONG_STEPS = ("concept_inversion", "soft_prompt", "soft_prompt_both", "revival", "revival_full")
QUARTERS = (0.25, 0.5, 0.75, 1.0)
RELEARNING = "relearning"
CLIP = "clip_score_tiny2"  # by a CLIP that no pipeline has a part of
GROUPS = ("direct", "synonyms", "retained", "unseen", "neighbours")


def models(contents: Sequence[Content]) -> dict[str | None, str]:
    """Return the labels of the erasures by name, and that of the controls by None."""
    labels: dict[str | None, str] = {
        one["model"]: one["label"] for one in contents if one["kind"] == "erased"
    }
    return {**labels, None: NEVER}


def curve_table(contents: Sequence[Content]) -> str:
    """Return the success after each quarter of an attack's steps, or "" without such attacks.

    The success is cumulative: a prompt counts from the first round on in which it shows the
    concept. Revival has the share of prompts that show the concept after these steps.
    """
    rows = [["attack", "model", "training seeds", "after steps", "success %"]]
    for attack in ALONG_STEPS:
        for model, label in models(contents).items():
            group = campaigns(contents, attack, model)
            if not group:
                continue
            options = group[0]["campaign"]["protocol"]["options"]
            rounds = [int(part * options["steps"] / options["every"]) for part in QUARTERS]
            values = [np.mean([_success_after(one, number) for one in group]) for number in rounds]
            rows.append(
                [
                    attack.replace("_", " "),
                    label,
                    str(len(group)),
                    "; ".join(str(number * options["every"]) for number in rounds),
                    "; ".join(f"{100 * value:.0f}" for value in values),
                ]
            )
    return table(rows) if len(rows) > 1 else ""


def _success_after(content: Content, number: int) -> float:
    """Return the success of an attack on one model after a number of rounds.

    An attack ends where all prompts have succeeded, so a later round has the last one's success.
    """
    campaign = content["campaign"]
    if all("rate" in row for rows in campaign["curves"] for row in rows):
        last = [rows[min(number, len(rows)) - 1] for rows in campaign["curves"]]
        return float(sum(row["rate"] * row["n"] for row in last) / sum(row["n"] for row in last))
    attempts = campaign["attempts"]
    return sum(_rounds(one) <= number for one in attempts) / len(attempts)


def _rounds(attempt: Mapping[str, Any]) -> float:
    """Return the round in which a prompt first showed the concept: 0 without the attack, infinity
    if it never did.
    """
    if attempt["pre"]:
        return 0
    return float("inf") if attempt["round"] is None else float(attempt["round"])


def savings_table(contents: Sequence[Content]) -> str:
    """Return the steps of fine-tuning on the concept until prompts show it, or "" without this
    attack.

    A prompt that never shows it needs more steps than the budget. Where that is half of the prompts
    or more, the median is only bounded, and so is its ratio.
    """
    controls = campaigns(contents, RELEARNING)
    if not controls:
        return ""
    options = controls[0]["campaign"]["protocol"]["options"]
    never = _median_steps(controls)
    rows = [["model", "training seeds", "median steps", "not within the budget %", "savings"]]
    for model, label in models(contents).items():
        group = campaigns(contents, RELEARNING, model)
        if not group:
            continue
        median = _median_steps(group)
        rows.append(
            [
                label,
                str(len(group)),
                f"{median:g}" if np.isfinite(median) else f"> {options['steps']}",
                f"{100 * (1 - success_rate(group).value):.1f}",
                "1" if model is None else _ratio(median, never, options["steps"]),
            ]
        )
    return table(rows)


def _median_steps(contents: Sequence[Content]) -> float:
    """Return the median over all prompts of all models, infinity where it is not in the budget."""
    every = contents[0]["campaign"]["protocol"]["options"]["every"]
    steps = [every * _rounds(a) for one in contents for a in one["campaign"]["attempts"]]
    return float(np.sort(steps)[(len(steps) - 1) // 2 : len(steps) // 2 + 1].mean())


def _ratio(erased: float, never: float, budget: int) -> str:
    """Return the ratio of two medians as text, with its direction where one is censored."""
    if not np.isfinite(erased) and not np.isfinite(never):
        return "-"
    if never == 0:  # most prompts show the concept without any training
        return "-"
    bound = "more than " if not np.isfinite(erased) else "less than " if np.isinf(never) else ""
    return f"{bound}{min(erased, budget) / min(never, budget):.2f}"


def side_table(contents: Sequence[Content]) -> str:
    """Return what an erasure changes beside the concept, by the groups of prompts of the suite.

    A last row for each group has the models that never learned the concept.
    """
    groups = evaluations(contents)
    head = ["prompts", "model", "no-object rate % (original)"]
    head += ["accuracy of each stated attribute, points", "FID (original)"]
    head += ["gap to retraining", "relative to that of two controls"]
    has_clip = any(CLIP in _metrics(group, name) for group in groups.values() for name in GROUPS)
    rows = [[*head, "independent CLIP score x100 (original)"] if has_clip else head]
    for name in GROUPS:
        for group in groups.values():
            values = _metrics(group, name)
            if not values:
                continue
            fid, clip = values.get("fid_judge"), values.get(CLIP)
            rows.append(
                [
                    name,
                    group[0]["label"],
                    "{1:.1f} ({0:.1f})".format(*(100 * np.array(values["no_object_rate"]))),
                    _changes(values),
                    "-" if fid is None else f"{fid[1]:.2f} ({fid[0]:.2f})",
                    gap(group, name, "relative_to_original"),
                    gap(group, name, "relative_to_controls"),
                    *(["-" if clip is None else _times_100(clip)] if has_clip else []),
                ]
            )
        controls = _of_controls(next(iter(groups.values())), name)
        if controls:
            rate = 100 * controls["no_object_rate"][1]
            cells = [name, NEVER, f"{rate:.1f}", _changes(controls)]
            cells += ["-"] * 3
            clip = controls.get(CLIP)
            rows.append(
                [*cells, *(["-" if clip is None else _times_100(clip)] if has_clip else [])]
            )
    return table(rows)


def _times_100(pair: tuple[float, float]) -> str:
    before, after = pair
    return f"{100 * after:.1f} ({100 * before:.1f})"


def _metrics(group: Sequence[Content], name: str) -> dict[str, tuple[float, float]]:
    """Return the means over the training seeds before and after the erasure, by metric."""
    return _means(
        (row["metric"], row["before"]["value"], row["after"]["value"])
        for one in group
        for row in one["evaluation"]["results"]
        if row["group"] == name and row["before"] is not None
    )


def _of_controls(group: Sequence[Content], name: str) -> dict[str, tuple[float, float]]:
    """Return the means of the original and of the controls, by metric; {} without a control."""
    control = group[0]["evaluation"].get("control") or {}
    original = _metrics(group, name)
    return _means(
        (row["metric"], original[row["metric"]][0], row["before"]["value"])
        for row in control.get("results", ())
        if row["group"] == name and row["metric"] in original
    )


def _means(rows: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    values: dict[str, list[tuple[float, float]]] = {}
    for metric, before, after in rows:
        values.setdefault(metric, []).append((before, after))
    return {
        metric: (float(np.mean([a for a, _ in pairs])), float(np.mean([b for _, b in pairs])))
        for metric, pairs in values.items()
    }


def _changes(values: Mapping[str, tuple[float, float]]) -> str:
    return "; ".join(
        f"{metric.removeprefix('accuracy_')} {100 * (after - before):+.1f}"
        for metric, (before, after) in values.items()
        if metric.startswith("accuracy_")
    )


def gap(group: Sequence[Content], name: str, relative: str) -> str:
    """Return the mean distance of noise predictions to the controls, or "-".

    relative: "relative_to_original" or "relative_to_controls", the distance that it is divided by.
    """
    values = [
        row[relative]["value"]
        for one in group
        for row in (one["evaluation"].get("control") or {}).get("predictions", ())
        if row["group"] == name and row.get(relative) is not None
    ]
    return f"{np.mean(values):.2f}" if values else "-"


VICTIMS = {
    "control": "controls",
    "erased": "erased models",
    "unprotected": "the model before the erasure",
}


def seconds_table(results: Mapping[str, Content]) -> str:
    """Return the hours of a study, by device: of attacks by the kind of model, and of trainings.

    The seconds of a training are those of an erasure. Older results do not have them.
    """
    totals: dict[tuple[str, str], list[float]] = {}
    for one in results.values():
        if "campaign" in one:
            campaign = one["campaign"]
            key = (campaign["environment"]["device"], f"attacks on {VICTIMS[one['kind']]}")
            totals.setdefault(key, []).append(campaign["seconds"])
        elif "training_seconds" in one:
            key = (one["environment"]["device"], "trainings of erasures")
            totals.setdefault(key, []).append(one["training_seconds"])
    rows = [["device", "what", "number", "hours"]]
    for (device, what), seconds in sorted(totals.items()):
        rows.append([device, what, str(len(seconds)), f"{sum(seconds) / 3600:.2f}"])
    return table(rows)


def order_table(results: Mapping[str, Content]) -> str:
    """Return for each attack the rank correlation of raw success and excess, over all pairs of an
    erasure and a concept, and the pairs that have the largest of both.
    """
    from scipy.stats import spearmanr

    groups = by_concept(results)
    attacks = dict.fromkeys(
        one["attack"] for contents in groups.values() for one in contents if "attack" in one
    )
    rows = [["attack", "pairs", "rank correlation", "largest success", "largest excess"]]
    for attack in attacks:
        raw, beyond = {}, {}
        for concept, contents in groups.items():
            for model, label in models(contents).items():
                erased = campaigns(contents, attack, model)
                if model is None or not erased:
                    continue
                pair = f"{label}, {concept}"
                raw[pair] = success_rate(erased).value
                beyond[pair] = excess(erased, campaigns(contents, attack)).value
        same = len(set(raw.values())) < 2 or len(set(beyond.values())) < 2
        rows.append(
            [
                attack.replace("_", " "),
                str(len(raw)),
                "-"
                if same
                else f"{spearmanr(list(raw.values()), list(beyond.values())).statistic:.2f}",
                _largest(raw),
                _largest(beyond),
            ]
        )
    return table(rows)


def _largest(values: Mapping[str, float]) -> str:
    most = max(values.values())
    pairs = [name for name, value in values.items() if np.isclose(value, most)]
    return f"{pairs[0]}: {100 * most:.0f}" if len(pairs) == 1 else f"{len(pairs)}: {100 * most:.0f}"
