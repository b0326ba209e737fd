"""Four networks for small images, after those of the natural-gradient paper.

The paper has an OLP 784-200-10 and an MLP 784-784-256-10 on MNIST, and a CNN and a pretrained
ResNet-18 on CIFAR-10. Here the ResNet has two blocks and group norms, and is not pretrained. On
scikit-learn's digits, 8x8 images, the MLP is 64-256-64-10.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from studies.papers.samples import DIGITS, load

Shape = tuple[int, ...]  # channels, height and width
DIGIT: Shape = (1, 8, 8)


class Block(nn.Module):
    """A residual block of two convolutions with group norms."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(4, outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.GroupNorm(4, outside),
        )
        self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def olp(shape: Shape = DIGIT) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 200), nn.ReLU(), nn.Linear(200, 10)
    )


def mlp(shape: Shape = DIGIT) -> nn.Module:
    pixels = math.prod(shape)
    first, second = (256, 64) if shape == DIGIT else (pixels, 256)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(pixels, first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, 10),
    )


def cnn(shape: Shape = DIGIT) -> nn.Module:
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 2) * (width // 2), 128),
        nn.Tanh(),
        nn.Linear(128, 10),
    )


def resnet(shape: Shape = DIGIT) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1),
        Block(16, 16, 1),
        Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


NETWORKS: dict[str, Callable[[Shape], nn.Module]] = {
    "OLP": olp,
    "MLP": mlp,
    "CNN": cnn,
    "ResNet": resnet,
}


def split(
    seed: int, n: int, noise: float, source: str = DIGITS
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return n training samples, with a share of wrong labels, and the other samples for tests.

    A model that fits wrong labels has seen them, so membership attacks have something to detect.
    """
    rng = np.random.default_rng(seed)
    samples = load(source)
    order = torch.from_numpy(rng.permutation(len(samples.labels)))
    images, noisy = samples.images[order], samples.labels[order]
    wrong = torch.from_numpy(rng.permutation(len(order))[: int(noise * len(order))])
    noisy[wrong] = (noisy[wrong] + torch.from_numpy(rng.integers(1, 10, len(wrong)))) % 10
    return (images[:n], noisy[:n]), (images[n:], noisy[n:])


def fit(
    name: str, data: tuple[Tensor, Tensor], *, seed: int, epochs: int = 60, lr: float = 2e-3
) -> nn.Module:
    """Return a network that was trained by Adam on batches of 64."""
    torch.manual_seed(seed)
    x, y = data
    model = NETWORKS[name](tuple(x.shape[1:]))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model
