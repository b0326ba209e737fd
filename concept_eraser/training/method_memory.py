"""How many vectors of the size of the trained parameters a method holds at once, found by trying.

The method takes its first steps on a small problem with real numbers, and `Peak` counts what it
holds. So the count needs no declaration by the method, and also covers methods of plug-ins. The
losses are quadratic. Their passes make one gradient and nothing else of that size, so what is held
is the method's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from concept_eraser.methods.base import Method
from concept_eraser.methods.vectors import Vec
from concept_eraser.training.closure import LossClosure
from concept_eraser.training.memory import Peak

_LOG = logging.getLogger(__name__)
TENSORS = 64  # of the small problem; what a method does tensor by tensor hardly counts
# Of a tensor. What does not grow with it as a vector does, such as a matrix, is found by two sizes.
SIZES = (64, 256)
STEPS = 3  # some methods do more in their first steps, or alternate


@dataclass(frozen=True)
class Vectors:
    """Numbers of vectors of the size of the trained parameters.

    Attributes:
        during_pass: Those that a method holds when a forward and backward pass begins, at most.
        peak: The largest number of all, the gradient of a running pass included.
        is_exact: Whether it computes exact Hessian products, which need the graph of a gradient.
    """

    during_pass: float
    peak: float
    is_exact: bool = False


class _Closure(LossClosure):
    """The losses of the small problem. It notes exact Hessian products."""

    is_exact = False

    def _double_backward(self, objective: str, v: Vec, of: Sequence[int] | None = None) -> Vec:
        self.is_exact = True
        return super()._double_backward(objective, v, of)


def vectors_of(build: Callable[[], Method], objectives: tuple[str, ...]) -> Vectors | None:
    """Return the vectors that the steps of a method hold, or None if it cannot be tried so.

    Some methods need a history, or an eraser of a certain kind.

    Args:
        build: Returns the method anew.
        objectives: The names of the objectives.
    """
    try:
        few, many = (_vectors_of(build(), objectives, size) for size in SIZES)
    except Exception as error:  # a dry run says what it can
        _LOG.debug("the method cannot be tried: %s", error)
        return None
    return many if abs(few.peak - many.peak) < 0.5 else None


def _vectors_of(method: Method, objectives: tuple[str, ...], size: int) -> Vectors:
    generator = torch.Generator().manual_seed(0)

    def random() -> list[Tensor]:
        return [torch.randn(size, generator=generator) for _ in range(TENSORS)]

    params = tuple(part.requires_grad_() for part in random())
    slopes = {objective: random() for objective in objectives}
    held, is_exact = 0, False

    def loss(objective: str) -> Tensor:
        nonlocal held
        held = max(held, counter.now)
        values = [
            p @ slope + 0.05 * (p @ p) for p, slope in zip(params, slopes[objective], strict=True)
        ]
        return torch.stack(values).sum()

    counter = Peak()
    with counter:
        for step in range(STEPS):
            closure = _Closure(
                params,
                {objective: [partial(loss, objective)] for objective in objectives},
                step=step,
                inner=(TENSORS - 1,) if method.needs_attack else (),
            )
            method.direction(closure)
            is_exact |= closure.is_exact
    vector = sum(part.numel() * part.element_size() for part in params)
    return Vectors(held / vector, counter.peak / vector, is_exact)
