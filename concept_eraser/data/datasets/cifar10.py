"""CIFAR-10: 60,000 images of ten classes, 32x32, in [-1, 1] (Krizhevsky 2009).

torchvision reads it. The data are not shipped. `download: true` downloads them to `root`; without a
network put `cifar-10-batches-py` there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from concept_eraser.data.datasets.base import from_torchvision, to_tensor
from concept_eraser.data.labelled import Labelled
from concept_eraser.data.stand_in import Known

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class CIFAR10:
    """CIFAR-10.

    Args:
        root: The folder that holds the files.
        download: Fetch missing files from the web.
    """

    title: ClassVar[str] = "CIFAR-10"
    root: str = "data"
    download: bool = False

    def load(self, split: str) -> Labelled:
        from torchvision import datasets

        return from_torchvision(
            lambda: datasets.CIFAR10(
                self.root, train=split != "test", transform=to_tensor(None), download=self.download
            ),
            "CIFAR-10",
            self.root,
        )

    def known_facts(self) -> Known:
        return Known((3, 32, 32), CLASSES, 50_000)


PLUGIN = CIFAR10
