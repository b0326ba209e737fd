"""The files of the cache: chunks of tensors, rows of JSON, and records of one size.

Each has its own SHA-256. The content of the cache can be made again, so it is never trusted. A
chunk, row or record that does not match its digest counts as missing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from concept_eraser.storage.digests import value_digest
from concept_eraser.storage.readers import LOG_BYTES, cannot, read_bytes, whole_lines
from concept_eraser.storage.writers import ends_otherwise, is_full
from concept_eraser.utils.errors import UserError

_DIGEST = "sha256"
CHECK_BYTES = 8  # bytes of the digest of a record


class CacheFull(UserError):
    """The cache's disk is full, or the cache cannot be written to."""


def read_chunk(path: Path) -> dict[str, Any] | None:
    """Return the tensors of a chunk by name; None if it is missing or damaged."""
    from safetensors import safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            digest = (file.metadata() or {}).get(_DIGEST)
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except Exception:  # safetensors has its own error class, and raises others too
        return None
    return tensors if digest == value_digest(tensors) else None


def write_chunk(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors into the cache, whole or not at all. Raises CacheFull if that fails."""
    from safetensors.torch import save_file

    contents = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(contents, partial, metadata={_DIGEST: value_digest(contents)})
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if is_full(error) or isinstance(error, OSError):
            raise CacheFull(_failure(path, error)) from error
        raise


def remove_chunk(path: Path) -> None:
    """Remove a chunk from the cache, if it is there."""
    with suppress(OSError):
        path.unlink()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the undamaged rows of a file of the cache; [] without a file."""
    try:
        text = (
            read_bytes(path, LOG_BYTES).decode("utf-8", errors="replace") if path.is_file() else ""
        )
    except UserError:
        return []
    return [
        line["row"]
        for line in whole_lines(text)
        if isinstance(line.get("row"), dict) and line.get(_DIGEST) == _row_digest(line["row"])
    ]


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a file of the cache, after the fragment of a killed process.

    Raises CacheFull if that fails.
    """
    content = json.loads(json.dumps(row))  # as it is after reading
    _append(
        path,
        (json.dumps({"row": content, _DIGEST: _row_digest(content)}) + "\n").encode(),
        line=True,
    )


def _row_digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def append_records(path: Path, records: bytes, size: int) -> None:
    """Append records of one size after the last whole one. Raises CacheFull if that fails."""
    _append(path, records, size=size)


def check_of(record: bytes) -> bytes:
    """Return the part of a record's digest that is stored with it."""
    return hashlib.sha256(record).digest()[:CHECK_BYTES]


def _append(path: Path, content: bytes, *, size: int = 1, line: bool = False) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        with os.fdopen(
            os.open(path, flags, 0o666), "r+b", buffering=0
        ) as file:  # one write, so that two processes do not mix
            end = file.seek(0, os.SEEK_END)
            if end % size:
                file.truncate(end - end % size)
            if line and end and ends_otherwise(file, end):
                content = b"\n" + content
            file.write(content)
    except OSError as error:
        raise CacheFull(_failure(path, error)) from error


def _failure(path: Path, error: BaseException) -> str:
    advice = "name another folder with the variable CONCEPT_ERASER_CACHE"
    if is_full(error):
        return (
            f"cannot write to the cache {path.parent}: the disk is full; free some space, or "
            f"{advice}"
        )
    if getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"cannot write to the cache {path.parent}: this user may not, or it is "
            f"read-only; {advice}"
        )
    return f"{cannot('write to the cache', path.parent, error)}, or {advice}"
