"""The state of a run in progress. The one before is kept, so that a damaged state costs the steps
between them only.

A state carries the SHA-256 of all that is in it: every tensor, every counter. A flipped bit is
noticed when it is read.
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
    """Where the state before the last one lies."""
    return path.with_name(f"previous_{path.name}")


def exists(path: Path) -> bool:
    """Whether there is a state, or the one before it."""
    return path.exists() or previous(path).exists()


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state; the last one becomes the one before. A kill at any moment leaves a whole one.

    Raises UserError where it cannot be written.
    """
    content = {**state, _DIGEST: _digest(state)}

    def write(partial: Path) -> None:
        torch.save(content, partial)
        if path.is_file() and not path.is_symlink():
            write_file(previous(path), lambda place: give_second_name(path, place), growing=True)

    write_file(path, write, growing=True)


def load(path: Path) -> dict[str, Any]:
    """Read the last state, or where it is damaged the one before (tensors and plain values only: no
    pickle is executed).

    Raises UserError where neither is whole.
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
        processes: How many processes the launch has.

    Raises:
        UserError: One of the three differs.
    """
    if set(state["params"]) != params:
        raise UserError(
            f"{path} belongs to a run that trained other tensors; start over in a new folder"
        )
    if state.get("origin", origin) != origin:  # the teacher and the mask would be others
        raise UserError(
            f"{path} belongs to a run that started from other weights; give the original "
            "model again (an object in memory has been trained already)"
        )
    before = state.get("ranks", 1)
    # every process brings its micro-batches, so the batch would be another one
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
    except Exception as error:  # torch raises half a dozen kinds
        raise UserError(f"the checkpoint {path} is damaged ({first_line(error)[:120]})") from None
    if not isinstance(state, dict) or state.pop(_DIGEST, None) != _digest(state):
        raise UserError(f"the checkpoint {path} is damaged (its content is not what was written)")
    return state


def _digest(state: dict[str, Any]) -> str | None:
    """The digest of a state; None where a method keeps a value that has none."""
    try:
        return value_digest(state)
    except TypeError:
        return None
