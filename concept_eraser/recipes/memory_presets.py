"""Settings of memory for cards of some size, as data: `memory: 8gb` in a recipe, `--memory 8gb` on
the command line.

A preset fills in what a recipe leaves unsaid, and what the user says beside it wins. Of what a
recipe does say it changes only how much is done at once: a batch is dealt into micro-batches of at
most `at_once` examples (8 become 2 x 4), which is the same step, since the gradients are summed
before they are combined (but for two losses that are functions of a whole micro-batch: data-free
ones share a time step in it, `histogram` is one of a mean over it); and images are generated
fewer at once, each from its own seed. Which weights are trained and by which optimiser stays the
recipe's: that is a matter of the result, not of the card. docs/memory.md says what fits where.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from concept_eraser.utils.errors import unknown_message


@dataclass(frozen=True)
class MemoryPreset:
    """at_once: examples in one forward and backward pass; images: as many are generated at once,
    at most; values: section -> key -> (value, why)."""

    about: str
    at_once: int
    images: int
    values: Mapping[str, Mapping[str, tuple[Any, str]]]


_ALL: dict[str, dict[str, tuple[Any, str]]] = {
    "training": {
        "checkpointing": (
            True,
            "activations of one block at a time, for about a third more time a step",
        ),
        "offload": (
            True,
            (
                "text encoders, denoiser and VAE make the examples by turns, and the "
                "training asks the denoiser alone"
            ),
        ),
        "precision": (
            "bf16",
            (
                "activations and the weights' working copies at half the size; what is "
                "trained stays in fp32"
            ),
        ),
    },
    "generation": {"precision": ("bf16", "images for training need no more")},
}
_FROZEN: dict[str, dict[str, tuple[Any, str]]] = {
    **_ALL,
    "training": {
        **_ALL["training"],
        "frozen": (
            "bf16",
            (
                "weights that do not move, those of text encoders too, at half the size: the "
                "forward pass reads no more digits of them"
            ),
        ),
    },
}

# 24 GB hold what fits them in fp32; the larger cards are for Flux, whose weights fit no smaller one
# even in bf16
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
    """A recipe's mapping with a preset's values where it says nothing, and its batches dealt.

    needs_fp32: the method takes differences of gradients; then nothing of the training is put into
    bf16.
    deal: the sections whose batches may be dealt: not those of which the user has said how they
    are.

    Raises ValueError for a preset that is not there.
    """
    if name not in PRESETS:
        raise ValueError(unknown_message("memory preset", str(name), PRESETS))
    preset, expanded_content = PRESETS[name], dict(content)
    for section, values in preset.values.items():
        own = expanded_content.get(section) or {}
        if isinstance(own, Mapping):  # else the recipe's own check says what is wrong with it
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
    """The settings of training that a preset must leave alone in this recipe."""
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
    if content.get("watch") is not None:  # it draws whole images between the steps
        unfit |= {"offload", "frozen"}
    return unfit


def dealt(training: Any, at_once: int) -> Any:
    """The batch as micro-batches of the largest size up to `at_once` that divides it."""
    if not isinstance(training, Mapping):
        return training
    size, micro = training.get("batch_size", 16), training.get("micro_batches", 1)
    if not isinstance(size, int) or not isinstance(micro, int) or size < 1:
        return training
    small = max(d for d in range(1, min(size, at_once) + 1) if size % d == 0)
    return {**training, "batch_size": small, "micro_batches": micro * (size // small)}


def describe(name: str) -> str:
    """One line: what a preset sets."""
    preset = PRESETS[name]
    description = ", ".join(
        f"{key} {str(value).lower() if isinstance(value, bool) else value}"
        for key, (value, _) in preset.values["training"].items()
    )
    return (
        f"{preset.about}: at most {preset.at_once} examples and {preset.images} images "
        f"at once, {description}"
    )
