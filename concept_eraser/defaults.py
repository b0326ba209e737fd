"""What `concept-eraser erase --forget ... --anchor ...` does where nothing else is asked: one recipe, chosen by measuring.

On the bundled model it is measured against all other methods, attacks included (eval/results/tiny_leaderboard.md), and
without each of its parts (eval/results/tiny_ablation.md). With an anchor: MUNBa's bargain between showing the anchor at noised
pictures of the concept and saying what the model said elsewhere, on all weights, and then, where the model has keys and values
that are linear in the text (Stable Diffusion 1, 2, XL), these in closed form. Without an anchor: ESD's loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concept_eraser.recipe import Recipe

FINISH = "uce"
BUNDLED = ["training.steps=100", "training.lr=1e-4", "training.decay=linear", "generation.steps=12", "generation.batch_size=64", "generation.precision=bf16"]  # fmt: skip
OTHERS = ["training.lr=1e-5"]  # MUNBa and ESD on Stable Diffusion 1.4; not measured here


def settings(model: str | None, *, anchored: bool, retained: bool) -> list[str]:
    """Changes to an empty recipe, to be made before the user's own."""
    found = list(BUNDLED if model in (None, "tiny-sd") else OTHERS)
    return found + (["retain.loss=distill"] if retained and anchored else [])


def family_of(source: str) -> str | None:
    """The family of a model by its name, without loading it: None where a hub id says nothing about it."""
    from concept_eraser.models.loading import BUNDLED as OURS
    from concept_eraser.models.loading import FAMILIES
    from concept_eraser.tiny import published

    if source in OURS:
        return "sd"
    place = source.partition(".safetensors@")[2] or source
    for index in (Path(place) / "pipeline" / "model_index.json", Path(place) / "model_index.json"):
        if index.is_file():
            return FAMILIES.get(str(json.loads(index.read_text()).get("_class_name")))
    return published.family_of(place)


def finishes(recipe: Recipe, family: str | None) -> bool:
    """Whether the default closed form can follow: an anchor, trained weights that hold all keys and values, and a known family."""
    chosen = recipe.trainable.select in ("all", "cross_attention", "cross_attention_kv")
    anchored = all(side.anchor and side.loss == "anchor" for side in recipe.forgotten)
    trains = recipe.target == "denoiser" and recipe.trainable.lora is None and recipe.method.name not in ("uce", "rece")
    return family in ("sd", "sdxl") and chosen and anchored and trains and recipe.retain is not None
