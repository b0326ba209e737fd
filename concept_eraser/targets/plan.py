"""Step 1 for prompts: plan the prompts and images of each objective. The model computes nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from concept_eraser.data import generate, images
from concept_eraser.data.generate import ImageRequest
from concept_eraser.data.prompts import Prompt, PromptSet
from concept_eraser.losses import find
from concept_eraser.losses.base import Images
from concept_eraser.losses.denoiser import LOSSES as DENOISER_LOSSES
from concept_eraser.losses.text_encoder import LOSSES as TEXT_ENCODER_LOSSES
from concept_eraser.recipes.objective_fields import ObjectiveSpec, role
from concept_eraser.registry import Plugin
from concept_eraser.targets.context import PromptContext
from concept_eraser.utils import distributed, provenance
from concept_eraser.utils.errors import UserError, quote

_LOG = logging.getLogger(__name__)

Chunk = tuple[
    ImageRequest, int
]  # the position of the first image of a chunk, which is one file of the cache


@dataclass(frozen=True)
class ObjectivePlan:
    """The data of one objective.

    Attributes:
        spec: The objective in the recipe.
        rows: The prompt of each example.
        images: The images of a folder [n, h, w, 3] uint8, or those that the model is to generate.
        None if the loss needs no images or x_t is sampled during training.
    """

    spec: ObjectiveSpec
    rows: Sequence[Prompt]
    images: Tensor | ImageRequest | None = None


@dataclass(frozen=True)
class PromptPlan:
    """The data of all objectives.

    Attributes:
        objectives: The plan of each objective by name.
        missing: With training.offload: the chunks of requested images that the cache lacks, by
        file. Each process has its share of them.
    """

    objectives: Mapping[str, ObjectivePlan]
    missing: Mapping[Path, Chunk]


def plan_objectives(context: PromptContext) -> PromptPlan:
    """Choose the prompts of each objective, and read or request its images.

    Raises:
        UserError: A folder of images cannot be read, or each prompt to forget is its own anchor.
    """
    plans = {name: _plan(context, name) for name in context.objectives}
    for name, plan in plans.items():
        if role(name) == "forget" and plan.spec.anchor:
            _check_anchor(name, plan.rows, plan.spec.anchor)
    requests = [plan.images for plan in plans.values() if isinstance(plan.images, ImageRequest)]
    return PromptPlan(plans, missing_chunks(requests) if context.offload else {})


def images_of(target: str, loss: str | Plugin) -> Images | None:
    """Return which images a loss noises by default.

    They are those of the prompt or of its anchor; None for a loss without images.
    """
    if target != "text_encoder":
        return find(DENOISER_LOSSES, loss).images
    formula = find(TEXT_ENCODER_LOSSES, loss)
    return formula.images if formula.needs_images else None


def missing_chunks(requests: Iterable[ImageRequest]) -> dict[Path, Chunk]:
    """Return this process's share of the requested chunks that the cache lacks."""
    chunks = {
        request.path(start): (request, start)
        for request in requests
        for start in distributed.mine(request.starts)
    }
    return {path: chunk for path, chunk in chunks.items() if generate.read(path) is None}


def _plan(context: PromptContext, name: str) -> ObjectivePlan:
    spec, prompt_set = context.objectives[name], context.prompt_sets[name]
    rows = list(prompt_set.take(spec.n, context.recipe.generation.seed).prompts)
    owner = images_of(context.recipe.target, spec.loss)
    if spec.images == "free" or owner is None:
        return ObjectivePlan(spec, rows)
    if spec.images != "generate":
        return _from_folder(context, spec, prompt_set)
    anchor = spec.anchor if (spec.noised or owner) == "anchor" else None
    texts = [row.anchor_prompt(anchor) if anchor else row.text for row in rows]
    return ObjectivePlan(spec, rows, _request(context, name, texts))


def _check_anchor(name: str, rows: Sequence[Prompt], anchor: str | dict[str, str]) -> None:
    """Compare each prompt of a forget set with its anchor, apart from capitals and spaces.

    Raises UserError if all are the same. Some may be: their loss preserves them, which is a
    warning.
    """
    unchanged_texts = [
        row.text for row in rows if _plain(row.text) == _plain(row.anchor_prompt(anchor))
    ]
    if not unchanged_texts:
        return
    if len(unchanged_texts) == len(rows):
        raise UserError(
            f"{name}: the anchor of {quote(unchanged_texts[0])} is that prompt itself, and so for "
            "all prompts, so nothing would be forgotten; give an anchor that describes something "
            "else"
        )
    _LOG.warning(
        "%s",
        f"{name}: the anchor of {quote(unchanged_texts[0])} is that prompt itself, and so for "
        f"{len(unchanged_texts)} of {len(rows)} examples, which would not be forgotten; leave "
        "these prompts out, or give another anchor",
    )


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _request(context: PromptContext, name: str, texts: Sequence[str]) -> ImageRequest:
    """Request images by the model itself.

    A concept has the same images alone and among several concepts.
    """
    settings = context.recipe.generation
    sampling = generate.Sampling(
        settings.steps, settings.guidance, settings.batch_size, settings.precision
    )
    seeds = generate.seeds_for(texts, provenance.derive_seed(settings.seed, role(name)))
    return generate.request_images(
        context.model, texts, seeds, sampling, cache=context.cache, weights=context.weights
    )


def _from_folder(
    context: PromptContext, spec: ObjectiveSpec, prompt_set: PromptSet
) -> ObjectivePlan:
    """Return a folder's images with its captions.

    Images without one have the only prompt of the set.
    """
    width = context.model.image_width()
    caption = prompt_set.texts[0] if len(prompt_set) == 1 else None
    pixels, captions = images.read_folder(Path(spec.images), (width, width), caption=caption)
    prompt_by_text = {prompt.text: prompt for prompt in prompt_set.prompts}
    return ObjectivePlan(
        spec, [prompt_by_text.get(text, Prompt(text)) for text in captions], pixels
    )
