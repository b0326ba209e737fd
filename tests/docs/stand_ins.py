"""Stand-ins under the names that the pages use: models, runs, files of weights, images, prompts.

The models have the real classes at tiny sizes and random weights. A Stable Diffusion has the text
encoder of the bundled pipeline, so that prompts and attacks have their usual tokens.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import concept_eraser
from tests.families import build
from tests.small_model import make_small_stable_diffusion

SD = "stable-diffusion-v1-4"
FAMILIES = {"sdxl": "sdxl", "sd35": "sd3", "flux": "flux"}
FILES = {
    "forget.txt": "a star\na red star\n",
    "others.txt": "a moon\na blue moon\n",
    "retain.txt": "a house\na green tree\n",
    "prompts.yaml": "- target: van gogh\n  guidance_scale: 1.0\n",
    "recipe.yaml": f"model: ./{SD}\n"
    "forget: {prompts: forget.txt, loss: anchor, anchor: a person}\nretain: retain.txt\n",
}
STEPS = ["training.steps=2", "training.batch_size=2", "training.device=cpu"]
FEW = [*STEPS, "forget.n=2", "retain.n=2", "generation.steps=2"]
# name of a run: what it forgets, and what it trains
RUNS: dict[str, tuple[str, Any]] = {
    "mine": ("forget.txt", "all_but_cross_attention"),
    "lora": ("others.txt", {"select": "cross_attention", "lora": {"rank": 4}}),
    "star": ("tiny_star", "cross_attention"),
    "moon": ("tiny_moon", "cross_attention"),
}
# other names of a stand-in
COPIES = {
    "sd15": SD,
    "erased-sd": "runs/mine/pipeline",
    "esd-unet.safetensors": "runs/mine/pipeline/unet/diffusion_pytorch_model.safetensors",
    "lora.safetensors": "runs/lora/lora/pytorch_lora_weights.safetensors",
    "model.safetensors": "single.safetensors",
    "runs/van_gogh": "runs/lora",
    "runs/heart": "runs/moon",
    "runs/tiny_star_munba": "runs/star",
    "runs/star_munba": "runs/star",
    "runs/star_esd": "runs/moon",
}
ALWAYS = [SD, "flux", *FILES]
IMAGES = ("before", "after", "reference")


def make_images(folder: Path, seed: int) -> None:
    folder.mkdir()
    generator = np.random.default_rng(seed)
    for number in range(3):
        pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:05}.png")


def make_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every stand-in in a folder. The runs are trained for two steps."""
    monkeypatch.chdir(folder)
    make_small_stable_diffusion(folder / SD)
    for name, family in FAMILIES.items():
        build(family, folder / name)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for seed, name in enumerate(IMAGES):
        make_images(folder / name, seed)
    for name, (prompts, trainable) in RUNS.items():
        concept_eraser.erase(
            model=f"./{SD}",
            forget={"prompts": prompts, "loss": "anchor", "anchor": "a person wearing clothes"},
            retain={"prompts": "retain.txt", "loss": "distill"},
            method="munba",
            trainable=trainable,
            overrides=FEW,
            output=f"runs/{name}",
        )
    concept_eraser.export(f"./{SD}", "single-file", output="single.safetensors")
    for name, source in COPIES.items():
        link(folder / source, folder / name)


def link(source: Path, target: Path) -> None:
    """Copy a file or a folder by hard links: whoever writes a file replaces it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link)
    else:
        os.link(source, target)


def names() -> list[str]:
    return [SD, *FAMILIES, *FILES, *IMAGES, *(f"runs/{name}" for name in RUNS), *COPIES]


def supply(
    folder: Path, stand_ins: Path, texts: Iterable[str], *, without: Iterable[str] = ()
) -> None:
    """Give a folder the stand-ins that texts name, except those that a command there writes.

    It also gets what the recipes of the stand-ins name. `without` names runs that the texts write
    without an option.
    """
    text = "\n".join(texts)
    words = {word.removeprefix("./") for word in re.split(r"[\s\"'`=,()\[\]]+", text)}
    for name in names():
        writes = re.search(rf"(?:--output|-o) {re.escape(name)}(?!\S)", text)
        is_named = any(word == name or word.startswith(f"{name}/") for word in words)
        if not writes and name not in without and (is_named or name in ALWAYS):
            link(stand_ins / name, folder / name)
