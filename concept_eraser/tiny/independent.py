"""Write the second judge and the second CLIP beside the bundled weights, each with its record."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from concept_eraser.utils import provenance

PARTS = ("judge2", "clip2")  # trained by `build --only judge2` and `build --only clip2`


def publish(work: Path, weights: Path, name: str, *, seed: int, threads: int) -> dict:
    """Copy a trained part to the weights, and write `NAME.json` beside it.

    Args:
        work: the folder of the build, with the part in `NAME/` and its scores in `NAME.json`.
        weights: the folder of the finished weights.
        name: one of `PARTS`.
        seed: the seed of the build.
        threads: the threads of the build.

    Returns:
        The record: command, SHA-256 of the weights, size, settings and scores, versions.
    """
    shutil.copytree(work / name, weights / name, dirs_exist_ok=True)
    content = (weights / name / "model.safetensors").read_bytes()
    command = f"python -m concept_eraser.tiny.build --only {name} --seed {seed} --threads {threads}"
    record = {
        "command": command,
        "sha256": hashlib.sha256(content).hexdigest(),
        "megabytes": round(len(content) / 2**20, 2),
        **json.loads((work / f"{name}.json").read_text()),
        "environment": {**provenance.describe(), "command": command},
    }
    (weights / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return record
