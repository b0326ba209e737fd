"""Four networks for scikit-learn's digits, after those of the natural-gradient paper.

The paper has an OLP 784-200-10 and an MLP 784-784-256-10 on MNIST, and a CNN and a pretrained
ResNet-18 on CIFAR-10. Here all have 8x8 images, and the ResNet has two blocks and group norms.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


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


def olp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.Tanh(),
        nn.Linear(128, 10),
    )


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        Block(16, 16, 1),
        Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "OLP": olp,
    "MLP": mlp,
    "CNN": cnn,
    "ResNet": resnet,
}


def digits(seed: int, n: int, noise: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return n training samples, with a share of wrong labels, and the other samples for tests.

    A model that fits wrong labels has seen them, so membership attacks have something to detect.
    """
    rng = np.random.default_rng(seed)
    x, y = load_digits(return_X_y=True)
    order = rng.permutation(len(x))
    images = torch.from_numpy(x[order] / 16).float().view(-1, 1, 8, 8)
    labels = torch.from_numpy(y[order]).long()
    noisy = labels.clone()
    wrong = torch.from_numpy(rng.permutation(len(x))[: int(noise * len(x))])
    noisy[wrong] = (noisy[wrong] + torch.from_numpy(rng.integers(1, 10, len(wrong)))) % 10
    return (images[:n], noisy[:n]), (images[n:], noisy[n:])


def fit(
    name: str, data: tuple[Tensor, Tensor], *, seed: int, epochs: int = 60, lr: float = 2e-3
) -> nn.Module:
    """Return a network that was trained by Adam on batches of 64."""
    torch.manual_seed(seed)
    model, (x, y) = NETWORKS[name](), data
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model
