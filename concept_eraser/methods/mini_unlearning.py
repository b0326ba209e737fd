"""Mini-Unlearning: Machine Unlearning with Minimal Gradient Dependence (arXiv 2406.16986).

The paper is Huang et al., "Machine Unlearning with Minimal Gradient Dependence for High Unlearning
Ratios". A model was trained by mini-batch SGD, w_i = w_{i-1} - eta mean_{B_i} grad F_j(w_{i-1}), i
= 1..T. Training again without the forget set, with the same start and order, would have given w*_T.
To first order in D_i = w*_i - w_i,

    D_i = (I - eta H_{R_i}) D_{i-1} + eta (g_{B_i} - g_{R_i}),   R_i = B_i without the forget set,

with g the mean gradient and H the mean Hessian at w_{i-1}. Mini-Unlearning starts from D = 0 at i =
T - k and returns w_T + D. So it drops everything before the last k iterations. The error of this
has the factor ||prod (I - eta H)||, which is small only where the iteration contracts. An iteration
takes one Hessian-vector product (Horner) and O(p) memory.

`rewind` is its natural baseline: load the checkpoint w_{T-k} and train the last k iterations again
without the forgotten samples. The formula above is the linearisation of that, and on quadratics
they are equal. rewind needs one gradient for each iteration and no Hessian.

Deliberate differences from the paper:
* The sign of the forgotten samples' gradient: + as in Eqs. 7 and 14 (6 and 13 print -).
* Algorithm 1 propagates all p basis vectors and pairs early Hessians with late gradients; here it
  is one vector.
* w_{i-1} is recorded, not w_i. The forget set need not be known while training. A batch that is
  wholly forgotten changes nothing on the retained path (no division by zero).
* Hessian products by double backward, or Gauss-Newton products, or Algorithm 4's compact L-BFGS
  with its four errors corrected (sigma's denominator, the Cholesky factor, the signs of the blocks,
  the strictly lower L).
* Heavy ball (ours): v_i = beta v_{i-1} + g, w_i = w_{i-1} - eta v_i. A batch that is wholly
  forgotten then counts as a gradient of 0, and the momentum goes on. Other optimisers are not
  covered: record SGD runs only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from concept_eraser.methods.base import Edit, EditRequest, all_or_nothing
from concept_eraser.methods.fisher import Fisher, Risk
from concept_eraser.methods.history import History, Iteration
from concept_eraser.methods.vectors import Vec, combine, dot, norm, spectral_norm

REMEDY = "take fewer iterations k, or record a training whose learning rate contracts"
NAMED = {"rewind": {"rewind": True}}

# (samples, v) -> the mean Gauss-Newton matrix of the samples times v
Curvature = Callable[[Sequence[int], Vec], Vec]
# mean loss of some samples, by index, at the parameters as they stand
MeanLoss = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class RecursionOutcome:
    """The result of unlearning.

    Attributes:
        lengths: ||D_i|| after each iteration.
        touched: The share of iterations with forgotten samples.
        contraction: The estimated ||I - eta H|| of each iteration; empty without an estimate.
        truncation: Their product, a bound of the factor of the dropped iterations. It is nan with
            momentum, which has another map.
    """

    lengths: tuple[float, ...]
    touched_share: float
    contraction: tuple[float, ...] = ()

    @property
    def truncation(self) -> float:
        product = 1.0
        for rate in self.contraction:
            product *= rate
        return product if self.contraction else float("nan")


@dataclass(frozen=True)
class MiniUnlearning(Edit):
    """Remove samples from a model trained by SGD, from its last k iterations.

    Args:
        k: The number of last iterations that are used. A larger k is closer to training again.
        history: In a recipe, the folder that a History recorded while the model was trained.
        rewind: Use the baseline instead: the last k iterations again from their checkpoint, without
            the forgotten samples.
        hvp: autograd (double backward), ggn (Gauss-Newton: needs the `curvature` product) or lbfgs
            (Algorithm 4, from differences along the path; poor with few pairs, see the tests).
        estimate: The number of power iterations that estimate each iteration's contraction; 0 for
            none.
    """

    title: ClassVar[str] = (
        "Machine Unlearning with Minimal Gradient Dependence for High Unlearning Ratios"
    )
    source: ClassVar[str] = "arXiv 2406.16986"
    defaults: ClassVar[Mapping[str, str]] = {
        "k": "the paper, section 4",
        "history": "where yours lies",
        "rewind": "the method itself",
        "hvp": "ours (the paper: lbfgs)",
        "estimate": "ours: none",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point", "exact_on_quadratics"})

    k: int = 10
    history: str = ""
    rewind: bool = False
    hvp: Literal["autograd", "ggn", "lbfgs"] = "autograd"
    estimate: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1 or self.estimate < 0:
            raise ValueError(f"k must be >= 1 and estimate >= 0, found {self.k}, {self.estimate}")

    def apply(
        self,
        history: History | None,
        loss: MeanLoss,
        forget: Sequence[int],
        *,
        curvature: Curvature | None = None,
    ) -> RecursionOutcome:
        """Move history.params from w_T to w_T + D.

        Args:
            history: The recorded iterations.
            loss: The mean loss of some samples by index, with their share of weight decay.
                BatchNorm must be frozen.
            forget: The indices of the samples to forget.
            curvature: For hvp: ggn, the product of the mean Gauss-Newton matrix of some samples
                with a vector.
        """
        steps = _require(history).last(self.k)
        if self.hvp == "ggn" and curvature is None:
            raise ValueError(
                "hvp: ggn needs the argument `curvature`, (samples, v) -> Gauss-Newton "
                "product, e.g. lambda rows, v: Fisher(risk, [(x[rows], "
                "y[rows])]).product(v); or use hvp: autograd"
            )
        assert history is not None
        with all_or_nothing(history.params, REMEDY) as final:
            return self._recursion(
                steps,
                history.params,
                final=final,
                forgotten_rows={int(j) for j in forget},
                loss=loss,
                curvature=curvature,
            )

    def _recursion(
        self,
        steps: list[Iteration],
        params: Vec,
        final: Vec,
        forgotten_rows: set[int],
        loss: MeanLoss,
        curvature: Curvature | None,
    ) -> RecursionOutcome:
        """Return D over the recorded iterations, oldest first, added to the weights of the last."""
        d = dv = tuple(torch.zeros_like(p) for p in params)
        lengths, rates, affected_steps = [], [], 0
        without_momentum = not any(step.momentum for step in steps)
        product = self._product(steps, params, loss, curvature)
        for i, step in enumerate(steps):
            retained_rows = [j for j in step.indices if j not in forgotten_rows]
            is_affected = len(retained_rows) < len(step.indices)
            affected_steps += is_affected
            put(params, step.weights)
            multiply = partial(product, i, retained_rows)
            d, dv = _advance(
                step,
                rows=retained_rows,
                hit=is_affected,
                d=d,
                dv=dv,
                params=params,
                loss=loss,
                product=multiply,
            )
            if self.estimate and without_momentum and retained_rows:
                rates.append(_contraction(multiply, step.lr, params, self.estimate))
            lengths.append(float(norm(d)))
        put(params, tuple(w + part for w, part in zip(final, d, strict=True)))
        return RecursionOutcome(tuple(lengths), affected_steps / len(steps), tuple(rates))

    def edit(self, request: EditRequest) -> Mapping[str, float]:
        history = open_recorded(request, self.history, "Mini-Unlearning")
        require_same_loss(history, request.loss)
        if self.rewind:
            outcome = rewind(history, request.loss, request.forget, self.k)
        else:
            outcome = self.apply(
                history, request.loss, request.forget, curvature=self._curvature(request)
            )
        truncation = {"truncation": outcome.truncation} if math.isfinite(outcome.truncation) else {}
        return {"step": outcome.lengths[-1], "touched": outcome.touched_share, **truncation}

    def _curvature(self, request: EditRequest) -> Curvature:
        risk = Risk(request.model, "softmax", request.ridge)
        return lambda rows, v: Fisher(risk, request.batches(rows), request.ridge).product(v)

    def _product(
        self, steps: list[Iteration], params: Vec, loss: MeanLoss, curvature: Curvature | None
    ) -> Callable[[int, Sequence[int], Vec], Vec]:
        """Return the product (i, samples, v).

        It is the mean Hessian of the samples at w_{i-1} times v.
        """
        if self.hvp == "ggn":
            return lambda i, rows, v: curvature(rows, v)  # type: ignore[misc]
        if self.hvp == "autograd":
            return lambda i, rows, v: hessian_product(loss, rows, params, v)

        def secant(i: int, rows: Sequence[int], v: Vec) -> Vec:
            near = sorted(
                {max(0, min(len(steps) - 3, i - 1)) + j for j in range(min(3, len(steps)))}
            )
            points = [steps[j].weights for j in near]
            grads = []
            # every gradient needs the same samples, or the differences are noise
            for point in points:
                put(params, point)
                grads.append(mean_gradient(loss, rows, params))
            put(params, steps[i].weights)
            s = [combine([1.0, -1.0], pair) for pair in zip(points[1:], points[:-1], strict=True)]
            y = [combine([1.0, -1.0], pair) for pair in zip(grads[1:], grads[:-1], strict=True)]
            return lbfgs_product(s, y, v)

        return secant


def _require(history: History | None) -> History:
    if history is None or history.recorded_count == 0:
        raise ValueError(
            "Mini-Unlearning needs the recorded history of the training (weights and "
            "samples of its last iterations), and there is none. Train with a History, "
            "or use a method that needs no history"
        )
    return history


def open_recorded(request: EditRequest, folder: str, title: str) -> History:
    """Return the history that was recorded of a model's training.

    Args:
        request: The model.
        folder: The method's option `history`.
        title: The name of the method, for errors.

    Raises:
        ValueError: The folder is not given, or its record is of other parameters.
    """
    if not folder:
        raise ValueError(
            f"{title} needs the recorded history of the training: give "
            "method.history, the folder of a History(..., folder=...)"
        )
    history = History.open(request.params, Path(folder))
    shapes = [tuple(w.shape) for w in history.last(1)[0].weights]
    if shapes != [tuple(p.shape) for p in request.params]:
        raise ValueError(
            f"the history {folder} is of {len(shapes)} tensors, of which the "
            f"first are {shapes[:2]}; the selected ones are {len(request.params)}. "
            "Give the model it was recorded of, and trainable: all"
        )
    return history


def put(params: Vec, values: Vec) -> None:
    with torch.no_grad():
        for parameter, value in zip(params, values, strict=True):
            parameter.copy_(value)


def mean_gradient(loss: MeanLoss, indices: Sequence[int], params: Vec) -> Vec:
    return torch.autograd.grad(loss(indices), params, allow_unused=True, materialize_grads=True)


def hessian_product(loss: MeanLoss, indices: Sequence[int], params: Vec, v: Vec) -> Vec:
    gradient = torch.autograd.grad(
        loss(indices), params, create_graph=True, allow_unused=True, materialize_grads=True
    )
    slope = torch.stack([(g * part).sum() for g, part in zip(gradient, v, strict=True)]).sum()
    if not slope.requires_grad:  # a loss that is linear in the parameters
        return tuple(torch.zeros_like(p) for p in params)
    return torch.autograd.grad(slope, params, allow_unused=True, materialize_grads=True)


def _advance(
    step: Iteration,
    rows: list[int],
    hit: bool,
    d: Vec,
    dv: Vec,
    params: Vec,
    loss: MeanLoss,
    product: Callable[[Vec], Vec],
) -> tuple[Vec, Vec]:
    """One iteration of the recursion, with heavy ball: dv_i = beta dv_{i-1} + change of the
    gradient, d_i = d_{i-1} - lr dv_i. The gradient of a batch that is wholly forgotten changes to
    0."""
    if not rows:
        change = tuple(-g for g in mean_gradient(loss, step.indices, params))
    else:
        change = product(d)
        if hit:
            change = combine(
                [1.0, 1.0, -1.0],
                [
                    change,
                    mean_gradient(loss, rows, params),
                    mean_gradient(loss, step.indices, params),
                ],
            )
    dv = combine([step.momentum, 1.0], [dv, change]) if step.momentum else change
    return combine([1.0, -step.lr], [d, dv]), dv


def _contraction(product: Callable[[Vec], Vec], lr: float, like: Vec, iterations: int) -> float:
    """Return an estimate of ||I - lr H||."""
    return spectral_norm(lambda v: combine([1.0, -lr], [v, product(v)]), like, iterations)


def require_same_loss(history: History, loss: MeanLoss, tolerance: float = 0.05) -> None:
    """Raise ValueError if the last recorded step but one is not a step of this loss.

    Possible reasons are another weight decay, batch norm in training mode, and augmentation. The
    recursion would then linearise around the wrong path.
    """
    if min(history.recorded_count, history.k) < 2:
        return
    before, after = history.last(2)
    params = history.params
    with all_or_nothing(params, REMEDY) as current_weights:
        put(params, before.weights)
        expected_step = mean_gradient(loss, before.indices, params)
        if before.momentum and before.velocity is not None:
            expected_step = combine([before.momentum, 1.0], [before.velocity, expected_step])
        put(params, current_weights)
    recorded_step = tuple(
        (a - b) / before.lr for a, b in zip(before.weights, after.weights, strict=True)
    )
    error = float(norm(combine([1.0, -1.0], [recorded_step, expected_step])))
    rounding_error = 1e-6 * float(norm(before.weights)) / before.lr
    if error > tolerance * float(norm(recorded_step)) + rounding_error:
        raise ValueError(
            "the recorded training did not minimise this loss: its last step but one "
            f"differs by {error / max(float(norm(recorded_step)), 1e-30):.0%} from a step of it. "
            "Give the weight decay it was trained with (training.weight_decay), and record "
            "with batch norm frozen and without augmentation"
        )


def rewind(
    history: History | None, loss: MeanLoss, forget: Sequence[int], k: int
) -> RecursionOutcome:
    """Load w_{T-k} and train the last k iterations again without the forgotten samples."""
    steps = _require(history).last(k)
    assert history is not None
    params, forget_rows, affected_steps = history.params, {int(j) for j in forget}, 0
    with all_or_nothing(params, REMEDY) as final:
        put(params, steps[0].weights)
        velocity = steps[0].velocity or tuple(torch.zeros_like(p) for p in params)
        for step in steps:
            retained_rows = [j for j in step.indices if j not in forget_rows]
            affected_steps += len(retained_rows) < len(step.indices)
            gradient = (
                mean_gradient(loss, retained_rows, params)
                if retained_rows
                else tuple(torch.zeros_like(p) for p in params)
            )
            velocity = (
                combine([step.momentum, 1.0], [velocity, gradient]) if step.momentum else gradient
            )
            with torch.no_grad():
                for parameter, v in zip(params, velocity, strict=True):
                    parameter.sub_(step.lr * v)
        displacement = tuple(p.detach() - w for p, w in zip(params, final, strict=True))
    return RecursionOutcome((float(norm(displacement)),), affected_steps / k)


def lbfgs_product(s: Sequence[Vec], y: Sequence[Vec], v: Vec) -> Vec:
    """Return B v for the compact L-BFGS matrix B.

    This is Algorithm 4, corrected (Byrd, Nocedal & Schnabel 1994, Eq. 3.5):

        B v = sigma v - [Y, sigma S] [[-D, L^T], [L, sigma S^T S]]^-1 [Y^T v; sigma S^T v]

    S, Y: differences of weights and of gradients; D, L the diagonal and the strictly lower part of
    S^T Y; sigma = y^T s / s^T s of the last pair. Pairs without positive curvature are left out.
    """
    pairs = [
        (a, b) for a, b in zip(s, y, strict=True) if float(dot(a, b)) > 1e-12 * float(dot(a, a))
    ]
    if not pairs:
        return tuple(torch.zeros_like(part) for part in v)
    s, y = [a for a, _ in pairs], [b for _, b in pairs]
    sy = torch.stack([torch.stack([dot(a, b) for b in y]) for a in s])
    ss = torch.stack([torch.stack([dot(a, b) for b in s]) for a in s])
    sigma = float(sy[-1, -1] / ss[-1, -1])
    lower, diagonal = sy.tril(-1), torch.diag(sy.diagonal())
    block = torch.cat([torch.cat([-diagonal, lower.T], 1), torch.cat([lower, sigma * ss], 1)])
    right = torch.stack([*(dot(b, v) for b in y), *(sigma * dot(a, v) for a in s)])
    q = torch.linalg.solve(block, right)
    m = len(s)
    return combine([sigma, *(-q[:m]).tolist(), *(-sigma * q[m:]).tolist()], [v, *y, *s])


PLUGIN = MiniUnlearning
