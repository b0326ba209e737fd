"""Presets for the memory of a GPU: `memory: 8gb` in a recipe, `--memory 8gb` on the command line.

A preset sets what a recipe leaves open. Settings of the recipe and of the user take precedence. Two
settings of the recipe change:
* A batch is split into micro-batches of at most `at_once` examples (8 become 2 x 4). This is the
  same step, since the gradients are summed before they are combined. Two losses are exceptions,
  because they depend on a whole micro-batch: data-free losses share a time step in it, and
  `histogram` is a function of its mean.
* Fewer images are generated at once, each from its own seed.

The trained weights and the optimiser remain those of the recipe, since they affect the result.
docs/memory.md lists what fits on which card.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from concept_eraser.utils.errors import unknown_message


@dataclass(frozen=True)
class MemoryPreset:
    """The settings for one size of memory.

    Attributes:
        about: The card, in words.
        at_once: The examples in one forward and backward pass.
        images: The largest number of images that are generated at once.
        values: Section -> key -> (value, reason).
    """

    about: str
    at_once: int
    images: int
    values: Mapping[str, Mapping[str, tuple[Any, str]]]


_ALL: dict[str, dict[str, tuple[Any, str]]] = {
    "training": {
        "checkpointing": (
            True,
            "activations of one block at a time, for about a third more time per step",
        ),
        "offload": (
            True,
            (
                "text encoders, denoiser and VAE make the examples one after the other, and the "
                "training uses the denoiser alone"
            ),
        ),
        "precision": (
            "bf16",
            (
                "activations and the weights' working copies at half the size; the trained "
                "weights stay in fp32"
            ),
        ),
    },
    "generation": {"precision": ("bf16", "sufficient for training images")},
}
_FROZEN: dict[str, dict[str, tuple[Any, str]]] = {
    **_ALL,
    "training": {
        **_ALL["training"],
        "frozen": (
            "bf16",
            (
                "frozen weights, those of text encoders too, at half the size: the forward pass "
                "is in bf16 anyway"
            ),
        ),
    },
}

# On 24 GB the frozen weights stay in fp32. The presets for larger cards are for Flux, whose weights
# need such a card even in bf16.
PRESETS: dict[str, MemoryPreset] = {
    "8gb": MemoryPreset("a card of 8 GB", 1, 1, _FROZEN),
    "12gb": MemoryPreset("a card of 12 GB", 1, 1, _FROZEN),
    "16gb": MemoryPreset("a card of 16 GB", 2, 2, _FROZEN),
    "24gb": MemoryPreset("a card of 24 GB", 4, 4, _ALL),
    "32gb": MemoryPreset("a card of 32 GB", 4, 4, _FROZEN),
    "48gb": MemoryPreset("a card of 48 GB", 8, 8, _FROZEN),
}


def expand(
    content: Mapping[str, Any],
    name: str,
    *,
    needs_fp32: bool = False,
    deal: Collection[str] = ("training", "generation"),
) -> dict[str, Any]:
    """Return a recipe's mapping with a preset's values for its open settings, and smaller batches.

    Args:
        content: The mapping of the recipe.
        name: The name of the preset.
        needs_fp32: The method takes differences of gradients. Then nothing of the training is in
            bf16.
        deal: The sections whose batches may be split. A section is not among them if the user has
            set its batches.

    Raises:
        ValueError: There is no such preset.
    """
    if name not in PRESETS:
        raise ValueError(unknown_message("memory preset", str(name), PRESETS))
    preset, expanded_content = PRESETS[name], dict(content)
    for section, values in preset.values.items():
        own = expanded_content.get(section) or {}
        if isinstance(own, Mapping):  # else the recipe's own check reports the mistake
            unfit = _unfit(content, own, needs_fp32) if section == "training" else set()
            expanded_content[section] = {
                **{key: value for key, (value, _) in values.items() if key not in unfit},
                **own,
            }
    if "training" in deal:
        expanded_content["training"] = dealt(expanded_content.get("training"), preset.at_once)
    generation = expanded_content.get("generation")
    if (
        "generation" in deal
        and isinstance(generation, Mapping)
        and isinstance(size := generation.get("batch_size", 32), int)
    ):
        expanded_content["generation"] = {**generation, "batch_size": min(size, preset.images)}
    return expanded_content


def _unfit(content: Mapping[str, Any], training: Mapping[str, Any], needs_fp32: bool) -> set[str]:
    """Return the settings of training that a preset must not change in this recipe."""
    unfit: set[str] = set()
    if needs_fp32:
        unfit |= {"precision", "frozen"}
    generation = content.get("generation")
    exact = isinstance(generation, Mapping) and generation.get("precision") == "fp32"
    if (
        exact
        or training.get("precision") == "fp32"
        or content.get("target", "denoiser") != "denoiser"
    ):
        unfit.add("frozen")
    if content.get("watch") is not None:  # watching generates whole images between the steps
        unfit |= {"offload", "frozen"}
    return unfit


def dealt(training: Any, at_once: int) -> Any:
    """Split the batch into micro-batches of the largest size up to `at_once` that divides it."""
    if not isinstance(training, Mapping):
        return training
    size, micro = training.get("batch_size", 16), training.get("micro_batches", 1)
    if not isinstance(size, int) or not isinstance(micro, int) or size < 1:
        return training
    small = max(d for d in range(1, min(size, at_once) + 1) if size % d == 0)
    return {**training, "batch_size": small, "micro_batches": micro * (size // small)}


def describe(name: str) -> str:
    """Describe the settings of a preset in one line."""
    preset = PRESETS[name]
    description = ", ".join(
        f"{key} {str(value).lower() if isinstance(value, bool) else value}"
        for key, (value, _) in preset.values["training"].items()
    )
    examples, images = (
        f"{n} {word}" if n == 1 else f"{n} {word}s"
        for n, word in ((preset.at_once, "example"), (preset.images, "image"))
    )
    return f"{preset.about}: at most {examples} and {images} at once, {description}"
