"""What a second judge detects in the images of an evaluation, for studies with a `second_judge`.

The second judge selects nothing, and no attack uses it. It labels the same images as the suite's
judge. The images come from the cache, or are generated again from their prompts and seeds. Those of
an attack are labelled while it runs. A result has counts of images, so that rates over several
training seeds can be computed from it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from concept_eraser.data import generate
from concept_eraser.data.images import read_image
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks.runner import Campaign
from concept_eraser.models.base import Model
from concept_eraser.reporting import plots
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from studies.result_tables import Content

STAGES = ("before", "after")
COLUMNS, ROWS = 8, 2  # of a sheet


def count_pairs(first: np.ndarray, second: np.ndarray) -> dict[str, int]:
    """Return how many images have a property by both judges, by one of them, and by neither.

    Args:
        first: Whether each image has it by the first judge, [n] bool.
        second: The same by the second judge, [n] bool.
    """
    return {
        "both": int((first & second).sum()),
        "first_only": int((first & ~second).sum()),
        "second_only": int((~first & second).sum()),
        "neither": int((~first & ~second).sum()),
    }


def count_attacked(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return `count_pairs` of the concept for the images that decided an attack.

    They are the image that broke each attacked prompt, or the last one.

    Args:
        outcomes: The outcomes of an attack whose suite has a second judge.
    """
    rows = [row for row in outcomes if "second_shows_concept" in row]
    first, second = (
        np.array([row[name] for row in rows], bool)
        for name in ("shows_concept", "second_shows_concept")
    )
    return count_pairs(first, second)


def draw_differing(campaign: Campaign, path: Path) -> None:
    """Write a sheet of the images of an attack in which the first judge alone sees the concept.

    They are the first ones of COLUMNS x ROWS at most, in the order of the prompts. Without such an
    image no file is written.

    Args:
        campaign: The attack, with a second judge and stored images.
        path: The WebP file. It is replaced.
    """
    positions = {(a.prompt, a.seed): number for number, a in enumerate(campaign.attempts)}
    differing = [
        positions[row["prompt"], row["seed"]]
        for row in campaign.outcomes
        if row["stage"] == "attack" and row["shows_concept"] and not row["second_shows_concept"]
    ]
    paths = [campaign.images[number] for number in sorted(differing)[: COLUMNS * ROWS]]
    if paths:
        images = torch.stack([torch.tensor(read_image(one)) for one in paths])
        rows = [images[i : i + COLUMNS] for i in range(0, len(images), COLUMNS)]
        sheet = Image.open(io.BytesIO(plots.stack(rows, COLUMNS)))
        sheet.convert("RGB").save(path, "webp", quality=80, method=6)


def settings_of(suite: suites.Suite, original: Model, model: Model) -> Content:
    """Return what determines a comparison: the suite, both models and both judges.

    Raises:
        UserError: A judge is unknown.
    """
    second_judge = suite.build_second_judge()
    return {
        "model": generate.model_fingerprint(model),
        "original": generate.model_fingerprint(original),
        "suite": provenance.fingerprint(suite.model_dump(mode="json")),
        "judge": suite.build_judge().fingerprint,
        "second_judge": None if second_judge is None else second_judge.fingerprint,
    }


def compare(suite: suites.Suite, original: Model, model: Model) -> Content:
    """Return the counts of both judges for each group of prompts, before and after an erasure.

    Args:
        suite: The suite, with a second judge.
        original: The model before the erasure.
        model: The erased model.

    Returns:
        `judges` has the judges. `groups` has for each group its `role`, and for each stage:
        `concept`, the counts of `count_pairs` for the concept; `stated`, those for the value that
        the prompt states for the concept's attribute, over the prompts that state one that both
        judges know; `same_label` and `n`, the images to which both judges give the same label of
        this attribute, and all images.

    Raises:
        UserError: The suite has no second judge, or a judge does not know the concept.
    """
    first_judge, second_judge = suite.build_judge(), suite.build_second_judge()
    evaluation = suites.evaluate(original, model, suite.using(metrics=[]))
    opinion = evaluation.second_opinion
    if opinion is None or second_judge is None:
        raise UserError("the suite has no second judge; give one with `second_judge`")
    ((attribute, value),) = suite.concept.items()
    known = [
        one for one in first_judge.classes[attribute] if one in second_judge.classes[attribute]
    ]
    groups: Content = {}
    for name, group in evaluation.groups.items():
        expected = [prompt.fields.get(attribute, "") for prompt in group.prompts]
        groups[name] = {"role": group.role} | {
            stage: _count(
                np.asarray(group.labels[stage][attribute], str),
                np.asarray(opinion.labels[name][stage][attribute], str),
                expected=expected,
                known=known,
                value=value,
            )
            for stage in STAGES
        }
    judges = {"first": suite.model_dump(mode="json")["judge"]}
    return {"judges": {**judges, "second": suite.describe_second_judge()}, "groups": groups}


def _count(
    first: np.ndarray,
    second: np.ndarray,
    *,
    expected: Sequence[str],
    known: Sequence[str],
    value: str,
) -> Mapping[str, Any]:
    stated = np.array(expected, str)
    rows = np.isin(stated, known)
    return {
        "concept": count_pairs(first == value, second == value),
        "stated": count_pairs((first == stated)[rows], (second == stated)[rows]),
        "same_label": int((first == second).sum()),
        "n": len(first),
    }
