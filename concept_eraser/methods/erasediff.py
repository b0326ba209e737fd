"""EraseDiff: Erasing Undesirable Influence in Diffusion Models (Wu et al., arXiv 2401.05779).

The forget loss of the paper's experiments on Stable Diffusion is `anchor` with `teacher: current`
(losses/denoiser.py has the lines of the authors' code). Their code is JingWu321/EraseDiff.

This is Algorithm 1. It minimises the retain loss F under the condition that the forget loss f is at
its minimum: min F(theta) subject to theta in argmin f. By its value function the constraint reads
q(theta) = f(theta) - min f <= 0. The step is the one closest to F's own gradient that lowers q fast
enough (the dynamic barrier of BOME, arXiv 2209.08709):

    d = argmin 1/2 ||d - g_r||^2  subject to  <d, g_q> >= a
      = g_r + lambda g_q,      lambda = max(0, (a - <g_r, g_q>) / ||g_q||^2),

with g_r the gradient of F and g_q that of q. The minimum of f is taken as a constant of the step,
as in the public code, so g_q is the gradient of f. The barrier a says how fast q is to fall:

* norm      a = eta ||g_q||^2: BOME's choice, hence
            lambda = max(0, eta - <g_r, g_q> / ||g_q||^2)
* gap       a = eta q with q = f(theta) - f(theta^K), theta^K by K plain gradient steps on f:
            the barrier is 0 where f can fall no further
* constant  a = eta

Consequences (each a test): <d, g_q> = max(a, <g_r, g_q>). Where g_r lowers q fast enough, d = g_r.
The step d lowers f even where the two losses are opposed, unlike Nash bargaining.

Deliberate differences from the public code (lines of sd/train_scripts/erasediff_nsfw.py):
* The code runs K epochs on the forget set with Adam and puts theta back (lines 149-198). The value
  that it gets is detached (line 240) and enters neither g_q nor lambda, so its K changes no step.
  So `norm` and `constant` do not take these steps.
* The code's lambda is a constant (line 278), which is the method `weighted`: 1 in both commands
  (train_nsfw.sh, train_cls.sh), 0.1 by default. With a negative constant it is
  max(0, eta - cos(g_r, g_q)) (lines 242-276), without the division by ||g_q||^2. Its commands do
  not use this.
* The code adds the two losses and hands the sum to Adam. The direction here goes to the same
  optimiser.
* The K steps here are taken on the step's own batch.
* Objectives other than retain and forget are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from concept_eraser.methods.base import Closure, Direction, Method, usable
from concept_eraser.methods.vectors import Vec


@dataclass(frozen=True)
class EraseDiff(Method):
    """The step closest to the retain gradient that lowers the forget loss fast enough.

    Args:
        eta: How fast the forget loss has to fall.
        barrier: How eta enters the barrier: "norm", "gap" or "constant".
        inner_steps: K, for the barrier "gap" only.
        inner_lr: The size of these steps, for the barrier "gap" only.
    """

    title: ClassVar[str] = "EraseDiff: erasing undesirable influence in diffusion models"
    source: ClassVar[str] = "arXiv 2401.05779"
    theorems: ClassVar[frozenset[str]] = frozenset({"permutation"})
    defaults: ClassVar[Mapping[str, str]] = {
        "eta": "ours",
        "barrier": "BOME (arXiv 2209.08709)",
        "inner_steps": "its code",
        "inner_lr": "ours",
    }

    eta: float = 1.0
    barrier: Literal["norm", "gap", "constant"] = "norm"
    inner_steps: int = 2
    inner_lr: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eta <= 0 or self.inner_steps < 1 or self.inner_lr <= 0:
            raise ValueError(
                f"eta and inner_lr must be > 0 and inner_steps >= 1, found {self.eta}, "
                f"{self.inner_lr}, {self.inner_steps}"
            )

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if set(objectives) != {"retain", "forget"}:
            raise ValueError(
                "erasediff needs the two objectives retain and forget; found "
                f"{', '.join(objectives)}"
            )

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        gradients = {"retain": closure.grad("retain"), "forget": closure.grad("forget")}
        forget_loss, grads = (
            closure.last_loss,
            [gradients[objective] for objective in closure.objectives],
        )
        gram, index = closure.gramian(grads), closure.objectives.index("forget")
        forget = gram[index, index]
        gap = self._gap(closure, gradients["forget"], forget_loss) if self.barrier == "gap" else 0.0
        barrier = {"norm": float(forget), "gap": gap, "constant": 1.0}[self.barrier] * self.eta
        weights = torch.ones(2, dtype=torch.float64)
        weights[index] = (
            ((barrier - gram[index, 1 - index]) / forget).clamp(min=0)
            if bool(usable(gram)[index])
            else 0.0
        )
        notes = {"gap": gap} if self.barrier == "gap" else {}
        return Direction.weighted_sum(weights, grads, gram, notes=notes)

    def _gap(self, closure: Closure, first: Vec, loss: float) -> float:
        """Return f(theta) - f(theta^K), at least 0."""
        offset = tuple(-self.inner_lr * part for part in first)
        for step in range(self.inner_steps):
            with closure.at(offset):
                gradient = closure.grad("forget")
            if step + 1 < self.inner_steps:
                offset = tuple(o - self.inner_lr * s for o, s in zip(offset, gradient, strict=True))
        return max(0.0, loss - closure.last_loss)


PLUGIN = EraseDiff
