"""Step 4 for prompts: the objectives of an eraser, in the order that the methods expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from concept_eraser import registry
from concept_eraser.data.batches import Examples
from concept_eraser.erasers.base import AttackTerms
from concept_eraser.erasers.denoiser import DenoiserObjective
from concept_eraser.erasers.text_encoder import TextEncoderObjective
from concept_eraser.losses import LossSettings
from concept_eraser.losses.base import TrajectoryTerms
from concept_eraser.models.base import Model
from concept_eraser.recipes.objective_fields import HistogramSpec, ObjectiveSpec
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.targets.context import PromptContext
from concept_eraser.targets.encode import TokenizedPrompts


def denoiser_objectives(
    context: PromptContext, examples: Mapping[str, Examples]
) -> dict[str, DenoiserObjective]:
    """Return the objectives of a denoiser, also the adversary's and the histogram's.

    Their examples have no latents yet, see `with_latents`.

    Raises:
        UserError: The judge of the histogram cannot be built, or cannot judge the concept.
    """
    recipe = context.recipe
    ready = {
        name: denoiser_objective(spec, examples[name]) for name, spec in context.objectives.items()
    }
    if recipe.histogram is not None:
        ready["histogram"] = _histogram_objective(
            recipe.histogram, ready["forget"], judge=context.judge
        )
        _require_judge(context.model, ready["histogram"])
    if recipe.attack is not None:
        ready["attack"] = replace(ready["attack"], decay=recipe.attack.decay)
    return {name: ready[name] for name in recipe.all_objectives}


def with_latents(
    objectives: Mapping[str, DenoiserObjective], latents: Mapping[str, Tensor | None]
) -> dict[str, DenoiserObjective]:
    """Return the objectives of a denoiser with the latents of their examples.

    The histogram objective has those of the forget set.
    """
    return {
        name: replace(
            objective,
            examples=replace(
                objective.examples, latents=latents["forget" if name == "histogram" else name]
            ),
        )
        for name, objective in objectives.items()
    }


def text_encoder_objectives(
    context: PromptContext,
    tokens: Mapping[str, TokenizedPrompts],
    latents: Mapping[str, Tensor | None],
) -> dict[str, TextEncoderObjective]:
    """Return the objectives of a text encoder, also the adversary's."""
    recipe = context.recipe
    ready = {
        name: text_encoder_objective(spec, tokens[name], latents[name])
        for name, spec in context.objectives.items()
    }
    if recipe.attack is not None:
        ready["attack"] = replace(ready["attack"], decay=recipe.attack.decay)
    return {name: ready[name] for name in recipe.all_objectives}


def attack_terms(recipe: Recipe) -> AttackTerms:
    """Return how a recipe's adversary enters the losses."""
    if recipe.attack is None:
        return AttackTerms()
    return AttackTerms(
        warmup=recipe.attack.warmup,
        is_sum=recipe.attack.forget == "both",
        tokens=recipe.attack.tokens,
        both_branches=recipe.attack.both_branches,
        seed=recipe.training.seed,
        search=recipe.method.build().search,
    )


def denoiser_objective(spec: ObjectiveSpec, examples: Examples) -> DenoiserObjective:
    """Return one objective of a denoiser with its examples."""
    return DenoiserObjective(
        examples,
        spec.loss,
        settings=LossSettings(
            spec.teacher,
            spec.eta,
            neutral=spec.neutral or "null",
            beta=spec.beta,
            trajectory=TrajectoryTerms(**spec.trajectory.model_dump())
            if spec.trajectory
            else TrajectoryTerms(),
        ),
        scale=spec.scale,
        timesteps=spec.timesteps,
        elastic=spec.elastic.weight if spec.elastic else 0.0,
    )


def text_encoder_objective(
    spec: ObjectiveSpec, prompts: TokenizedPrompts, latents: Tensor | None
) -> TextEncoderObjective:
    """Return one objective of a text encoder with its prompts and latents."""
    return TextEncoderObjective(
        prompts.tokens,
        spec.loss,
        anchors=prompts.anchors,
        latents=latents,
        scale=spec.scale,
        teacher=spec.teacher,
        timesteps=spec.timesteps,
        beta=spec.beta,
        eta=spec.eta,
    )


def _histogram_objective(
    spec: HistogramSpec, forget: DenoiserObjective, *, judge: Any
) -> DenoiserObjective:
    """Return the histogram objective on the forget set's own examples.

    Each of them keeps its prompt, since the concept does not appear for the empty prompt. `judge`
    is the judge in memory, or None for the one that the recipe names.
    """
    judge = registry.read("judge", spec.judge if judge is None else judge).build()
    ((attribute, value),) = spec.concept.items()
    settings = LossSettings(
        shows=lambda images: judge.probability(images, attribute, value), alpha=spec.alpha
    )
    return replace(
        forget,
        examples=replace(forget.examples, empty=0.0),
        loss="histogram",
        scale=1.0,
        timesteps=spec.timesteps,
        settings=settings,
    )


@torch.enable_grad()
def _require_judge(model: Model, histogram: DenoiserObjective) -> None:
    """Raise the error of a judge that cannot give the concept's probability, on a blank image."""
    width = model.image_width()
    if histogram.settings.shows is not None:
        histogram.settings.shows(torch.zeros(1, 3, width, width, device=model.device))
