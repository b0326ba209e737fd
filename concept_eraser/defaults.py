"""What `concept-eraser erase --forget ... --anchor ...` does where nothing else is asked: one recipe, chosen by measuring.

On the bundled model it is measured against other methods, attacks included (eval/results/tiny_leaderboard.md). With an
anchor: MUNBa's bargain between showing the anchor at noised pictures of the concept and saying what the model said
elsewhere, on all weights, and then, where the model has keys and values that are linear in the text (Stable Diffusion 1, 2,
XL), these in closed form. Without an anchor: ESD's loss. A method that is named is run alone, and whatever is asked wins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from concept_eraser import recipe as recipes
from concept_eraser import registry

FINISH = "uce"
BUNDLED = ("training.steps=100", "training.lr=1e-4", "training.decay=linear", "generation.steps=12", "generation.batch_size=64", "generation.precision=bf16")  # fmt: skip
OTHERS = ("training.lr=1e-5",)  # MUNBa and ESD on Stable Diffusion 1.4; not measured here
ALONE = (
    "method",
    "finish",
    "trainable.saliency",
    "trainable.reinitialise",
    "trainable.negate",
)  # nothing follows these


def completed(asked: Sequence[str]) -> list[str]:
    """The user's changes to an empty recipe (`key.path=value`), with what they leave open. Raises UserError for what no recipe is."""
    given = dict(one.partition("=")[::2] for one in asked)
    method = str(_value(given, "method.name", "method") or "munba")
    if hasattr(registry.load("method", method), "edit"):
        selected = _has(given, "trainable")
        return [*([] if selected else ["trainable.select=cross_attention_kv"]), *asked]
    anchored = _says(given, "forget", "anchor")
    before = list(BUNDLED if _value(given, "model") in (None, "tiny-sd") else OTHERS)
    after = [] if _says(given, "forget", "loss") else ["forget.loss=anchor" if anchored else "forget.loss=esd"]
    if anchored and _has(given, "retain") and not _says(given, "retain", "loss"):
        after.append("retain.loss=distill")
    if _has(given, "finish") and not {"finish", "finish.name"} & given.keys():
        before.append(f"finish.name={FINISH}")
    found = [*before, *asked, *after]
    if any(_has(given, key) for key in ALONE):
        return found
    whole = recipes.load({}, found)
    return [*found, f"finish={FINISH}"] if finishes(whole, family_of(whole.model)) else found


def _has(given: dict[str, str], key: str) -> bool:
    return any(name == key or name.startswith(key + ".") for name in given)


def _says(given: dict[str, str], side: str, key: str) -> bool:
    """Whether a side is given this key, by its path or inside a mapping."""
    inside = _value(given, side)
    return _has(given, f"{side}.{key}") or any(isinstance(one, dict) and key in one for one in (inside if isinstance(inside, list) else [inside]))  # fmt: skip


def _value(given: dict[str, str], *keys: str) -> object:
    """The last of some keys that is given, read as YAML."""
    return next((yaml.safe_load(given[key]) for key in keys if key in given), None)


def family_of(source: str) -> str | None:
    """The family of a model by its name, without loading it: None for a hub id that is neither known nor in the cache."""
    from huggingface_hub import try_to_load_from_cache

    from concept_eraser.models import hub
    from concept_eraser.models.loading import BUNDLED as OURS
    from concept_eraser.models.loading import FAMILIES
    from concept_eraser.tiny import published

    if source in OURS:
        return "sd"
    place = source.partition(".safetensors@")[2] or source
    indices = [Path(place) / "pipeline" / "model_index.json", Path(place) / "model_index.json"]
    if hub.is_id(place):
        repository, revision = hub.split(place)
        cached = try_to_load_from_cache(repository, "model_index.json", revision=revision)
        indices += [Path(cached)] if isinstance(cached, str) else []
    for index in indices:
        if index.is_file():
            return FAMILIES.get(str(json.loads(index.read_text()).get("_class_name")))
    return published.family_of(place)


def finishes(recipe: recipes.Recipe, family: str | None) -> bool:
    """Whether the default closed form can follow: an anchor, trained weights that hold all keys and values, and a known family."""
    chosen = recipe.trainable.select in ("all", "cross_attention", "cross_attention_kv")
    anchored = all(side.anchor and side.loss == "anchor" for side in recipe.forgotten)
    trains = recipe.target == "denoiser" and recipe.trainable.lora is None
    return family in ("sd", "sdxl") and chosen and anchored and trains and recipe.retain is not None
