"""Export of one erasure to other formats: diffusers, changed tensors, two LoRA namings, single
file.

The exported change is the difference of two models, before and after. The source is a run, a
folder, or a LoRA of another tool. A LoRA keeps its own factors. Any other difference D = W_after -
W_before gets each layer's best approximation of a rank (Eckart and Young: the largest singular
values). Its relative error

    sqrt(sum ||D - up down||^2 / sum ||D||^2)

counts all tensors that changed, also those no LoRA can carry (biases, norms). The export reports
the error and refuses one above a bound.
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

from concept_eraser.models import loading, lora_files, single_file
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
class Exported:
    """What was written. rank, error: of a LoRA; error is 0 where the factors are the erasure's
    own.
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
) -> Exported:
    """Write an erasure in another format.

    Args:
        source: a run folder, or anything that `load` takes.
        to: one of FORMATS.
        before: the model that the erasure was made from (default: the one that a run's recipe
            names; not needed for a whole model at strength 1).
        output: a folder for diffusers, a .safetensors file else (default: in a run folder exports/,
            else here); it must not exist.
        strength: 0 is the original, 1 the erasure, between and beyond them in proportion.
        rank: the rank of a LoRA (default: the erasure's own factors, else the smallest rank that
            leaves at most `max_error`).
        max_error: the largest relative error of a LoRA.
        allow_pickle: also load weights stored as pickles, which can execute code.

    Returns:
        The path, and of a LoRA its rank and error.

    Raises:
        UserError: the two models do not match, or a LoRA of that rank leaves more than `max_error`.

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
        return Exported(place)
    original = _original(base, source, allow_pickle)
    changes = differences(original, after)
    require_its_own(Path(source), original, changes)
    if missing_tensors := sorted(left_out & changes.keys()):
        raise UserError(
            f"a single file of the family {after.family!r} holds the denoiser alone, and "
            f"this erasure changed {' and '.join(missing_tensors)}; export --to diffusers"
        )
    if to in ("lora", "kohya"):
        return _write_lora(
            Path(source),
            original,
            changes,
            to,
            place,
            strength=strength,
            rank=rank,
            max_error=max_error,
        )
    if to == "tensors":
        _write_tensors(original, changes, place, strength)
        return Exported(place)
    with torch.no_grad():
        for part, tensors in changes.items():
            state = after.parts[part].state_dict()
            for name, pair in tensors.items():
                state[name].copy_(torch.lerp(*pair, strength))  # exact at 0 and at 1
    _write_whole(after, to, place)
    return Exported(place)


def _place(source: Path, to: str, output: str | Path | None) -> Path:
    """Where it goes. Raises UserError where there is something already, or the name is of another
    kind.
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
    """The model that a run started from, by its recipe; None for what is no run of ours."""
    path = source / "recipe.yaml"
    if not path.is_file():
        return None
    recipe = recipes.load(str(path))
    if not (source / "pipeline").is_dir():
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
            f"what {source} changed can only be told beside the model it was made from; "
            "give it with --before"
        )
    return loading.load(base, allow_pickle=allow_pickle)


def differences(before: Model, after: Model) -> Changes:
    """The tensors in which two models of one architecture differ. Raises UserError where they are
    not, or none differs.
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
            f"{after.source} differs in nothing from {before.source}; give the model it "
            "was made from with --before"
        )
    return changes


def require_its_own(source: Path, original: Model, changes: Changes) -> None:
    """Raise UserError where a run differs from `original` in more than it trained: it was made from
    another model.
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
            "which that run did not train; give the model it was made from with --before"
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
) -> Exported:
    if "vae" in changes:
        raise UserError(
            "a LoRA file has no place for changes of the VAE; export --to diffusers or single-file"
        )
    layer_factors, error = _own_factors(source, model) if rank is None else [], 0.0
    if not layer_factors or not _explain(
        layer_factors, changes
    ):  # e.g. beside another model than it was trained on
        layer_factors, error = low_rank(model, changes, rank, max_error)
    notes = {"strength": f"{strength:g}", "relative_error": f"{error:.3g}"}
    scaled_factors = [one.scale_by(strength) for one in layer_factors]
    for one in scaled_factors:
        factors = {
            f"{layer} ({i})": value
            for layer, pair in one.layers.items()
            for i, value in enumerate(pair)
        }
        require_finite(factors, "the LoRA's factors", "give a smaller --strength")
    write_file(
        place,
        lambda path: lora_files.save(model, scaled_factors, path, kohya=to == "kohya", notes=notes),
    )
    return Exported(place, max(one.rank for one in layer_factors), error)


def _own_factors(source: Path, model: Model) -> list[Factors]:
    """The factors of a run that trained a LoRA, or of a LoRA file; none of anything else."""
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


def _explain(factors: Sequence[Factors], changes: Changes) -> bool:
    """Whether factors are all that moved, but for a hundredth (rounding)."""
    remainder, total = 0.0, 0.0
    products = {
        (one.part, f"{layer}.weight"): one.change(layer) for one in factors for layer in one.layers
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
    """The best factors of a rank for what moved, and the relative error that they leave; rank None:
    the smallest that leaves at most `max_error`. Raises UserError where that cannot be kept."""
    spectra, other_square, total = _spectra(model, changes)
    widest = max((len(values) for _, values, _ in spectra.values()), default=0)
    errors = [_left(spectra, other_square, total, r) for r in range(widest + 1)]  # by rank
    enough = next((r for r in range(1, widest + 1) if errors[r] <= max_error), None)
    best_rank = enough if rank is None else min(rank, widest)
    if not best_rank or errors[best_rank] > max_error:
        hint = (
            f"rank {enough} leaves {errors[enough]:.3f}"
            if enough
            else (
                f"no rank leaves less than {errors[-1]:.3f} (biases, norms and embeddings "
                "are no part of a LoRA)"
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
    """The singular value decomposition of each layer's change, the squared length of what is no
    layer, and of all.
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


def _left(
    spectra: Mapping[Any, Sequence[Tensor]], unexplained: float, total: float, rank: int
) -> float:
    """The relative error of the factors of a rank, see the module's docstring."""
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
