"""Export of a change as a LoRA file: the erasure's own factors, or the best ones of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from concept_eraser.exporting.low_rank import (
    Approximation,
    Changes,
    LayerErrors,
    approximate,
    spectra_of_changes,
    spectra_of_factors,
)
from concept_eraser.models import lora_files
from concept_eraser.models.base import Model, require_finite
from concept_eraser.models.lora import Factors
from concept_eraser.models.lora_readers import Ignored, find_ignored
from concept_eraser.storage.manifest import require_intact
from concept_eraser.storage.readers import read_tensor_header, read_tensors
from concept_eraser.storage.writers import write_file
from concept_eraser.utils.errors import UserError

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class LoraRequest:
    """What the user wants of a LoRA file.

    Attributes:
        naming: "kohya" or "diffusers".
        strength: A factor of the change.
        rank: The rank (default: that of the erasure's own factors, else the smallest one).
        max_error: The largest relative error.
    """

    naming: str
    strength: float
    rank: int | None
    max_error: float


@dataclass(frozen=True)
class LoraFile:
    """A written LoRA file.

    Attributes:
        rank: Its rank.
        error: The relative error of the change. It is 0 if the factors are the erasure's own.
        layers: The relative errors of the layers; None for the erasure's own factors.
        ignored: The layers that programs ignore, one entry for each such program.
    """

    rank: int
    error: float
    layers: LayerErrors | None
    ignored: tuple[Ignored, ...]


def write(
    source: Path, *, model: Model, changes: Changes, place: Path, request: LoraRequest
) -> LoraFile:
    """Write a change as a LoRA file.

    Args:
        source: The run, LoRA or model that the change is from.
        model: The original model.
        changes: The change of its weights.
        place: The file.
        request: The naming, strength and rank.

    Returns:
        The rank and the errors.

    Raises:
        UserError: A LoRA cannot hold the change, or its error is above `max_error`.
    """
    if "vae" in changes:
        raise UserError(
            "a LoRA file cannot hold changes of the VAE; export --to diffusers or single-file"
        )
    result = _approximate(source, model, changes, request)
    scaled_factors = [one.scale_by(request.strength) for one in result.factors]
    for one in scaled_factors:
        tensors = {
            f"{layer} ({i})": value
            for layer, pair in one.layers.items()
            for i, value in enumerate(pair)
        }
        require_finite(tensors, "the LoRA's factors", "give a smaller --strength")
    notes = {"strength": f"{request.strength:g}", "relative_error": f"{result.error:.3g}"}
    write_file(
        place,
        lambda path: lora_files.save(
            model, scaled_factors, path, kohya=request.naming == "kohya", notes=notes
        ),
    )
    return LoraFile(
        rank=max(one.rank for one in result.factors),
        error=result.error,
        layers=result.layers,
        ignored=find_ignored(model.family, result.factors, request.naming),
    )


def _approximate(
    source: Path, model: Model, changes: Changes, request: LoraRequest
) -> Approximation:
    """Return the erasure's own factors, else the best ones of the rank."""
    own = _own_factors(source, model)
    if own and _is_whole_change(own, changes):  # e.g. not beside another model than trained on
        if request.rank is None or request.rank >= max(one.rank for one in own):
            return Approximation(own, 0.0, None)
        return approximate(spectra_of_factors(own), 0.0, request.rank, request.max_error)
    return approximate(*spectra_of_changes(model, changes), request.rank, request.max_error)


def _own_factors(source: Path, model: Model) -> list[Factors]:
    """Read the factors of a run that trained a LoRA, or of a LoRA file. Else return []."""
    folder = source / lora_files.FOLDER if (source / "recipe.yaml").is_file() else source
    file = folder / lora_files.FILE if source.is_dir() else source
    if not file.is_file() or file.suffix != SUFFIX:
        return []
    require_intact(file)
    header, names = read_tensor_header(file)
    return (
        lora_files.read(model, read_tensors(file), header, str(file))
        if any("lora" in name for name in names)
        else []
    )


def _is_whole_change(factors: Sequence[Factors], changes: Changes) -> bool:
    """Whether the factors are the whole change, up to a relative error of 1 % (rounding)."""
    remainder, total = 0.0, 0.0
    products = {
        (part_factors.part, f"{layer}.weight"): part_factors.change(layer)
        for part_factors in factors
        for layer in part_factors.layers
    }
    for part, tensors in changes.items():
        for name, (before, after) in tensors.items():
            change = after.float().cpu() - before.float().cpu()
            total += float(change.square().sum())
            remainder += float(
                (change - products.get((part, name), torch.zeros(()))).square().sum()
            )
    return remainder <= 1e-4 * total
