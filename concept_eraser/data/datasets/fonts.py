"""Generated digits of MNIST's size: 28x28, ten classes.

They vary in font, affine map, stroke width and noise. A seed draws them from the fonts that
matplotlib installs (DejaVu, STIX, Computer Modern; free licences, not copied into this package).
Values are in [0, 1]. The data are ours (Apache-2.0). They are cached, since 60,000 images take a
while.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from concept_eraser.data.generate import keep
from concept_eraser.data.labelled import Labelled, from_arrays
from concept_eraser.storage.cache import read_chunk, write_chunk
from concept_eraser.utils import resources
from concept_eraser.utils.provenance import fingerprint

SIZE = 28
VERSION = 1  # of the painter below; part of the cache's key
_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Oblique",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "cmr10",
    "cmb10",
    "cmss10",
    "cmtt10",
)


@cache
def _font(name: str) -> Any:
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(
        str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"), 40
    )


def draw(digit: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one digit: [28, 28] uint8."""
    from PIL import Image, ImageDraw

    big = 2 * SIZE
    canvas = Image.new("L", (big, big))
    middle = (big / 2, big / 2)
    stroke = int(rng.integers(0, 3))
    ImageDraw.Draw(canvas).text(
        middle,
        str(digit),
        font=_font(_FONTS[rng.integers(len(_FONTS))]),
        fill=255,
        anchor="mm",
        stroke_width=stroke,
    )
    angle, shear = np.deg2rad(rng.uniform(-20, 20)), rng.uniform(-0.25, 0.25)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turn @ np.array([[1, shear], [0, 1]]) @ np.diag(1 / rng.uniform(0.75, 1.1, 2))
    shift = np.array(middle) - matrix @ (np.array(middle) + rng.uniform(-5, 5, 2))
    coefficients = (*matrix[0], shift[0], *matrix[1], shift[1])
    transformed = canvas.transform(
        (big, big), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR
    )
    small = np.asarray(transformed.resize((SIZE, SIZE), Image.Resampling.BOX), dtype=np.float32)
    return np.clip(small + rng.normal(0, 8, small.shape), 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Fonts:
    """Generated digits of 28x28 pixels.

    Args:
        n: The number of training images. The test split has a sixth as many.
        flat: Give images [n, 784]; otherwise [n, 1, 28, 28].
        seed: The seed of all random numbers.
    """

    title: ClassVar[str] = "Generated digits, 28x28"
    n: int = 60000
    flat: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n < 60:
            raise ValueError(f"n must be at least 60, found {self.n}")

    def load(self, split: str) -> Labelled:
        count = self.n if split != "test" else self.n // 6
        x, y = self._make(count, split)
        x = x.astype(np.float32) / 255
        return from_arrays(x.reshape(len(x), -1) if self.flat else x[:, None], y, about="fonts")

    def _make(self, count: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        import torch

        key = fingerprint([VERSION, asdict(self) | {"flat": True}, split])
        path = resources.cache() / "datasets" / f"fonts-{key}.safetensors"
        if (chunk := read_chunk(path)) is not None:
            return chunk["x"].numpy(), chunk["y"].numpy()
        rng = np.random.default_rng([self.seed, split == "test", 28])
        y = rng.integers(0, 10, count)
        x = np.stack([draw(int(digit), rng) for digit in y])
        keep(lambda: write_chunk(path, {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}))
        return x, y


PLUGIN = Fonts
