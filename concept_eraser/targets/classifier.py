"""Targets classifier and clip. The class names turn a CLIP model into a classifier."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from concept_eraser.data.labelled import Labelled
from concept_eraser.erasers.classifier import Classifier, ClassifierObjective
from concept_eraser.models.families.clip import Clip
from concept_eraser.recipes.objective_fields import ObjectiveSpec
from concept_eraser.recipes.selections import select
from concept_eraser.targets.context import Context
from concept_eraser.targets.labelled_data import Rows, select_rows
from concept_eraser.utils.errors import UserError, quote


def build(context: Context) -> Classifier:
    """Build the eraser of a recipe with target classifier or clip.

    Raises:
        UserError: The recipe, the model and the data do not fit each other.
    """
    recipe = context.recipe
    rows = select_rows(recipe, context.objects)
    module = _module(context, rows)
    selected_names = select(
        [name for name, _ in module.named_parameters()], recipe.trainable.select
    )
    objectives = {
        name: ClassifierObjective(
            data,
            positions,
            spec.loss,
            scale=spec.scale,
            anchor=_anchor_class(name, spec, data.labels[positions], data),
            teacher=spec.teacher,
            l1=spec.l1,
            distill=spec.distill,
            beta=spec.beta,
        )
        for name, (data, positions) in rows.items()
        for spec in (recipe.objective_specs[name],)
    }
    return Classifier(
        module,
        objectives,
        selected_names,
        batchnorm=recipe.trainable.batchnorm,
        batch_size=recipe.training.batch_size,
    )


def _module(context: Context, rows: Mapping[str, Rows]) -> nn.Module:
    model, recipe = context.model, context.recipe
    if recipe.target != "clip":
        return model.part(recipe.target)
    if not isinstance(model, Clip):
        raise UserError(f"{model.source} is no CLIP model")
    for data in {id(data): data for data, _ in rows.values()}.values():
        model.check_images(data.inputs([0]), data.about)
    return model.zero_shot(rows["forget"][0].names, recipe.templates)


def _anchor_class(
    objective: str, spec: ObjectiveSpec, labels: Tensor, data: Labelled
) -> int | None:
    """Return the class of the anchor, which is given by name or by number.

    A number may stand for a class of which the data have no example. A random share of all classes
    may have examples of the anchor's class.

    Raises UserError if a forgotten class is its own anchor.
    """
    if not isinstance(spec.anchor, str):
        return None
    if spec.anchor.isdigit() and spec.anchor not in data.names:
        anchor = int(spec.anchor)
    else:
        anchor = data.class_index(spec.anchor)
    is_anchor = labels == anchor
    if objective == "forget" and bool(is_anchor.any() if spec.classes else is_anchor.all()):
        raise UserError(
            f"forget: the anchor {quote(spec.anchor)} is a class to forget, so its examples would "
            "be learned; give another class, or leave it out of `classes`"
        )
    return anchor
