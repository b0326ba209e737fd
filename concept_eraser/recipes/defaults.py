"""The recipe of `concept-eraser erase --forget ... --anchor ...` without further settings.

It was chosen by measurements on the bundled model, against other methods and with attacks
(eval/results/tiny_leaderboard.md). The learning rate of its LoRA, 2e-3, is the leaderboard's. The
select split of protocol 2 scores 1e-3 higher, by one prompt and one image
(eval/results/combination_rules.md).

With an anchor it is MUNBa on a LoRA of the linear layers and convolutions of all blocks. The first
and the last layer and the embeddings of the time step have none, because sd-scripts ignores them
(models/lora_readers.py; eval/results/tiny_default.md compares both). The forget objective generates
the anchor at noised images of the concept. The retain objective preserves the original
predictions elsewhere. A quarter of the concept's examples have the empty prompt (see
losses/denoiser.py).

If the user selects weights, these are trained without a LoRA. A closed form then follows where the
keys and values are linear in the text (Stable Diffusion 1, 2, XL). After a LoRA it does not help
(tiny_ablation.md).

On a CPU with bf16 instructions the default trains the bundled model in bf16, in three quarters of
the seconds. The measured recipes of the leaderboard train in fp32.

If only some concepts have an anchor, all weights are trained, without the closed form. If none has
one, the loss is ESD's. A method that the user names runs alone. Settings of the user always take
precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from concept_eraser import registry
from concept_eraser.recipes import overrides
from concept_eraser.recipes import recipe as recipes
from concept_eraser.storage import base_model
from concept_eraser.storage.readers import read_json
from concept_eraser.utils import path_redaction
from concept_eraser.utils.errors import UserError

FINISH = "uce"
BUNDLED = (
    "training.steps=100",
    "training.decay=linear",
    "generation.steps=12",
    "generation.batch_size=64",
    "generation.precision=bf16",
)
LORA = {"rank": 64, "conv": True}
LORA_LAYERS = "blocks"
WHOLE = ("all", LORA_LAYERS)  # selections that a LoRA of the default recipe may have
# learning rates on the bundled model: the leaderboard's choice for a LoRA and for all weights, and
# the one for any other recipe
LORA_RATE, RATE, CAREFUL = 2e-3, 8e-4, 1e-4
# learning rates on other models, not measured here: that of MUNBa and ESD on Stable Diffusion 1.4,
# and a usual one for LoRAs on it
OTHERS, LORA_OTHERS = 1e-5, 1e-4
EMPTY = 0.25  # the leaderboard's recipe
ALONE = (
    "saliency",
    "project",
    "reinitialise",
    "negate",
)  # no closed form follows a training with these


def complete(changes: Sequence[str]) -> list[str]:
    """Add the default settings to the user's overrides of an empty recipe (`key.path=value`).

    Raises UserError for overrides that are no recipe.
    """
    settings: dict[str, Any] = {}
    for one in changes:
        overrides.apply(settings, one)
    method, trainable, retain = (
        settings.get("method"),
        settings.get("trainable"),
        settings.get("retain"),
    )
    name = method.get("name", "munba") if isinstance(method, dict) else method or "munba"
    if isinstance(name, str) and hasattr(registry.load("method", name), "edit"):
        return [*([] if trainable else ["trainable.select=cross_attention_kv"]), *changes]
    concepts = _concepts(settings.get("forget"))
    has_anchor = any("anchor" in one for one in concepts.values())
    after = [
        f"{key}.loss={'anchor' if 'anchor' in one else 'esd'}"
        for key, one in concepts.items()
        if "loss" not in one
    ]
    lora = _lora(settings, concepts)
    if lora is not None:
        after.append(f"trainable.lora={overrides.as_text(lora)}")
        if not _says(trainable, "select"):
            after.append(f"trainable.select={LORA_LAYERS}")
    low = lora is not None or (isinstance(trainable, dict) and not _off(trainable.get("lora")))
    rate = CAREFUL if "method" in settings or not has_anchor else LORA_RATE if low else RATE
    tiny = base_model.is_bundled(settings.get("model", base_model.BUNDLED))
    before = [f"training.lr={LORA_OTHERS if low else OTHERS}"]
    if tiny:
        before = [*BUNDLED, f"training.lr={rate}"]
        # several methods need fp32; the default one does not
        before += fast_precision() if "method" not in settings else []
    if has_anchor and retain and not _says(retain, "loss"):
        after.append("retain.loss=distill")
    if isinstance(settings.get("finish"), dict) and "name" not in settings["finish"]:
        before.append(f"finish.name={FINISH}")
    all_changes = [*before, *changes, *after]
    if "method" in settings:
        return all_changes
    whole = recipes.load({}, all_changes)
    family = family_of(whole.model)
    holdings = zip(concepts.items(), holds(whole, family), strict=True)
    all_changes += [
        f"{key}.empty_prompts={EMPTY}"
        for (key, one), here in holdings
        if here and "empty_prompts" not in one
    ]
    if "finish" in settings or any(_says(trainable, key) for key in ALONE):
        return all_changes
    return [*all_changes, f"finish={FINISH}"] if finishes(whole, family) else all_changes


def fast_precision() -> list[str]:
    """Return the override for training the bundled model in bf16 where that is faster, or none."""
    from concept_eraser.models.base import trains_faster_in_bf16

    return ["training.precision=bf16"] if trains_faster_in_bf16() else []


def _lora(settings: dict[str, Any], concepts: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the LoRA of the default recipe, with the user's settings of it.

    Returns None if the user selects other weights or another recipe, if a concept has no anchor, or
    if there are elastic weights, which a LoRA does not have.
    """
    trainable = settings.get("trainable", {})
    every = all(
        "anchor" in one and one.get("loss", "anchor") == "anchor" for one in concepts.values()
    )
    elastic = _says(settings.get("retain"), "elastic") or any(
        "elastic" in one for one in concepts.values()
    )
    if (
        "method" in settings
        or settings.get("target", "denoiser") != "denoiser"
        or not every
        or elastic
    ):
        return None
    if not isinstance(trainable, dict) or any(key in trainable for key in ALONE):
        return None
    lora_settings = trainable.get("lora", {})
    others = "select" in trainable and not (trainable["select"] in WHOLE and "lora" in trainable)
    if others or _off(lora_settings):
        return None
    return {
        **LORA,
        **(
            lora_settings
            if isinstance(lora_settings, dict)
            else {}
            if lora_settings is True
            else {"rank": lora_settings}
        ),
    }


def _off(lora: Any) -> bool:
    """Whether the value means no LoRA, as in trainable_fields.TrainableSpec."""
    return lora is None or lora is False or lora == "none"


def _concepts(forget: Any) -> dict[str, dict[str, Any]]:
    """Return the user's settings of each concept.

    The keys are their places in a recipe: `forget`, or `forget.1`, `forget.2`, ... for several.
    """
    try:
        objectives = overrides.concepts(forget) if isinstance(forget, list) else forget
    except ValueError:
        objectives = None  # loading the recipe reports the mistake
    if isinstance(objectives, list):
        return {
            f"forget.{i + 1}": objective if isinstance(objective, dict) else {}
            for i, objective in enumerate(objectives)
        }
    return {"forget": objectives if isinstance(objectives, dict) else {}}


def _says(objectives: Any, key: str) -> bool:
    """Whether a section, or one of a list of them, has this key."""
    return any(
        isinstance(one, dict) and key in one
        for one in (objectives if isinstance(objectives, list) else [objectives])
    )


def family_of(source: str, chain: int = 0) -> str | None:
    """Return the family of a model from its name, without loading the model.

    chain: how many runs were erased from this one, each without a pipeline of its own.

    Returns None for a hub id that is neither known nor in the cache.
    """
    from huggingface_hub import try_to_load_from_cache

    from concept_eraser.models import hub, run_base
    from concept_eraser.models.loading import FAMILIES
    from concept_eraser.storage.base_model import BUNDLED_MODELS
    from concept_eraser.tiny import published

    place = path_redaction.base_of(source)
    if place in BUNDLED_MODELS:
        return "sd"
    indices = [Path(place) / "pipeline" / "model_index.json", Path(place) / "model_index.json"]
    if hub.is_id(place):
        repository, revision = hub.split(place)
        index_path = try_to_load_from_cache(repository, "model_index.json", revision=revision)
        indices += [Path(index_path)] if isinstance(index_path, str) else []
    for index in indices:
        if index.is_file():
            try:
                return FAMILIES.get(str(read_json(index)["_class_name"]))
            except (ValueError, KeyError, TypeError):
                return None  # damaged; loading the model reports it
    if chain < base_model.LONGEST_CHAIN and run_base.is_rebuilt(Path(place)):
        try:
            record = run_base.read(Path(place))
        except UserError:
            return None
        return family_of(record.model, chain + 1) if record else None
    return published.family_of(place)


def holds(recipe: recipes.Recipe, family: str | None) -> list[bool]:
    """Return for each concept whether some of its examples should have the empty prompt.

    They should if all layers are trained and the sampler uses the unconditional prediction.
    """
    trainable = recipe.trainable
    learns = recipe.target == "denoiser" and (
        trainable.select == "all"
        if trainable.lora is None
        else trainable.select in WHOLE and trainable.lora.conv
    )
    holdings = [
        objective.loss == "anchor" and objective.images != "free" and objective.teacher == "frozen"
        for objective in recipe.forgotten
    ]
    return [learns and family != "flux" and one for one in holdings]


def finishes(recipe: recipes.Recipe, family: str | None) -> bool:
    """Whether the default closed form can follow the training.

    It needs an anchor, trained weights that include all keys and values, and a known family.
    """
    has_suitable_weights = recipe.trainable.select in (
        "all",
        "cross_attention",
        "cross_attention_kv",
    )
    has_anchors = all(
        objective.anchor and objective.loss == "anchor" for objective in recipe.forgotten
    )
    trains = recipe.target == "denoiser" and recipe.trainable.lora is None
    return (
        family in ("sd", "sdxl")
        and has_suitable_weights
        and has_anchors
        and trains
        and recipe.retain is not None
    )
