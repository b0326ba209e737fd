"""The base class of image features, the lookup of their weights, and their cache."""

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

from concept_eraser.data.generate import keep
from concept_eraser.data.images import read_images
from concept_eraser.storage.cache import CHECK_BYTES, append_records, check_of
from concept_eraser.utils import distributed, provenance, resources
from concept_eraser.utils.devices import find_gpu
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress, silent


class Features(ABC):
    """A plug-in of features/, named PLUGIN: a row of numbers for each image."""

    title: ClassVar[str]
    backend: ClassVar[str]  # the implementation that the features follow
    batch: ClassVar[int] = 16  # images per forward pass

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the weights. Raises UserError where there are none."""

    @property
    @abstractmethod
    def protocol(self) -> dict[str, Any]:
        """`model`, `resize` (the resizing method), `input_size` and other facts of the features."""

    @abstractmethod
    def prepare(self, image: np.ndarray) -> Tensor:
        """Convert one image [h, w, 3] uint8 to the input of the network."""

    @abstractmethod
    def embed(self, batch: Tensor) -> Tensor:
        """Embed a batch [b, ...] of images prepared alike: [b, d] features."""

    @cached_property
    def dim(self) -> int:
        """Number of features per image, measured on the network itself."""
        return int(self._embed([self.prepare(np.zeros((64, 64, 3), np.uint8))]).shape[1])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that must be equal for two numbers on these features to be comparable."""
        return {
            "backend": self.backend,
            **self.protocol,
            "weights": self.fingerprint,
            "dim": self.dim,
        }

    def extract(self, images: Tensor | Iterable[np.ndarray]) -> np.ndarray:
        """Extract the features [n, d] float32 of images.

        Each image is embedded once. Its features are kept in the cache, so interrupted work
        continues where it stopped. Under `accelerate launch` each process embeds its share of a
        tensor and reads the others' features from the cache.

        Args:
            images: [n, h, w, 3] uint8, or an iterable of arrays [h, w, 3] of any size.
        """
        if isinstance(images, Tensor) and not distributed.alone():
            share = list(distributed.mine(images))
            if share:
                self._extract(map(np.asarray, share))
            distributed.wait()
        return self._extract(map(np.asarray, images))

    def _extract(self, images: Iterable[np.ndarray]) -> np.ndarray:
        memory = Memory(
            resources.cache() / "features" / f"{provenance.fingerprint(self.settings)}.checked",
            self.dim,
        )
        # pending images by shape, because a batch has one shape
        pending: dict[tuple[int, ...], dict[str, Tensor]] = {}
        keys = []
        for array in images:
            keys.append(key := image_hash(array))
            if key in memory.rows or any(key in some for some in pending.values()):
                continue
            inputs = self.prepare(array)
            pending.setdefault(tuple(inputs.shape), {})[key] = inputs
            if len(pending[tuple(inputs.shape)]) == self.batch:
                self._remember(memory, pending.pop(tuple(inputs.shape)))
        for some in pending.values():
            self._remember(memory, some)
        if not keys:
            raise UserError("there are no images to take features of")
        return np.stack([memory.rows[key] for key in keys])

    def of_folder(
        self, folder: Path, *, progress: Progress = silent
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Extract the features [n, d] of the images of a folder, and a summary of the folder.

        The summary holds the folder's name, `images` (their number), `hash` (of their pixels,
        whatever their names) and `left_out` (the unreadable files). Raises UserError where there is
        no image.
        """
        left_out, hashes = list[str](), list[str]()

        def each() -> Iterator[np.ndarray]:
            for _, array in read_images(folder, left_out, deep=True, progress=progress):
                hashes.append(image_hash(array))
                yield array

        features = self.extract(each())
        summary = {
            "folder": folder.name,
            "images": len(hashes),
            "hash": provenance.fingerprint(sorted(hashes)),
        }
        return features, {**summary, "left_out": left_out}

    @torch.no_grad()
    def _embed(self, inputs: list[Tensor]) -> np.ndarray:
        return self.embed(torch.stack(inputs).to(device())).float().cpu().numpy()

    def _remember(self, memory: Memory, waiting: dict[str, Tensor]) -> None:
        memory.add(dict(zip(waiting, self._embed(list(waiting.values())), strict=True)))


class Memory:
    """A cache file of feature rows [d] float32, indexed by image hash.

    A killed process may cut the file anywhere. A record that does not match its checksum counts as
    missing.
    """

    def __init__(self, path: Path, dim: int) -> None:
        self._path = path
        self._record = np.dtype([("image", "S32"), ("row", "<f4", (dim,)), ("check", "V8")])
        records = np.fromfile(path, self._record) if path.is_file() else np.empty(0, self._record)
        valid_records = (
            one
            for one in records
            if one["check"].tobytes() == check_of(one.tobytes()[:-CHECK_BYTES])
        )
        self.rows = {one["image"].decode(): one["row"].copy() for one in valid_records}

    def add(self, rows: dict[str, np.ndarray]) -> None:
        """Append more rows after the last whole record."""
        self.rows |= rows
        records = np.array([(key.encode(), row, b"") for key, row in rows.items()], self._record)
        bodies = (one.tobytes()[:-CHECK_BYTES] for one in records)
        content = b"".join(body + check_of(body) for body in bodies)
        keep(lambda: append_records(self._path, content, self._record.itemsize))


def image_hash(image: np.ndarray) -> str:
    """Hash of the pixels [h, w, 3] uint8. Raises UserError for another shape or type."""
    if (
        image.ndim != 3
        or image.shape[2] != 3
        or image.dtype != np.uint8
        or min(image.shape[:2]) < 2
    ):
        raise UserError(
            "features are taken of RGB images [h, w, 3] of bytes, at least 2x2; found "
            f"{image.shape} of {image.dtype}"
        )
    return hashlib.sha256(
        str(image.shape).encode() + np.ascontiguousarray(image).tobytes()
    ).hexdigest()[:32]


def device() -> torch.device:
    return find_gpu() or torch.device("cpu")


def places(*others: Path) -> list[Path]:
    """The folders that may hold weights: $CONCEPT_ERASER_WEIGHTS, the cache's `weights`, and
    `others`.
    """
    folder = os.environ.get("CONCEPT_ERASER_WEIGHTS")
    return [
        *([Path(folder).expanduser()] if folder else []),
        resources.cache() / "weights",
        *others,
    ]


def find_weights(name: str, *others: Path, instead: str) -> Path:
    """Find a file of weights by name, in `places` or `others`.

    Raises:
        UserError: no folder has the file. The error names the folder for it and the alternative.
    """
    for place in places(*others):
        if (place / name).is_file():
            return place / name
    raise UserError(
        f"the weights file {name} is missing, and nothing is downloaded: put it into "
        f"{places()[0]} (or name its folder by $CONCEPT_ERASER_WEIGHTS), or {instead}"
    )


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
