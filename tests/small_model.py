"""A Stable Diffusion with random weights and few channels, for tests without trained weights.

A training of it takes about half the seconds of one of the bundled pipeline.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

SESSION: list[Path] = []  # the folder that the processes of this session share (tests/conftest.py)


def make_small_stable_diffusion(folder: Path) -> None:
    """Save a Stable Diffusion with a quarter of the bundled pipeline's channels, in fp32.

    It has the bundled text encoder, so that prompts and attacks have their usual tokens.
    """
    import torch  # after tests/conftest.py has set the variables that torch reads
    from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel

    from concept_eraser.models.loading import load

    bundled_model: Any = load("tiny-sd")
    bundled_model.pipeline.save_pretrained(folder)
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    unet = {**pipeline.unet.config, "block_out_channels": (16, 32), "norm_num_groups": 8}
    vae = {**pipeline.vae.config, "block_out_channels": (8, 16, 16), "norm_num_groups": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline.unet = UNet2DConditionModel.from_config(unet)
        pipeline.vae = AutoencoderKL.from_config(vae)
    shutil.rmtree(folder)
    pipeline.save_pretrained(folder)


def small_sd() -> str:
    """Return the folder of the session's small Stable Diffusion. The first caller saves it."""
    folder = SESSION[0] / "small-sd"
    if not folder.is_dir():
        own_folder = SESSION[0] / f"small-sd.{os.getpid()}"
        make_small_stable_diffusion(own_folder)
        try:
            own_folder.rename(folder)
        except OSError:  # another worker was first
            shutil.rmtree(own_folder)
    return str(folder)
