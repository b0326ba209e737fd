"""Outcomes: one row for each judged image, so that every summary can be recomputed.

`evaluate` writes them to evaluation.csv.xz and `attack` to attack.csv.xz, beside the JSON of the
summary. `pandas.read_csv("attack.csv.xz")` reads the table. docs/reference/run_folder.md lists the
columns.

A distance of two sets of images (FID, KID) has no value for one image, so it is not in the table.
Its images can be generated again from their prompts and seeds.
"""

from __future__ import annotations

import csv
import io
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation.base import Group, Judge, Result
from concept_eraser.evaluation.features.base import device
from concept_eraser.storage.writers import write_bytes
from concept_eraser.utils.errors import UserError

DIGITS = 4  # of a probability
BATCH = 32  # images whose probability of the concept is computed at once
# metrics that follow from the columns of the expected and the predicted attributes
_FROM_LABELS = ("concept_rate", "no_object_rate", "ua", "ira", "cra")
# the writer of CSV puts a text with one of these characters into quotes; no text has a null
_LINE_END = "\0\r\n"


def write(path: Path, rows: Sequence[Mapping[str, Any]], *, overwrite: bool = False) -> None:
    """Write a table of outcomes as CSV under xz.

    Args:
        path: the file, whose name ends with .csv.xz.
        rows: one mapping of columns to values for each image. A missing column is an empty cell.
        overwrite: also replace a file that no manifest of this package lists.

    Raises:
        UserError: the file may not be replaced, or cannot be written.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns, restval="", lineterminator=_LINE_END)
    table.writeheader()
    table.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    content = text.getvalue().replace(_LINE_END, "\n")
    write_bytes(path, _compress(content.encode()), overwrite=overwrite)


def _compress(content: bytes) -> bytes:
    """Compress with a dictionary as large as the content.

    xz's usual 64 MB are cleared for each file, which took 50 times as long as a table of 64 rows.
    """
    size = min(2**26, max(2**16, len(content)))
    return lzma.compress(
        content, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": size}]
    )


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return int(value) if isinstance(value, bool | np.bool_) else value


def label_columns(
    judge: Judge,
    concept: tuple[str, str],
    *,
    prompts: Sequence[Prompt],
    labels: Mapping[str, np.ndarray],
    probabilities: Mapping[str, np.ndarray],
) -> list[dict[str, Any]]:
    """Return the columns of the judge for images [n].

    Args:
        judge: the judge, whose attributes give the columns.
        concept: the attribute and the value of the erased concept.
        prompts: the prompts of the images. Their fields are the expected attributes.
        labels: the predicted value of each attribute, [n] names.
        probabilities: as `read_probabilities`.
    """
    attribute, value = concept
    rows = []
    for number, prompt in enumerate(prompts):
        row: dict[str, Any] = {}
        for name, classes in judge.classes.items():
            predicted = str(labels[name][number])
            row[f"expected_{name}"] = prompt.fields.get(name, "")
            row[f"predicted_{name}"] = predicted
            if name in probabilities and predicted in classes:
                chance = probabilities[name][number, list(classes).index(predicted)]
                row[f"probability_{name}"] = round(float(chance), DIGITS)
        if "" in probabilities:
            row["concept_probability"] = round(float(probabilities[""][number]), DIGITS)
        row["shows_concept"] = bool(labels[attribute][number] == value)
        rows.append(row)
    return rows


@torch.no_grad()
def read_probabilities(
    judge: Judge, concept: tuple[str, str], images: Tensor
) -> dict[str, np.ndarray]:
    """Return the judge's probabilities for images [n, h, w, 3] uint8.

    The probabilities of an attribute are [n, classes], by its name, if the judge gives them. Those
    of the concept are [n], by the name "", if the judge has any probability.
    """
    attribute, value = concept
    by_attribute = dict(judge.probabilities(images))
    if attribute in by_attribute:
        position = list(judge.classes[attribute]).index(value)
        return {**by_attribute, "": by_attribute[attribute][:, position]}
    try:
        parts = [
            judge.probability(
                part.permute(0, 3, 1, 2).float().div(127.5).sub(1).to(device()), attribute, value
            )
            for part in images.split(BATCH)
        ]
    except UserError:  # a judge without probabilities
        return by_attribute
    return {**by_attribute, "": torch.cat(parts).cpu().numpy()} if parts else by_attribute


def rows_of_group(
    group: Group,
    judge: Judge,
    concept: tuple[str, str],
    *,
    seeds: Sequence[int],
    models: Mapping[str, str],
    results: Sequence[Result],
) -> list[dict[str, Any]]:
    """Return the outcomes of one group of prompts, before and after the erasure.

    Args:
        group: the images of the group with the judge's labels.
        judge: the judge.
        concept: the attribute and the value of the erased concept.
        seeds: the seed of each image, [n].
        models: the fingerprints of the weights, by "before" and "after".
        results: the numbers of the evaluation. A mean over all images of the group becomes a
            column, with the value of each image.
    """
    measures = {
        result.metric: result.per_image
        for result in results
        if result.group == group.name
        and result.per_image
        and result.metric not in _FROM_LABELS
        and not result.metric.startswith("accuracy_")
        and all(len(values) == len(group.prompts) for values in result.per_image.values())
    }
    rows = []
    for when, fingerprint in models.items():
        columns = label_columns(
            judge,
            concept,
            prompts=group.prompts,
            labels=group.labels[when],
            probabilities=read_probabilities(judge, concept, group.images[when]),
        )
        for number, (prompt, seed) in enumerate(zip(group.prompts, seeds, strict=True)):
            row: dict[str, Any] = {
                "model": fingerprint,
                "stage": when,
                "group": group.name,
                "role": group.role,
                "position": number,
                "prompt": prompt.text,
                "seed": seed,
                "judge": judge.fingerprint,
                **columns[number],
            }
            for metric, values in measures.items():
                row[metric] = values[when][number] if when in values else None
            rows.append(row)
    return rows
