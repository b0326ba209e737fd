"""SHA-256 of files, of texts, and of nested values with tensors in them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def value_digest(value: Any) -> str:
    """Return the SHA-256 of nested mappings, lists, tensors and plain values, in hex.

    Two values have one digest if they are equal in type, order of keys, shapes and every bit of
    every tensor. Raises TypeError for a value of another type.
    """
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {tuple(value.shape)} {value.dtype};".encode())
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)};".encode())
        for key, inner in value.items():
            _add(digest, key)
            _add(digest, inner)
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__} {len(value)};".encode())
        for inner in value:
            _add(digest, inner)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    else:
        raise TypeError(f"a {type(value).__name__} has no digest")
