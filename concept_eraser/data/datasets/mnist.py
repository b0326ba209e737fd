"""MNIST: 70,000 handwritten digits of 28x28 pixels in [0, 1] (LeCun, Cortes, Burges).

The data are not shipped and not downloaded. The files are the four of the original set, e.g.
train-images-idx3-ubyte, with or without .gz. They lie in `root`, or in MNIST/raw below it, as
torchvision leaves them. Values are divided by 255.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from concept_eraser.data.labelled import Labelled, from_arrays
from concept_eraser.data.stand_in import Known, NotHere
from concept_eraser.storage.readers import read_bytes
from concept_eraser.utils.errors import UserError, first_line

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
SIZE = 28
BYTES = 256 * 2**20  # of a decompressed file; the largest of MNIST has 47 MB


@dataclass(frozen=True)
class MNIST:
    """Handwritten digits of 28x28 pixels.

    Args:
        root: The folder that holds the files.
        flat: Give images [n, 784] for a perceptron; otherwise [n, 1, 28, 28].
    """

    title: ClassVar[str] = "MNIST"
    root: str = "data"
    flat: bool = True

    def load(self, split: str) -> Labelled:
        part = "test" if split == "test" else "train"
        images, labels = (
            read_idx(self._find(name), dimensions)
            for name, dimensions in zip(FILES[part], (3, 1), strict=True)
        )
        if images.shape[1:] != (SIZE, SIZE):
            raise UserError(f"MNIST in {self.root}: expected images of 28x28, found {images.shape}")
        if len(images) != len(labels):
            raise UserError(
                f"MNIST in {self.root}: {len(images):,} images and {len(labels):,} labels; copy "
                "the files again"
            )
        x = images.astype(np.float32) / 255
        return from_arrays(
            x.reshape(len(x), -1) if self.flat else x[:, None],
            labels.astype(np.int64),
            names=tuple(map(str, range(10))),
            about="MNIST",
        )

    def _find(self, name: str) -> Path:
        folders = (Path(self.root), Path(self.root) / "MNIST" / "raw")
        for folder in folders:
            for path in (folder / name, folder / f"{name}.gz"):
                if path.is_file():
                    return path
        raise NotHere(
            f"MNIST is not at {Path(self.root).resolve()}: it has no {name} or {name}.gz, and no "
            "MNIST/raw with it; get the four files of the original set, and give options: {root: "
            "<their folder>}"
        )

    def known_facts(self) -> Known:
        shape = (SIZE * SIZE,) if self.flat else (1, SIZE, SIZE)
        return Known(shape, tuple(map(str, range(10))), 60_000)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an array of bytes in MNIST's format idx, with or without gzip.

    Raises:
        UserError: It is damaged, or has another type or number of dimensions.
    """
    content = read_bytes(path, BYTES)
    if path.suffix == ".gz":
        try:
            decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            content = decompressor.decompress(content, BYTES)
        except zlib.error as error:
            raise UserError(f"{path} is damaged ({first_line(error)}); copy it again") from None
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes([0, 0, 8, dimensions]):
        raise UserError(
            f"{path} is no idx file of bytes in {dimensions} dimensions; check that it is the "
            "right file"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    size = 1
    for number in shape:
        size *= number
    if len(content) - header != size:
        raise UserError(
            f"{path} says its shape is {list(shape)}, and holds {len(content) - header:,} values; "
            "it is damaged, copy it again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


PLUGIN = MNIST
