"""Imagenette: 13,394 images of ten easy ImageNet classes, in [-1, 1] (fast.ai, Apache-2.0 list).

torchvision reads it. The data are not shipped. `download: true` downloads them to `root`; without a
network put `imagenette2-160` (or the size's folder) there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from concept_eraser.data.datasets.base import from_torchvision, to_tensor
from concept_eraser.data.labelled import Labelled
from concept_eraser.data.stand_in import Known


@dataclass(frozen=True)
class Imagenette:
    """Imagenette.

    Args:
        root: The folder that holds the files.
        variant: Which copy.
        size: Width and height of the square images in pixels.
        download: Fetch missing files from the web.
    """

    title: ClassVar[str] = "Imagenette"
    root: str = "data"
    variant: Literal["full", "320px", "160px"] = "160px"
    size: int = 128
    download: bool = False

    def load(self, split: str) -> Labelled:
        from torchvision import datasets

        name = "val" if split == "test" else "train"
        return from_torchvision(
            lambda: _with_labels(
                datasets.Imagenette(
                    self.root,
                    split=name,
                    size=self.variant,
                    transform=to_tensor(self.size),
                    download=self.download,
                )
            ),
            "Imagenette",
            self.root,
        )

    def known_facts(self) -> Known:
        from torchvision import datasets

        folders = datasets.Imagenette._WNID_TO_CLASS  # their sorted names number the classes
        return Known(
            (3, self.size, self.size), tuple(folders[name][0] for name in sorted(folders)), 9_469
        )


def _with_labels(dataset: object) -> object:
    """Add labels without opening an image, and one name for each class.

    torchvision has tuples of synonyms instead.
    """
    dataset.targets = [label for _, label in dataset._samples]  # type: ignore[attr-defined]
    dataset.classes = [names[0] for names in dataset.classes]  # type: ignore[attr-defined]
    return dataset


PLUGIN = Imagenette
