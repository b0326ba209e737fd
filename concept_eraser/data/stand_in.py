"""Random images that replace a named data set in a dry run, if its files are not available.

The set's own file in data/datasets/ states its facts (`Known`). The replacement has the set's true
number of examples, classes and shape, so that a wrong class or position is an error. An image is
drawn when it is read. The order of the true labels is unknown, so the labels cycle through the
classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from concept_eraser.data.labelled import Labelled
from concept_eraser.utils.errors import UserError


class NotHere(UserError):
    """The files of a named data set are not on this machine."""


@dataclass(frozen=True)
class Known:
    """The facts of a named data set without its files.

    Attributes:
        shape: The shape of one example.
        names: The names of the classes, in the order of their numbers.
        n: The number of training examples.
        own: The classes are those of the user's own folders. Then other names and more examples are
            allowed.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    n: int
    own: bool = False

    def reaching(self, classes: Iterable[str], last: int) -> Known:
        """Add these classes and examples up to position `last`, for the user's own set."""
        if not self.own:
            return self
        names = dict.fromkeys([*self.names, *classes])
        return replace(self, names=tuple(names), n=max(self.n, len(names), last + 1))

    def examples(self, about: str) -> Labelled:
        """Return uniform noise in [-1, 1], the same for the same position."""

        def fetch(rows: Sequence[int]) -> Tensor:
            noise = (
                torch.rand(self.shape, generator=torch.Generator().manual_seed(int(row)))
                for row in rows
            )
            return torch.stack(list(noise)).mul(2).sub(1)

        return Labelled(torch.arange(self.n) % len(self.names), self.names, fetch, about)


def a_few(data: Labelled, rows: Tensor, each: int) -> list[int]:
    """Return the first positions among `rows` of each class, at most `each` for one class."""
    labels = data.labels[rows]
    return sorted(int(row) for label in labels.unique() for row in rows[labels == label][:each])


def only(data: Labelled, rows: Sequence[int]) -> Labelled:
    """Return the examples at some positions, numbered from 0."""
    positions = torch.tensor(rows)
    return replace(
        data,
        labels=data.labels[positions],
        fetch=lambda requested: data.fetch([rows[int(i)] for i in requested]),
    )
