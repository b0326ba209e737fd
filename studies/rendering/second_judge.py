"""The section of a page about the second judge: its rates beside those of the first judge, and how
often both give the same label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from concept_eraser.evaluation.statistics import wilson
from studies.rendering.common import share, table
from studies.result_tables import Content, figure_path

KIND = "second_judge"
ORIGINAL = "original"
COUNTS = ("both", "first_only", "second_only", "neither")


def second_judge_key(model_key: str) -> str:
    """Return the key of the comparison of both judges on an erased model."""
    return f"{model_key}_second_judge"


def second_judge_section(results: Mapping[str, Content]) -> str:
    """Return the section with a row for each group of prompts and each model, or "" without a
    result.

    The counts of all training seeds of an erasure are added. The original's images are the same
    for all erasures of a concept, so it has one row.
    """
    contents = [one for one in results.values() if one["kind"] == KIND]
    if not contents:
        return ""
    judges = contents[0]["judges"]
    head = ["concept", "prompts", "what counts", "model", "training seeds"]
    head += [f"first judge ({judges['first']}) %", f"second judge ({judges['second']}) %"]
    rows = [[*head, "same label %", "only the first; only the second"]]
    for concept in dict.fromkeys(one["concept"] for one in contents):
        of_concept = [one for one in contents if one["concept"] == concept]
        for name, content in of_concept[0]["groups"].items():
            attribute = of_concept[0]["attribute"]
            is_forget = content["role"] == "forget"
            what = "the concept" if is_forget else f"the stated {attribute}"
            for label, seeds, counts in _models(of_concept, name):
                cells = _cells(counts, "concept" if is_forget else "stated")
                rows.append([concept, name, what, label, seeds, *cells])
    parts = ["## The second judge", EXPLANATION, table(rows), attacked_table(results)]
    return "\n\n".join(part for part in parts if part)


def attacked_table(results: Mapping[str, Content]) -> str:
    """Return the concept rates by both judges in the images that decided the attacks, or "".

    It has a row for each attack on each model of a concept, with the attacks that a second judge
    labelled. The counts of all training seeds, or of all controls, are added.
    """
    groups: dict[tuple[str, str, str], list[Content]] = {}
    for one in results.values():
        if "campaign" in one and "second_judge" in one:
            key = (one["concept"], one["attack"].replace("_", " "), one["label"])
            groups.setdefault(key, []).append(one)
    if not groups:
        return ""
    head = ["concept", "attack", "model", "trainings", "images", "first judge %"]
    rows = [[*head, "second judge %", "only the first; only the second"]]
    for key, contents in sorted(groups.items()):
        both, first_only, second_only, neither = (
            sum(one["second_judge"][name] for one in contents) for name in COUNTS
        )
        n = both + first_only + second_only + neither
        if n == 0:  # all prompts show the concept without the attack
            continue
        rates = [share(wilson(count, n)) for count in (both + first_only, both + second_only)]
        differ = f"{first_only}; {second_only}"
        rows.append([*key, str(len(contents)), str(n), *rates, differ])
    return f"{OF_ATTACKS}\n\n{table(rows)}"


def differing_images(study: str, results: Mapping[str, Content]) -> list[str]:
    """Return a caption and a figure for each attack whose differing images the study has drawn."""
    parts = []
    for key, content in results.items():
        path = figure_path(study, f"{key}.webp")
        if path.is_file():
            attack = content["attack"].replace("_", " ")
            caption = (
                f"Images of {attack} on {content['label']}, seed {content['seed']}. The first "
                f"judge alone sees the {content['concept']} in them."
            )
            parts.append(f"{caption}\n\n![{caption}]({path.name})")
    return parts


def _models(
    contents: Sequence[Content], group: str
) -> Iterator[tuple[str, str, Sequence[Mapping[str, Any]]]]:
    """Yield the label, the number of training seeds and the counts of the original and of each
    erasure, on a group of prompts.
    """
    yield ORIGINAL, "-", [contents[0]["groups"][group]["before"]]
    for model in dict.fromkeys(one["model"] for one in contents):
        seeds = [one for one in contents if one["model"] == model]
        yield (
            seeds[0]["label"],
            str(len(seeds)),
            [one["groups"][group]["after"] for one in seeds],
        )


def _cells(counts: Sequence[Mapping[str, Any]], what: str) -> list[str]:
    """Return the rates by both judges, the share of equal labels, and the images that differ."""
    both, first_only, second_only, neither = (
        sum(one[what][name] for one in counts) for name in COUNTS
    )
    n = both + first_only + second_only + neither
    return [
        share(wilson(both + first_only, n)),
        share(wilson(both + second_only, n)),
        share(wilson(sum(one["same_label"] for one in counts), sum(one["n"] for one in counts))),
        f"{first_only}; {second_only}",
    ]


OF_ATTACKS = """The images of attacks: for each attacked prompt the one that broke it by the first
judge, or the last one. Prompts that show the concept without the attack are not attacked. Where
only the first judge detects the concept, the success may be a property of that judge."""

EXPLANATION = """The second judge selected no setting, and no attack used it. `tiny2` has another
architecture, seed and order of the training data than `tiny`. The second judge labels the images
of the evaluation, which the first judge labels too. A rate is the share of images in which a judge
detects what counts. That is the concept for prompts to forget, and the value that the prompt states
for all others. "Same label" is the share of images to which both judges give the same label of this
attribute. The last column has the numbers of images in which one judge alone detects what counts.
The images of all training seeds are added up. Brackets are Wilson intervals over these images."""
