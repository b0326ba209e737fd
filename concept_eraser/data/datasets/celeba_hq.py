"""CelebA-HQ by identity, as in MUNBa's Table 9. Each person is a subfolder under train/ and test/.

The images (Karras et al. 2018, non-commercial research use) are not shipped and not downloaded. The
307 identities with at least 15 images are the usual choice in the literature.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from concept_eraser.data.labelled import Labelled, from_folder
from concept_eraser.data.stand_in import Known, NotHere


@dataclass(frozen=True)
class CelebAHQ:
    """CelebA-HQ by identity.

    Args:
        root: The folder with train/<identity>/*.jpg and test/<identity>/*.jpg.
        size: Width and height of the square images in pixels.
    """

    title: ClassVar[str] = "CelebA-HQ identities"
    root: str = "data/celeba_hq"
    size: int = 224

    def load(self, split: str) -> Labelled:
        folder = Path(self.root) / ("test" if split == "test" else "train")
        if not folder.is_dir():
            raise NotHere(
                f"CelebA-HQ is not at {folder.resolve()}; give options: {{root: <folder "
                "with train/ and test/>}"
            )
        return from_folder(folder, self.size)

    def known_facts(self) -> Known:
        people = tuple(map(str, range(307)))
        return Known((3, self.size, self.size), people, 15 * len(people), own=True)


PLUGIN = CelebAHQ
