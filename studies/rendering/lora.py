"""The page of the study `lora`: LoRA files at strengths, smaller, weighed by block, and together.

Intervals are Wilson's, 95 %, over the images of all training seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import yaml

from concept_eraser.concepts.bundled import VALUES as BY_ATTRIBUTE
from concept_eraser.evaluation.statistics import Interval, wilson
from studies.lora import CONTROL, PLAIN, RETAINED, STYLE, Row, rows_of
from studies.rendering.attacks import rate
from studies.rendering.common import notes, share, source, table
from studies.result_tables import STUDIES, Content, Results

STUDY = "lora"
COMMAND = f"python -m studies.lora studies/configs/{STUDY}.yaml"
ATTRIBUTE = {value: name for name, values in BY_ATTRIBUTE.items() for value in values}
NAMES = {CONTROL: "a model that never learned the concept"}
Runs = Sequence[Content]


def concept_rate(runs: Runs, concept: str) -> Interval | None:
    """Return the share of a concept's images that show it."""
    labels = [one for run in runs for one in run["predicted"][concept][ATTRIBUTE[concept]]]
    return wilson(labels.count(concept), len(labels)) if labels else None


def retain_accuracy(
    runs: Runs, prompts: Sequence[Any], attributes: Sequence[str] = tuple(BY_ATTRIBUTE)
) -> Interval | None:
    """Return the share of images of retain prompts with these attributes of the prompt."""
    right = [
        all(labels[name][i] == fields[name] for name in attributes)
        for run in runs
        for labels in [run["predicted"][RETAINED]]
        for i, fields in enumerate(prompts)
    ]
    return wilson(sum(right), len(right)) if right else None


def style_rate(runs: Runs, style: str) -> Interval | None:
    """Return the share of images in the style, of prompts that name no style."""
    labels = [one for run in runs for one in run["predicted"][PLAIN]["style"]]
    return wilson(labels.count(style), len(labels)) if labels else None


def _by_row(results: Results) -> dict[str, list[Content]]:
    rows: dict[str, list[Content]] = {}
    for run in results.values():
        rows.setdefault(run["row"], []).append(run)
    return rows


def _mean(runs: Runs, name: str, key: str) -> float:
    return float(np.mean([run["files"][name][key] for run in runs]))


def attacked(study: Content, results: Results) -> str:
    """Return the table of attack success rates, or "" without a result."""
    attacks = list(study["attacked"]["attacks"])
    lines = [["file", *(f"{name} %" for name in attacks)]]
    for row in [CONTROL, *study["attacked"]["rows"]]:
        some = [one for one in results.values() if one["row"] == row]
        cells = [
            rate([one for one in some if one["protocol"]["attack"] == name]) for name in attacks
        ]
        if some:
            lines.append([NAMES.get(row, row.replace("_", " ")), *cells])
    return table(lines) if len(lines) > 1 else ""


def page() -> str:
    study = yaml.safe_load((STUDIES / f"{STUDY}.yaml").read_text())
    measured = _by_row(Results(STUDY))
    rows = [row for row in rows_of(study) if row.name in measured]
    first, prompts = study["concepts"][0], measured["original"][0]["prompts"][RETAINED]

    def rates(runs: Runs, concepts: Sequence[str], *attributes: str) -> list[str]:
        return [
            *(share(concept_rate(runs, one)) for one in concepts),
            share(retain_accuracy(runs, prompts, attributes or tuple(BY_ATTRIBUTE))),
        ]

    def part(
        head: Sequence[str], chosen: Sequence[Row], cells: Callable[[Row, Runs], list[str]]
    ) -> str:
        return table([list(head), *(cells(row, measured[row.name]) for row in chosen)])

    alone = sorted(
        (row for row in rows if set(row.loras) <= {first} and not row.export),
        key=lambda row: row.loras.get(first, 0.0),
    )
    smaller = [row for row in rows if {"rank", "dtype"} & set(row.export)]
    weighed = [row for row in rows if "block_weights" in row.export]
    others = [row for row in rows if row not in [*alone, *smaller, *weighed]]
    whole = [row for row in alone if row.loras == {first: 1.0}]

    def small(row: Row, runs: Runs) -> list[str]:
        (kind, value), *_ = [*row.export.items(), ("rank", "64, trained, in fp32")]
        name = f"rank {value}" if kind == "rank" else str(value)
        size = f"{_mean(runs, first, 'file_bytes') / 1e6:.1f}"
        errors = [f"{_mean(runs, first, key):.3f}" for key in ("error", "rounding")]
        return [name, size, *errors, *rates(runs, [first])]

    def joint(row: Row, runs: Runs) -> list[str]:
        strengths = {value for name, value in row.loras.items() if name != STYLE}
        strength = f"{strengths.pop():g}" if strengths else "-"
        look = share(style_rate(runs, study["style"]["value"]))
        ends = rates(runs, study["concepts"], "shape", "color")
        return [" + ".join(row.loras) or "none", strength, *ends, look]

    ends = [f"concept rate, {first} %", "retain accuracy %"]
    every = [f"concept rate, {one} %" for one in study["concepts"]]
    under_attack = attacked(study, Results(STUDY).folder("attacks"))
    seeds = sorted({run["seed"] for runs in measured.values() for run in runs})
    return (
        "\n\n".join(
            [
                "# Erasing LoRAs: strengths, smaller files, block weights, several at once",
                f"{source(STUDY, COMMAND)}. Training seeds: {', '.join(map(str, seeds))}. Each "
                f"share has {study['images']} images of a training seed.",
                notes(STUDY),
                f"## Strengths: the LoRA of `erase {first}`",
                part(
                    ["strength", *ends],
                    alone,
                    lambda row, runs: [f"{row.loras.get(first, 0.0):g}", *rates(runs, [first])],
                ),
                "## Smaller files",
                part(
                    ["file", "MB", "relative error of the rank", "of the numbers", *ends],
                    [*whole, *smaller],
                    small,
                ),
                "## Block weights",
                part(
                    ["blocks of weight 0", *ends],
                    weighed,
                    lambda row, runs: [
                        row.name.removeprefix(f"{first}_without_").upper(),
                        *rates(runs, [first]),
                    ],
                ),
                "## Several at once",
                part(
                    [
                        "LoRAs",
                        "strength of the erasures",
                        *every,
                        "retain accuracy, shape and colour %",
                        f"{study['style']['value']}, of prompts without a style %",
                    ],
                    [*[row for row in alone if not row.loras], *whole, *others],
                    joint,
                ),
                *([f"## Attacks on the files\n\n{under_attack}"] if under_attack else []),
            ]
        )
        + "\n"
    )


PAGES: dict[str, Callable[[], str]] = {STUDY: page}
