"""Handwritten digits, 8x8: scikit-learn's copy of the UCI set, real data that needs no download.

There are 1,797 images of 43 writers (UCI Optical Recognition of Handwritten Digits, CC BY 4.0),
with values in [0, 1]. A fifth of each class, drawn with seed 0, is the test split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from concept_eraser.data.labelled import Labelled, from_arrays
from concept_eraser.utils.extras import import_from_extra


@dataclass(frozen=True)
class Digits:
    """Handwritten digits of 8x8 pixels.

    Args:
        flat: Give images [n, 64] for a perceptron; otherwise [n, 1, 8, 8].
    """

    title: ClassVar[str] = "Handwritten digits (UCI, in scikit-learn)"
    flat: bool = True

    def load(self, split: str) -> Labelled:
        with import_from_extra("labelled", "the data set digits"):
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split

        x, y = load_digits(return_X_y=True)
        x = x / 16.0 if self.flat else (x / 16.0).reshape(-1, 1, 8, 8)
        parts = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
        return from_arrays(parts[split == "test"], parts[2 + (split == "test")], about="digits")


PLUGIN = Digits
