"""Select the labelled examples of each objective of a classifier, a CLIP model or a VAE."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concept_eraser import registry
from concept_eraser.data import labelled
from concept_eraser.data.labelled import Labelled
from concept_eraser.recipes.objective_fields import ObjectiveSpec
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.recipes.training_fields import RewindingSpec
from concept_eraser.storage.readers import read_text
from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError, names_text, quote

Rows = tuple[Labelled, Tensor]  # the data, and positions in them


def select_rows(recipe: Recipe, objects: Mapping[str, Any] | None = None) -> dict[str, Rows]:
    """Return the data of each objective and the positions in them, in the order of the methods.

    Args:
        recipe: The erasing job.
        objects: Data sets in memory, by the name of their objective.

    Raises:
        UserError: Data cannot be read, have no such class or position, or an example is both
            forgotten and retained.
    """
    objects, seed = objects or {}, recipe.generation.seed
    forget = _open("forget", recipe.forgotten[0], objects)
    rows = {"forget": (forget, select_own(recipe.forgotten[0], forget, seed))}
    for name in ("retain", "replace"):
        spec: ObjectiveSpec | None = getattr(recipe, name)
        if spec is None:
            continue
        if spec.data == "rest":
            rows[name] = (forget, labelled.rest_of(*rows["forget"]))
            continue
        data = _open(name, spec, objects)
        rows[name] = (data, select_own(spec, data, seed))
        if name == "retain" and labelled.same_examples(data, forget):
            labelled.require_apart(rows["forget"][1], rows[name][1], data.about)
    if recipe.target != "vae":
        rows = _with_same_classes(rows, always=recipe.target == "clip")
    return {name: rows[name] for name in recipe.objectives if name in rows}


def select_unseen(
    spec: RewindingSpec,
    rows: Mapping[str, Rows],
    objects: Mapping[str, Any] | None = None,
    *,
    same_names: bool = False,
) -> Rows:
    """Return a set with unseen examples, and the positions of those of the forgotten classes.

    Args:
        spec: The section `rewinding` of a recipe.
        rows: The data of each objective, of `select_rows`.
        objects: Data sets in memory; that of `rewinding` takes the place of the named one.
        same_names: The class names have to be those of the forget set, as for a CLIP model.

    Raises:
        UserError: The set cannot be read, has no example of a forgotten class, or holds examples
            that are forgotten or retained.
    """
    if objects is not None and "rewinding" in objects:
        data = labelled.open_data(objects["rewinding"], spec.split)
    else:
        data = open_named(spec.data, spec.options, spec.split)
    selected = _positions(spec, data)
    seen = sorted(
        {
            int(position)
            for other, positions in rows.values()
            if labelled.same_examples(data, other)
            for position in selected[torch.isin(selected, positions)]
        }
    )
    if seen:
        raise UserError(
            f"rewinding: {len(seen)} examples of {data.about} are forgotten or retained, e.g. "
            f"{seen[0]}, so they are not unseen; name examples that the model was not trained on"
        )
    forget, positions = rows["forget"]
    if same_names or set(data.names) & set(forget.names):
        data = data.with_classes(forget.names)
    classes = forget.labels[positions].unique()
    missing = [
        forget.names[int(number)] for number in classes[~torch.isin(classes, data.labels[selected])]
    ]
    if missing:
        raise UserError(
            f"rewinding: {data.about} has no example of the forgotten class "
            f"{names_text(missing, 5)}; the error on unseen examples needs the same classes"
        )
    return data, selected[torch.isin(data.labels[selected], classes)]


def select_own(spec: ObjectiveSpec, data: Labelled, seed: int) -> Tensor:
    """Return the positions that an objective selects in its own data; see `labelled.choose`."""
    indices = spec.indices
    if isinstance(indices, str):
        indices = read_indices(Path(indices))
    return labelled.choose(data, classes=spec.classes, share=spec.share, indices=indices, seed=seed)


def named_parts(spec: ObjectiveSpec) -> tuple[list[str], int]:
    """Return the classes that an objective names, and its largest position (-1 for none)."""
    indices = spec.indices or []
    if isinstance(indices, str):
        indices = read_indices(Path(indices))
    return [str(name) for name in spec.classes or []], max(indices, default=-1)


def open_named(source: str | None, options: dict[str, Any], split: str) -> Labelled:
    """Open a data set of datasets/ by name, or one on disk.

    Args:
        source: A name, a folder of images (which takes the option `size`), or an .npz file.
        options: Options of the data set.
        split: "train" or "test".

    Raises:
        UserError: There is no such data set, or it does not have these options.
    """
    if source in registry.names("dataset"):
        return registry.build("dataset", str(source), options).load(split)
    if set(options) - {"size"}:
        raise UserError(
            f"data {source!r} is no named data set; a folder of images has the option size only, "
            f"found {', '.join(options)}"
        )
    try:
        size = limits.whole(options.get("size", 64), 1, limits.SIDE)
        return labelled.open_data(source, split, size)
    except ValueError as error:
        names = ", ".join(registry.names("dataset"))
        raise UserError(f"{error}. Named sets: {names}") from None


def read_indices(path: Path) -> list[int]:
    """Read positions from a text file, one in each line.

    Raises:
        UserError: The file does not exist, lists no position, or has a line that is none.
    """
    if not os.path.exists(path):
        raise UserError(f"no such file of indices: {path}; check the path")
    indices = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        is_number = text.isascii() and text.isdecimal() and len(text) < 10
        if not is_number or int(text) > limits.POSITION:
            raise UserError(
                f"{path}, line {number}: expected a position (an integer from 0 to "
                f"{limits.POSITION:,}), found {quote(text, 40)}"
            )
        indices.append(int(text))
    if not indices:
        raise UserError(f"{path} lists no position")
    return indices


def _open(name: str, spec: ObjectiveSpec, objects: Mapping[str, Any]) -> Labelled:
    if name in objects:
        return labelled.open_data(objects[name], "train")
    return open_named(spec.data, spec.options, "train")


def _positions(spec: RewindingSpec, data: Labelled) -> Tensor:
    """Return the positions that `rewinding` selects, all without `indices`."""
    indices = spec.indices
    if isinstance(indices, str):
        indices = read_indices(Path(indices))
    return labelled.choose(data, indices=indices)


def _with_same_classes(data_by_objective: dict[str, Rows], *, always: bool) -> dict[str, Rows]:
    """Return the data with labels that are positions in the longest list of class names.

    So each output of the model is one class. Lists without a name in common do not change, unless
    `always`: they may be other words for the same outputs.
    """
    names = max((data.names for data, _ in data_by_objective.values()), key=len)
    return {
        name: (data.with_classes(names) if always or set(data.names) & set(names) else data, rows)
        for name, (data, rows) in data_by_objective.items()
    }
