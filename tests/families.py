"""Tiny pipelines of every family (concept_eraser/tiny/families.py), and the images that plain
diffusers generates with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

from concept_eraser.tiny.families import LABELS, NAMES, SIZE, VARIANTS, build, options
from concept_eraser.tiny.families import clip_text as _clip
from concept_eraser.tiny.families import t5_text as _t5

__all__ = [
    "LABELS",
    "NAMES",
    "SIZE",
    "VARIANTS",
    "_clip",
    "_t5",
    "build",
    "by_hand",
    "options",
    "plain",
    "sample_images",
    "texts",
]


def texts(name: str) -> list[str]:
    return (
        ["goldie", "281"] if name == "dit" else ["a red star", "a blue house on a white background"]
    )


def plain(name: str, folder: Path) -> Any:
    """The pipeline as plain diffusers loads it."""
    absent = {"text_encoder_3": None, "tokenizer_3": None} if name == "sd3-no-t5" else {}
    classes = {
        "sdxl": "StableDiffusionXLPipeline",
        "sd3": "StableDiffusion3Pipeline",
        "flux": "FluxPipeline",
        "dit": "DiTPipeline",
        "pixart": "PixArtAlphaPipeline",
        "pixart-sigma": "PixArtSigmaPipeline",
        "sana": "SanaPipeline",
        "zimage": "ZImagePipeline",
        "qwenimage": "QwenImagePipeline",
        "flux2": "Flux2KleinPipeline",
    }
    kind = classes.get(name) or classes[name.split("-")[0]]
    pipe = getattr(diffusers, kind).from_pretrained(folder, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def by_hand(name: str, pipe: Any, *, guidance: float = 3.0) -> np.ndarray:
    """Both images by diffusers' own pipeline, seeds 5 and 6."""
    size = {"height": SIZE[name], "width": SIZE[name]} if name in SIZE else {}
    if name.startswith(("pixart", "sana")):
        # with it the pipelines draw larger images and shrink them; Sana has no default size
        side = SIZE.get(name) or pipe.transformer.config.sample_size * pipe.vae_scale_factor
        size = {"height": side, "width": side, "use_resolution_binning": False}
    inputs = {"class_labels": [207, 281]} if name == "dit" else {"prompt": texts(name), **size}
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    guiding: dict[str, Any] = {"guidance_scale": guidance}
    if name == "flux2":
        guiding["max_sequence_length"] = pipe.tokenizer.model_max_length
    if name == "zimage":
        guiding = {"guidance_scale": guidance - 1}  # 0 is without guidance there
    elif name == "qwenimage":
        guiding = {"true_cfg_scale": guidance, "negative_prompt": [" ", " "]}
    images = pipe(
        **inputs, generator=generators, num_inference_steps=3, output_type="np", **guiding
    ).images
    return (images * 255).round().astype("uint8")


def sample_images(name: str, model: Any, *, guidance: float = 3.0) -> np.ndarray:
    return model.sample(texts(name), seeds=[5, 6], steps=3, guidance=guidance).numpy()
