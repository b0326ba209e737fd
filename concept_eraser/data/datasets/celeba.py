"""CelebA: 202,599 faces with forty attributes, as in UNO's benchmark (Liu et al. 2015).

The images (non-commercial research use) are not shipped and not downloaded. The class is one
attribute: class 0 is without it, class 1 with it. UNO forgets `Male`. An image is the central
square, resized, with values in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from concept_eraser.data.images import read
from concept_eraser.data.labelled import Labelled
from concept_eraser.data.stand_in import Known, NotHere
from concept_eraser.storage.readers import read_text
from concept_eraser.utils.errors import UserError, unknown

IMAGES, ATTRIBUTES, PARTS = "img_align_celeba", "list_attr_celeba.txt", "list_eval_partition.txt"
_NUMBERS = {"train": "0", "valid": "1", "test": "2"}


@dataclass(frozen=True)
class CelebA:
    """Faces with one attribute as the class.

    Args:
        root: The folder with img_align_celeba/, list_attr_celeba.txt and list_eval_partition.txt.
        attribute: The attribute, as the header of list_attr_celeba.txt calls it.
        size: Width and height of the square images in pixels.
    """

    title: ClassVar[str] = "CelebA attributes"
    root: str = "data/celeba"
    attribute: str = "Male"
    size: int = 64

    def load(self, split: str) -> Labelled:
        root = Path(self.root)
        missing_names = [n for n in (IMAGES, ATTRIBUTES, PARTS) if not (root / n).exists()]
        if missing_names:
            raise NotHere(
                f"CelebA is not at {root.resolve()}: it has no {missing_names[0]}; get the aligned "
                "images and the two lists from the set's page, and give options: {root: <their "
                "folder>}"
            )
        values = attribute_values(root / ATTRIBUTES, self.attribute)
        part = _NUMBERS.get(split, "0")
        names = [name for name, number in partition(root / PARTS).items() if number == part]
        without = [name for name in names if name not in values]
        if without or not names:
            raise UserError(
                f"{root / ATTRIBUTES} has no attributes of {without[0]}"
                if without
                else f"{root / PARTS} names no image of the split {split!r}"
            )
        paths = [root / IMAGES / name for name in names]

        def fetch(rows: Sequence[int]) -> Tensor:
            images = np.stack([read(paths[int(i)], (self.size, self.size)) for i in rows])
            # Not channels last: with it torch 2.13 damages memory in the backward pass of a layer
            # of two channels.
            pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
            return pixels.float().div(127.5).sub(1)

        labels = torch.tensor([values[name] for name in names])
        return Labelled(labels, self._names, fetch, "CelebA")

    @property
    def _names(self) -> tuple[str, str]:
        return (f"not {self.attribute}", self.attribute)

    def known_facts(self) -> Known:
        return Known((3, self.size, self.size), self._names, 162_770)


def partition(path: Path) -> dict[str, str]:
    """Read the part of each image: "0" training, "1" validation, "2" test.

    Raises:
        UserError: A line has another form, or names a file outside the folder.
    """
    parts = {}
    for number, line in enumerate(read_text(path, 2**28).splitlines(), 1):
        cells = line.split()
        if not cells:
            continue
        if len(cells) != 2 or cells[1] not in _NUMBERS.values() or Path(cells[0]).name != cells[0]:
            raise UserError(
                f"{path}, line {number}: expected the name of an image and 0, 1 or 2, found "
                f"{line[:80]!r}"
            )
        parts[cells[0]] = cells[1]
    return parts


def attribute_values(path: Path, attribute: str) -> dict[str, int]:
    """Read one attribute of each image, 0 or 1.

    Raises:
        UserError: The list has no such attribute, or a line has another form.
    """
    lines = read_text(path, 2**28).splitlines()
    header = lines[1].split() if len(lines) > 2 else []
    if attribute not in header:
        raise unknown(f"attribute in {path.name}", attribute, header)
    column = header.index(attribute) + 1
    values = {}
    for number, line in enumerate(lines[2:], 3):
        cells = line.split()
        if not cells:
            continue
        if len(cells) != len(header) + 1 or cells[column] not in ("1", "-1"):
            raise UserError(
                f"{path}, line {number}: expected a name and {len(header)} values of 1 or -1"
            )
        values[cells[0]] = int(cells[column] == "1")
    return values


PLUGIN = CelebA
