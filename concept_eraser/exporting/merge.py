"""Add several erasures of one model by task arithmetic: W = W_0 + sum_i w_i (W_i - W_0).

See Ilharco et al., arXiv 2212.04089, section 2. Their negated task vectors are fine-tunings. Here
they are erasures, so they are added. Sums are in float64. The order of the runs therefore does not
change float32 weights, and one run of weight 1 gives its own weights, bit for bit. The runs were
trained without each other, so the sum need not erase all their concepts: measure it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concept_eraser.exporting.formats import differences, require_its_own
from concept_eraser.exporting.low_rank import Changes
from concept_eraser.models import loading, residual_gate
from concept_eraser.models.base import Model, require_finite
from concept_eraser.recipes import recipe as recipes
from concept_eraser.storage.writers import probe, write_folder, write_json
from concept_eraser.utils.errors import UserError

NOTE = "merge.json"  # in the folder of the result
Place = tuple[str, str]  # part and tensor


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge.

    If the changes of the runs are orthogonal, length = sqrt(sum lengths^2). A larger length means
    that they agree, a smaller one that they oppose each other.

    Attributes:
        path: The folder of the merged model.
        before: The original model.
        sources: The runs.
        weights: The factor w_i of each run.
        lengths: ||w_i (W_i - W_0)|| of each run.
        length: The length of the sum of the changes.
        tensors: The number of changed tensors.
    """

    path: Path
    before: str
    sources: list[str]
    weights: list[float]
    lengths: list[float]
    length: float
    tensors: int

    @property
    def apart(self) -> float:
        """The length of the sum if the changes were orthogonal."""
        return math.hypot(*self.lengths)


def merge(
    *sources: str | Path,
    output: str | Path,
    weights: Sequence[float] | None = None,
    before: Any = None,
    allow_pickle: bool = False,
) -> MergeResult:
    """Add the changes of several erasures of one model, and write the whole model.

    Args:
        sources: run folders, or anything that `load` takes.
        output: a new folder.
        weights: one factor for each source (default: all 1).
        before: the original model (default: the one that the runs' recipes name).
        allow_pickle: also load weights stored as pickles, which can execute code.

    Returns:
        The path of the diffusers folder, and the lengths of the changes and of their sum.

    Raises:
        UserError: the erasures are not of one model, or one of them is given twice.

    Example:
        >>> import concept_eraser
        >>> merged = concept_eraser.merge("runs/star", "runs/heart", output="runs/both")
    """
    source_names = [str(source) for source in sources]
    factors = _weights(source_names, weights)
    place = Path(output)
    if os.path.lexists(place):
        raise UserError(f"{place} exists already; give another --output, or remove it")
    probe(place)
    base = before if before is not None else _common_base(source_names)
    original = loading.load(base, allow_pickle=allow_pickle)
    sums: dict[Place, Tensor] = {}
    lengths: list[float] = []
    first_sources: dict[str, str] = {}
    for source, factor in zip(source_names, factors, strict=True):
        changes = _changes(original, source, base, allow_pickle)
        digest = _digest(changes)
        if digest in first_sources:
            raise UserError(
                f"{source} and {first_sources[digest]} are the same erasure; to add it twice, "
                "give it once with the weight 2"
            )
        first_sources[digest] = source
        lengths.append(_add(sums, changes, factor))
    result = MergeResult(
        path=place,
        before=original.source,
        sources=source_names,
        weights=factors,
        lengths=lengths,
        length=_length(sums),
        tensors=len(sums),
    )
    _write(original, sums, result)
    return result


def _weights(sources: Sequence[str], weights: Sequence[float] | None) -> list[float]:
    if not sources:
        raise UserError("nothing to merge; give one or more runs")
    factors = [1.0] * len(sources) if weights is None else [float(weight) for weight in weights]
    if len(factors) != len(sources):
        raise UserError(
            f"found {len(factors)} weights for {len(sources)} runs; "
            "give one each, in the same order"
        )
    if not all(map(math.isfinite, factors)):
        raise UserError(f"weights are finite numbers, found {', '.join(f'{w:g}' for w in factors)}")
    return factors


def _common_base(sources: Sequence[str]) -> str:
    """Return the original model of all runs, from their recipes.

    Raises UserError if they name none, or several.
    """
    bases = {source: _base_of(Path(source)) for source in sources}
    unknown = next((source for source, base in bases.items() if base is None), None)
    if unknown is not None:
        if not Path(unknown).exists():
            raise UserError(
                f"{unknown} is no run folder of this machine, so its original model is unknown; "
                "check the path, or give the original with --before"
            )
        raise UserError(
            f"the change of {unknown} cannot be computed without its original model; "
            "give it with --before"
        )
    names = sorted({str(base) for base in bases.values()})
    if len(names) > 1:
        pairs = "; ".join(f"{source} from {base}" for source, base in bases.items())
        raise UserError(
            f"these are erasures of different models ({pairs}), whose changes cannot be added; "
            "merge those of one model, or give --before if these are names of one model"
        )
    return names[0]


def _base_of(source: Path) -> str | None:
    path = source / "recipe.yaml"
    if not path.is_file():
        return None
    name = recipes.load_run(source).model
    return None if name.endswith(" in memory") else name


def _changes(original: Model, source: str, base: Any, allow_pickle: bool) -> Changes:
    """Return the changes of one erasure.

    Raises UserError if `original` is not the model that a run was trained on, or if it has a gate.
    """
    erased = loading.load(source, allow_pickle=allow_pickle, base=base)
    residual_gate.refuse(erased, "merge")
    changes = differences(original, erased)
    require_its_own(Path(source), original, changes)
    return changes


def _digest(changes: Changes) -> str:
    digest = hashlib.sha256()
    for part, tensors in sorted(changes.items()):
        for name, (_, after) in sorted(tensors.items()):
            digest.update(f"{part}.{name}".encode())
            digest.update(
                after.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            )
    return digest.hexdigest()


def _add(sums: dict[Place, Tensor], changes: Changes, factor: float) -> float:
    """Add one erasure to the sums, in place. Returns the length of its change."""
    total = 0.0
    for part, tensors in changes.items():
        for name, (before, after) in tensors.items():
            if not after.is_floating_point():
                raise UserError(
                    f"{part}.{name} is of {after.dtype} and cannot be added; these "
                    "models differ in more than weights"
                )
            change = factor * (after.detach().cpu().double() - before.detach().cpu().double())
            total += float(change.square().sum())
            sums[part, name] = sums[part, name] + change if (part, name) in sums else change
    return math.sqrt(total)


def _length(sums: Mapping[Place, Tensor]) -> float:
    return math.sqrt(sum(float(change.square().sum()) for change in sums.values()))


def _write(model: Model, sums: Mapping[Place, Tensor], merge: MergeResult) -> None:
    """Change the model, save it with a note about the merge, and restore it.

    The model may belong to the caller, in memory.
    """
    originals = {place: model.parts[place[0]].state_dict()[place[1]].clone() for place in sums}
    changes = {
        place: (originals[place].cpu().double() + change).to(originals[place].dtype)
        for place, change in sums.items()
    }

    def write(folder: Path) -> None:
        model.save(folder)
        note = {key: value for key, value in asdict(merge).items() if key != "path"}
        write_json(folder / NOTE, note)

    require_finite(
        {f"{part}.{name}": value for (part, name), value in changes.items()},
        "the merged weights",
        "give smaller --weights",
    )
    try:
        _set(model, changes)
        write_folder(merge.path, write, kind="model")
    finally:
        _set(model, originals)


@torch.no_grad()
def _set(model: Model, values: Mapping[Place, Tensor]) -> None:
    for (part, name), value in values.items():
        model.parts[part].state_dict()[name].copy_(value)
