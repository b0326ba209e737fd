"""Measure a finished run on labelled data: what the classifier (or CLIP model) says about forgotten, retained and test
examples, or how well the VAE reconstructs them, before and after. `api.measure` and `concept-eraser evaluate` call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from concept_eraser import environment, resources
from concept_eraser import recipe as recipes
from concept_eraser.data.labelled import Labelled, open_data, rest_of
from concept_eraser.errors import UserError
from concept_eraser.evaluation import classification, reconstruction
from concept_eraser.models.base import Loaded
from concept_eraser.models.clip import Clip
from concept_eraser.models.loading import load_part, names_code
from concept_eraser.models.module import WEIGHTS
from concept_eraser.storage.manifest import require_intact
from concept_eraser.storage.readers import read_tensors
from concept_eraser.storage.writers import write_json
from concept_eraser.targets import labelled
from concept_eraser.targets.base import Request

MEASURED = ("classifier", "clip", "vae")


def measure(run: Path, *, before: Any = None, after: Any = None, objects: Mapping[str, Any] | None = None, allow_code: bool = False) -> dict[str, Any]:  # fmt: skip
    """The numbers of a run, as JSON: per set of at least two examples the accuracy with its interval, and the membership
    attack.

    before, after: the model it started from and the erased one, where they cannot be loaded because they were in memory;
    allow_code: where the run's recipe names the model as package.module:function, call it;
    objects: the data sets in memory by side ("forget", "retain", "test"), where the run had them from Python.

    Raises UserError where the run is of another target, or its data or model are not at hand.
    """
    path = run / "recipe.yaml"
    if not path.is_file():
        raise UserError(f"{run} is no run folder (it has no recipe.yaml)")
    recipe = recipes.load(str(path))
    if recipe.target not in MEASURED:
        raise UserError(f"{run} erased from a {recipe.target}; labelled data measures {', '.join(MEASURED)} only")
    given = dict(objects or {})
    after = _after(run, recipe, after, allow_code)
    request = Request(recipe, after, objects={k: v for k, v in given.items() if k != "test"})
    chosen = labelled.rows(request)
    (data, forget), (other, retain) = chosen["forget"], chosen["retain"] if "retain" in chosen else _rest(chosen)
    test = open_data(given["test"]).aligned(data.names) if "test" in given else _test(recipe, data.names)
    sets = {"forget": (data, forget), "retain": (other, retain)}
    if test is not None:
        sets["test"] = (test, torch.arange(len(test)))
    test_rows = None
    side = recipe.forgotten[0]
    whole = side.classes and side.share is None and side.indices is None
    if test is not None and whole:  # a forgotten class is to be missed in the test set too
        gone = torch.isin(test.labels, data.labels[forget])
        test_rows = (~gone).nonzero()[:, 0]
        sets |= {"test": (test, test_rows), "test, forgotten classes": (test, gone.nonzero()[:, 0])}
    few = sorted(name for name, (_, rows) in sets.items() if len(rows) < 2)  # they have no interval
    sets = {name: value for name, value in sets.items() if name not in few}
    found: dict[str, Any] = {}
    for when, model in (("before", _before(recipe, before, allow_code)), ("after", after)):
        if model is None:
            continue
        module = _module(model, data, recipe)
        if recipe.target == "vae":
            found[when] = {"psnr": reconstruction.intervals(module, sets)}
            continue
        found[when] = {"accuracy": classification.intervals(module, sets)}
        if test is not None and other is data and not few:
            found[when]["table"] = asdict(
                classification.measure(module, data, forget, retain, test, test_rows=test_rows)
            )
            rows = torch.arange(len(test)) if test_rows is None else test_rows
            inside, outside, asked = (classification.look(module, d, r) for d, r in ((data, retain), (test, rows), (data, forget)))  # fmt: skip
            found[when]["membership"] = classification.every_membership(inside, outside, asked)
    return {"recipe": recipe.fingerprint, "target": recipe.target, "results": found, "too_few": few, "environment": environment.describe()}  # fmt: skip


def save(found: Mapping[str, Any], path: Path) -> None:
    """Write the JSON file. Raises UserError as `writers.write_file`."""
    write_json(path, found)


def _before(recipe: recipes.Recipe, given: Any, allow_code: bool) -> Loaded | None:
    """The original; None where the recipe names an object that was in memory and none is given."""
    if given is not None:
        return load_part(given, recipe.target, allow_code=True)  # named by the caller
    if recipe.model.endswith("in memory") or recipe.model.startswith("a fresh "):
        return None
    return load_part(recipe.model, recipe.target, allow_code=allow_code)


def _after(run: Path, recipe: recipes.Recipe, given: Any, allow_code: bool) -> Loaded:
    """The erased model: the given one, the saved one, or the one that the recipe's function makes with saved weights."""
    if given is not None:
        return load_part(given, recipe.target, allow_code=True)
    if names_code(recipe.model):
        made = load_part(recipe.model, recipe.target, allow_code=allow_code)
        file = run / resources.whole_model(made.family) / WEIGHTS
        require_intact(file)
        tensors = read_tensors(file)
        next(iter(made.parts.values())).load_state_dict(tensors)
        return made
    try:
        return load_part(str(run), recipe.target)
    except UserError as error:
        raise UserError(f"{error}. In Python: measure(run, after=<the erased model>)") from None


def _rest(chosen: dict[str, tuple[Labelled, torch.Tensor]]) -> tuple[Labelled, torch.Tensor]:
    data, forget = chosen["forget"]
    return data, rest_of(data, forget)


def _test(recipe: recipes.Recipe, names: tuple[str, ...]) -> Labelled | None:
    """The test split of the forget side's data: of a named set, or the subfolder `test`; None where there is none."""
    side = recipe.forgotten[0]
    try:
        named = labelled.open_named(side.data, side.options, "test")
    except UserError:
        return None
    own = Path(str(side.data))
    return None if own.exists() and not (own / "test").is_dir() else named.aligned(names)


def _module(model: Loaded, data: Labelled, recipe: recipes.Recipe) -> nn.Module:
    if isinstance(model, Clip):
        return model.zero_shot(data.names, recipe.templates)
    return model.parts[recipe.target]
