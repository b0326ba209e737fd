"""Step 3 for prompts: the images of each objective, encoded by the VAE.

Images come from a folder or from the model itself, through the cache of data/generate.py. With
training.offload the denoiser first makes the latents of all images that the cache lacks. Then the
VAE decodes them, so that each part is moved to the device once. These images have the same keys and
the same bits. The latents are stored in the cache until they are decoded, so that an interrupted
run continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from concept_eraser.data import batches, generate
from concept_eraser.data.generate import ImageRequest
from concept_eraser.models import generation_stages
from concept_eraser.models.base import Model
from concept_eraser.storage.cache import remove_chunk
from concept_eraser.targets.context import PromptContext
from concept_eraser.targets.encode import CODES, Embeddings, codes_path
from concept_eraser.targets.plan import Chunk, PromptPlan
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress, silent


def make_latents(
    context: PromptContext, plan: PromptPlan, embeddings: Embeddings
) -> dict[str, Tensor | None]:
    """Return the latents of the images of each objective [n, c, h, w]; None if it has no images.

    Args:
        context: The resolved context.
        plan: The images of each objective.
        embeddings: With training.offload, the encoded prompts of the missing images. They are
            removed as they are used.
    """
    model, progress = context.model, context.progress
    if plan.missing:
        context.bring(("denoiser",))
        draw_missing(model, plan.missing, embeddings, progress)
    if context.offload and any(
        objective_plan.images is not None for objective_plan in plan.objectives.values()
    ):
        context.bring(("vae",))
        decode_missing(model, plan.missing, progress)
    latents: dict[str, Tensor | None] = {}
    for name, objective_plan in plan.objectives.items():
        images = objective_plan.images
        if isinstance(images, ImageRequest):
            what = f"generating {name} images"
            images = generate.load_or_generate(model, images, what=what, progress=progress)
        latents[name] = None if images is None else batches.encode_pixels(model, images)
    return latents


def draw_missing(
    model: Model,
    missing: Mapping[Path, Chunk],
    embeddings: Embeddings,
    progress: Progress = silent,
) -> None:
    """Make the latents of missing images by the denoiser, and drop the embeddings of each chunk."""
    total = len(embeddings)
    progress("drawing images", 0, total)
    for number, path in enumerate(list(embeddings), 1):
        request, start = missing[path]
        sampling = request.sampling
        codes: dict[int, Tensor] = {}
        for embedding, (scale, rows) in zip(
            embeddings.pop(path), request.calls(start), strict=True
        ):
            chunk_codes = generation_stages.draw(
                model,
                [request.texts[i] for i in rows],
                embedding,
                seeds=[request.seeds[i] for i in rows],
                steps=sampling.steps,
                guidance=scale,
                autocast=sampling.autocast,
            )
            codes |= dict(zip(rows, chunk_codes, strict=True))
        generate.write(codes_path(path), torch.stack([codes[i] for i in sorted(codes)]), CODES)
        progress("drawing images", number, total)


def decode_missing(
    model: Model, missing: Mapping[Path, Chunk], progress: Progress = silent
) -> None:
    """Decode the latents of `draw_missing` by the VAE, and put the images into the cache."""
    progress("decoding images", 0, len(missing))
    for number, (path, (request, start)) in enumerate(missing.items(), 1):
        codes = generate.read(codes_path(path), CODES)
        if codes is None:  # another run with this cache has decoded them
            _require_images(path)
            continue
        images: dict[int, Tensor] = {}
        for _, rows in request.calls(start):  # as many at once as the pipeline decodes
            call_codes = codes[[i - start for i in rows]]
            chunk_images = generation_stages.show(
                model, call_codes, autocast=request.sampling.autocast
            )
            images |= dict(zip(rows, chunk_images, strict=True))
        generate.write(path, torch.stack([images[i] for i in sorted(images)]))
        remove_chunk(codes_path(path))
        progress("decoding images", number, len(missing))


def _require_images(path: Path) -> None:
    """Raise UserError if a chunk has neither latents nor images."""
    if generate.read(path) is None:
        raise UserError(
            f"the latents of {path.name} were removed from the cache {path.parent} during this "
            "run, and its images are not there; run the same command with --resume"
        )
