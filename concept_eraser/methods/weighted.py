"""A fixed weighted sum of the two gradients: the baseline behind most published scripts.

    g = retain * g_r + forget * g_f

Settings that have their own name:
* Fine-tuning on the retain set only: forget=0.
* Gradient ascent (GA, called A in UNO's paper): retain=0 with the loss `ascent`.
* Gradient difference (GDiff, Liu et al., arXiv 2203.12817): both 1 with the loss `ascent`.
* A-D of UNO's paper (arXiv 2506.04712): `alternate`, ascent and descent in turn, one gradient for
  each step.
* ESD: retain=0 with the loss `esd`.

Deliberate differences: none in the rules of the texts. The code behind the paper's numbers of A-D
on MNIST (pinakm9/forget, modules/mnist/vae_ad.py, lines 98-167) takes turns between ascent and
surgery, which is `a-s` of surgery.py. That for ImageNet (modules/imagenet/ascent_descent.py) has
plain descent, as here. Losses, data and weights of each of them are the recipe's; each recipe in
pipelines/ names the definition that it follows.

An objective of weight 0 needs no backward pass. Objectives other than retain and forget have the
weight of forget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from concept_eraser.methods.base import Closure, Direction, Method


@dataclass(frozen=True)
class Weighted(Method):
    """A weighted sum of the two gradients. Both losses are minimised, so both weights are >= 0.

    Args:
        retain: The weight of the retain gradient.
        forget: The weight of the forget gradient.
        alternate: Forget alone at even steps (counted from 0), retain alone at odd ones.
    """

    title: ClassVar[str] = "Weighted sum (fine-tune, GA, GDiff, ESD's objective)"
    source: ClassVar[str] = "folklore; GDiff: arXiv 2203.12817"
    defaults: ClassVar[Mapping[str, str]] = {
        "retain": "a plain sum",
        "forget": "a plain sum",
        "alternate": "ours",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"permutation"})

    retain: float = 1.0
    forget: float = 1.0
    alternate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.retain < 0 or self.forget < 0 or self.retain + self.forget == 0:
            raise ValueError(
                f"the weights must be >= 0 and not both 0, found retain={self.retain}, "
                f"forget={self.forget}; to climb a loss use the loss 'ascent'"
            )
        if self.alternate and self.retain * self.forget == 0:
            raise ValueError(
                "alternate needs both weights > 0; without it one weight of 0 leaves an "
                "objective out"
            )

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if self.retain > 0 and "retain" not in objectives:
            raise ValueError(
                "the method 'weighted' needs a retain set; to forget without one use "
                "method: {name: weighted, retain: 0}"
            )

    def uses_all(self, objectives: tuple[str, ...]) -> bool:
        weights = [self.retain if name == "retain" else self.forget for name in objectives]
        return not self.alternate and min(weights) > 0

    def direction(self, closure: Closure) -> Direction:
        is_retain_turn = closure.step % 2 == 1  # whether it is the turn of retain
        weights = [
            self.retain if objective == "retain" else self.forget
            for objective in closure.objectives
        ]
        if self.alternate:
            weights = [
                w if (p == "retain") == is_retain_turn else 0.0
                for p, w in zip(closure.objectives, weights, strict=True)
            ]
        positions = [i for i, weight in enumerate(weights) if weight > 0]
        grads = [closure.grad(closure.objectives[i]) for i in positions]
        computed = closure.gramian(grads)
        all_weights = torch.tensor(weights, dtype=torch.float64)
        gram = torch.full((len(weights), len(weights)), float("nan"), dtype=torch.float64)
        gram[torch.tensor(positions)[:, None], torch.tensor(positions)] = computed
        direction = Direction.weighted_sum(all_weights[positions], grads, computed)
        return replace(direction, gram=gram, weights=all_weights)


NAMED = {
    "finetune": {"forget": 0.0},
    "ga": {"retain": 0.0},
    "a": {"retain": 0.0},
    "gdiff": {},
    "a-d": {"alternate": True},
}
PLUGIN = Weighted
