"""The inputs for building an eraser: the recipe, the model, and the resolved prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from concept_eraser.data import prompts
from concept_eraser.data.generate import model_fingerprint
from concept_eraser.data.prompts import PromptSet
from concept_eraser.models.base import Loaded, Model
from concept_eraser.recipes.objective_fields import ObjectiveSpec, role
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.recipes.selections import select
from concept_eraser.targets.adapter import check_lora
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress, silent

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Context:
    """A recipe with its loaded model.

    Attributes:
        recipe: The erasing job.
        model: The model that it names, loaded.
        progress: Receives the progress of the slow steps.
        cache: The folder of generated images; None for the default of `resources.cache`.
        objects: Objects in memory, which the recipe can only name: the data sets of objectives, by
        name, and a `judge`.
        move_parts: With training.offload: moves the parts of the model that the next step needs to
            the device, and all others away.
    """

    recipe: Recipe
    model: Loaded
    progress: Progress = silent
    cache: Path | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    move_parts: Callable[[Sequence[str]], None] | None = None


@dataclass(frozen=True)
class PromptContext:
    """A context whose objectives are prompts, checked and resolved.

    Attributes:
        recipe: The erasing job.
        model: The text-to-image model.
        part: The module that is trained.
        selected: The names of its tensors that trainable.select covers.
        objectives: Each objective by name, also the adversary's.
        prompt_sets: The prompts of each objective.
        progress: See `Context`.
        cache: See `Context`.
        move_parts: See `Context`.
        judge: The judge in memory, of the `objects` of `Context`; None if there is none.
    """

    recipe: Recipe
    model: Model
    part: nn.Module
    selected_names: Sequence[str]
    objectives: Mapping[str, ObjectiveSpec]
    prompt_sets: Mapping[str, PromptSet]
    progress: Progress
    cache: Path | None
    move_parts: Callable[[Sequence[str]], None] | None
    judge: Any = None

    @property
    def offload(self) -> bool:
        """Whether the parts of the model are on the device only for the steps that need them."""
        return self.move_parts is not None

    @cached_property
    def weights(self) -> str:
        """The fingerprint of the model's weights before the training."""
        return model_fingerprint(self.model)

    def bring(self, parts: Sequence[str]) -> None:
        """Move these parts to the device and all others away, with training.offload."""
        if self.move_parts is not None:
            self.move_parts(parts)


def resolve(context: Context) -> PromptContext:
    """Resolve a context with target denoiser or text_encoder.

    Raises:
        UserError: The model has no such part, the selection matches no tensor, its layers cannot
        have the recipe's LoRA, a prompt set cannot be read, or a prompt is both forgotten and
        retained.
    """
    recipe, model = context.recipe, require_pipeline(context)
    if recipe.target == "text_encoder" and not model.has_clip_words:
        raise model.lacks("the target 'text_encoder'")
    part = model.parts[recipe.target]
    selected_names = select([name for name, _ in part.named_parameters()], recipe.trainable.select)
    if recipe.trainable.lora is not None:
        check_lora(recipe.trainable.lora, part, selected_names)
    objectives = dict(recipe.objective_specs)
    if recipe.attack is not None:  # the adversary regenerates the images of the forgotten prompts
        concept = recipe.forgotten[0].prompts
        distill = "distill" if recipe.target == "denoiser" else "distill_prediction"
        loss = distill if recipe.attack.loss == "prediction" else "data"
        objectives["attack"] = ObjectiveSpec(prompts=concept, loss=loss, n=recipe.attack.n)
    return PromptContext(
        recipe=recipe,
        model=model,
        part=part,
        selected_names=selected_names,
        objectives=objectives,
        prompt_sets=read_prompt_sets(objectives),
        progress=context.progress,
        cache=context.cache,
        move_parts=context.move_parts,
        judge=context.objects.get("judge"),
    )


def require_pipeline(context: Context) -> Model:
    """Return the model of a context as a text-to-image model. Raises UserError if it is none."""
    if not isinstance(context.model, Model):
        raise UserError(
            f"{context.model.source} is no text-to-image pipeline, "
            f"which the target {context.recipe.target!r} needs"
        )
    return context.model


def read_prompt_sets(
    objectives: Mapping[str, ObjectiveSpec], *, warn: bool = True
) -> dict[str, PromptSet]:
    """Read the prompt set of each objective.

    Args:
        objectives: The objectives by name.
        warn: Warn of anchors that are probably misspelt.

    Raises:
        UserError: A set cannot be read, or a prompt is both forgotten and retained.
    """
    sets = {name: prompts.load(spec.prompts or []) for name, spec in objectives.items()}
    for name, prompt_set in sets.items():
        if role(name) == "forget" and "retain" in sets:
            prompts.require_disjoint(prompt_set, sets["retain"])
    if warn:
        anchors = {name: spec.anchor for name, spec in objectives.items()}
        for warning in prompts.slips(anchors, sets):
            _LOG.warning("%s", warning)
    return sets


def describe_prompts(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the id, number of rows and hash of each objective's prompt set, for the run folder."""
    return {
        name: prompts.load(spec.prompts).describe()
        for name, spec in recipe.objective_specs.items()
        if spec.prompts is not None
    }
