"""The state of a run in progress, replaced atomically so that a kill at any moment leaves a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from concept_eraser.errors import UserError
from concept_eraser.files import write_whole


def save(path: Path, state: dict[str, Any]) -> None:
    write_whole(path, lambda partial: torch.save(state, partial))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint of ours, tensors and plain values only (no pickle is executed)."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"the checkpoint {path} is damaged ({str(error).splitlines()[0][:120]}); delete it to start over"
        ) from error
