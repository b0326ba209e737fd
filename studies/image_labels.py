"""The judge's label of each image of an evaluation, in a form that takes little space.

A result of a study has one character for each image and attribute. The prompts and the seeds of the
images follow from the suite, in the same order (concept_eraser/evaluation/suite.py). So each rate
of the result can be computed again, and two models can be compared by image:

    content = results["heart_uce_seed0"]["labels"]
    labels = decode(content, "after", group="direct", attribute="shape")
    sum(label == "heart" for label in labels) / len(labels)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_lowercase, digits
from typing import Any

from studies.result_tables import Content

SYMBOLS = digits + ascii_lowercase  # of the labels of one attribute
PREFIX = "predicted_"  # of the columns of the first judge


def encode(rows: Sequence[Mapping[str, Any]]) -> Content:
    """Return the labels of all images of an evaluation.

    Args:
        rows: The outcomes of the evaluation, as `PromptEvaluation.outcomes` has them.

    Returns:
        "names" has the labels of each attribute. "images" has a text for each stage, group and
        attribute. Its character at position i is the label of image i: the position of its name, in
        base 36.

    Raises:
        ValueError: An attribute has more than 36 labels.
    """
    attributes = [name.removeprefix(PREFIX) for name in rows[0] if name.startswith(PREFIX)]
    names = {name: sorted({str(row[PREFIX + name]) for row in rows}) for name in attributes}
    too_many = [name for name, labels in names.items() if len(labels) > len(SYMBOLS)]
    if too_many:
        raise ValueError(f"{too_many[0]} has more than {len(SYMBOLS)} labels")
    images: Content = {}
    for row in sorted(rows, key=lambda row: int(row["position"])):  # stable: within each group
        group = images.setdefault(row["stage"], {}).setdefault(row["group"], {})
        for name in attributes:
            symbol = SYMBOLS[names[name].index(str(row[PREFIX + name]))]
            group[name] = group.get(name, "") + symbol
    return {"names": names, "images": images}


def decode(content: Mapping[str, Any], stage: str, *, group: str, attribute: str) -> list[str]:
    """Return the label of each image of a group, in the order of its prompts.

    Args:
        content: What `encode` returned.
        stage: "before", "after", "control", or "control_2" for the second control.
        group: The group of prompts.
        attribute: The attribute of the judge.

    Raises:
        KeyError: The result has no such stage, group or attribute.
    """
    names = content["names"][attribute]
    return [names[SYMBOLS.index(symbol)] for symbol in content["images"][stage][group][attribute]]
