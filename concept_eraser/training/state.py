"""The state of a run in progress: what is in state.ckpt, and how a run goes on from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from concept_eraser import ranks
from concept_eraser.errors import UserError
from concept_eraser.training import checkpoint

if TYPE_CHECKING:
    from concept_eraser.training.engine import Engine


def save(engine: Engine, step: int) -> None:
    """Write the state after `step` steps. All processes must come here together; the main one writes."""
    optimizer = engine.optimizer.state_dict()
    if not engine.accelerator.is_main_process:
        return
    state = {
        "step": step,
        "ranks": engine.accelerator.num_processes,
        "params": {name: value.detach().cpu() for name, value in engine.params.items()},
        "optimizer": optimizer,
        "method": engine.method.state_dict(),
        "origin": engine.eraser.origin,
        "buffers": {name: value.detach().cpu().clone() for name, value in engine.eraser.buffers().items()},
        "skipped": engine.skipped,
        "skipped_in_a_row": engine.skipped_in_a_row,
        "seconds": engine.seconds,
        "cpu_seconds": engine.cpu_seconds,
    }
    checkpoint.save(engine.checkpoint, state)


def restore(engine: Engine) -> int:
    """Load the checkpoint if there is one; the step to go on with.

    Raises UserError where it is of another run, or not all processes see it.
    """
    there = checkpoint.exists(engine.checkpoint)
    if not ranks.same(there):
        raise UserError(f"not all processes see {engine.checkpoint}; the run folder must lie where all of them can read it")  # fmt: skip
    if not there:
        return 0
    state = checkpoint.load(engine.checkpoint)
    _require_same_run(engine, state)
    with torch.no_grad():
        for name, value in state["params"].items():
            engine.params[name].copy_(value)
        for name, value in state.get("buffers", {}).items():
            engine.eraser.buffers()[name].copy_(value)
    engine.optimizer.load_state_dict(state["optimizer"])
    engine.method.load_state_dict(state["method"])
    engine.skipped, engine.skipped_in_a_row, engine.seconds = (
        state["skipped"],
        state["skipped_in_a_row"],
        state["seconds"],
    )
    engine.cpu_seconds = state.get("cpu_seconds", 0.0)
    return int(state["step"])


def _require_same_run(engine: Engine, state: dict) -> None:
    if set(state["params"]) != set(engine.params):
        raise UserError(f"{engine.checkpoint} belongs to a run that trained other tensors; start over in a new folder")
    if state.get("origin", engine.eraser.origin) != engine.eraser.origin:  # the teacher and the mask would be others
        raise UserError(f"{engine.checkpoint} belongs to a run that started from other weights; give the original model again (an object in memory has been trained already)")  # fmt: skip
    before, now = state.get("ranks", 1), engine.accelerator.num_processes
    if before != now:  # every process brings its micro-batches, so the batch would be another one
        raise UserError(f"{engine.checkpoint} was written by {before} process{'es' if before > 1 else ''}, this is a launch of {now}: the batch would be another. Launch {before} to go on, or start over with --overwrite")  # fmt: skip
