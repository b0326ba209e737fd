"""Step 2 for prompts: encode all prompts, or tokenize them for a text encoder in training.

With training.offload only the text encoders are on the device. They then also encode the prompts of
images that are not in the cache, so that they are moved to the device once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from concept_eraser.data import batches, generate
from concept_eraser.data.batches import Examples
from concept_eraser.models import generation_stages
from concept_eraser.models.base import Condition, Model
from concept_eraser.targets.context import PromptContext
from concept_eraser.targets.plan import Chunk, ObjectivePlan, PromptPlan

CODES = (
    "codes"  # the suffix of a chunk's file, and its tensor, before the VAE has decoded its images
)
Embeddings = dict[
    Path, list[Any]
]  # the pipeline's encodings of a chunk's prompts, one entry for each call


@dataclass(frozen=True)
class TokenizedPrompts:
    """The token ids of an objective's prompts and their anchors, one row for each example."""

    tokens: Condition
    anchors: Condition | None


def encode_prompts(
    context: PromptContext, plan: PromptPlan
) -> tuple[dict[str, Examples], Embeddings]:
    """Encode the prompts of all objectives.

    Returns:
        The examples of each objective, still without latents, and the embeddings of the missing
        images.
    """
    context.bring(context.model.readers)
    examples = {
        name: _examples(context.model, objective_plan)
        for name, objective_plan in plan.objectives.items()
    }
    return examples, encode_missing(context.model, plan.missing)


def tokenize_prompts(
    context: PromptContext, plan: PromptPlan
) -> tuple[dict[str, TokenizedPrompts], Embeddings]:
    """Tokenize the prompts of all objectives, for a text encoder in training.

    Returns:
        The tokens of each objective, and the embeddings of the missing images.
    """
    if plan.missing:
        context.bring(context.model.readers)
    tokens = {
        name: _tokenize(context.model, objective_plan)
        for name, objective_plan in plan.objectives.items()
    }
    return tokens, encode_missing(context.model, plan.missing)


def encode_missing(model: Model, missing: Mapping[Path, Chunk]) -> Embeddings:
    """Encode the prompts of missing images, except of those whose latents already exist.

    Prompts that occur several times are encoded once, since the states of a T5 are large.
    """
    embeddings: Embeddings = {}
    cache: dict[Any, Any] = {}
    for path, (request, start) in missing.items():
        if generate.read(codes_path(path), CODES) is not None:
            continue
        embeddings[path] = []
        for scale, rows in request.calls(start):
            texts, autocast = tuple(request.texts[i] for i in rows), request.sampling.autocast
            key = texts, scale, autocast
            if key not in cache:
                cache[key] = generation_stages.read(
                    model, list(texts), guidance=scale, autocast=autocast
                )
            embeddings[path].append(cache[key])
    return embeddings


def codes_path(path: Path) -> Path:
    """Return the path of a chunk's latents, where they are stored until the VAE decodes them."""
    return path.with_suffix(f".{CODES}")


def _examples(model: Model, plan: ObjectivePlan) -> Examples:
    spec, texts = plan.spec, [row.text for row in plan.rows]
    anchors = [row.anchor_prompt(spec.anchor) for row in plan.rows] if spec.anchor else None
    mixture = [
        (factor, [row.anchor_prompt(text) for row in plan.rows])
        for text, factor in (spec.mixture or {}).items()
    ]
    examples = batches.make_examples(model, texts, latents=None, anchors=anchors, mixture=mixture)
    if spec.loss == "resteer" and model.attention_layers():
        with_end = spec.tokens != "concept"
        examples = replace(examples, positions=model.concept_tokens(texts, anchors, end=with_end))
    return replace(examples, empty=spec.empty_prompts)


def _tokenize(model: Model, plan: ObjectivePlan) -> TokenizedPrompts:
    cpu, anchor = torch.device("cpu"), plan.spec.anchor
    tokens = model.tokenize([row.text for row in plan.rows]).to(cpu)
    if not anchor:
        return TokenizedPrompts(tokens, None)
    return TokenizedPrompts(
        tokens, model.tokenize([row.anchor_prompt(anchor) for row in plan.rows]).to(cpu)
    )
