"""The judge of the bundled data set: shape, colour, style and background of a 64x64 image.

It is a small convolutional network with four heads. The shape head has an eleventh class, "none",
for images that show no shape. Its temperature was fitted on held-out images, so that its
probabilities are calibrated.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from concept_eraser.tiny.painter import BACKGROUNDS, COLORS, SHAPES, STYLES

CLASSES: dict[str, tuple[str, ...]] = {
    "shape": (*SHAPES, "none"),
    "color": COLORS,
    "style": STYLES,
    "background": BACKGROUNDS,
}


def _block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class JudgeNet(nn.Module):
    """[n, 3, 64, 64] in [-1, 1] -> features [n, 192] -> logits of four heads."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        w = width
        self.body = nn.Sequential(
            # 32 x 32
            nn.Conv2d(3, w, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm2d(w),
            nn.ReLU(),
            _block(w, 2 * w, 1),
            _block(2 * w, 4 * w, 2),  # 16 x 16
            _block(4 * w, 4 * w, 1),
            _block(4 * w, 6 * w, 2),  # 8 x 8
            _block(6 * w, 8 * w, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.heads = nn.ModuleDict(
            {name: nn.Linear(8 * w, len(classes)) for name, classes in CLASSES.items()}
        )
        self.temperature = nn.Buffer(torch.ones(()))

    def features(self, images: Tensor) -> Tensor:
        return self.body(images)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the logits of each head.

        Those of the shape are divided by the fitted temperature.
        """
        features = self.features(images)
        logits = {name: head(features) for name, head in self.heads.items()}
        return {**logits, "shape": logits["shape"] / self.temperature}


def load_judge(folder: Path) -> JudgeNet:
    """Load the judge from a folder with `config.json` and `model.safetensors`.

    They are stored in half precision.
    """
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    judge = JudgeNet(config["width"])
    judge.load_state_dict(
        {
            k: v.float() if v.is_floating_point() else v
            for k, v in load_file(folder / "model.safetensors").items()
        }
    )
    return judge.eval().requires_grad_(False)
