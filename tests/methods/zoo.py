"""One zoo of gradient pairs that every law is tried on, and closures that hand them out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from concept_eraser.vectors import Vec

SCALES = (1e-12, 1e-8, 1e-3, 1.0, 1e4, 1e12)
COSINES = (-0.999999, -0.9, -0.3, 0.0, 0.3, 0.9, 1.0)


def pair(cosine: float, first: float, second: float, *, seed: int = 0) -> tuple[Vec, Vec]:
    """Two vectors of three float64 tensors with the given cosine and norms."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (3, 4, 5)
    a = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    b = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    a = a / a.norm()
    b = b - (a @ b) * a
    b = b / b.norm()
    v = cosine * a + (1 - cosine**2) ** 0.5 * b
    return split(a * first, sizes), split(v * second, sizes)


def split(x: Tensor, sizes: tuple[int, ...]) -> Vec:
    return tuple(x.split(sizes))


PAIRS = [pair(c, a, b) for c, a, b in itertools.product(COSINES, SCALES, SCALES)]


@dataclass
class Fixed:
    """A closure that answers with fixed gradients and counts what it was asked."""

    gradients: dict[str, Vec]
    asked: list[str] = field(default_factory=list)

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(self.gradients)

    def grad(self, player: str) -> Vec:
        self.asked.append(player)
        return self.gradients[player]


def closure(retain: Vec, forget: Vec) -> Fixed:
    return Fixed({"retain": retain, "forget": forget})


def flat(v: Vec) -> Tensor:
    return torch.cat([part.flatten() for part in v])
