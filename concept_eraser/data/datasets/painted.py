"""The painted images of the bundled data set: ten shapes, eight colours, four styles.

They have four backgrounds, 64x64 pixels and values in [-1, 1]. Labels are one attribute of the
scene. The data are ours (Apache-2.0), drawn by concept_eraser/tiny/painter.py from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from concept_eraser.data.labelled import Labelled, from_arrays
from concept_eraser.tiny import painter

_VALUES = {
    "shape": painter.SHAPES,
    "color": painter.COLORS,
    "style": painter.STYLES,
    "background": painter.BACKGROUNDS,
}


@dataclass(frozen=True)
class Painted:
    """Painted images of the bundled data set.

    Args:
        label: The attribute that is the class.
        n: The number of training images. The test split has a quarter as many.
        size: Width and height in pixels, 64 or a divisor of it (averaged down).
        seed: The seed of the scenes.
    """

    title: ClassVar[str] = "Painted scenes of the bundled world"
    label: Literal["shape", "color", "style", "background"] = "shape"
    n: int = 4000
    size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n < 10 or self.size < 8 or painter.SIZE % self.size:
            raise ValueError(
                f"n must be at least 10 and size a divisor of {painter.SIZE} from 8, "
                f"found {self.n} and {self.size}"
            )

    def load(self, split: str) -> Labelled:
        rng = np.random.default_rng([self.seed, split == "test", 4])
        scenes = [
            painter.random_scene(rng) for _ in range(self.n if split != "test" else self.n // 4)
        ]
        images = torch.from_numpy(np.stack([painter.paint(scene, rng) for scene in scenes]))
        x = images.permute(0, 3, 1, 2).float().div(127.5).sub(1)
        x = (
            torch.nn.functional.avg_pool2d(x, painter.SIZE // self.size)
            if self.size < painter.SIZE
            else x
        )
        names = _VALUES[self.label]
        return from_arrays(
            x, [names.index(getattr(scene, self.label)) for scene in scenes], names, "painted"
        )


PLUGIN = Painted
