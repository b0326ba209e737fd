"""Target vae: an autoencoder, trained on labelled examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.data.labelled import Labelled
from concept_eraser.erasers.vae import Vae, VaeObjective
from concept_eraser.models.base import Loaded
from concept_eraser.models.module import open_folder
from concept_eraser.recipes.objective_fields import HistogramSpec
from concept_eraser.recipes.selections import select
from concept_eraser.targets.context import Context
from concept_eraser.targets.labelled_data import Rows, select_rows
from concept_eraser.utils.errors import UserError


def build(context: Context) -> Vae:
    """Build the eraser of a recipe with target vae.

    Raises:
        UserError: The recipe, the model and the data do not fit each other.
    """
    recipe = context.recipe
    rows = select_rows(recipe, context.objects)
    module = context.model.part("vae")
    selected_names = select(
        [name for name, _ in module.named_parameters()], recipe.trainable.select
    )
    return Vae(
        module,
        _objectives(context, rows),
        selected_names,
        batchnorm=recipe.trainable.batchnorm,
        batch_size=recipe.training.batch_size,
    )


def _objectives(context: Context, rows: Mapping[str, Rows]) -> dict[str, VaeObjective]:
    recipe = context.recipe
    objectives = {
        name: VaeObjective(
            data, positions, spec.loss, scale=spec.scale, kl=spec.kl, teacher=spec.teacher
        )
        for name, (data, positions) in rows.items()
        for spec in (recipe.objective_specs[name],)
    }
    if recipe.histogram is not None:
        data, positions = rows.get("retain", rows["forget"])
        objectives["histogram"] = VaeObjective(
            data,
            positions,
            "histogram",
            shows=_probability(context, recipe.histogram, data),
            alpha=recipe.histogram.alpha,
        )
    return {name: objectives[name] for name in recipe.objectives}


def _probability(
    context: Context, histogram: HistogramSpec, data: Labelled
) -> Callable[[Tensor], Tensor]:
    """Return a differentiable function for the probability that images show a class of the data."""
    judge = _judge(context, histogram)
    judge = judge.to(context.model.device).eval().requires_grad_(False)
    number = data.class_index(next(iter(histogram.concept.values())))
    example = data.inputs([0])
    with torch.no_grad():
        try:
            logits = judge(example.to(context.model.device))
        except RuntimeError as error:
            line = str(error).splitlines()[0][:150]
            raise UserError(f"the judge cannot take an example of {data.about} ({line})") from error
    if logits.ndim != 2 or logits.shape[1] != len(data.names):
        raise UserError(
            f"the judge must return logits of the {len(data.names)} classes of {data.about}, "
            f"found {list(logits.shape)}"
        )
    shape = example.shape[1:]
    return lambda images: judge(images.reshape(-1, *shape)).float().softmax(1)[:, number]


def _judge(context: Context, histogram: HistogramSpec) -> nn.Module:
    judge: Any = context.objects.get("judge")
    if judge is None:
        judge = open_folder(Path(histogram.judge), "classifier").module
    if isinstance(judge, Loaded):
        judge = next(iter(judge.parts.values()))
    if not isinstance(judge, nn.Module):
        kind = type(judge).__name__
        raise UserError(f"a judge is a classifier (a torch module with logits), found a {kind}")
    return judge
