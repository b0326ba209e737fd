"""ResNet-18 (arXiv 1512.03385) for small images.

It is torchvision's, with a 3x3 first layer and no first pooling. This form is usual for CIFAR-10
and SVHN (11.2 M parameters at width 64). `width` scales all channels, so that a small one trains on
a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


class SmallResNet(nn.Module):
    """[n, channels, h, w] -> logits [n, classes].

    `features` is the input of the last layer, [n, 8 width].
    """

    def __init__(self, channels: int, width: int, classes: int) -> None:
        super().__init__()
        from torchvision.models.resnet import BasicBlock

        self.first = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        inputs, stages = width, []
        for stage in range(4):
            outputs, stride = width * 2**stage, 1 if stage == 0 else 2
            stages += [
                self._block(BasicBlock, inputs, outputs, stride),
                self._block(BasicBlock, outputs, outputs, 1),
            ]
            inputs = outputs
        self.stages = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inputs, classes)

    @staticmethod
    def _block(kind: Any, inputs: int, outputs: int, stride: int) -> nn.Module:
        change = None
        if stride != 1 or inputs != outputs:
            change = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )
        return kind(inputs, outputs, stride, change)

    def features(self, x: Tensor) -> Tensor:
        return self.stages(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@dataclass(frozen=True)
class ResNet18Architecture:
    """Options of the network.

    Args:
        channels: The channels of the images.
        width: The channels of the first layer.
        classes: The number of classes.
    """

    channels: int = 3
    width: int = 64
    classes: int = 10

    def build(self) -> nn.Module:
        return SmallResNet(self.channels, self.width, self.classes)


PLUGIN = ResNet18Architecture
