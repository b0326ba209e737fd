"""Export of an erasure: diffusers folder, changed tensors, LoRA in two namings, single file.

The exported change is the difference of two models, before and after. The source is a run, a
folder, or a LoRA of another tool. A LoRA is exported with its own factors. Any other difference D =
W_after - W_before is approximated in each layer by the best matrix of a rank (Eckart and Young: the
largest singular values). Its relative error

    sqrt(sum ||D - up down||^2 / sum ||D||^2)

counts all tensors that changed, also those that a LoRA cannot hold (biases, norms). The export
reports the error and refuses one above a bound.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concept_eraser.models import loading, lora_files, run_base, single_file
from concept_eraser.models.base import Model, require_finite
from concept_eraser.models.lora import Factors, Pair, can_adapt
from concept_eraser.recipes import recipe as recipes
from concept_eraser.storage.manifest import require_intact
from concept_eraser.storage.readers import read_tensor_header, read_tensors
from concept_eraser.storage.writers import probe, write_file, write_folder, write_tensors
from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError, unknown

FORMATS = ("diffusers", "tensors", "lora", "kohya", "single-file")
_SUFFIX = ".safetensors"
Changes = dict[str, dict[str, tuple[Tensor, Tensor]]]  # part -> tensor -> (before, after)


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        path: The file or folder.
        rank: The rank of a LoRA.
        error: The relative error of a LoRA. It is 0 if the factors are the erasure's own.
    """

    path: Path
    rank: int | None = None
    error: float | None = None


def export(
    source: str | Path,
    to: str,
    *,
    before: Any = None,
    output: str | Path | None = None,
    strength: float = 1.0,
    rank: int | None = None,
    max_error: float = 0.2,
    allow_pickle: bool = False,
) -> ExportResult:
    """Write an erasure in another format.

    Args:
        source: a run folder, or anything that `load` takes.
        to: one of FORMATS.
        before: the original model (default: the one that a run's recipe names). It is not needed
            for a whole model at strength 1.
        output: a folder for diffusers, else a .safetensors file. It must not exist. The default is
            in exports/ of a run folder, else in the working folder.
        strength: 0 is the original and 1 the erasure. Other values interpolate or extrapolate.
        rank: the rank of a LoRA (default: that of the erasure's own factors, else the smallest rank
            with an error of at most `max_error`).
        max_error: the largest relative error of a LoRA.
        allow_pickle: also load weights stored as pickles, which can execute code.

    Returns:
        The path, and the rank and error of a LoRA.

    Raises:
        UserError: the two models do not match, or the error of the LoRA is above `max_error`.

    Example:
        >>> import concept_eraser
        >>> lora = concept_eraser.export("runs/tiny_star_munba", "lora")
    """
    if to not in FORMATS:
        raise unknown("format", to, FORMATS)
    place = _place(Path(source), to, output)
    base = before if before is not None else _base_of(Path(source))
    after = loading.load(source, allow_pickle=allow_pickle, base=base)
    if not (abs(strength) <= limits.PORTION and math.isfinite(max_error)):
        raise UserError(
            f"strength is a number from -{limits.PORTION:g} to {limits.PORTION:g} and "
            f"max_error a finite one, found {strength:g} and {max_error:g}"
        )
    left_out = (
        set(after.parts) - set(single_file.written_parts(after)) if to == "single-file" else set()
    )
    if to in ("diffusers", "single-file") and strength == 1 and not (left_out and base is not None):
        _write_whole(after, to, place)
        return ExportResult(place)
    original = _original(base, source, allow_pickle)
    changes = differences(original, after)
    require_its_own(Path(source), original, changes)
    if missing_tensors := sorted(left_out & changes.keys()):
        raise UserError(
            f"a single file of the family {after.family!r} holds only the denoiser, and "
            f"this erasure changed {' and '.join(missing_tensors)}; export --to diffusers"
        )
    if to in ("lora", "kohya"):
        return _write_lora(
            source=Path(source),
            model=original,
            changes=changes,
            to=to,
            place=place,
            strength=strength,
            rank=rank,
            max_error=max_error,
        )
    if to == "tensors":
        _write_tensors(original, changes, place, strength)
        return ExportResult(place)
    with torch.no_grad():
        for part, tensors in changes.items():
            state = after.parts[part].state_dict()
            for name, pair in tensors.items():
                state[name].copy_(torch.lerp(*pair, strength))  # exact at 0 and at 1
    _write_whole(after, to, place)
    return ExportResult(place)


def _place(source: Path, to: str, output: str | Path | None) -> Path:
    """Return the output path.

    Raises UserError if it exists, or if its name does not fit the format.
    """
    if output is None:
        name = f"{source.stem if source.suffix == _SUFFIX else source.name}-{to}"
        folder = source / "exports" if (source / "recipe.yaml").is_file() else Path()
        place = folder / (name if to == "diffusers" else name + _SUFFIX)
    else:
        place = Path(output)
    if (place.suffix == _SUFFIX) != (to != "diffusers"):
        expected_kind = f"a {_SUFFIX} file" if to != "diffusers" else "a folder"
        raise UserError(f"--to {to} writes {expected_kind}, found the output {place}")
    if os.path.lexists(place):
        raise UserError(f"{place} exists already; give another --output, or remove it")
    probe(place)
    return place


def _base_of(source: Path) -> str | None:
    """Return the original model of a run, from its recipe. None for a source that is no run."""
    path = source / "recipe.yaml"
    if not path.is_file():
        return None
    recipe = recipes.load(str(path))
    if not (source / "pipeline").is_dir() and not run_base.is_rebuilt(source):
        summary = (
            "is not finished"
            if not (source / "done.json").is_file()
            else f"erased from a {recipe.target}"
        )
        raise UserError(f"{source} {summary}, so it holds no text-to-image pipeline to export")
    return None if recipe.model.endswith(" in memory") else recipe.model


def _original(base: Any, source: str | Path, allow_pickle: bool) -> Model:
    if base is None:
        raise UserError(
            f"the change of {source} cannot be computed without its original model; "
            "give it with --before"
        )
    return loading.load(base, allow_pickle=allow_pickle)


def differences(before: Model, after: Model) -> Changes:
    """Return the tensors in which two models of one architecture differ.

    Raises UserError if the architectures differ, or if no tensor differs.
    """
    changes: Changes = {}
    for part, module in after.parts.items():
        theirs, ours = (
            before.parts[part].state_dict() if part in before.parts else {},
            module.state_dict(),
        )
        other = next((n for n in ours if n not in theirs or ours[n].shape != theirs[n].shape), None)
        if other or len(ours) != len(theirs):
            raise UserError(
                f"{after.source} and {before.source} are not of one architecture: they "
                f"differ in {part}.{other or next(n for n in theirs if n not in ours)}"
            )
        part_changes = {
            name: (theirs[name], value)
            for name, value in ours.items()
            if not torch.equal(theirs[name], value)
        }
        if part_changes:
            changes[part] = part_changes
    if not changes:
        raise UserError(
            f"{after.source} has the same weights as {before.source}; give its original model "
            "with --before"
        )
    return changes


def require_its_own(source: Path, original: Model, changes: Changes) -> None:
    """Raise UserError if a run differs from `original` in tensors that it did not train.

    It then has another original model.
    """
    weights_file = source / "weights.safetensors"
    if not (source / "recipe.yaml").is_file() or not weights_file.is_file():
        return
    tensor_names = set(read_tensor_header(weights_file)[1])
    other = next(
        (
            f"{part}.{name}"
            for part, tensors in changes.items()
            for name in tensors
            if name not in tensor_names
        ),
        None,
    )
    if other is not None:
        raise UserError(
            f"{source} was not made from {original.source}: they differ in {other}, "
            "which that run did not train; give its original model with --before"
        )


def _write_whole(model: Model, to: str, place: Path) -> None:
    for part, module in model.parts.items():
        require_finite(
            module.state_dict(), f"the weights of the {part}", "give a smaller --strength"
        )
    if to == "diffusers":
        write_folder(place, model.save, kind="model")
    else:
        write_file(place, lambda path: single_file.write(model, path))


def _write_tensors(model: Model, changes: Changes, place: Path, strength: float) -> None:
    if len(changes) > 1:
        raise UserError(
            "tensors are of one part of a pipeline, and this erasure changed "
            f"{' and '.join(changes)}; export --to diffusers"
        )
    ((part, tensors),) = changes.items()
    values = {name: torch.lerp(*pair, strength).contiguous() for name, pair in tensors.items()}
    header = {
        "format": "pt",
        "part": getattr(model, "network", "unet") if part == "denoiser" else part,
    }
    require_finite(values, "the exported tensors", "give a smaller --strength")
    write_tensors(place, values, header)


def _write_lora(
    source: Path,
    model: Model,
    changes: Changes,
    to: str,
    place: Path,
    *,
    strength: float,
    rank: int | None,
    max_error: float,
) -> ExportResult:
    if "vae" in changes:
        raise UserError(
            "a LoRA file cannot hold changes of the VAE; export --to diffusers or single-file"
        )
    layer_factors, error = _own_factors(source, model) if rank is None else [], 0.0
    if not layer_factors or not _is_whole_change(
        layer_factors, changes
    ):  # e.g. beside another model than it was trained on
        layer_factors, error = low_rank(model, changes, rank, max_error)
    notes = {"strength": f"{strength:g}", "relative_error": f"{error:.3g}"}
    scaled_factors = [part_factors.scale_by(strength) for part_factors in layer_factors]
    for part_factors in scaled_factors:
        factors = {
            f"{layer} ({i})": value
            for layer, pair in part_factors.layers.items()
            for i, value in enumerate(pair)
        }
        require_finite(factors, "the LoRA's factors", "give a smaller --strength")
    write_file(
        place,
        lambda path: lora_files.save(model, scaled_factors, path, kohya=to == "kohya", notes=notes),
    )
    return ExportResult(place, max(part_factors.rank for part_factors in layer_factors), error)


def _own_factors(source: Path, model: Model) -> list[Factors]:
    """Read the factors of a run that trained a LoRA, or of a LoRA file. Else return []."""
    folder = source / lora_files.FOLDER if (source / "recipe.yaml").is_file() else source
    file = folder / lora_files.FILE if source.is_dir() else source
    if not file.is_file() or file.suffix != _SUFFIX:
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


def low_rank(
    model: Model, changes: Changes, rank: int | None, max_error: float
) -> tuple[list[Factors], float]:
    """Compute the best factors of a rank for a change, and their relative error.

    Without a rank, take the smallest with an error of at most `max_error`. Raises UserError if the
    error is larger.
    """
    spectra, other_square, total = _spectra(model, changes)
    widest = max((len(values) for _, values, _ in spectra.values()), default=0)
    errors = [
        _relative_error(spectra, other_square, total, r) for r in range(widest + 1)
    ]  # by rank
    least_rank = next((r for r in range(1, widest + 1) if errors[r] <= max_error), None)
    best_rank = least_rank if rank is None else min(rank, widest)
    if not best_rank or errors[best_rank] > max_error:
        hint = (
            f"rank {least_rank} leaves {errors[least_rank]:.3f}"
            if least_rank
            else (
                f"no rank leaves less than {errors[-1]:.3f} (biases, norms and embeddings "
                "are not part of a LoRA)"
            )
        )
        request = (
            f"of rank {best_rank} leaves {errors[best_rank]:.3f} of the change"
            if best_rank
            else "cannot hold this change"
        )
        raise UserError(
            f"a LoRA {request}, more than --max-error {max_error:g}; {hint}. Allow more "
            "with --max-error, or export --to diffusers"
        )
    parts: dict[str, dict[str, Pair]] = {}
    for (part, layer), (left_vectors, values, right) in spectra.items():
        shape, root = (
            model.parts[part].get_parameter(f"{layer}.weight").shape,
            values[:best_rank].sqrt(),
        )
        down, up = root[:, None] * right[:best_rank], left_vectors[:, :best_rank] * root
        pair = (down.view(-1, *shape[1:]), up.view(*up.shape, *[1] * (len(shape) - 2)))
        parts.setdefault(part, {})[layer] = pair
    return [lora_files.of_pairs(part, pairs) for part, pairs in parts.items()], errors[best_rank]


def _spectra(
    model: Model, changes: Changes
) -> tuple[dict[tuple[str, str], tuple[Tensor, Tensor, Tensor]], float, float]:
    """Return the singular value decomposition of each layer's change, and two squared lengths.

    They are those of the changes outside of layers, and of all changes.
    """
    spectra, other_square, total = {}, 0.0, 0.0
    for part, tensors in changes.items():
        for name, (before, after) in tensors.items():
            change = after.float().cpu() - before.float().cpu()
            total += float(change.double().square().sum())
            layer, _, kind = name.rpartition(".")
            if kind == "weight" and can_adapt(model.parts[part].get_submodule(layer), conv=True):
                spectra[part, layer] = torch.linalg.svd(change.flatten(1), full_matrices=False)
            else:
                other_square += float(change.double().square().sum())
    return spectra, other_square, total


def _relative_error(
    spectra: Mapping[Any, Sequence[Tensor]], unexplained: float, total: float, rank: int
) -> float:
    """Return the relative error of the factors of a rank, see the module's docstring."""
    return float(
        (
            (
                unexplained
                + sum(
                    float(values[rank:].double().square().sum())
                    for _, values, _ in spectra.values()
                )
            )
            / total
        )
        ** 0.5
    )
