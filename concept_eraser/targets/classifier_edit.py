"""Edits of a classifier without training: the natural-gradient step, Mini-Unlearning, rewind."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from concept_eraser.erasers.base import Eraser
from concept_eraser.methods.base import Edit, EditRequest, all_or_nothing
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.targets import classifier
from concept_eraser.targets.context import Context
from concept_eraser.utils.errors import UserError


def apply(method: Edit, context: Context) -> tuple[Eraser, Mapping[str, float], float]:
    """Edit the classifier of a recipe in place.

    The ridge of the risk is training.weight_decay. It should be the weight decay of the model's
    training. Positions in a recorded history refer to the data of the forget set.

    Returns:
        The eraser, the edit's results, and the seconds it took.

    Raises:
        UserError: The recipe has settings that an edit ignores, the forget and retain sets are not
        of one data set, or the method cannot edit the model.
    """
    recipe = context.recipe
    _refuse_ignored(recipe)
    eraser = classifier.build(context)
    forget, retain = eraser.objective_by_name["forget"], eraser.objective_by_name["retain"]
    if retain.data is not forget.data:
        raise UserError(
            "an edit needs forget and retain from one data set, the one the model was trained on; "
            "give retain: rest"
        )
    data, size, ridge = forget.data, recipe.training.batch_size, recipe.training.weight_decay
    params = tuple(eraser.trainable().values())

    def inputs_and_labels(rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = list(rows)
        return data.inputs(rows).to(eraser.device), data.labels[rows].to(eraser.device)

    def batches(rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        return [inputs_and_labels(rows[i : i + size]) for i in range(0, len(rows), size)]

    def loss(rows: Sequence[int]) -> Tensor:
        inputs, labels = inputs_and_labels(rows)
        fit = F.cross_entropy(eraser.module(inputs), labels)
        return fit + 0.5 * ridge * sum(p.square().sum() for p in params)

    request = EditRequest(
        model=eraser.module,
        forget=tuple(forget.rows.tolist()),
        retain=tuple(retain.rows.tolist()),
        ridge=ridge,
        batches=batches,
        loss=loss,
        params=params,
    )
    eraser.module.eval()
    began = time.monotonic()
    try:
        with all_or_nothing(params, "use more damping, or a smaller strength"):
            notes = method.edit(request)
    except UserError:  # a missing package is no fault of the data
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    return eraser, notes, time.monotonic() - began


def _refuse_ignored(recipe: Recipe) -> None:
    """Raise UserError for settings of training that an edit would ignore."""
    defaults = {"loss": "data", "scale": 1.0, "l1": 0.0, "distill": 0.0}
    objectives = {"forget": recipe.forgotten[0], "retain": recipe.retain}
    ignored = [
        f"{name}.{key}"
        for name, spec in objectives.items()
        if spec
        for key, default in defaults.items()
        if getattr(spec, key) != default
    ]
    for key in ("saliency", "project", "reinitialise"):
        if getattr(recipe.trainable, key) is not None:
            ignored.append(f"trainable.{key}")
    if recipe.trainable.batchnorm != "frozen":
        ignored.append("trainable.batchnorm")
    if recipe.training.precision != "fp32":
        ignored.append("training.precision")
    if ignored:
        raise UserError(
            f"the method {recipe.method.name!r} edits the model without training steps and does "
            f"not use {', '.join(ignored)}; leave them out"
        )
