"""Export of a change as a LoRA file: the erasure's own factors, or the best ones of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from concept_eraser.exporting.low_rank import (
    Approximation,
    Changes,
    LayerErrors,
    approximate,
    spectra_of_changes,
    spectra_of_factors,
)
from concept_eraser.models import lora_blocks, lora_files, lora_metadata, lora_names
from concept_eraser.models.base import Model, require_finite
from concept_eraser.models.lora import Factors
from concept_eraser.models.lora_readers import Ignored, find_ignored
from concept_eraser.recipes import recipe as recipes
from concept_eraser.storage.manifest import require_intact
from concept_eraser.storage.readers import read_tensor_header, read_tensors
from concept_eraser.storage.writers import write_file
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.path_redaction import shorten
from concept_eraser.utils.provenance import version

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class LoraRequest:
    """What the user wants of a LoRA file.

    Attributes:
        naming: One of lora_names.NAMINGS.
        strength: A factor of the change.
        rank: The rank (default: that of the erasure's own factors, else the smallest one).
        max_error: The largest relative error.
        dtype: The numbers of the file, one of lora_files.DTYPES.
        block_weights: A factor for each block of the UNet (models/lora_blocks.py), or none.
    """

    naming: str
    strength: float
    rank: int | None
    max_error: float
    dtype: str = "fp32"
    block_weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class LoraFile:
    """A written LoRA file.

    Attributes:
        rank: Its rank.
        error: The relative error of the change. It is 0 if the factors are the erasure's own.
        layers: The relative errors of the layers; None for the erasure's own factors.
        rounding: The relative error of the change by the rounding of the file's numbers.
        ignored: The layers that programs ignore, one entry for each such program.
    """

    rank: int
    error: float
    layers: LayerErrors | None
    rounding: float
    ignored: tuple[Ignored, ...]


def write(
    source: Path, *, model: Model, changes: Changes | None, place: Path, request: LoraRequest
) -> LoraFile:
    """Write a change as a LoRA file.

    Args:
        source: The run, LoRA or model that the change is from.
        model: The original model. Without `changes` its weights are not needed
            (`loading.outline`).
        changes: The change of its weights. None for a run whose change is its own LoRA.
        place: The file.
        request: The naming, strength and rank.

    Returns:
        The rank and the errors.

    Raises:
        UserError: A LoRA cannot hold the change, or its error is above `max_error`.
    """
    if changes is not None and "vae" in changes:
        raise UserError(
            "a LoRA file cannot hold changes of the VAE; export --to diffusers or single-file"
        )
    result = _approximate(source, model, changes, request)
    scaled_factors = [one.scale_by(request.strength) for one in result.factors]
    if request.block_weights:
        scaled_factors = lora_blocks.weigh(model, scaled_factors, request.block_weights)
    _require_finite(scaled_factors)
    tensors, header = lora_files.build(
        model, scaled_factors, naming=request.naming, dtype=request.dtype
    )
    rounding = 0.0
    if request.dtype != "fp32":
        written_factors = lora_files.read(model, tensors, header, str(place))
        _require_finite(written_factors)
        rounding = _rounding(scaled_factors, written_factors)
    header |= _notes(request, result, rounding)
    is_kohyas = request.naming in lora_names.KOHYA_FORMAT
    describe = lora_metadata.description if is_kohyas else lora_metadata.specification
    header |= describe(
        model,
        place.stem,
        _comment(source, result, request.strength),
        tags="concept erasure",
        usage=_usage(request.strength),
    )
    write_file(place, lambda path: lora_files.write(tensors, header, path))
    return LoraFile(
        rank=max(one.rank for one in result.factors),
        error=result.error,
        layers=result.layers,
        rounding=rounding,
        ignored=find_ignored(
            model.family, scaled_factors, request.naming, is_fp8=request.dtype == "fp8"
        ),
    )


def _approximate(
    source: Path, model: Model, changes: Changes | None, request: LoraRequest
) -> Approximation:
    """Return the erasure's own factors, else the best ones of the rank."""
    own = own_factors(source, model)
    if changes is None and not any(up.any() for one in own for _, up in one.layers.values()):
        raise UserError(
            f"the LoRA of {source} changes nothing; give the run's original model with --before "
            "to compare the two"
        )
    # e.g. not beside another model than trained on
    if changes is None or (own and _is_whole_change(own, changes)):
        if request.rank is None or request.rank >= max(one.rank for one in own):
            return Approximation(own, 0.0, None)
        result = approximate(spectra_of_factors(own), 0.0, request.rank, request.max_error)
        return replace(result, reduced_from=max(one.rank for one in own))
    return approximate(*spectra_of_changes(model, changes), request.rank, request.max_error)


def _require_finite(factors: Sequence[Factors]) -> None:
    for one in factors:
        tensors = {
            f"{layer} ({i})": value
            for layer, pair in one.layers.items()
            for i, value in enumerate(pair)
        }
        require_finite(tensors, "the LoRA's factors", "give a smaller --strength or --dtype fp32")


def _rounding(factors: Sequence[Factors], written_factors: Sequence[Factors]) -> float:
    """Return sqrt(sum ||D' - D||^2 / sum ||D||^2) of the written changes D'."""
    written = {
        (one.part, layer): one.change(layer) for one in written_factors for layer in one.layers
    }
    error, total = 0.0, 0.0
    for one in factors:
        for layer in one.layers:
            change = one.change(layer).double()
            total += float(change.square().sum())
            error += float((written.get((one.part, layer), 0.0) - change).square().sum())
    return (error / total) ** 0.5 if total else 0.0


def _notes(request: LoraRequest, result: Approximation, rounding: float) -> dict[str, str]:
    """Return what the export did to the change, for the header."""
    notes = {"strength": f"{request.strength:g}", "relative_error": f"{result.error:.3g}"}
    if result.layers:
        notes["layer_error_mean"] = f"{result.layers.mean:.3g}"
        notes["layer_error_worst"] = f"{result.layers.worst:.3g}"
    if set(request.block_weights) - {1.0}:
        notes["block_weights"] = ",".join(f"{weight:g}" for weight in request.block_weights)
    if request.dtype != "fp32":
        notes |= {"dtype": request.dtype, "rounding_error": f"{rounding:.3g}"}
    return notes


def _usage(strength: float) -> str:
    """Return what the weight of the file means in other programs."""
    first = "erases" if strength == 1 else f"is strength {strength:g} of the erasure"
    return f"weight 1 {first}; weight 0 is the original"


def _comment(source: Path, result: Approximation, strength: float) -> str:
    """Return what the LoRA erases, without paths, and sd-scripts' words for a reduced rank."""
    parts = []
    if result.reduced_from:
        rank = max(one.rank for one in result.factors)
        parts.append(f"dimension is resized from {result.reduced_from} to {rank}")
    if (source / "recipe.yaml").is_file():
        recipe = recipes.load_run(source)
        for objective in recipe.forgotten:
            parts.append(f"forgets {_prompts_text(objective.prompts)}")
            if objective.anchor:
                anchor = objective.anchor
                text = anchor if isinstance(anchor, str) else ", ".join(map(str, anchor.values()))
                parts.append(f"anchor concept {shorten(text)}")
        parts.append(f"method {recipe.method.name}")
    if strength != 1:
        parts.append(f"strength {strength:g} of the erasure")
    return "; ".join([*parts, f"concept_eraser {version()}"])


def _prompts_text(source: Any) -> str:
    if isinstance(source, list | tuple):
        return f"{len(source)} prompts"
    return shorten(str(source.get("about", "its prompts") if isinstance(source, dict) else source))


def own_factors(source: Path, model: Model) -> list[Factors]:
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
    owners = {
        (one.part, f"{layer}.weight"): (one, layer) for one in factors for layer in one.layers
    }
    for part, tensors in changes.items():
        for name, (before, after) in tensors.items():
            change = after.float().cpu() - before.float().cpu()
            total += float(change.square().sum())
            if (part, name) in owners:  # one product at a time: all are as large as the model
                one, layer = owners[part, name]
                change -= one.change(layer)
            remainder += float(change.square().sum())
    return remainder <= 1e-4 * total
