"""Pictures of the sides where parts of the model come and go (training.offload): all prompts are read, then all pictures
drawn, then all shown, so that each part is brought to the device once.

They end in the cache that data/generate.py keeps, under the same keys and with the same bits. What was drawn waits there
too until it is shown, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concept_eraser import ranks
from concept_eraser.data import generate
from concept_eraser.data.generate import Asked
from concept_eraser.models import pieces
from concept_eraser.models.base import Model
from concept_eraser.progress import Progress, silent
from concept_eraser.storage.cache import remove_chunk

CODES = "codes"  # what a chunk's file is called, and the tensor in it, before its pictures are shown


class Missing:
    """The chunks of some pictures that the cache does not have. Under `accelerate launch` this process's share of them."""

    def __init__(self, model: Model, asked: Iterable[Asked], progress: Progress = silent) -> None:
        self.model, self.progress = model, progress
        chunks = {one.path(start): (one, start) for one in asked for start in ranks.mine(one.starts)}
        self.chunks = {path: chunk for path, chunk in chunks.items() if generate.read(path) is None}
        self._known: dict[Path, list[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self.chunks)

    @property
    def undrawn(self) -> dict[Path, tuple[Asked, int]]:
        return {path: chunk for path, chunk in self.chunks.items() if generate.read(_codes(path), CODES) is None}

    def read(self) -> None:
        """By the text encoders; prompts that come again together are read once, since what a T5 makes of them is large."""
        once: dict[Any, Any] = {}
        for path, (asked, start) in self.undrawn.items():
            self._known[path] = []
            for scale, rows in asked.calls(start):
                texts, autocast = tuple(asked.texts[i] for i in rows), asked.sampling.autocast
                key = texts, scale, autocast
                if key not in once:
                    once[key] = pieces.read(self.model, list(texts), guidance=scale, autocast=autocast)
                self._known[path].append(once[key])

    def draw(self) -> None:
        """By the denoiser, after `read`."""
        todo = self.undrawn
        self.progress("drawing pictures", 0, len(todo))
        for done, (path, (asked, start)) in enumerate(todo.items(), 1):
            how = asked.sampling
            found: dict[int, Tensor] = {}
            for known, (scale, rows) in zip(self._known.pop(path), asked.calls(start), strict=True):
                drawn = pieces.draw(self.model, [asked.texts[i] for i in rows], known, seeds=[asked.seeds[i] for i in rows], steps=how.steps, guidance=scale, autocast=how.autocast)  # fmt: skip
                found |= dict(zip(rows, drawn, strict=True))
            generate.write(_codes(path), torch.stack([found[i] for i in sorted(found)]), CODES)
            self.progress("drawing pictures", done, len(todo))

    def show(self) -> None:
        """By the VAE, after `draw`; then the pictures are in the cache."""
        self.progress("decoding pictures", 0, len(self.chunks))
        for done, (path, (asked, start)) in enumerate(self.chunks.items(), 1):
            codes = generate.read(_codes(path), CODES)
            assert codes is not None  # drawn
            shown: dict[int, Tensor] = {}
            for _, rows in asked.calls(start):  # as many at once as the pipeline would decode
                decoded = pieces.show(self.model, codes[[i - start for i in rows]], autocast=asked.sampling.autocast)
                shown |= dict(zip(rows, decoded, strict=True))
            generate.write(path, torch.stack([shown[i] for i in sorted(shown)]))
            remove_chunk(_codes(path))
            self.progress("decoding pictures", done, len(self.chunks))


def _codes(path: Path) -> Path:
    return path.with_suffix(f".{CODES}")
