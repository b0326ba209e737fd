"""Build the eraser of a recipe, or edit its model: the entry point of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from concept_eraser.erasers.base import Eraser
from concept_eraser.methods.base import Edit, GateEdit, ProjectionEdit
from concept_eraser.targets import (
    classifier,
    classifier_edit,
    cross_attention_edit,
    denoiser,
    gate_edit,
    text_encoder,
    vae,
)
from concept_eraser.targets.context import Context

BUILDERS: Mapping[str, Callable[[Context], Eraser]] = {
    "denoiser": denoiser.build,
    "text_encoder": text_encoder.build,
    "classifier": classifier.build,
    "clip": classifier.build,
    "vae": vae.build,
}


def build_eraser(context: Context) -> Eraser:
    """Build the eraser that trains a recipe's target.

    Raises:
        UserError: The recipe, the model and the data do not fit each other.
    """
    return BUILDERS[context.recipe.target](context)


def edit_model(method: Edit, context: Context) -> tuple[Eraser, Mapping[str, float], float]:
    """Edit the model of a recipe in place, by a method without a training loop.

    Returns:
        The eraser, the edit's results, and the seconds it took.

    Raises:
        UserError: The recipe, the model and the data do not fit each other, or the edit fails.
    """
    if isinstance(method, ProjectionEdit):
        return cross_attention_edit.apply(method, context)
    if isinstance(method, GateEdit):
        return gate_edit.apply(method, context)
    return classifier_edit.apply(method, context)
