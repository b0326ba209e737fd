"""Writing files so that a kill at any moment leaves the earlier one, or the new one, whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

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
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file. Raises UserError when the disk is full."""
    write_whole(path, lambda partial: _write(partial, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
