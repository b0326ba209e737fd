"""ResAlign: resilient safety-driven unlearning (Li et al., arXiv 2507.16302).

The weights forget a concept, and still have forgotten it after a later fine-tuning:

    L(theta) = L_forget(theta) + lam (L_forget(theta*) - L_forget(theta)) + w L_retain(theta),

with theta* the weights after fine-tuning theta on the objective `relearn`. Its gradient needs that
of theta* with respect to theta. theta* is taken for the proximal point of the fine-tuning's loss f,
argmin_p f(p) + 1/2 ||p - theta||^2. There theta = theta* + grad f(theta*), so that

    d L_forget(theta*) / d theta = (I + H)^{-1} g*,    g* = grad L_forget(theta*),

with H the Hessian of f at theta*. The inverse is a fixed point of K terms:

    v = g*,    v <- (I - s (I + H)) v + g*  K - 1 times,    result s v.

Its limit is the solution for any step s at which the iteration converges. s starts at 1 and is
halved, at most five times, where (I - s (I + H)) v is longer than v.

The paper's text was not read here. The authors' code is AntigoneRandy/ResAlign, src/train/. The
loss is train.py, lines 531-552. In hypergrad.py the fine-tuning is lines 411-518, the proximal term
lines 532-549, and the fixed point lines 44-284. The defaults are those of scripts/train.sh and
configs/config3.json.

Deliberate differences from the code:
* The code draws three of its fifteen fine-tunings in each step. They differ in data, optimizer and
  learning rate, and one has a term of prior preservation. Here there is one fine-tuning.
* The fine-tuning and H have the step's own batch of `relearn`. The code draws new images for each
  step and for H.
* The Hessian products are exact in the code. Here they are central differences by default.
* The code takes the mean over the tensors of the ratio of lengths. Here it is that of the vectors.
* Where the iteration still grows after the last halving, the code leaves the term of theta* out,
  and so does this. The code also halves s while the whole gradient is longer than 0.2, and leaves
  the term out in the end; here `training.clip` limits the length.
* lam and w are constants. The command lets w grow from 1.6 to 2 in the second half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from concept_eraser.methods.base import Closure, Direction, HessianProduct, Method
from concept_eraser.methods.relearning import (
    RELEARN,
    TuningSteps,
    fine_tuned,
    require_objectives,
)
from concept_eraser.methods.vectors import Vec, combine, norm

HALVINGS = 5


@dataclass(frozen=True)
class ResAlign(Method):
    """Forget now and after a later fine-tuning, whose derivative is that of a proximal point.

    Args:
        inner_steps: The steps of the fine-tuning.
        inner_lr: Their learning rate.
        inner_optimizer: Plain gradient steps (gradient) or Adam (adam).
        lam: The share of the forget loss that is taken after the fine-tuning.
        retain: w, the weight of the retain loss.
        terms: K, the terms of the fixed point.
        hvp: How Hessian products are computed; see Closure.hvp.
        size: The step of their differences.
    """

    title: ClassVar[str] = "ResAlign: unlearning that survives fine-tuning"
    source: ClassVar[str] = "arXiv 2507.16302"
    defaults: ClassVar[Mapping[str, str]] = {
        "inner_steps": "its code (configs/config3.json)",
        "inner_lr": "its code (configs/config3.json)",
        "inner_optimizer": "its code (configs/config3.json)",
        "lam": "its command",
        "retain": "its command",
        "terms": "its code",
        "hvp": "ours (its code: exact)",
        "size": "ours",
    }
    needs_fp32: ClassVar[bool] = True
    needs_relearning: ClassVar[bool] = True

    inner_steps: int = 5
    inner_lr: float = 1e-4
    inner_optimizer: TuningSteps = "gradient"
    lam: float = 0.8
    retain: float = 1.6
    terms: int = 5
    hvp: HessianProduct = "difference"
    size: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner_steps < 0 or self.retain < 0 or self.terms < 1:
            raise ValueError(
                "inner_steps and retain must be >= 0 and terms >= 1, found "
                f"{self.inner_steps}, {self.retain} and {self.terms}"
            )
        if self.inner_lr <= 0 or self.size <= 0 or not 0 <= self.lam <= 1:
            raise ValueError(
                "inner_lr and size must be > 0 and lam must lie in [0, 1], found "
                f"{self.inner_lr}, {self.size} and {self.lam}"
            )

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        require_objectives("resalign", objectives)

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        step = combine(
            [1 - self.lam, self.retain], [closure.grad("forget"), closure.grad("retain")]
        )
        change = fine_tuned(closure, self.inner_steps, self.inner_lr, self.inner_optimizer)
        with closure.at(change):
            later = closure.grad("forget")
            forgotten = closure.last_loss
            through, scale = self._through(closure, later)
        weights = {"retain": self.retain, "forget": 1 - self.lam, RELEARN: 0.0}
        return Direction(
            combine([1.0, self.lam], [step, through]),
            weights=torch.tensor(
                [weights[objective] for objective in closure.objectives], dtype=torch.float64
            ),
            notes={"tuned": float(norm(change)), "forget_later": forgotten, "scale": scale},
        )

    def _through(self, closure: Closure, slope: Vec) -> tuple[Vec, float]:
        """Return (I + H)^{-1} slope by K terms, and the step s; 0 and 0 if they grow."""
        scale = 1.0
        for _ in range(HALVINGS + 1):
            solution = self._terms(closure, slope, scale)
            if solution is not None:
                return solution, scale
            scale /= 2
        return tuple(torch.zeros_like(part) for part in slope), 0.0

    def _terms(self, closure: Closure, slope: Vec, scale: float) -> Vec | None:
        """Return s v of the fixed point, or None if a product is longer than its argument."""
        v = slope
        for _ in range(self.terms - 1):
            product = closure.hvp(RELEARN, v, self.hvp, self.size)
            image = combine([1 - scale, -scale], [v, product])
            if float(norm(image)) > float(norm(v)):
                return None
            v = combine([1.0, 1.0], [image, slope])
        return combine([scale], [v])


PLUGIN = ResAlign
