"""The images that decided an attack, as PNG files in its folder.

images/0007.png belongs to the prompt at position 7 of `attempts` in attack.json, counted from 0. It
is the image that broke the prompt, or else the last one. A prompt that shows the concept without an
attack has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from concept_eraser.data.images import png
from concept_eraser.storage.writers import write_bytes

FOLDER = "images"


def write(folder: Path, images: Mapping[int, Tensor]) -> None:
    """Write images [h, w, 3] uint8 by the position of their prompt into the folder of an attack.

    Raises:
        UserError: A file cannot be written.
    """
    for position, pixels in images.items():
        write_bytes(folder / name(position), png(pixels))


def find(folder: Path | None, positions: range) -> dict[int, Path]:
    """Return the files that the folder of an attack has, by the position of their prompt."""
    if folder is None:
        return {}
    paths = {position: folder / name(position) for position in positions}
    return {position: path for position, path in paths.items() if path.is_file()}


def name(position: int) -> str:
    """Return the file of a prompt in the folder of an attack."""
    return f"{FOLDER}/{position:04d}.png"
