"""The state of a run in progress, which an interrupted run continues from.

The previous state is also stored. If the last one is damaged, only the steps between the two are
lost. A state has the SHA-256 of its whole content, every tensor and every counter, so a flipped bit
is noticed when it is read.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from concept_eraser.storage.digests import value_digest
from concept_eraser.storage.readers import require_regular
from concept_eraser.storage.writers import give_second_name, write_file
from concept_eraser.utils.errors import UserError, first_line

_LOG = logging.getLogger(__name__)
_DIGEST = "sha256"


def previous(path: Path) -> Path:
    """Return the path of the state before the last one."""
    return path.with_name(f"previous_{path.name}")


def exists(path: Path) -> bool:
    """Whether there is a state, or the one before it."""
    return path.exists() or previous(path).exists()


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state. The last state becomes the previous one.

    If the process is killed at any moment, at least one whole state remains. Raises UserError if
    the state cannot be written.
    """
    content = {**state, _DIGEST: _digest(state)}

    def write(partial: Path) -> None:
        torch.save(content, partial)
        if path.is_file() and not path.is_symlink():
            write_file(previous(path), lambda place: give_second_name(path, place), growing=True)

    write_file(path, write, growing=True)


def load(path: Path) -> dict[str, Any]:
    """Read the last state, or the previous one if the last is damaged.

    It holds tensors and plain values only: no pickle is executed. Raises UserError if neither is
    whole.
    """
    problems = []
    for place in (path, previous(path)):
        if not os.path.lexists(place):
            continue
        try:
            state = _read(place)
        except UserError as error:
            problems.append(str(error))
            continue
        if problems:
            _LOG.warning(
                "%s; the run goes on from the state before, after %s steps",
                problems[0],
                state.get("step"),
            )
        return state
    raise UserError(f"{'; '.join(problems)}. No other state is left: start over with --overwrite")


def require_same_run(
    path: Path, state: dict[str, Any], *, params: set[str], origin: str, processes: int
) -> None:
    """Check that a state belongs to the run that continues.

    Args:
        path: The file of the state, for the error.
        state: What `load` returned.
        params: The names of the tensors that the run trains.
        origin: The fingerprint of the values that it starts from.
        processes: The number of processes of the launch.

    Raises:
        UserError: One of the three differs.
    """
    if set(state["params"]) != params:
        raise UserError(
            f"{path} belongs to a run that trained other tensors; start over in a new folder"
        )
    if state.get("origin", origin) != origin:  # the teacher and the mask would be different
        raise UserError(
            f"{path} belongs to a run that started from other weights; give the original "
            "model again (an object in memory has been trained already)"
        )
    before = state.get("ranks", 1)
    # each process has its own micro-batches, so the batch would be different
    if before != processes:
        raise UserError(
            f"{path} was written by {before} process{'es' if before > 1 else ''}, this "
            f"is a launch of {processes}: the batch would be another. Launch {before} to "
            "go on, or start over with --overwrite"
        )


def _read(path: Path) -> dict[str, Any]:
    require_regular(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many types
        raise UserError(f"the checkpoint {path} is damaged ({first_line(error)[:120]})") from None
    if not isinstance(state, dict) or state.pop(_DIGEST, None) != _digest(state):
        raise UserError(f"the checkpoint {path} is damaged (its content is not what was written)")
    return state


def _digest(state: dict[str, Any]) -> str | None:
    """Return the digest of a state; None if a method has a value without one."""
    try:
        return value_digest(state)
    except TypeError:
        return None
