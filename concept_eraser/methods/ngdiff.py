"""NGDiff: normalised gradient difference (Bu et al., arXiv 2410.22086), Eq. 5.

    g = g_r / ||g_r|| + g_f / ||g_f||

The paper writes a difference, because its g_f is the gradient of the loss to be increased. Here it
is that of the loss to be minimised. The direction is parallel to MUNBa's exact direction, which is
sqrt(1/(1 + c)) times as long. Under an optimiser that ignores the length of a gradient with a
constant cosine, the two are one method. This file shows it.

Deliberate difference: the automatic learning rate of the paper is not part of the rule and is left
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.methods.base import GramMethod, usable


@dataclass(frozen=True)
class NGDiff(GramMethod):
    """The sum of the unit gradients."""

    title: ClassVar[str] = (
        "NGDiff: Unlearning as multi-task optimization, a normalized gradient difference approach"
    )
    source: ClassVar[str] = "arXiv 2410.22086"
    theorems: ClassVar[frozenset[str]] = frozenset(
        {"pareto_descent", "scale_invariance", "permutation", "equal_contribution", "stationarity"}
    )

    def solve(self, gram: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        usable_objectives = usable(gram)
        squares = torch.where(
            usable_objectives, gram.diagonal().double(), torch.ones((), dtype=torch.float64)
        )
        return torch.where(usable_objectives, squares.rsqrt(), 0.0), {
            "degenerate": int(not bool(usable_objectives.all()))
        }


PLUGIN = NGDiff
