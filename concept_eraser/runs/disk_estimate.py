"""Estimate the disk space of a run before it starts, and check that it is free.

Counted are the LoRA, the changed tensors, the whole model in the checkpoint's precision, and the
states of the unfinished training. The state of a method and the images in the cache are not.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from concept_eraser.models import lora_files, run_base
from concept_eraser.models.base import Loaded
from concept_eraser.models.lora import layers_of
from concept_eraser.recipes.objective_fields import PROMPTED
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.recipes.selections import select
from concept_eraser.storage.readers import size_text
from concept_eraser.targets import gate_edit
from concept_eraser.training import checkpoint
from concept_eraser.training.memory import Trained
from concept_eraser.training.rewinding import round_ends
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError

_FP32 = 4
STATES = 3  # at most at one moment: the last, the one before, and the next while it is written
# tokenizers, schedulers, log, curves and manifest: 3.6 MB of them are the bundled tokenizer's
SMALL_FILES = 5_000_000
STATE = "states for --resume, removed at the end"


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes by their use.

    Attributes:
        files: What stays in the run folder.
        states: What lies there during the training.
    """

    files: Mapping[str, int]
    states: int = 0

    @property
    def bytes(self) -> int:
        """The space that the run needs: all files, and the states that precede them."""
        return sum(self.files.values()) + self.states

    def lines(self, folder: Path) -> list[str]:
        """Return lines for people, the largest part first."""
        parts = {**self.files, STATE: self.states}
        parts_text = ", ".join(
            f"{name} {size_text(size)}"
            for name, size in sorted(parts.items(), key=lambda item: -item[1])
            if size
        )
        free = free_space(folder)
        return [
            f"disk (an estimate): {size_text(self.bytes)}; {size_text(free)} are free for {folder}",
            f"  of which {parts_text}",
        ]


def estimate(recipe: Recipe, model: Loaded, saved: str) -> DiskEstimate:
    """Estimate the disk space of a recipe.

    Args:
        recipe: The recipe.
        model: Its model. It may be on the meta device.
        saved: What is written: "lora", "changed" or "pipeline".
    """
    part = model.part(recipe.target)
    parameters = dict(part.named_parameters())
    names = select(parameters, recipe.trainable.select)
    shapes = [tuple(parameters[name].shape) for name in names]
    files: dict[str, int] = {}
    lora = recipe.trainable.lora
    if lora is not None:
        layers = layers_of(part, names, conv=lora.conv)
        shapes = [
            shape for layer in layers for shape in _factors(part.get_submodule(layer), lora.rank)
        ]
        names = [f"{layer}.weight" for layer in layers]
        if recipe.finish is None:
            files[f"{lora_files.FOLDER}/"] = _FP32 * sum(map(math.prod, shapes))
    if recipe.method.adds_gate:
        files[run_base.WEIGHTS] = _FP32 * gate_edit.count(recipe, parameters, names)
    elif saved != "lora":
        files[run_base.WEIGHTS] = _FP32 * sum(parameters[name].numel() for name in names)
    if saved == "pipeline":
        files[f"{resources.whole_model(model.family)}/"] = _whole_model(model)
    files["other files"] = SMALL_FILES
    return DiskEstimate(files, _states(recipe, shapes))


def _factors(layer: Any, rank: int) -> list[tuple[int, ...]]:
    """Return the shapes of a LoRA's two matrices for a layer."""
    height, *rest = layer.weight.shape
    return [(rank, *rest), (height, rank)]


def _whole_model(model: Loaded) -> int:
    """Return the bytes of all parts in the precision in which they are written."""
    stored: Mapping[str, Any] = getattr(model, "stored", {})
    total = 0
    for name, module in model.parts.items():
        precision = stored.get(name)
        tensors = _tensors(module)
        total += sum(
            value.numel() * (precision.dtype_of(key).itemsize if precision else value.itemsize)
            for key, value in tensors.items()
        )
    return total


def _tensors(module: nn.Module) -> dict[str, Any]:
    """Return the stored tensors of a module by name. Tied weights count once."""
    by_id = {id(value): (name, value) for name, value in module.state_dict(keep_vars=True).items()}
    return dict(by_id.values())


def _states(recipe: Recipe, shapes: list[tuple[int, ...]]) -> int:
    """Return the bytes of the states that --resume continues from."""
    if recipe.method.edits or not shapes:
        return 0
    training = recipe.training
    trained = Trained(shapes, optimizer=training.optimizer, momentum=training.momentum > 0)
    copies = int(training.ema is not None)
    if recipe.rewinding is not None:
        ends = round_ends(recipe.method.build(), recipe.rewinding.every, training.steps)
        copies += sum(map(ends, range(1, training.steps + 1)))
    count = min(STATES, max(1, training.steps // training.save_every))
    return count * ((1 + copies) * trained.bytes + trained.state())


def free_space(folder: Path) -> int:
    """Return the free bytes for a folder, which need not exist yet."""
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    return shutil.disk_usage(place).free


def check(recipe: Recipe, model: Loaded, folder: Path, *, saved: str) -> None:
    """Raise UserError if a run does not fit on the disk, see `require_space`.

    A recipe that does not fit the model has no estimate. The job reports the mistake.
    """
    try:
        needed = estimate(recipe, model, saved)
    except UserError:
        return
    require_space(needed, folder, recipe, saved)


def require_space(needed: DiskEstimate, folder: Path, recipe: Recipe, saved: str) -> None:
    """Raise UserError if a run does not fit on the disk. It is called before the work.

    States of this run that are there already count as free, since they are replaced.
    """
    state = folder / "state.ckpt"
    present = sum(
        os.stat(path).st_size
        for path in (state, checkpoint.previous(state))
        if path.is_file() and not path.is_symlink()
    )
    free = free_space(folder) + min(present, needed.states)
    if needed.bytes <= free:
        return
    advice = ""
    if saved == "pipeline" and recipe.target in PROMPTED:
        smaller = (
            "lora" if recipe.trainable.lora is not None and recipe.finish is None else "changed"
        )
        size = estimate_text(needed, smaller)
        advice = f", or leave out the pipeline with --save {smaller} ({size})"
    raise UserError(
        f"the run needs {size_text(needed.bytes)} on the disk, and {size_text(free)} are free for "
        f"{folder}; free some, give another --output{advice}"
    )


def estimate_text(needed: DiskEstimate, saved: str) -> str:
    """Return the size of a run that leaves out a part of what was estimated."""
    left_out = {f"{name}/" for name in resources.WHOLE_MODEL}
    left_out |= {run_base.WEIGHTS} if saved == "lora" else set()
    files = {name: size for name, size in needed.files.items() if name not in left_out}
    return size_text(DiskEstimate(files, needed.states).bytes)
