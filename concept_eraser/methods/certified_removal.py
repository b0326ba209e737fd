"""Certified removal: one Newton step of a linear model, with a certificate (arXiv 1911.03030).

The paper is Guo, Goldstein, Hannun & van der Maaten, "Certified Data Removal from Machine Learning
Models" (ICML 2020). A model that is linear in its parameters was trained to the minimum w* of

    L_b(w; D) = sum_{z in D} (l(w, z) + ridge/2 ||w||^2) + b^T w,     b ~ N(0, sigma^2 I)

For the m deleted samples U and the retained ones R, Eq. 3 with several samples (its section 3.1) is

    w' = w* + H^-1 Delta,   Delta = m ridge w* + sum_U grad l(w*, z)

with H the Hessian of L_b(.; R) at w*. l is the softmax cross-entropy of all classes. What is left
is the gradient residual r = grad L_b(w'; R). If ||r|| is bounded, theorem 3 makes w' (epsilon,
delta)-indistinguishable from training again, with epsilon = c ||r|| / sigma and
delta = 1.5 exp(-c^2 / 2).
`residual` is this norm.

It is the natural-gradient step (methods/natural_gradient.py) with the Hessian in place of the
Fisher. The two are equal for linear models, which tests show.

Deliberate differences from the paper and its code (facebookresearch/certified-removal):
* The paper trains one binary classifier for each class. Here it is one softmax.
* The paper bounds ||r|| by 1/4 ||X|| ||H^-1 Delta|| ||X H^-1 Delta||, in order not to compute it.
  Here r is computed, with one more pass over the retained samples. It needs no b:
  r = grad L(w'; R) - grad L(w*; R) - Delta, because grad L_b(w*; D) = 0.
* So `epsilon` describes this deletion alone. The paper adds the bounds of all deletions.
* The perturbation b belongs to the training. This file cannot add it. `sigma: 0` says that there
  was none, and then there is no epsilon.
* Conjugate gradients with Hessian products in place of a dense inverse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.methods.base import Edit, EditRequest
from concept_eraser.methods.mini_unlearning import hessian_product, mean_gradient, put
from concept_eraser.methods.vectors import Vec, combine, dot, norm


def conjugate_gradients(
    multiply: Callable[[Vec], Vec], right: Vec, iterations: int, tolerance: float
) -> Vec:
    """Return x with A x = right, for a positive definite A that is given by its products.

    It stops at ||A x - right|| <= tolerance ||right||.
    """
    solution = tuple(torch.zeros_like(part) for part in right)
    residual = direction = right
    square = float(dot(residual, residual))
    limit = tolerance**2 * square
    for _ in range(iterations):
        if square <= limit:
            break
        product = multiply(direction)
        length = square / float(dot(direction, product))
        solution = combine([1.0, length], [solution, direction])
        residual = combine([1.0, -length], [residual, product])
        before, square = square, float(dot(residual, residual))
        direction = combine([1.0, square / before], [residual, direction])
    return solution


@dataclass(frozen=True)
class CertifiedRemoval(Edit):
    """One Newton step on the retained samples, for a model that is linear in its parameters.

    Args:
        sigma: The standard deviation of the perturbation b of the training; 0 for none.
        delta: The delta of the certificate.
        iterations: The largest number of iterations of conjugate gradients.
        tolerance: Their relative tolerance.
    """

    title: ClassVar[str] = "Certified data removal from machine learning models"
    source: ClassVar[str] = "arXiv 1911.03030"
    defaults: ClassVar[Mapping[str, str]] = {
        "sigma": "the training: none",
        "delta": "ours",
        "iterations": "ours",
        "tolerance": "ours",
    }
    targets: ClassVar[tuple[str, ...] | None] = ("classifier", "clip")
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point"})

    sigma: float = 0.0
    delta: float = 1e-4
    iterations: int = 500
    tolerance: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma < 0 or not 0 < self.delta < 1:
            raise ValueError(
                f"sigma must be >= 0 and delta must lie in (0, 1), found {self.sigma}, {self.delta}"
            )
        if self.iterations < 1 or self.tolerance <= 0:
            raise ValueError(
                "iterations must be >= 1 and tolerance must be > 0, found "
                f"{self.iterations}, {self.tolerance}"
            )

    def edit(self, request: EditRequest) -> Mapping[str, float]:
        if request.ridge <= 0:
            raise ValueError(
                "certified removal needs a strongly convex loss: give the weight decay of the "
                "training, training.weight_decay > 0"
            )
        _require_linear(request)
        params, retain = request.params, request.retain
        if not request.forget:
            return {"step": 0.0, "residual": 0.0}
        before = mean_gradient(request.loss, retain, params)
        removed = tuple(  # Delta / (n - m)
            g * (len(request.forget) / len(retain))
            for g in mean_gradient(request.loss, request.forget, params)
        )
        step = conjugate_gradients(
            lambda v: hessian_product(request.loss, retain, params, v),
            removed,
            self.iterations,
            self.tolerance,
        )
        put(params, tuple(p.detach() + s for p, s in zip(params, step, strict=True)))
        after = mean_gradient(request.loss, retain, params)
        left = combine([1.0, -1.0, -1.0], [after, before, removed])
        residual = len(retain) * float(norm(left))
        notes = {"step": float(norm(step)), "residual": residual}
        if self.sigma > 0:
            notes["epsilon"] = math.sqrt(2 * math.log(1.5 / self.delta)) * residual / self.sigma
        return notes


def _require_linear(request: EditRequest) -> None:
    """Raise ValueError if the outputs are not linear in the parameters.

    A linear f has f(w) + f(w + 2 v) = 2 f(w + v).
    """
    rows = [*request.retain[:8], *request.forget[:8]]
    generator = torch.Generator().manual_seed(0)
    start = tuple(p.detach().clone() for p in request.params)
    move = tuple(torch.randn(p.shape, generator=generator).to(p) for p in start)
    scale = float(norm(start)) / max(float(norm(move)), 1e-30) or 1.0

    @torch.no_grad()
    def outputs(factor: float) -> Tensor:
        put(request.params, combine([1.0, factor * scale], [start, move]))
        return torch.cat([request.model(x) for x, _ in request.batches(rows)]).double()

    try:
        first, middle, last = (outputs(factor) for factor in (0.0, 1.0, 2.0))
    finally:
        put(request.params, start)
    bend = float((first + last - 2 * middle).abs().max())
    if bend > 1e-4 * float((last - first).abs().max()):
        raise ValueError(
            "certified removal is for models that are linear in their parameters, and the outputs "
            "of this one are not. Select its last layer alone (trainable.select: re:NAME), or use "
            "natural_gradient"
        )


PLUGIN = CertifiedRemoval
