"""Features of pictures: what they are, where their weights are looked for, and the memory that keeps them."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from concept_eraser import environment, ranks, resources
from concept_eraser.data.generate import keep
from concept_eraser.data.images import read_pictures
from concept_eraser.errors import UserError
from concept_eraser.progress import Progress, silent
from concept_eraser.storage.cache import CHECK_BYTES, append_records, check_of


class Features(ABC):
    """A plug-in of features/, named PLUGIN: a row of numbers for each picture."""

    title: ClassVar[str]
    backend: ClassVar[str]  # whose way it is
    batch: ClassVar[int] = 16  # pictures the net sees at once

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Of the weights. Raises UserError where there are none."""

    @property
    @abstractmethod
    def protocol(self) -> dict[str, Any]:
        """`model`, `resize` (how a picture gets its size) and `input_size` (which)."""

    @abstractmethod
    def prepare(self, picture: np.ndarray) -> Tensor:
        """[h, w, 3] uint8 -> what the net takes of one picture."""

    @abstractmethod
    def embed(self, batch: Tensor) -> Tensor:
        """[b, ...], pictures prepared alike -> [b, d] features."""

    @cached_property
    def dim(self) -> int:
        """Numbers a picture: asked of the net itself."""
        return self._embed([self.prepare(np.zeros((64, 64, 3), np.uint8))]).shape[1]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What must be equal for two numbers on these features to be compared."""
        return {"backend": self.backend, **self.protocol, "weights": self.fingerprint, "dim": self.dim}

    def extract(self, pictures: Tensor | Iterable[np.ndarray]) -> np.ndarray:
        """[n, h, w, 3] uint8, or arrays [h, w, 3] of any sizes, one after the other -> [n, d] float32.

        A picture is embedded once: its features are kept in the cache, so work that was stopped goes on where it was. Under
        `accelerate launch` each process embeds its share of a tensor, and finds that of the others in the cache.
        """
        if isinstance(pictures, Tensor) and not ranks.alone():
            share = list(ranks.mine(pictures))
            if share:
                self._extract(map(np.asarray, share))
            ranks.wait()
        return self._extract(map(np.asarray, pictures))

    def _extract(self, pictures: Iterable[np.ndarray]) -> np.ndarray:
        memory = Memory(resources.cache() / "features" / f"{environment.fingerprint(self.settings)}.checked", self.dim)
        waiting: dict[tuple[int, ...], dict[str, Tensor]] = {}  # by shape, as a batch holds one shape
        keys = []
        for array in pictures:
            keys.append(key := picture_hash(array))
            if key in memory.rows or any(key in some for some in waiting.values()):
                continue
            prepared = self.prepare(array)
            waiting.setdefault(tuple(prepared.shape), {})[key] = prepared
            if len(waiting[tuple(prepared.shape)]) == self.batch:
                self._remember(memory, waiting.pop(tuple(prepared.shape)))
        for some in waiting.values():
            self._remember(memory, some)
        if not keys:
            raise UserError("there are no pictures to take features of")
        return np.stack([memory.rows[key] for key in keys])

    def of_folder(self, folder: Path, *, progress: Progress = silent) -> tuple[np.ndarray, dict[str, Any]]:
        """Features [n, d] of the pictures of a folder and those in it, and what is told of it.

        Told are its name, `pictures` (how many), `hash` (of their pixels, whatever their names) and `left_out` (what
        could not be read). Raises UserError where there is no picture.
        """
        left_out, seen = list[str](), list[str]()

        def each() -> Iterator[np.ndarray]:
            for _, array in read_pictures(folder, left_out, deep=True, progress=progress):
                seen.append(picture_hash(array))
                yield array

        features = self.extract(each())
        told = {"folder": folder.name, "pictures": len(seen), "hash": environment.fingerprint(sorted(seen))}
        return features, {**told, "left_out": left_out}

    @torch.no_grad()
    def _embed(self, prepared: list[Tensor]) -> np.ndarray:
        return self.embed(torch.stack(prepared).to(device())).float().cpu().numpy()

    def _remember(self, memory: Memory, waiting: dict[str, Tensor]) -> None:
        memory.add(dict(zip(waiting, self._embed(list(waiting.values())), strict=True)))


class Memory:
    """Rows [d] float32 by the hash of a picture, in a file of records that a kill may cut anywhere. A record that does not fit
    its check is as good as missing."""

    def __init__(self, path: Path, dim: int) -> None:
        self._path = path
        self._record = np.dtype([("picture", "S32"), ("row", "<f4", (dim,)), ("check", "V8")])
        known = np.fromfile(path, self._record) if path.is_file() else np.empty(0, self._record)
        whole = (one for one in known if one["check"].tobytes() == check_of(one.tobytes()[:-CHECK_BYTES]))
        self.rows = {one["picture"].decode(): one["row"].copy() for one in whole}

    def add(self, rows: dict[str, np.ndarray]) -> None:
        """Keep more rows, behind the last whole record."""
        self.rows |= rows
        records = np.array([(key.encode(), row, b"") for key, row in rows.items()], self._record)
        bodies = (one.tobytes()[:-CHECK_BYTES] for one in records)
        content = b"".join(body + check_of(body) for body in bodies)
        keep(lambda: append_records(self._path, content, self._record.itemsize))


def picture_hash(picture: np.ndarray) -> str:
    """Of the pixels [h, w, 3] uint8. Raises UserError for another shape or type."""
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8 or min(picture.shape[:2]) < 2:
        raise UserError(f"features are taken of RGB pictures [h, w, 3] of bytes, at least 2x2; found {picture.shape} of {picture.dtype}")  # fmt: skip
    return hashlib.sha256(str(picture.shape).encode() + np.ascontiguousarray(picture).tobytes()).hexdigest()[:32]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def places(*others: Path) -> list[Path]:
    """Folders in which weights are looked for: $CONCEPT_ERASER_WEIGHTS, the cache's `weights`, and `others`."""
    own = os.environ.get("CONCEPT_ERASER_WEIGHTS")
    return [*([Path(own).expanduser()] if own else []), resources.cache() / "weights", *others]


def find_weights(name: str, *others: Path, instead: str) -> Path:
    """A file of weights by name, in `places` or `others`. Raises UserError with where to put it and what to do instead."""
    for place in places(*others):
        if (place / name).is_file():
            return place / name
    raise UserError(f"the weights file {name} is missing, and nothing is downloaded: put it into {places()[0]} (or name its folder by $CONCEPT_ERASER_WEIGHTS), or {instead}")  # fmt: skip


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
