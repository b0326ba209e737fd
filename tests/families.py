"""Tiny pipelines of every family (concept_eraser/tiny/families.py), and the images that plain
diffusers generates with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

from concept_eraser.tiny.families import LABELS, NAMES, SIZE, build, options
from concept_eraser.tiny.families import clip_text as _clip
from concept_eraser.tiny.families import t5_text as _t5

__all__ = [
    "LABELS",
    "NAMES",
    "SIZE",
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
    }
    pipe = getattr(diffusers, classes[name.split("-")[0]]).from_pretrained(folder, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def by_hand(name: str, pipe: Any, *, guidance: float = 3.0) -> np.ndarray:
    """Both images by diffusers' own pipeline, seeds 5 and 6."""
    size = {"height": SIZE[name], "width": SIZE[name]} if name in SIZE else {}
    inputs = {"class_labels": [207, 281]} if name == "dit" else {"prompt": texts(name), **size}
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    images = pipe(
        **inputs,
        generator=generators,
        num_inference_steps=3,
        guidance_scale=guidance,
        output_type="np",
    ).images
    return (images * 255).round().astype("uint8")


def sample_images(name: str, model: Any, *, guidance: float = 3.0) -> np.ndarray:
    return model.sample(texts(name), seeds=[5, 6], steps=3, guidance=guidance).numpy()
