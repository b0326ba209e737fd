"""MoCo: multi-objective gradient correction (Fernando et al., arXiv 2210.12624).

The paper is "Mitigating Gradient Bias in Multi-objective Learning: A Provably Convergent Approach"
(ICLR 2023). The Gram matrix of noisy gradients is biased. So MoCo tracks each gradient, and moves
the weights of the objectives slowly instead of solving for them. With h_i the gradients of a step,
k = 0, 1, ...:

    y_i   <- y_i - beta_k (y_i - h_i)
    lam   <- P(lam - gamma_k (Y^T Y + rho I) lam),    P the projection on the simplex
    alpha moves along -Y lam

from y = 0 and equal weights. Under a lower-level problem, h_i is the gradient of F_i at w_T(alpha),
the end of T gradient steps on f from omega, through these steps (methods/unrolled.py). omega moves
to w_T. This is how FORUM compares MoCo: its code has MOML's gradients with MoCo's weights.

The authors' code is heshandevaka/MoCo, LibMTL/LibMTL/weighting/Tracking.py, lines 70-73: the three
updates in this order, y = 0 at the start, equal weights, and the rates beta_k = beta / (k +
1)^beta_decay and gamma_k alike. P is the Euclidean projection there (by sorting, lines 32-40). The
paper's text was not read here.

Deliberate differences from this code, and from the code that FORUM's authors compare with
(Baijiong-Lin/FORUM, LibMTL/weighting/MoCo.py, lines 46-51):
* The first code has the gradient of lam's objective, 2 Y^T Y lam. So its gamma is half of ours. It
  has no rho. Its docstring has beta 0.1. The default rates here are those of FORUM's code.
* FORUM's code applies a softmax in place of P (`simplex: softmax`).
* FORUM's code replaces h_i by h_i / ||h_i|| times the loss (`normalize: true`). The first code does
  not.
* Neither code bounds y_i, nor does this file.
* Hessian products by central differences by default, as in MOML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from concept_eraser.methods.base import Closure, Direction, HessianProduct, Method
from concept_eraser.methods.forum import ATTACK, start_inner
from concept_eraser.methods.moml import diverged
from concept_eraser.methods.unrolled import hypergradient, iterates, move_inner
from concept_eraser.methods.vectors import Vec, combine, gramian, is_finite, norm


def project_on_simplex(x: Tensor) -> Tensor:
    """Return the point of the simplex that is nearest to x [m]."""
    ordered = x.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(x) + 1, dtype=x.dtype)
    last = int((ordered > excess).nonzero().max())
    return (x - excess[last]).clamp(min=0)


@dataclass(frozen=True)
class Moco(Method):
    """Tracked gradients, with weights that move towards the min-norm combination.

    Args:
        beta: The first rate of the tracked gradients, 0 to 1.
        beta_decay: The exponent of its fall; 0 for a constant.
        gamma: The first rate of the weights.
        gamma_decay: The exponent of its fall.
        rho: The regularisation of the weights towards equal ones.
        simplex: Keep the weights on the simplex by projection, or by a softmax.
        normalize: Give each gradient the length of its loss.
        inner_steps: T of the lower level.
        inner_lr: Its step size. If its steps diverge, the step is skipped.
        hvp: Hessian products by differences of gradients, or exactly by double backward.
        size: The step of the differences.
        warm: Start the lower level at the present attack, else at the attack of the first step.
    """

    title: ClassVar[str] = "MoCo: mitigating gradient bias in multi-objective learning"
    source: ClassVar[str] = "arXiv 2210.12624"
    defaults: ClassVar[Mapping[str, str]] = {
        "beta": "FORUM's code",
        "beta_decay": "FORUM's code",
        "gamma": "FORUM's code",
        "gamma_decay": "FORUM's code",
        "rho": "FORUM's code",
        "simplex": "MoCo's authors' code (FORUM's code: softmax)",
        "normalize": "MoCo's authors' code (FORUM's code: true)",
        "inner_steps": "FORUM's multi-task runs",
        "inner_lr": "FORUM's multi-task runs",
        "hvp": "ours",
        "size": "ours",
        "warm": "ours",
    }
    needs_fp32: ClassVar[bool] = True  # differences of gradients
    needs_attack: ClassVar[bool] = True

    beta: float = 0.5
    beta_decay: float = 0.5
    gamma: float = 0.1
    gamma_decay: float = 0.5
    rho: float = 0.0
    simplex: Literal["projection", "softmax"] = "projection"
    normalize: bool = False
    inner_steps: int = 5
    inner_lr: float = 0.1
    hvp: HessianProduct = "difference"
    size: float = 0.01
    warm: bool = True
    _state: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta <= 1 or self.gamma <= 0:
            raise ValueError(
                f"beta must lie in (0, 1] and gamma must be > 0, found {self.beta}, {self.gamma}"
            )
        if min(self.beta_decay, self.gamma_decay, self.rho) < 0:
            raise ValueError(
                "beta_decay, gamma_decay and rho must be >= 0, found "
                f"{self.beta_decay}, {self.gamma_decay}, {self.rho}"
            )
        if self.inner_steps < 1 or self.inner_lr <= 0 or self.size <= 0:
            raise ValueError(
                "inner_steps must be >= 1, inner_lr and size > 0; found "
                f"{self.inner_steps}, {self.inner_lr}, {self.size}"
            )

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if ATTACK not in objectives:
            raise ValueError(
                f"MoCo needs a lower-level problem, the objective {ATTACK!r}; found "
                f"{', '.join(objectives)}. Give the recipe an `attack:` section"
            )

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        start = start_inner(closure, self._state, self.warm)
        path = iterates(closure, start, self.inner_steps, self.inner_lr)
        if not is_finite(tuple(path[-1])):
            return diverged(closure)
        uppers = [name for name in closure.objectives if name != ATTACK]
        beta = self.beta / (closure.step + 1) ** self.beta_decay
        tracked = [self._track(closure, name, path, beta) for name in uppers]
        weights = self._weigh(gramian(tracked), self.gamma / (closure.step + 1) ** self.gamma_decay)
        step = move_inner(combine(weights, tracked), closure, path[-1])
        return Direction(step, gramian(tracked), weights)

    def _track(
        self, closure: Closure, objective: str, path: list[list[Tensor]], beta: float
    ) -> Vec:
        """Return y of an objective after its update, and store it."""
        gradient, loss = hypergradient(
            closure, objective, path=path, lr=self.inner_lr, hvp=self.hvp, size=self.size
        )
        if self.normalize:
            # a loss below 0 (ascent) would turn the gradient around
            factor = abs(loss) / (float(norm(gradient)) + 1e-8)
            gradient = tuple(factor * part for part in gradient)
        names = [f"y_{objective}_{i}" for i in range(len(gradient))]
        tracked = tuple(
            y + beta * (h - y)
            for h, y in (
                (h, self._state[name].to(h) if name in self._state else torch.zeros_like(h))
                for h, name in zip(gradient, names, strict=True)
            )
        )
        self._state.update(zip(names, tracked, strict=True))
        return tracked

    def _weigh(self, gram: Tensor, gamma: float) -> Tensor:
        """Return lam after its update, and store it."""
        m = len(gram)
        lam = self._state.get("lam", torch.full((m,), 1 / m, dtype=gram.dtype)).to(gram)
        moved = lam - gamma * (gram + self.rho * torch.eye(m, dtype=gram.dtype)) @ lam
        weights = moved.softmax(0) if self.simplex == "softmax" else project_on_simplex(moved)
        self._state["lam"] = weights
        return weights


PLUGIN = Moco
