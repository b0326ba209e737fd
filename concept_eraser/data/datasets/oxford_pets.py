"""Oxford-IIIT Pets: 7,349 images of 37 breeds, in [-1, 1] (Parkhi et al. 2012, CC BY-SA 4.0).

torchvision reads it. The data are not shipped. `download: true` downloads them to `root`; without a
network put `oxford-iiit-pet` there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from concept_eraser.data.datasets.base import from_torchvision, to_tensor
from concept_eraser.data.labelled import Labelled
from concept_eraser.data.stand_in import Known

BREEDS = (
    "Abyssinian",
    "American Bulldog",
    "American Pit Bull Terrier",
    "Basset Hound",
    "Beagle",
    "Bengal",
    "Birman",
    "Bombay",
    "Boxer",
    "British Shorthair",
    "Chihuahua",
    "Egyptian Mau",
    "English Cocker Spaniel",
    "English Setter",
    "German Shorthaired",
    "Great Pyrenees",
    "Havanese",
    "Japanese Chin",
    "Keeshond",
    "Leonberger",
    "Maine Coon",
    "Miniature Pinscher",
    "Newfoundland",
    "Persian",
    "Pomeranian",
    "Pug",
    "Ragdoll",
    "Russian Blue",
    "Saint Bernard",
    "Samoyed",
    "Scottish Terrier",
    "Shiba Inu",
    "Siamese",
    "Sphynx",
    "Staffordshire Bull Terrier",
    "Wheaten Terrier",
    "Yorkshire Terrier",
)


@dataclass(frozen=True)
class OxfordPets:
    """Oxford-IIIT Pets.

    Args:
        root: The folder that holds the files.
        size: Width and height of the square images in pixels. CLIP's ViT-B/32 needs 224.
        download: Fetch missing files from the web.
    """

    title: ClassVar[str] = "Oxford-IIIT Pets"
    root: str = "data"
    size: int = 224
    download: bool = False

    def load(self, split: str) -> Labelled:
        from torchvision import datasets

        name = "test" if split == "test" else "trainval"
        return from_torchvision(
            lambda: _with_labels(
                datasets.OxfordIIITPet(
                    self.root, split=name, transform=to_tensor(self.size), download=self.download
                )
            ),
            "Oxford Pets",
            self.root,
        )

    def known_facts(self) -> Known:
        return Known((3, self.size, self.size), BREEDS, 3_680)


def _with_labels(dataset: object) -> object:
    """Add the labels, which torchvision does not make public.

    Without them every image would be opened to count the classes.
    """
    dataset.targets = dataset._labels  # type: ignore[attr-defined]
    return dataset


PLUGIN = OxfordPets
