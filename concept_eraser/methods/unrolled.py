"""Gradients through the steps of a lower-level problem: iterative differentiation.

With w_0 a constant and w_{t+1} = w_t - eta grad_w f(alpha, w_t), the objective F_i(alpha, w_T) is a
function of alpha. Its gradient is computed backwards from p = grad_w F_i(alpha, w_T) and
h = grad_alpha F_i(alpha, w_T):

    for t = T - 1 .. 0:   h <- h - eta (d^2 f / dalpha dw) p,   p <- p - eta (d^2 f / dw^2) p

with the second derivatives at (alpha, w_t). One step of the loop is one product of the Hessian of f
with (0, p). The T iterates w_t are stored, so the memory grows with T. FORUM's does not. Only the
variable w is copied and moved. alpha, which is much larger, stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from concept_eraser.methods.base import Closure, HessianProduct
from concept_eraser.methods.forum import ATTACK, at_inner
from concept_eraser.methods.vectors import Vec


def iterates(closure: Closure, start: list[Tensor], steps: int, lr: float) -> list[list[Tensor]]:
    """Return w_0 .. w_T of the lower level, each as an offset from the present variable."""
    path = [start]
    for _ in range(steps):
        with at_inner(closure, path[-1]):
            grads = closure.grad(ATTACK, of=closure.inner)
        path.append([o - lr * g for o, g in zip(path[-1], grads, strict=True)])
    return path


def hypergradient(
    closure: Closure,
    objective: str,
    *,
    path: Sequence[list[Tensor]],
    lr: float,
    hvp: HessianProduct,
    size: float,
) -> tuple[Vec, float]:
    """Return the gradient of an objective at w_T(alpha) with respect to alpha, and its loss there.

    Args:
        closure: The losses of the step.
        objective: The upper-level objective.
        path: The iterates of the lower level, of `iterates`.
        lr: Their step size.
        hvp: How Hessian products of f are computed.
        size: The step of differences.

    Returns:
        The gradient, one tensor for each parameter and zero at the variable of the lower level, and
        the loss.
    """
    with at_inner(closure, path[-1]):
        total = closure.grad(objective)
    loss = closure.last_loss
    back = [total[i] for i in closure.inner]
    for offset in reversed(path[:-1]):
        with at_inner(closure, offset):
            product = closure.hvp(ATTACK, tuple(back), hvp, size, of=closure.inner)
        total = tuple(part - lr * change for part, change in zip(total, product, strict=True))
        back = [b - lr * product[i] for b, i in zip(back, closure.inner, strict=True)]
    gradient = tuple(
        torch.zeros_like(part) if i in closure.inner else part for i, part in enumerate(total)
    )
    return gradient, loss


def move_inner(step: Vec, closure: Closure, offset: list[Tensor]) -> Vec:
    """Return the step with -(w_T - w) at the variable of the lower level, which moves it to w_T."""
    moves = dict(zip(closure.inner, offset, strict=True))
    return tuple(-moves[i] if i in moves else part for i, part in enumerate(step))
