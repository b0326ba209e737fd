"""A fixed weighted sum of the two gradients: the baseline behind most published scripts.

    g = retain * g_r + forget * g_f

Settings with a name of their own: fine-tuning on the retain set only (forget=0); gradient ascent, GA (retain=0
with the loss `ascent`); gradient difference, GDiff (both 1 with the loss `ascent`, Liu et al., arXiv 2203.12817);
ESD (retain=0 with the loss `esd`). A player of weight 0 costs no backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from concept_eraser.methods.base import Closure, Direction, Method
from concept_eraser.vectors import combine, gramian


@dataclass(frozen=True)
class Weighted(Method):
    """retain, forget: the weights of the two gradients; both losses are minimised, so both are >= 0."""

    title: ClassVar[str] = "Weighted sum (fine-tune, GA, GDiff, ESD's objective)"
    source: ClassVar[str] = "folklore; GDiff: arXiv 2203.12817"
    theorems: ClassVar[frozenset[str]] = frozenset({"permutation"})

    retain: float = 1.0
    forget: float = 1.0

    def __post_init__(self) -> None:
        if self.retain < 0 or self.forget < 0 or self.retain + self.forget == 0:
            raise ValueError(f"the weights must be >= 0 and not both 0, found retain={self.retain}, forget={self.forget}; to climb a loss use the loss 'ascent'")  # fmt: skip

    def direction(self, closure: Closure) -> Direction:
        each = [self.retain if player == "retain" else self.forget for player in closure.players]
        used = [i for i, weight in enumerate(each) if weight > 0]
        grads = [closure.grad(closure.players[i]) for i in used]
        gram = torch.full((len(each), len(each)), float("nan"), dtype=torch.float64)
        gram[torch.tensor(used)[:, None], torch.tensor(used)] = gramian(grads)
        return Direction(combine([each[i] for i in used], grads), gram, torch.tensor(each, dtype=torch.float64))


PLUGIN = Weighted
