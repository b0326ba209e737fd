"""Seeds, versions, commit and device, which are stored with every number."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from concept_eraser.utils.devices import gpu_module

_PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "numpy",
    "open-clip-torch",
    "clean-fid",
    "nudenet",
)


def version() -> str:
    try:
        return importlib.metadata.version("concept-eraser")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def commit() -> str | None:
    """Return the commit of the checkout of this package, with "+changes" if it differs.

    Returns None outside of a checkout, also if the package is installed somewhere inside another
    repository.
    """
    package_root = Path(__file__).resolve().parents[1]
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--show-toplevel", "HEAD"],
            cwd=package_root,
            capture_output=True,
            text=True,
            timeout=5,
        )
        # only sources count: results of the present run are no change of the code
        change = subprocess.run(
            ["git", "status", "--porcelain", "-uno", "--", "."],
            cwd=package_root,
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    top, _, commit_hash = head.stdout.strip().rpartition("\n")
    if head.returncode or Path(top).resolve() != package_root.parent:
        return None
    return commit_hash + ("+changes" if change.stdout.strip() else "")


def describe() -> dict[str, Any]:
    """Return versions, commit and machine, ready for JSON."""
    import torch

    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    gpu = gpu_module()
    device = gpu.get_device_name() if gpu else "cpu"
    return {
        "concept_eraser": version(),
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "device": device,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": command(sys.argv),
    }


def command(arguments: Sequence[str]) -> str:
    """Return a command line without the folders of this machine, quoted for a shell.

    Absolute paths become relative ones, or names.
    """

    def short(part: str) -> str:
        path = Path(part)
        if not path.is_absolute():
            return part
        inside = path.is_relative_to(Path.cwd())
        return str(path.relative_to(Path.cwd())) if inside else path.name

    short_arguments = (
        "=".join(short(part) for part in argument.split("=")) for argument in arguments[1:]
    )
    return shlex.join([Path(arguments[0]).name, *short_arguments])


def fingerprint(content: Any) -> str:
    """Return a short hash of any JSON content, independent of the order of keys."""
    text = json.dumps(content, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def derive_seed(*parts: int | str) -> int:
    """Return a seed for torch from any parts, e.g. (seed, step, rank, "forget").

    It is the same on every machine.
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def differences(one: Any, other: Any) -> list[str]:
    """Return the dotted names of the entries in which two nested mappings differ."""

    def flat(value: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {
            k: v
            for key, inner in value.items()
            for k, v in flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
        }

    first, second = flat(one), flat(other)
    return sorted(k for k in first.keys() | second.keys() if first.get(k) != second.get(k))
