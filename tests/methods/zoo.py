"""One zoo of gradient pairs that every law is tried on, and closures that hand them out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from concept_eraser.methods.base import Method
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
    """A closure that answers with fixed gradients (so its Hessians are zero) and counts what it was asked."""

    gradients: dict[str, Vec]
    step: int = 0
    inner: tuple[int, ...] = ()
    seen: float = 0.0
    asked: list[str] = field(default_factory=list)

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(self.gradients)

    @property
    def params(self) -> Vec:
        return tuple(torch.zeros_like(part) for part in next(iter(self.gradients.values())))

    def grad(self, player: str, of: Sequence[int] | None = None) -> Vec:
        self.asked.append(player)
        return self.gradients[player] if of is None else tuple(self.gradients[player][i] for i in of)

    def terms(self, player: str) -> int:
        return 1

    def at(self, offset: Vec) -> AbstractContextManager[None]:
        return nullcontext()

    def hvp(self, player: str, v: Vec, how: str = "difference", size: float = 0.01) -> Vec:
        return tuple(torch.zeros_like(part) for part in v)


def closure(retain: Vec, forget: Vec, method: Method | None = None) -> Fixed:
    """Two players; for a method with a lower-level problem also an attack that is solved already."""
    gradients = {"retain": retain, "forget": forget}
    if method is not None and method.needs_attack:
        gradients["attack"] = tuple(torch.zeros_like(part) for part in retain)
    return Fixed(gradients)


def flat(v: Vec) -> Tensor:
    return torch.cat([part.flatten() for part in v])
