"""What `concept-eraser erase --forget ... --anchor ...` does where nothing else is asked: one
recipe, chosen by measuring.

On the bundled model it is measured against other methods, attacks included
(eval/results/tiny_leaderboard.md). With an
anchor: MUNBa's bargain between showing the anchor at noised images of the concept and saying what
the model said elsewhere, on a LoRA of all linear layers and convolutions, a quarter of the
concept's examples without a prompt (see losses/denoiser.py). Who selects weights trains these
themselves, and then, where the model has keys and values that are linear in the text (Stable
Diffusion 1, 2, XL), these in closed form; behind a LoRA that does not help (tiny_ablation.md).
Where only some concepts have an anchor all weights are trained, without the closed form; where none
has, by ESD's loss. A method that is named is run alone, and whatever is asked wins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from concept_eraser import registry
from concept_eraser.recipes import overrides
from concept_eraser.recipes import recipe as recipes
from concept_eraser.storage.readers import read_json
from concept_eraser.utils import path_redaction

FINISH = "uce"
BUNDLED = (
    "training.steps=100",
    "training.decay=linear",
    "generation.steps=12",
    "generation.batch_size=64",
    "generation.precision=bf16",
)
LORA = {"rank": 64, "conv": True}
# learning rates on the bundled model: the leaderboard's choice on a LoRA and on all weights; of any
# other recipe
LORA_RATE, RATE, CAREFUL = 2e-3, 8e-4, 1e-4
# on other models, not measured here: MUNBa and ESD on Stable Diffusion 1.4; what LoRAs on it are
# usually trained at
OTHERS, LORA_OTHERS = 1e-5, 1e-4
EMPTY = 0.25  # the leaderboard's recipe
ALONE = ("saliency", "reinitialise", "negate")  # what is trained so is not rewritten afterwards


def completed(asked: Sequence[str]) -> list[str]:
    """The user's changes to an empty recipe (`key.path=value`), with what they leave open. Raises
    UserError for what no recipe is.
    """
    given: dict[str, Any] = {}
    for one in asked:
        overrides.apply(given, one)
    method, trainable, retain = given.get("method"), given.get("trainable"), given.get("retain")
    name = method.get("name", "munba") if isinstance(method, dict) else method or "munba"
    if isinstance(name, str) and hasattr(registry.load("method", name), "edit"):
        return [*([] if trainable else ["trainable.select=cross_attention_kv"]), *asked]
    concepts = _concepts(given.get("forget"))
    anchored = any("anchor" in one for one in concepts.values())
    after = [
        f"{key}.loss={'anchor' if 'anchor' in one else 'esd'}"
        for key, one in concepts.items()
        if "loss" not in one
    ]
    lora = _lora(given, concepts)
    if lora is not None:
        after.append(f"trainable.lora={json.dumps(lora)}")
    low = lora is not None or (isinstance(trainable, dict) and not _off(trainable.get("lora")))
    rate = CAREFUL if "method" in given or not anchored else LORA_RATE if low else RATE
    tiny = given.get("model", "tiny-sd") == "tiny-sd"
    before = (
        [*BUNDLED, f"training.lr={rate}"]
        if tiny
        else [f"training.lr={LORA_OTHERS if low else OTHERS}"]
    )
    if anchored and retain and not _says(retain, "loss"):
        after.append("retain.loss=distill")
    if isinstance(given.get("finish"), dict) and "name" not in given["finish"]:
        before.append(f"finish.name={FINISH}")
    found = [*before, *asked, *after]
    if "method" in given:
        return found
    whole = recipes.load({}, found)
    family = family_of(whole.model)
    held = zip(concepts.items(), holds(whole, family), strict=True)
    found += [
        f"{key}.empty_prompts={EMPTY}"
        for (key, one), here in held
        if here and "empty_prompts" not in one
    ]
    if "finish" in given or any(_says(trainable, key) for key in ALONE):
        return found
    return [*found, f"finish={FINISH}"] if finishes(whole, family) else found


def _lora(given: dict[str, Any], concepts: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The LoRA of the default recipe, as far as its settings are left open; None where other
    weights or another recipe are asked for, where a concept has no anchor, and with elastic
    weights, which a LoRA has none of."""
    trainable = given.get("trainable", {})
    every = all(
        "anchor" in one and one.get("loss", "anchor") == "anchor" for one in concepts.values()
    )
    elastic = _says(given.get("retain"), "elastic") or any(
        "elastic" in one for one in concepts.values()
    )
    if "method" in given or given.get("target", "denoiser") != "denoiser" or not every or elastic:
        return None
    if not isinstance(trainable, dict) or any(key in trainable for key in ALONE):
        return None
    asked = trainable.get("lora", {})
    others = "select" in trainable and not (trainable["select"] == "all" and "lora" in trainable)
    if others or _off(asked):
        return None
    return {
        **LORA,
        **(asked if isinstance(asked, dict) else {} if asked is True else {"rank": asked}),
    }


def _off(lora: Any) -> bool:
    """Whether this asks for no LoRA, as sections.TrainableSpec reads it."""
    return lora is None or lora is False or lora == "none"


def _concepts(forget: Any) -> dict[str, dict[str, Any]]:
    """What is said of each concept, by its place in a recipe: `forget`, or `forget.1`, `forget.2`,
    ... of several.
    """
    try:
        sides = overrides.concepts(forget) if isinstance(forget, list) else forget
    except ValueError:
        sides = None  # which loading it will tell
    if isinstance(sides, list):
        return {
            f"forget.{i + 1}": side if isinstance(side, dict) else {}
            for i, side in enumerate(sides)
        }
    return {"forget": sides if isinstance(sides, dict) else {}}


def _says(sides: Any, key: str) -> bool:
    """Whether a section, or one of a list of them, has this key."""
    return any(
        isinstance(one, dict) and key in one
        for one in (sides if isinstance(sides, list) else [sides])
    )


def family_of(source: str) -> str | None:
    """The family of a model by its name, without loading it: None for a hub id that is neither
    known nor in the cache.
    """
    from huggingface_hub import try_to_load_from_cache

    from concept_eraser.models import hub
    from concept_eraser.models.loading import BUNDLED as OURS
    from concept_eraser.models.loading import FAMILIES
    from concept_eraser.tiny import published

    if source in OURS:
        return "sd"
    place = path_redaction.base_of(source)
    indices = [Path(place) / "pipeline" / "model_index.json", Path(place) / "model_index.json"]
    if hub.is_id(place):
        repository, revision = hub.split(place)
        cached = try_to_load_from_cache(repository, "model_index.json", revision=revision)
        indices += [Path(cached)] if isinstance(cached, str) else []
    for index in indices:
        if index.is_file():
            try:
                return FAMILIES.get(str(read_json(index)["_class_name"]))
            except (ValueError, KeyError, TypeError):
                return None  # damaged, which loading it will tell
    return published.family_of(place)


def holds(recipe: recipes.Recipe, family: str | None) -> list[bool]:
    """Of each concept, whether its examples should hold what guidance subtracts: where all layers
    learn, and it subtracts.
    """
    trained = recipe.trainable
    learns = (
        recipe.target == "denoiser"
        and trained.select == "all"
        and (trained.lora is None or trained.lora.conv)
    )
    held = [
        side.loss == "anchor" and side.images != "free" and side.teacher == "frozen"
        for side in recipe.forgotten
    ]
    return [learns and family != "flux" and one for one in held]


def finishes(recipe: recipes.Recipe, family: str | None) -> bool:
    """Whether the default closed form can follow: an anchor, trained weights that hold all keys and
    values, and a known family.
    """
    chosen = recipe.trainable.select in ("all", "cross_attention", "cross_attention_kv")
    anchored = all(side.anchor and side.loss == "anchor" for side in recipe.forgotten)
    trains = recipe.target == "denoiser" and recipe.trainable.lora is None
    return family in ("sd", "sdxl") and chosen and anchored and trains and recipe.retain is not None
