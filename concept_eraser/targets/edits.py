"""Methods that edit a model in one go instead of training it: the natural-gradient step, Mini-Unlearning, rewind on a
classifier; what reads a text is edited in projections.py."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser import registry
from concept_eraser.erasers.base import Part
from concept_eraser.erasers.classifier import Classifier
from concept_eraser.errors import UserError
from concept_eraser.methods.base import Edit, EditRequest, ProjectionEdit, all_or_nothing
from concept_eraser.targets import labelled, projections
from concept_eraser.targets.base import Request
from concept_eraser.training.parameters import select


def apply(method: Edit, request: Request) -> tuple[Part, Mapping[str, float], float]:
    """Edit the model of a recipe in place: its eraser, what was done, and the seconds it took.

    The ridge of the risk is training.weight_decay, which should be the one the model was trained with. Positions in a
    recorded history are those of the forget side's data.
    """
    if isinstance(method, ProjectionEdit):
        return projections.apply(method, request)
    _refuse_what_is_ignored(request)
    eraser = labelled.build(request)
    assert isinstance(eraser, Classifier)  # the recipe allows edits on classifiers only
    forget, retain = eraser.sides["forget"], eraser.sides["retain"]
    if retain.data is not forget.data:
        raise UserError("an edit needs forget and retain from one data set, the one the model was trained on; give retain: rest")  # fmt: skip
    data, size, ridge = forget.data, request.recipe.training.batch_size, request.recipe.training.weight_decay
    params = tuple(eraser.trainable().values())

    def batches(rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        parts = [list(rows[i : i + size]) for i in range(0, len(rows), size)]
        return [(data.inputs(part).to(eraser.device), data.labels[part].to(eraser.device)) for part in parts]

    def loss(rows: Sequence[int]) -> Tensor:
        fit = F.cross_entropy(eraser.module(data.inputs(rows).to(eraser.device)), data.labels[list(rows)].to(eraser.device))  # fmt: skip
        return fit + 0.5 * ridge * sum(p.square().sum() for p in params)

    asked = EditRequest(eraser.module, tuple(forget.rows.tolist()), tuple(retain.rows.tolist()), ridge, batches, loss, params)  # fmt: skip
    eraser.module.eval()
    began = time.monotonic()
    try:
        with all_or_nothing(params, "use more damping, or a smaller strength"):
            notes = method.edit(asked)
    except ValueError as error:
        raise UserError(str(error)) from error
    return eraser, notes, time.monotonic() - began


def finish(request: Request, trained: Mapping[str, nn.Parameter] | None = None) -> tuple[Mapping[str, float], float]:
    """The closed form that a recipe asks for after its training, on keys and values among the trained weights: what was done,
    and the seconds it took. trained: by name; None only checks, before the training, that there will be such weights.

    Raises UserError where the model has none, or they are not all trained.
    """
    recipe, model = request.recipe, projections.text_to_image(request)
    assert recipe.finish is not None  # the caller looks
    readers = projections.layers(model, projections.SELECTION)
    names = [name for name, _ in model.denoiser.named_parameters()]
    missing = sorted(set(readers) - set(select(names, recipe.trainable.select)))
    if missing:
        raise UserError(f"finish: {recipe.finish.name} rewrites keys and values of the cross-attention, and trainable.select: {recipe.trainable.select!r} leaves out {missing[0]}; select all, cross_attention or {projections.SELECTION}")  # fmt: skip
    if trained is None:
        return {}, 0.0
    method: Any = registry.build("method", recipe.finish.name, recipe.finish.options)
    return projections.edit(method, model, recipe, {name: trained[name] for name in readers})


def _refuse_what_is_ignored(request: Request) -> None:
    """An edit has no loop: settings of one must not be taken for heard. Raises UserError."""
    recipe = request.recipe
    sides = {"forget": recipe.forgotten[0], "retain": recipe.retain}
    idle = [f"{name}.{key}" for name, side in sides.items() if side for key, plain in (("loss", "data"), ("scale", 1.0), ("l1", 0.0), ("distill", 0.0)) if getattr(side, key) != plain]  # fmt: skip
    idle += [f"trainable.{key}" for key in ("saliency", "reinitialise") if getattr(recipe.trainable, key) is not None]
    idle += ["trainable.batchnorm"] if recipe.trainable.batchnorm != "frozen" else []
    idle += ["training.precision"] if recipe.training.precision != "fp32" else []
    if idle:
        raise UserError(f"the method {recipe.method.name!r} edits in one go and does not hear {', '.join(idle)}; leave them out")  # fmt: skip
