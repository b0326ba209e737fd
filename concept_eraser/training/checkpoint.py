"""The state of a run in progress, replaced atomically so that a kill at any moment leaves a whole one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from concept_eraser.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file (or folder) beside its place, then move it there; on failure the earlier one is intact.

    Raises UserError when the disk is full.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)  # of a process that was killed
        write(partial)
        if path.is_dir():
            _remove(path)
        os.replace(partial, path)
    except BaseException as error:  # Ctrl-C too
        _remove(partial)
        code = getattr(error, "errno", None)
        # safetensors and torch wrap the system's error in one of their own
        full = code in _FULL or any(word in str(error) for word in ("No space left", "File too large", "os error 28", "os error 27", "unexpected pos"))  # fmt: skip
        if full:
            raise UserError(f"cannot write {path}: the disk is full or a size limit is reached; earlier files are intact. Free some space, then continue with --resume") from error  # fmt: skip
        raise


def _remove(path: Path) -> None:
    import shutil

    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
