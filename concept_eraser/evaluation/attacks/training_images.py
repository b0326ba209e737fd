"""Images by the original model that an attacker trains on: unrelated ones and ones of the concept.

They are stored in the attack's memory, because they serve for every victim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from concept_eraser.data import generate, prompts
from concept_eraser.data import images as image_files
from concept_eraser.evaluation.attacks.base import Scene
from concept_eraser.evaluation.attacks.trajectory import encode_images, image_size
from concept_eraser.utils.errors import UserError, quote
from concept_eraser.utils.provenance import derive_seed, fingerprint


def unrelated_prompts(scene: Scene, source: str, n: int) -> list[str]:
    """Return n prompts of unrelated images, in turn from a prompt set.

    Args:
        scene: The attacked batch; its concept's word must not be in a prompt.
        source: The prompt set by name or file; "" for the suite's retain groups.
        n: The number of prompts.

    Raises:
        UserError: There is no such prompt, or a prompt of the set states the concept.
    """
    if source:
        texts = prompts.load(source).take(n, scene.root).texts
        stated = [text for text in texts if scene.concept in text]
        if stated:
            raise UserError(
                f"the prompt {quote(stated[0])} of {source} states {scene.concept!r}, so that its "
                "image is not unrelated; give other prompts"
            )
    else:
        texts = [text for text in scene.others if scene.concept not in text]
    if not texts:
        raise UserError(
            "the suite has no retain group whose prompts leave out "
            f"{scene.concept!r}; give unrelated prompts with --set prompts=NAME"
        )
    order = torch.randperm(
        len(texts), generator=torch.Generator().manual_seed(derive_seed(scene.root, "unrelated"))
    ).tolist()
    return [texts[order[i % len(texts)]] for i in range(n)]


def original_latents(
    scene: Scene, texts: Sequence[str], name: str, *, mirrored: bool = False
) -> Tensor:
    """Return latents of the original model's images of some texts, [n, c, h, w].

    Args:
        scene: The attacked batch.
        texts: The prompts of the images.
        name: Another name gives other seeds.
        mirrored: Append the latents of the mirrored images, so that there are 2n.
    """
    seeds = [derive_seed(scene.root, name, i) % 2**31 for i in range(len(texts))]
    facts = {
        "weights": generate.model_fingerprint(scene.original),
        "drawing": scene.original.drawing(),
        "texts": list(texts),
        "seeds": seeds,
        "sampling": asdict(scene.sampling),
    }
    path = scene.memory / f"{fingerprint(facts)}.safetensors" if scene.memory else None
    images = generate.read(path) if path else None
    if images is None:
        size = scene.sampling.batch_size
        images = torch.cat(
            [
                scene.original.sample(
                    texts[start : start + size],
                    seeds=seeds[start : start + size],
                    steps=scene.sampling.steps,
                    guidance=scene.sampling.guidance,
                    autocast=scene.sampling.autocast,
                )
                for start in range(0, len(texts), size)
            ]
        )
        if path:
            generate.keep(partial(generate.write, path, images))
    return encode_images(scene, torch.cat([images, images.flip(2)]) if mirrored else images)


def folder_latents(scene: Scene, folder: str, n: int) -> tuple[Tensor, list[str]]:
    """Return latents and captions of the first n images of a folder, resized to the model's size.

    Raises UserError as `concept_eraser.data.images.read_folder` does.
    """
    images, captions = image_files.read_folder(Path(folder), image_size(scene))
    return encode_images(scene, images[:n]), captions[:n]
