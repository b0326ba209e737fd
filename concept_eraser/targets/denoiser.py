"""Target denoiser: the UNet or transformer of a text-to-image model."""

from __future__ import annotations

from typing import Any

from concept_eraser.erasers.denoiser import Denoiser, require_supported
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.targets.adapter import new_adapter
from concept_eraser.targets.context import Context, resolve
from concept_eraser.targets.encode import encode_prompts
from concept_eraser.targets.latents import make_latents
from concept_eraser.targets.objectives import attack_terms, denoiser_objectives, with_latents
from concept_eraser.targets.plan import plan_objectives
from concept_eraser.training.placement import needed
from concept_eraser.utils.provenance import derive_seed


def build(context: Context) -> Denoiser:
    """Build the eraser of a recipe with target denoiser.

    Raises:
        UserError: The recipe, the model and the data do not fit each other.
    """
    prompt_context = resolve(context)
    plan = plan_objectives(prompt_context)
    examples, embeddings = encode_prompts(prompt_context, plan)
    objectives = denoiser_objectives(prompt_context, examples)
    recipe, selected_names = prompt_context.recipe, prompt_context.selected_names
    is_start_token_trained = recipe.trainable.start_token is None
    require_supported(
        prompt_context.model, objectives, is_start_token_trained=is_start_token_trained
    )
    objectives = with_latents(objectives, make_latents(prompt_context, plan, embeddings))
    prompt_context.bring(needed("denoiser", histogram=recipe.histogram is not None))
    # last: the original model makes the images, and the cache's key has its weights
    with new_adapter(recipe, prompt_context.part, selected_names) as adapter:
        eraser = Denoiser(
            prompt_context.model,
            objectives,
            adapter.tensors if adapter else selected_names,
            adapter=adapter,
            rotate=recipe.concepts == "rotate",
            attack=attack_terms(recipe),
            is_start_token_trained=is_start_token_trained,
        )
        # `hold` has passes too; `Placement.undo` ends the checkpointing
        if recipe.training.checkpointing:
            latent_model: Any = prompt_context.model
            latent_model.checkpoint(True)
        eraser.hold(_elastic_seeds(recipe))
    return eraser


def _elastic_seeds(recipe: Recipe) -> dict[str, list[int]]:
    """Return the seeds of the examples that determine the elastic penalty of each parameter.

    They are the same for a resumed run.
    """
    seed = recipe.training.seed
    return {
        name: [derive_seed(seed, "elastic", name, i) for i in range(spec.elastic.n)]
        for name, spec in recipe.objective_specs.items()
        if spec.elastic
    }
