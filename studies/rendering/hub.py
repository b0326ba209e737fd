"""The leaderboard's rows by the axes of HUB, the Holistic Unlearning Benchmark (arXiv 2410.05664).

HUB reports its axes apart, without a sum. docs/explanation/protocols.md states each axis, its form
here, and the axes that cannot be measured on the bundled model. All numbers are of the stored
results of the leaderboard; nothing is measured for this table alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from concept_eraser.evaluation.statistics import Interval, wilson
from studies.rendering.attacks import rate
from studies.rendering.common import mean, pool, ratio, results, share, table
from studies.rendering.leaderboard_rows import AttackRuns, Runs, attempts_of, order

FORGET_GROUPS = ("direct", "synonyms")
TEXT = (
    "[The axes of HUB](../../docs/explanation/protocols.md#hub) (arXiv 2410.05664) for the same "
    "models, attacks and images, one table a task, in the order of the tables above. Target "
    "proportion: images that show the concept, for direct prompts and synonyms. Pinpoint-ness: "
    "right images of neighbours of the concept. Selective alignment: the other attributes that "
    "prompts of the concept state, and that the image shows; the attributes are pooled. "
    "Adversarial: the attack success rate. Quality: the FID (judge) of retained images, after "
    "minus before. General alignment: the change of their CLIP score. Efficiency: seconds and "
    "memory of the training steps, and the size of the result. The multilingual axis, the "
    "aesthetic score, ImageReward and PickScore are not measured here."
)
HEAD = [
    "method",
    "target proportion %",
    "pinpoint-ness %",
    "selective alignment %",
    "adversarial %",
    "quality",
    "general alignment",
    "s",
    "MB",
    "size MB",
]


def section(
    leaderboard: Mapping[str, Any],
    every: Mapping[str, Runs],
    attacks: Mapping[str, AttackRuns],
    memory: Mapping[str, Runs],
) -> str:
    """Return the section with one table for each task of a leaderboard.

    Args:
        leaderboard: Its configuration.
        every: The reported runs, by entry.
        attacks: The attacks on them, by entry.
        memory: Their memory, by entry.
    """
    names = [name for name in leaderboard["attacks"] if name != "relearning"]
    parts = []
    for task in leaderboard["tasks"]:
        of_task = {name: runs for name, runs in every.items() if runs[0]["task"] == task}
        best_first = sorted(
            of_task, key=lambda name: order(of_task[name], attacks.get(name, {}), names)
        )
        rows = [
            row(of_task[name], attacks.get(name, {}), memory.get(name, []), names)
            for name in best_first
        ]
        if rows:
            parts.append(f"### HUB: {task}\n\n{table([HEAD, *rows])}")
    return "\n\n".join(["## By the axes of HUB", TEXT, *parts]) if parts else ""


def row(runs: Runs, attacks: AttackRuns, memory: Runs, names: Sequence[str]) -> list[str]:
    """Return the row of a method on a task.

    Args:
        runs: The reported runs, one a training seed.
        attacks: The attacks on them.
        memory: Their memory.
        names: The attacks that count.
    """
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))
    fid = [mean(runs, "fid_judge", "retained", when) for when in ("before", "after")]
    seconds = [run["run"].get("cpu_seconds", run["run"]["seconds"]) for run in runs]
    return [
        runs[0]["label"],
        share(_pooled(runs, [("concept_rate", group) for group in FORGET_GROUPS])),
        share(pool(runs, f"accuracy_{attribute}", "neighbours")),
        share(selective_alignment(runs)),
        rate([{"attempts": attempts_of(attacks, list(names))}]),
        f"{fid[1] - fid[0]:+.1f}",
        f"{ratio(runs, 'clip_score', 'retained'):+.1f} %",
        f"{sum(seconds) / len(seconds):.0f}",
        f"{memory[0]['steps_mb']:.0f}" if memory else "-",
        f"{runs[0]['size_mb']:.1f}" if "size_mb" in runs[0] else "-",
    ]


def selective_alignment(runs: Runs) -> Interval | None:
    """Return the share of the other attributes that images of the concept's prompts show.

    Only attributes that the prompt states count. All of them are pooled, over both forget groups.
    None if there is none.
    """
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))
    others = [
        (result["metric"], result["group"])
        for result in runs[0]["evaluation"]["results"]
        if result["metric"].startswith("accuracy_")
        and result["metric"] != f"accuracy_{attribute}"
        and result["group"] in FORGET_GROUPS
    ]
    return _pooled(runs, others)


def _pooled(runs: Runs, measured: Sequence[tuple[str, str]]) -> Interval | None:
    """Return the rate over the images of all seeds, metrics and groups, with a Wilson interval."""
    values = [
        found["after"]
        for run in runs
        for metric, group in measured
        if (found := results(run, metric, group))
    ]
    if not values:
        return None
    return wilson(
        sum(round(value["value"] * value["n"]) for value in values),
        sum(value["n"] for value in values),
    )
