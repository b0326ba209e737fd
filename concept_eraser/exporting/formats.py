"""Export of an erasure: diffusers folder, changed tensors, LoRA in three namings, single file.

The exported change is the difference of two models, before and after. The source is a run, a
folder, or a LoRA of another tool. A LoRA is exported with its own factors. Any other difference is
approximated in each layer by the best matrix of a rank (see low_rank). The export reports the
relative error and refuses one above a bound.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from concept_eraser.exporting import lora_export
from concept_eraser.exporting.card_snippets import exported_pipeline
from concept_eraser.exporting.lora_export import LoraRequest
from concept_eraser.exporting.low_rank import Changes, LayerErrors
from concept_eraser.models import loading, residual_gate, run_base, single_file
from concept_eraser.models.base import Model, require_finite
from concept_eraser.models.lora_files import DTYPES
from concept_eraser.models.lora_readers import Ignored
from concept_eraser.recipes import recipe as recipes
from concept_eraser.storage.readers import read_tensor_header
from concept_eraser.storage.writers import probe, write_file, write_folder, write_tensors
from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError, unknown

FORMATS = ("diffusers", "tensors", "lora", "kohya", "musubi", "comfyui", "single-file")
MAX_ERROR = 0.2  # the largest relative error of a LoRA, unless another is given
_SUFFIX = lora_export.SUFFIX
_NAMINGS = {"lora": "diffusers", "kohya": "kohya", "musubi": "musubi", "comfyui": "comfyui"}


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        path: The file or folder.
        rank: The rank of a LoRA.
        error: The relative error of a LoRA. It is 0 if the factors are the erasure's own.
        layer_errors: The relative errors of the layers of a LoRA; None if nothing was left out.
        rounding: The relative error of the change by the rounding of the written numbers: those of
            a LoRA, or those of a whole model in the precision of its checkpoint. It is 0 for fp32,
            and for a whole model whose change was not needed.
        ignored: The layers of a LoRA that programs ignore, one entry for each such program.
    """

    path: Path
    rank: int | None = None
    error: float | None = None
    layer_errors: LayerErrors | None = None
    rounding: float = 0.0
    ignored: tuple[Ignored, ...] = ()


def export(
    source: str | Path,
    to: str,
    *,
    before: Any = None,
    output: str | Path | None = None,
    strength: float = 1.0,
    rank: int | None = None,
    max_error: float | None = None,
    dtype: str = "fp32",
    block_weights: Sequence[float] = (),
    allow_pickle: bool = False,
) -> ExportResult:
    """Write an erasure in another format.

    Args:
        source: a run folder, or anything that `load` takes.
        to: one of FORMATS.
        before: the original model (default: the one that a run's recipe names). It is not needed
            for a whole model at strength 1.
        output: a folder for diffusers, else a .safetensors file. It must not exist. The default is
            in exports/ of a run folder, else in the working folder. Its name has a strength other
            than 1.
        strength: 0 is the original and 1 the erasure. Other values interpolate or extrapolate.
        rank: the rank of a LoRA (default: that of the erasure's own factors, else the smallest rank
            with an error of at most `max_error`). A smaller rank than that of the own factors
            keeps the largest singular values of each layer.
        max_error: the largest relative error of a LoRA by its rank (default: 0.2).
        dtype: the numbers of a LoRA file: fp32, fp16, bf16 or fp8 (e4m3, only for
            kohya and musubi).
        block_weights: for kohya, a factor for each block of the UNet in the convention of LoRA
            Block Weight: 17 or 26 numbers for Stable Diffusion 1 and 2, 12 or 20 for XL. The layers
            of blocks of weight 0 are left out.
        allow_pickle: also load weights stored as pickles, which can execute code.

    Returns:
        The path, and the rank and errors of a LoRA.

    Raises:
        UserError: the erasure has a gate, the two models do not match, a setting of LoRA files is
            given for another format, the error of the LoRA is above `max_error`, the block weights
            are not those of the family, or the output is the place of a run's pipeline and the
            strength is not 1.

    Example:
        >>> import concept_eraser
        >>> lora = concept_eraser.export("runs/tiny_star_munba", "lora")
    """
    if to not in FORMATS:
        raise unknown("format", to, FORMATS)
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    of_loras = {
        "--rank": rank is not None,
        "--max-error": max_error is not None,
        "--dtype": dtype != "fp32",
    }
    option = next((name for name, is_given in of_loras.items() if is_given), None)
    if option is not None and to not in _NAMINGS:
        raise UserError(
            f"{option} is for LoRA files (--to {', '.join(_NAMINGS)}), found --to {to}; "
            "leave it out"
        )
    max_error = MAX_ERROR if max_error is None else max_error
    if block_weights and to != "kohya":
        raise UserError(
            f"--block-weights is for a LoRA in kohya's naming (--to kohya), found --to {to}"
        )
    place = _place(Path(source), to, output, strength)
    if not (abs(strength) <= limits.PORTION and math.isfinite(max_error)):
        raise UserError(
            f"strength is a number from -{limits.PORTION:g} to {limits.PORTION:g} and "
            f"max_error a finite one, found {strength:g} and {max_error:g}"
        )
    base = before if before is not None else _base_of(Path(source))
    request = LoraRequest(
        _NAMINGS.get(to, to),
        strength=strength,
        rank=rank,
        max_error=max_error,
        dtype=dtype,
        block_weights=tuple(block_weights),
    )
    if (
        to in _NAMINGS
        and before is None
        and base is not None
        and run_base.is_lora_alone(Path(source))
        and (outline := loading.outline(base)) is not None
    ):
        return _write_lora(Path(source), outline, None, place=place, request=request)
    is_change = to in (*_NAMINGS, "tensors") or strength != 1
    original = loading.original_of(source, base, allow_pickle=allow_pickle) if is_change else None
    after = loading.beside(source, original) if original is not None else None
    is_compared = after is not None  # with the record of the run's original, which takes seconds
    if after is None:
        after = loading.load(source, allow_pickle=allow_pickle, base=original or base)
    residual_gate.refuse(after, f"export --to {to}")
    left_out = (
        set(after.parts) - set(single_file.written_parts(after)) if to == "single-file" else set()
    )
    if to in ("diffusers", "single-file") and strength == 1 and not (left_out and base is not None):
        _write_whole(after, to, place)
        return ExportResult(place, rounding=_rounding_of_lora(Path(source), after))
    if original is None:
        original = _original(base, source, allow_pickle)
    changes = differences(original, after)
    if not is_compared:
        require_its_own(Path(source), original, changes)
    if missing_tensors := sorted(left_out & changes.keys()):
        raise UserError(
            f"a single file of the family {after.family!r} holds only the denoiser, and "
            f"this erasure changed {' and '.join(missing_tensors)}; export --to diffusers"
        )
    if to in _NAMINGS:
        return _write_lora(Path(source), original, changes, place=place, request=request)
    if to == "tensors":
        _write_tensors(original, changes, place, strength)
        return ExportResult(place)
    with torch.no_grad():
        for part, tensors in changes.items():
            state = after.parts[part].state_dict()
            for name, pair in tensors.items():
                state[name].copy_(torch.lerp(*pair, strength))  # exact at 0 and at 1
    _write_whole(after, to, place)
    written = {
        part: ((name, after.parts[part].state_dict()[name] - pair[0]) for name, pair in one.items())
        for part, one in changes.items()
    }
    return ExportResult(place, rounding=_rounding(after, written))


def _rounding_of_lora(source: Path, model: Model) -> float:
    """Return `_rounding` of a run that is its original and its LoRA, and 0 for another source."""
    if not run_base.is_lora_alone(source):
        return 0.0
    return _rounding(
        model,
        {
            one.part: ((f"{layer}.weight", one.change(layer)) for layer in one.layers)
            for one in lora_export.own_factors(source, model)
        },
    )


def _rounding(model: Model, changes: Mapping[str, Iterable[tuple[str, torch.Tensor]]]) -> float:
    """Return what the precision of the checkpoint leaves out of a change, relative to it.

    changes: by the part, the names of tensors and what was added to them. Of several parts it is
    the largest number.
    """
    stored: Mapping[str, Any] = getattr(model, "stored", {})
    return max(
        (
            stored[part].rounding(model.parts[part].state_dict(), tensors)
            for part, tensors in changes.items()
            if part in stored and stored[part].usual != torch.float32
        ),
        default=0.0,
    )


def _write_lora(
    source: Path, model: Model, changes: Changes | None, *, place: Path, request: LoraRequest
) -> ExportResult:
    lora = lora_export.write(source, model=model, changes=changes, place=place, request=request)
    return ExportResult(
        place,
        rank=lora.rank,
        error=lora.error,
        layer_errors=lora.layers,
        rounding=lora.rounding,
        ignored=lora.ignored,
    )


def _place(source: Path, to: str, output: str | Path | None, strength: float) -> Path:
    """Return the output path.

    Raises UserError if it exists, if its name does not fit the format, or if it is the place of the
    run's pipeline and the strength is not 1.
    """
    if output is None:
        named = source.resolve() if source.is_dir() else source  # `.` has no name
        name = named.stem if named.suffix == _SUFFIX else named.name
        name += f"-{to}" if strength == 1 else f"-strength-{strength:g}-{to}"
        folder = source / "exports" if (source / "recipe.yaml").is_file() else Path()
        place = folder / (name if to == "diffusers" else name + _SUFFIX)
    else:
        place = Path(output)
    if (place.suffix == _SUFFIX) != (to != "diffusers"):
        expected_kind = f"a {_SUFFIX} file" if to != "diffusers" else "a folder"
        raise UserError(f"--to {to} writes {expected_kind}, found the output {place}")
    if strength != 1 and place.resolve() == exported_pipeline(source).resolve():
        raise UserError(
            f"{place} is the place of the run's pipeline at strength 1, which `push` uploads, "
            f"found strength {strength:g}; give another --output"
        )
    if os.path.lexists(place):
        raise UserError(f"{place} exists already; give another --output, or remove it")
    probe(place)
    return place


def _base_of(source: Path) -> str | None:
    """Return the original model of a run, from its recipe. None for a source that is no run."""
    path = source / "recipe.yaml"
    if not path.is_file():
        return None
    recipe = recipes.load_run(source)
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

    A tied tensor, such as T5's table of words, has its first name alone.

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
        part_changes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        listed: set[int] = set()
        for name, owner in module.state_dict(keep_vars=True).items():
            if id(owner) not in listed and not torch.equal(theirs[name], ours[name]):
                part_changes[name] = theirs[name], ours[name]
                listed.add(id(owner))
        if part_changes:
            changes[part] = part_changes
    if not changes:
        raise UserError(
            f"{after.source} has the same weights as {before.source}; give its original model "
            "with --before"
        )
    return changes


def require_its_own(source: Path, original: Model, changes: Changes) -> None:
    """Raise UserError if `original` is not the model that a run was trained on.

    A run without a pipeline has a record of that model's weights. Any other run is compared with
    `original`: it may differ only in tensors that it trained.
    """
    if (record := run_base.read(source)) is not None:
        if parts := record.differences(original):
            raise run_base.other_base(source, record, original, parts)
        return
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
    values = {
        name: (after if strength == 1 else torch.lerp(before, after, strength)).contiguous()
        for name, (before, after) in tensors.items()
    }
    header = {
        "format": "pt",
        "part": getattr(model, "network", "unet") if part == "denoiser" else part,
    }
    require_finite(values, "the exported tensors", "give a smaller --strength")
    write_tensors(place, values, header)
