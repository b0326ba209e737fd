"""Target text_encoder: the text encoder of a text-to-image model that has one."""

from __future__ import annotations

from concept_eraser.erasers.text_encoder import TextEncoder, require_room
from concept_eraser.targets.adapter import new_adapter
from concept_eraser.targets.context import Context, resolve
from concept_eraser.targets.encode import tokenize_prompts
from concept_eraser.targets.latents import make_latents
from concept_eraser.targets.objectives import attack_terms, text_encoder_objectives
from concept_eraser.targets.plan import plan_objectives
from concept_eraser.training.placement import needed


def build(context: Context) -> TextEncoder:
    """Build the eraser of a recipe with target text_encoder.

    Raises:
        UserError: The recipe, the model and the data do not fit each other.
    """
    prompt_context = resolve(context)
    plan = plan_objectives(prompt_context)
    tokens, embeddings = tokenize_prompts(prompt_context, plan)
    require_room(
        prompt_context.model,
        attack_terms(prompt_context.recipe),
        {name: some.tokens for name, some in tokens.items()},
    )
    latents = make_latents(prompt_context, plan, embeddings)
    objectives = text_encoder_objectives(prompt_context, tokens, latents)
    recipe, selected_names = prompt_context.recipe, prompt_context.selected_names
    prompt_context.bring(needed("text_encoder", histogram=recipe.histogram is not None))
    # last: the original model makes the images, and the cache's key has its weights
    with new_adapter(recipe, prompt_context.part, selected_names) as adapter:
        return TextEncoder(
            prompt_context.model,
            objectives,
            adapter.tensors if adapter else selected_names,
            adapter=adapter,
            rotate=recipe.concepts == "rotate",
            attack=attack_terms(recipe),
        )
