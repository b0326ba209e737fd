"""The samples of the small problems: scikit-learn's digits, or a data set on this machine.

A source is `digits`, or KIND:FOLDER for one of KINDS, whose files are read by the package's own
loaders (concept_eraser/data/datasets/):

    python -m studies.paper_problems --only ngd_tradeoff --data mnist:data

FashionMNIST has the four file names of MNIST, in a folder of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from concept_eraser.data.datasets.cifar10 import CIFAR10
from concept_eraser.data.datasets.mnist import MNIST
from concept_eraser.data.labelled import Labelled

DIGITS = "digits"
Loader = Callable[[str, str], Labelled]  # of a folder and a split
# with the range of the loader's values
KINDS: dict[str, tuple[Loader, tuple[float, float]]] = {
    "mnist": (lambda folder, split: MNIST(folder, flat=False).load(split), (0.0, 1.0)),
    "fashion_mnist": (lambda folder, split: MNIST(folder, flat=False).load(split), (0.0, 1.0)),
    "cifar10": (lambda folder, split: CIFAR10(folder).load(split), (-1.0, 1.0)),
}


@dataclass(frozen=True)
class Samples:
    """All samples of a data set, those for training before those for tests.

    Attributes:
        images: [n, channels, height, width], from 0 to 1.
        labels: [n], from 0 to 9.
    """

    images: Tensor
    labels: Tensor

    @property
    def flat(self) -> Tensor:
        """The images as vectors [n, d]."""
        return self.images.flatten(1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of an image."""
        return tuple(self.images.shape[1:])


def kind_of(source: str) -> str:
    """Return the name of a source without its folder.

    Raises:
        ValueError: It is none.
    """
    kind, colon, folder = source.partition(":")
    if source != DIGITS and (kind not in KINDS or not colon or not folder):
        names = ", ".join(f"{name}:FOLDER" for name in KINDS)
        raise ValueError(f"there is no source {source!r}; there are {DIGITS}, {names}")
    return kind


def load(source: str = DIGITS) -> Samples:
    """Read the samples of a source.

    Raises:
        ValueError: There is no such source.
        UserError: Its files are missing or damaged.
    """
    kind = kind_of(source)
    if source == DIGITS:
        x, y = load_digits(return_X_y=True)
        return Samples(
            torch.from_numpy(x / 16).float().view(-1, 1, 8, 8), torch.from_numpy(y).long()
        )
    folder = source.partition(":")[2]
    read, (low, high) = KINDS[kind]
    parts = [read(folder, split) for split in ("train", "test")]
    images = torch.cat([part.inputs(range(len(part))) for part in parts])
    return Samples(
        (images - low) / (high - low),
        torch.cat([part.labels for part in parts]),
    )
