"""Add the LoRA of a recipe to the part that is trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from concept_eraser.models.lora import Adapter, layers_of
from concept_eraser.models.lora_files import file_bytes
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.recipes.selections import select
from concept_eraser.recipes.trainable_fields import LoraSpec
from concept_eraser.utils.provenance import derive_seed

_LOG = logging.getLogger(__name__)


def check_lora(lora: LoraSpec, part: nn.Module, selected_names: Sequence[str]) -> None:
    """Check before the images are made that a part can have a LoRA, and warn of a useless rank.

    Args:
        lora: The LoRA of a recipe.
        part: The module that is trained.
        selected_names: The names of its tensors that trainable.select covers.

    Raises:
        UserError: None of the selected tensors belongs to a layer that can have a LoRA.
    """
    layers = layers_of(part, selected_names, conv=lora.conv)
    shapes = [part.get_parameter(f"{layer}.weight").shape for layer in layers]
    largest = max(min(shape[0], shape.numel() // shape[0]) for shape in shapes)
    if lora.rank > largest:
        _LOG.warning(
            "%s",
            f"the LoRA's rank {lora.rank} is larger than that of the weights that it changes, at "
            f"most {largest}; a LoRA of rank {largest} can make the same change",
        )


def add_adapter(recipe: Recipe, part: nn.Module, selected_names: Sequence[str]) -> Adapter | None:
    """Add the LoRA of a recipe to a part of its model.

    Args:
        recipe: The erasing job.
        part: The module that is trained.
        selected_names: The names of its tensors that trainable.select covers.

    Returns:
        The adapter; None if the recipe trains the weights themselves.

    Raises:
        UserError: None of the selected tensors belongs to a layer that can have a LoRA.
    """
    lora = recipe.trainable.lora
    if lora is None:
        return None
    layers = layers_of(part, selected_names, conv=lora.conv)
    seed = derive_seed(recipe.training.seed, "lora")
    return Adapter(part, layers, rank=lora.rank, alpha=lora.alpha, seed=seed)


def file_megabytes(recipe: Recipe, part: nn.Module, dtype: str = "fp32") -> float | None:
    """Return the size of the LoRA file that a recipe will write, in 10^6 bytes.

    Args:
        recipe: The erasing job.
        part: The module that will be trained, without the LoRA.
        dtype: The numbers of the file, one of lora_files.DTYPES.

    Returns:
        The size, counted from the shapes of the layers; None if the recipe trains no LoRA.

    Raises:
        UserError: None of the selected tensors belongs to a layer that can have a LoRA.
    """
    lora = recipe.trainable.lora
    if lora is None or recipe.method.adds_gate:
        return None
    names = select(dict(part.named_parameters()), recipe.trainable.select)
    layers = layers_of(part, names, conv=lora.conv)
    shapes = [part.get_parameter(f"{layer}.weight").shape for layer in layers]
    numbers = sum(lora.rank * (shape.numel() // shape[0] + shape[0]) for shape in shapes)
    return file_bytes(numbers, 2 * len(layers), dtype) / 1e6


@contextmanager
def new_adapter(
    recipe: Recipe, part: nn.Module, selected_names: Sequence[str]
) -> Iterator[Adapter | None]:
    """Call `add_adapter`, and remove the LoRA again if the block raises."""
    adapter = add_adapter(recipe, part, selected_names)
    try:
        yield adapter
    except BaseException:
        if adapter is not None:
            adapter.remove()
        raise
