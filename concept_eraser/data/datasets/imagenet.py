"""ImageNet's 1,000 classes, in [-1, 1] (ILSVRC 2012; its terms allow non-commercial research).

MUNBa's Table 2 has the zero-shot accuracy on its validation images. The data are not shipped and
not downloaded. Each class is a folder with the number of its synset, e.g. n01440764, below val/ or
train/. Sorted, these folders number the classes. The names are those of open_clip's zero-shot
evaluation. Two of them occur twice, missile and sunglasses. A zero-shot classifier does not
tell these pairs apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from concept_eraser.data.labelled import Labelled, from_folder
from concept_eraser.data.stand_in import Known, NotHere
from concept_eraser.utils.errors import UserError

CLASSES = 1000


@dataclass(frozen=True)
class ImageNet:
    """ImageNet's 1,000 classes.

    Args:
        root: The folder with val/<synset>/*.JPEG and train/<synset>/*.JPEG.
        size: Width and height of the square images in pixels. CLIP's ViT-B/32 needs 224.
    """

    title: ClassVar[str] = "ImageNet"
    root: str = "data/imagenet"
    size: int = 224

    def load(self, split: str) -> Labelled:
        folder = Path(self.root) / ("val" if split == "test" else "train")
        if not folder.is_dir():
            raise NotHere(
                f"ImageNet is not at {folder.resolve()}; give options: {{root: <folder with val/ "
                "and train/>}"
            )
        synsets = [path.name for path in folder.iterdir() if path.is_dir()]
        wrong_names = sorted(name for name in synsets if not re.fullmatch(r"n\d{8}", name))
        if wrong_names or len(synsets) != CLASSES:
            raise UserError(
                f"{folder}: expected {CLASSES:,} folders with the numbers of synsets, such as "
                f"n01440764, found {len(synsets):,}"
                + (f", {wrong_names[0]!r} among them" if wrong_names else "")
                + "; with fewer, their places among the classes are unknown"
            )
        images = from_folder(folder, self.size)
        return Labelled(images.labels, class_names(), images.fetch, "ImageNet")

    def known_facts(self) -> Known:
        return Known((3, self.size, self.size), class_names(), 1_281_167)


def class_names() -> tuple[str, ...]:
    """Return open_clip's names of the 1,000 classes, in the order of their synsets."""
    from open_clip import IMAGENET_CLASSNAMES

    return tuple(IMAGENET_CLASSNAMES)


PLUGIN = ImageNet
