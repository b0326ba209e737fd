"""The progress of an attack, stored line by line, so that an interrupted attack can continue."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from concept_eraser.evaluation.attacks import deciding_images
from concept_eraser.storage import output_folder
from concept_eraser.storage.readers import read_lines
from concept_eraser.storage.writers import append_line
from concept_eraser.utils import distributed
from concept_eraser.utils.errors import UserError


class FinishedBatches:
    """The finished batches of an attack, one JSON line each. The first line identifies the attack.

    Several processes may write to one file. Each reads what the others have added.
    """

    def __init__(self, folder: Path | None, fingerprint: str) -> None:
        self.path = folder / "attempts.jsonl" if folder else None
        self.head = {"attack": fingerprint}
        self.rows: dict[str, dict[str, Any]] = {}
        if folder is None and not distributed.alone():
            raise UserError(
                "an attack by several processes needs a folder for what they find; give "
                "one with --output"
            )
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; give a folder with --output")
        lines = self._read()
        self.has_begun = bool(lines)
        if folder is not None and lines and lines[0] != self.head:
            raise UserError(
                f"{self.path} holds another attack (another model, protocol or budget); "
                f"give a new folder, e.g. --output {_next_to(folder)}"
            )

    def _read(self) -> list[dict[str, Any]]:
        lines = read_lines(self.path) if self.path else []
        self.rows |= {line["batch"]: line for line in lines if "batch" in line}
        return lines

    def batch(self, name: str) -> Any:
        """Return the result of a batch, or None if no process has finished it."""
        if name not in self.rows:
            self._read()
        return self.rows.get(name)

    def add(self, name: str, batch: dict[str, Any], images: Mapping[int, Tensor]) -> None:
        """Store a batch, after the images that decided it."""
        self.rows[name] = {"batch": name, **batch}
        if self.path is None:
            return
        self.claim()
        deciding_images.write(self.path.parent, images)
        append_line(self.path, self.rows[name])

    def claim(self) -> None:
        """Mark the folder as this attack's, once there is a result or nothing is left to do.

        A refused request leaves no file.
        """
        if self.path is not None and not self.has_begun:
            output_folder.claim(self.path.parent, "attack")
            append_line(self.path, self.head)
            self.has_begun = True


def _next_to(folder: Path) -> Path:
    """Return the first of folder-2, folder-3, ... that does not exist."""
    return next(
        path for n in count(2) if not (path := folder.with_name(f"{folder.name}-{n}")).exists()
    )
