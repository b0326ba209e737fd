"""SVHN: 99,289 digits of house numbers, 32x32, in [-1, 1] (Netzer et al. 2011, non-commercial use).

torchvision reads it. The data are not shipped. `download: true` downloads them to `root`; without a
network put `train_32x32.mat` and `test_32x32.mat` there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from concept_eraser.data.datasets.base import from_torchvision, to_tensor
from concept_eraser.data.labelled import Labelled
from concept_eraser.data.stand_in import Known


@dataclass(frozen=True)
class SVHN:
    """SVHN.

    Args:
        root: The folder that holds the files.
        download: Fetch missing files from the web.
    """

    title: ClassVar[str] = "SVHN"
    root: str = "data"
    download: bool = False

    def load(self, split: str) -> Labelled:
        from torchvision import datasets

        name = "test" if split == "test" else "train"
        return from_torchvision(
            lambda: datasets.SVHN(
                self.root, split=name, transform=to_tensor(None), download=self.download
            ),
            "SVHN",
            self.root,
        )

    def known_facts(self) -> Known:
        return Known((3, 32, 32), tuple(map(str, range(10))), 73_257)


PLUGIN = SVHN
