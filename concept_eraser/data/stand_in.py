"""Random images in the place of a named set whose files are not at hand: a dry run's examples.

What is known of a set without its files (`Known`) says its own file in data/datasets/. A stand-in
has the set's true number of examples, classes and shape, so that a wrong class or position is
found; an image is drawn when it is asked for. Nothing about the true labels' order is known:
labels go round the classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from concept_eraser.data.labelled import Labelled
from concept_eraser.utils.errors import UserError


class NotHere(UserError):
    """A named set's files are not on this machine."""


@dataclass(frozen=True)
class Known:
    """shape: of one example; names: of the classes, in the order of their numbers; n: examples of
    the training split.

    own: classes are called and counted as in the user's own folders, so that other names and more
    examples are no mistake.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    n: int
    own: bool = False

    def reaching(self, classes: Iterable[str], last: int) -> Known:
        """Where the set is the user's own, with these classes too, and examples up to position
        `last`.
        """
        if not self.own:
            return self
        names = dict.fromkeys([*self.names, *classes])
        return replace(self, names=tuple(names), n=max(self.n, len(names), last + 1))

    def examples(self, about: str) -> Labelled:
        """Uniform noise in [-1, 1], the same for the same position."""

        def fetch(rows: Sequence[int]) -> Tensor:
            noise = (
                torch.rand(self.shape, generator=torch.Generator().manual_seed(int(row)))
                for row in rows
            )
            return torch.stack(list(noise)).mul(2).sub(1)

        return Labelled(torch.arange(self.n) % len(self.names), self.names, fetch, about)


def a_few(data: Labelled, rows: Tensor, each: int) -> list[int]:
    """The first positions among `rows` of each class that occurs there, at most `each` of one."""
    labels = data.labels[rows]
    return sorted(int(row) for label in labels.unique() for row in rows[labels == label][:each])


def only(data: Labelled, rows: Sequence[int]) -> Labelled:
    """The examples at some positions, which are counted anew from 0."""
    positions = torch.tensor(rows)
    return replace(
        data,
        labels=data.labels[positions],
        fetch=lambda asked: data.fetch([rows[int(i)] for i in asked]),
    )
