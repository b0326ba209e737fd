"""BOME: a first-order method for bi-level optimisation (Liu et al., arXiv 2209.08709).

The paper is "BOME! Bilevel Optimization Made Easy: A Simple First-Order Approach" (NeurIPS 2022).
It has one upper objective F. With FORUM's names (methods/forum.py), one step at z = (alpha, omega):

1. T gradient steps on f from omega give w~; q^ = f(z) - f(alpha, w~), and w~ is a constant of it
2. lambda = max((phi - <grad F, grad q^>) / ||grad q^||^2, 0),   phi = eta ||grad q^||^2 or eta q^
3. z moves along -(grad F + lambda grad q^)

The direction is the one closest to -grad F that lowers q^ at the rate phi. FORUM with one objective
and rho_e = eta is the same step.

FORUM compares BOME on several objectives as the sum of them (its Table 2). F is the weighted sum of
all objectives except the attack.

The authors' code is Cranial-XIX/BOME. The step with phi = eta ||grad q^||^2 is in
toy/toy_convergence.py, lines 50-81, with eta 0.5 and T 10. That with phi = eta q^ is in
hpo/data_cleaning.py, lines 280-301. The numbers of the paper's equations were not read here.

Deliberate differences from this code:
* The code adds 1e-4 or 1e-8 to ||grad q^||^2. Here lambda is 0 where grad q^ is exactly 0.
* phi = eta q^ is 0 where the inner steps have raised f. In the code it is negative there.
* Sizes of steps: the weights move by the recipe's optimiser, the attack's variable by `outer_lr`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from concept_eraser.methods.base import Closure, Direction, Method
from concept_eraser.methods.forum import ATTACK, start_inner, value_gap
from concept_eraser.methods.vectors import combine, gramian, is_finite


@dataclass(frozen=True)
class Bome(Method):
    """The step closest to the gradient of the sum that lowers the gap of the lower level.

    Args:
        eta: How fast the gap must fall.
        barrier: phi = eta ||grad q||^2 ("norm") or eta q ("gap").
        inner_steps: T of the lower level.
        inner_lr: The step size of the lower level. If its steps diverge, the step is skipped.
        outer_lr: The step size of the attack's variable. The weights move by the optimiser.
        retain: The weight of the retain loss in F.
        forget: The weight of the forget loss and of all other losses in F.
    """

    title: ClassVar[str] = "BOME! Bilevel optimization made easy: a simple first-order approach"
    source: ClassVar[str] = "arXiv 2209.08709"
    defaults: ClassVar[Mapping[str, str]] = {
        "eta": "the authors' toy problems",
        "barrier": "the authors' toy problems (their data cleaning: gap)",
        "inner_steps": "the authors' toy problems",
        "inner_lr": "ours",
        "outer_lr": "ours",
        "retain": "FORUM's comparison: equal weights",
        "forget": "FORUM's comparison: equal weights",
    }
    needs_fp32: ClassVar[bool] = True  # grad q is a difference of gradients
    needs_attack: ClassVar[bool] = True
    theorems: ClassVar[frozenset[str]] = frozenset({"permutation"})

    eta: float = 0.5
    barrier: Literal["norm", "gap"] = "norm"
    inner_steps: int = 10
    inner_lr: float = 0.1
    outer_lr: float = 0.1
    retain: float = 1.0
    forget: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eta <= 0 or self.inner_steps < 1 or self.inner_lr <= 0 or self.outer_lr <= 0:
            raise ValueError(
                "eta, inner_lr and outer_lr must be > 0 and inner_steps >= 1; found "
                f"{self.eta}, {self.inner_lr}, {self.outer_lr}, {self.inner_steps}"
            )
        if min(self.retain, self.forget) < 0 or self.retain + self.forget == 0:
            raise ValueError(
                "the weights retain and forget must be >= 0, and one of them > 0; found "
                f"{self.retain}, {self.forget}"
            )

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if ATTACK not in objectives:
            raise ValueError(
                f"BOME needs a lower-level problem, the objective {ATTACK!r}; found "
                f"{', '.join(objectives)}. Give the recipe an `attack:` section"
            )

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        start = start_inner(closure, {}, warm=True)
        slope, gap = value_gap(closure, start, self.inner_steps, self.inner_lr)
        if not (is_finite(slope) and math.isfinite(gap)):
            return Direction(
                tuple(torch.full_like(p, float("nan")) for p in slope), notes={"inner_diverged": 1}
            )
        uppers = [objective for objective in closure.objectives if objective != ATTACK]
        grads = [closure.grad(objective) for objective in uppers]
        weights = torch.tensor(
            [self.retain if name == "retain" else self.forget for name in uppers],
            dtype=torch.float64,
        )
        gram = gramian([*grads, slope])
        square, inner = float(gram[-1, -1]), float(gram[-1, :-1] @ weights)
        rate = self.eta * (square if self.barrier == "norm" else max(gap, 0.0))
        multiplier = max((rate - inner) / square, 0.0) if square > 0 else 0.0
        step = combine([*weights.tolist(), multiplier], [*grads, slope])
        vec = tuple(
            part * self.outer_lr if i in closure.inner else part for i, part in enumerate(step)
        )
        return Direction(vec, gram[:-1, :-1], weights, {"q": gap, "nu": multiplier})


PLUGIN = Bome
