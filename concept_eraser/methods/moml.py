"""MOML: multi-objective bi-level optimisation with unrolled gradients (Ye et al., 2021).

The paper is "Multi-Objective Meta Learning" (NeurIPS 2021, arXiv 2102.07121). With FORUM's names
(methods/forum.py), one step at (alpha, omega):

1. T gradient steps on f(alpha, .) from omega give w_T(alpha)
2. h_i = grad_alpha F_i(alpha, w_T(alpha)), through the T steps (methods/unrolled.py)
3. lam = argmin ||sum_i lam_i h_i||^2 over the simplex (MGDA); alpha moves along -sum_i lam_i h_i
4. omega moves to w_T

It is the baseline of FORUM's tables. FORUM needs no Hessian product and no stored iterates.

The authors' code is Baijiong-Lin/MOML, MTL/moml_office.py: step 1 in lines 79-86, step 2 in line
102, step 3 in lines 105-118, with the option `--MGDA`. Its solver of step 3 is
MTL/min_norm_solvers.py. The numbers of the paper's equations were not read here.

Deliberate differences from this code:
* Hessian products by central differences of gradients, or by double backward (`hvp: exact`). The
  code uses double backward (line 80).
* `normalize: true` is MTL/moml_office.py, line 106: the lengths of the h_i are 1 in the problem of
  step 3, and their own lengths in the step. For two objectives lam is then always (1/2, 1/2). The
  default is the problem without it. MTL/moml_nyu.py, line 159, divides each h_i by its loss
  instead, which is not offered here.
* The code's loop takes one unrolled step and then one step of omega with the new alpha, on further
  data. Here omega is w_T on the step's data.
* Step 3 is solved exactly: in closed form for two objectives, by trying all supports for more. The
  code's weights of two objectives stay between 0.001 and 0.999. For more it iterates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.methods.base import Closure, Direction, HessianProduct, Method, usable
from concept_eraser.methods.forum import ATTACK, any_objectives, start_inner
from concept_eraser.methods.unrolled import hypergradient, iterates, move_inner
from concept_eraser.methods.vectors import Vec, combine, gramian, is_finite


def min_norm_weights(gram: Tensor) -> Tensor:
    """Return the weights on the simplex with the shortest sum of vectors, for a Gram matrix [m, m].

    A vector that is zero or not finite gets no weight. Two vectors of equal length get 1/2 each.
    """
    rows = usable(gram).nonzero().flatten()
    weights = torch.zeros(len(gram), dtype=gram.dtype)
    if len(rows):
        free = gram[rows][:, rows]
        unconstrained = -float("inf")
        weights[rows] = (
            _of_two(free)
            if len(rows) == 2
            else any_objectives(free, torch.zeros(len(rows), dtype=gram.dtype), unconstrained)
        )
    return weights


def _of_two(gram: Tensor) -> Tensor:
    """Return min_norm_weights for two vectors, each weight to full precision."""
    inner, squares = gram[0, 1], gram.diagonal()
    shorter = int(squares.argmin())
    if float((squares[0] - squares[1]).abs()) <= 1e-12 * float(squares.max()):
        return torch.full_like(squares, 0.5)
    if inner >= squares[shorter]:  # the sum is shortest at the shorter vector itself
        return torch.eye(2, dtype=gram.dtype)[shorter]
    parts = squares.flip(0) - inner  # the weight of each is <other, other - own>, up to their sum
    return parts / parts.sum()


@dataclass(frozen=True)
class Moml(Method):
    """The min-norm combination of the gradients through the steps of the lower level.

    Args:
        inner_steps: T of the lower level.
        inner_lr: Its step size. If its steps diverge, the step is skipped.
        hvp: Hessian products by differences of gradients, or exactly by double backward.
        size: The step of the differences.
        normalize: Whether the min-norm problem sees gradients of length 1.
        warm: Start the lower level at the present attack, else at the attack of the first step.
    """

    title: ClassVar[str] = "MOML: multi-objective meta learning"
    source: ClassVar[str] = "arXiv 2102.07121"
    defaults: ClassVar[Mapping[str, str]] = {
        "inner_steps": "FORUM's multi-task runs",
        "inner_lr": "FORUM's multi-task runs",
        "hvp": "ours (the authors' code: exact)",
        "size": "ours",
        "normalize": "ours (the authors' code for Office: true)",
        "warm": "ours",
    }
    needs_fp32: ClassVar[bool] = True  # differences of gradients
    needs_attack: ClassVar[bool] = True
    theorems: ClassVar[frozenset[str]] = frozenset({"permutation", "stationarity"})

    inner_steps: int = 5
    inner_lr: float = 0.1
    hvp: HessianProduct = "difference"
    size: float = 0.01
    normalize: bool = False
    warm: bool = True
    _state: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner_steps < 1 or self.inner_lr <= 0 or self.size <= 0:
            raise ValueError(
                "inner_steps must be >= 1, inner_lr and size > 0; found "
                f"{self.inner_steps}, {self.inner_lr}, {self.size}"
            )

    def laws(self) -> frozenset[str]:
        """Return the theorems, without the one that unit lengths in the problem lose."""
        return self.theorems - {"stationarity"} if self.normalize else self.theorems

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if ATTACK not in objectives:
            raise ValueError(
                f"MOML needs a lower-level problem, the objective {ATTACK!r}; found "
                f"{', '.join(objectives)}. Give the recipe an `attack:` section"
            )

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        start = start_inner(closure, self._state, self.warm)
        path = iterates(closure, start, self.inner_steps, self.inner_lr)
        if not is_finite(tuple(path[-1])):
            return diverged(closure)
        grads = [
            hypergradient(closure, name, path=path, lr=self.inner_lr, hvp=self.hvp, size=self.size)[
                0
            ]
            for name in closure.objectives
            if name != ATTACK
        ]
        gram = gramian(grads)
        lengths = gram.diagonal().sqrt()
        scale = torch.where(lengths > 0, 1 / lengths, 1.0) if self.normalize else lengths * 0 + 1
        weights = min_norm_weights(gram * torch.outer(scale, scale))
        step = move_inner(combine(weights, grads), closure, path[-1])
        return Direction(step, gram, weights)


def diverged(closure: Closure) -> Direction:
    """Return a direction that is not finite, which the engine skips and counts."""
    nan: Vec = tuple(torch.full_like(p, float("nan")) for p in closure.params)
    return Direction(nan, notes={"inner_diverged": 1})


PLUGIN = Moml
