"""Min/Max natural gradient descent, for losses that are not convex (arXiv 2407.08169).

Algorithm 2 of Lev & Wilson takes k_1 steps on forget batches and k_2 on retain batches in turn,
each of the form

    theta <- theta - alpha P^-1 (grad L_objective + 2 gamma (theta - theta_sm)),
    theta_sm <- theta_sm + beta (theta - theta_sm),

with P the axis-wise online Fisher of Povey et al. (arXiv 1410.7455) that the authors' code uses.
For every tensor and every axis of size d, F <- (1 - rho) F + rho X X^T / N over the other axes,
smoothed to F + smoothing tr(F)/d I. Each axis rescales its result to the length of the raw
gradient, so that learning rates of SGD keep their scale.

The step is plain SGD's, so SGD is the optimizer of a recipe that names none (`training.optimizer`).
Adam would divide each entry of P^-1 g by its own running size, which undoes most of P. The paper's
settings are `training: {momentum: 0.9, weight_decay: 0.1, decay: step}` and lr 7e-4 (CNN) or 5e-4
(ResNet-18), divided by 10 after 4 of 6 epochs. With `forget_steps: 0` the method is the paper's
natural-gradient fine-tuning on the retain set; its name is `ngd-finetune`.

Deliberate differences from the paper:
* Eq. 14 has + gamma ||theta - theta_sm||^2 in the ascent, which drives the weights away from their
  smoothed average. Here both phases pull the weights towards it.
* The forget loss is minimised, like every loss of this package. The loss `ascent` gives the paper's
  objective. A bounded loss (`anchor`) is better, because raw ascent diverges in long runs.
* k_1, k_2 and gamma are not given in the paper. The defaults are 1, 4 (its batches of 32 and 128)
  and 0.
* The code adds the weight decay to the gradient before P^-1 (YiwenShaoStephen/NGD-SGD, ngd.py,
  class NGD). Here the optimizer adds it to the preconditioned gradient.
* The code updates the factors at each of its first ten steps, then at every fourth, and applies
  those from before the present gradient (ngd.py, lines 240-243, 366 and 394-398). Here they are
  updated at every fourth step from the start, with the present gradient.
* Axes of up to 512 entries have dense factors. Longer axes are not preconditioned (the code keeps
  low-rank factors).
* The result is theta. The paper's option to release theta_sm instead is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.methods.base import Closure, Direction, Method
from concept_eraser.methods.vectors import Vec, gramian

LONGEST = 512  # entries of an axis with a dense factor


@dataclass(frozen=True)
class MinMaxNGD(Method):
    """Steps on one objective at a time, preconditioned axis by axis.

    Args:
        forget_steps: k_1; 0 for fine-tuning on the retain set alone.
        retain_steps: k_2.
        pull: gamma, the pull towards the smoothed weights.
        average: beta, the rate at which the smoothed weights follow.
        memory: rho of the running Fisher.
        smoothing: The multiple of the Fisher's mean eigenvalue that is added.
        period: The number of steps between updates of the Fisher.
    """

    title: ClassVar[str] = (
        "Min/Max natural gradient descent (Faster Machine Unlearning via Natural Gradient Descent)"
    )
    source: ClassVar[str] = "arXiv 2407.08169, Algorithm 2"
    optimizer: ClassVar[str | None] = "sgd"
    defaults: ClassVar[Mapping[str, str]] = {
        "forget_steps": "ours",
        "retain_steps": "ours",
        "pull": "ours: none",
        "average": "the paper",
        "memory": "its code",
        "smoothing": "its code",
        "period": "its code",
    }

    forget_steps: int = 1
    retain_steps: int = 4
    pull: float = 0.0
    average: float = 0.4
    memory: float = 0.1
    smoothing: float = 4.0
    period: int = 4
    _state: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.forget_steps < 0 or self.retain_steps < 1 or self.period < 1:
            raise ValueError(
                "forget_steps must be >= 0, retain_steps and period >= 1, found "
                f"{self.forget_steps}, {self.retain_steps}, {self.period}"
            )
        if (
            self.pull < 0
            or not 0 < self.average <= 1
            or not 0 < self.memory <= 1
            or self.smoothing <= 0
        ):
            raise ValueError(
                "expected pull >= 0, average and memory in (0, 1], smoothing > 0; found "
                f"{self.pull}, {self.average}, {self.memory}, {self.smoothing}"
            )

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if set(objectives) != {"retain", "forget"}:
            raise ValueError(
                f"minmax_ngd takes turns between retain and forget; found {', '.join(objectives)}"
            )

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        turn = closure.step % (self.forget_steps + self.retain_steps)
        objective = "forget" if turn < self.forget_steps else "retain"
        grad = closure.grad(objective)
        raw = gramian([grad])
        grad = self._pull(grad, closure.params)
        vec = tuple(self._precondition(i, g, closure.step) for i, g in enumerate(grad))
        index = closure.objectives.index(objective)
        gram = torch.full((2, 2), float("nan"), dtype=torch.float64)
        gram[index, index] = raw[0, 0]
        return Direction(vec, gram, None, {"forget_turn": float(objective == "forget")})

    def _pull(self, grad: Vec, params: Vec) -> Vec:
        """Return grad + 2 gamma (theta - theta_sm), and move theta_sm towards theta."""
        if self.pull == 0:
            return grad
        gradients = []
        for i, (g, p) in enumerate(zip(grad, params, strict=True)):
            smooth = self._state.get(f"smooth_{i}", p.detach()).to(p)
            smooth = smooth + self.average * (p.detach() - smooth)
            self._state[f"smooth_{i}"] = smooth
            gradients.append(g + 2 * self.pull * (p.detach() - smooth))
        return tuple(gradients)

    def _precondition(self, index: int, grad: Tensor, step: int) -> Tensor:
        result = grad
        for axis, size in enumerate(grad.shape):
            if 1 < size <= LONGEST:
                factor = self._factor(f"{index}_{axis}", result, axis, step).to(result)
                result = precondition_axis(result, factor, axis, self.smoothing)
        return result

    def _factor(self, name: str, grad: Tensor, axis: int, step: int) -> Tensor:
        """Return the running Fisher of one axis [d, d].

        It is updated every `period` steps, at another phase in every round. With a fixed phase, a
        period that divides the round would use the gradients of one objective only.
        """
        key = f"fisher_{name}"
        turns = step // (self.forget_steps + self.retain_steps) if self.forget_steps else 0
        if key not in self._state:
            self._state[key] = axis_covariance(grad, axis)
        elif (step + turns) % self.period == 0:
            self._state[key] = (1 - self.memory) * self._state[key].to(
                grad
            ) + self.memory * axis_covariance(grad, axis)
        return self._state[key]


def axis_covariance(grad: Tensor, axis: int) -> Tensor:
    """Return X X^T / N for the unfolding X [d, N] of a tensor along an axis."""
    rows = grad.movedim(axis, 0).reshape(grad.shape[axis], -1)
    return rows @ rows.T / rows.shape[1]


def precondition_axis(grad: Tensor, factor: Tensor, axis: int, smoothing: float) -> Tensor:
    """Apply (F + smoothing tr(F)/d I)^-1 along one axis, and rescale to the length of `grad`."""
    level = factor.diagonal().mean()
    is_positive = level > 0  # stays on the device, so that the host does not wait
    scale = torch.where(is_positive, level, torch.ones_like(level))
    rows = grad.movedim(axis, 0).reshape(grad.shape[axis], -1)
    damped_factor = factor + smoothing * scale * torch.eye(
        len(factor), dtype=factor.dtype, device=factor.device
    )
    # positive definite, so there is no error to check; a check would wait
    result: Tensor = torch.linalg.solve_ex(damped_factor / scale, rows).result
    result = result * (rows.norm() / result.norm().clamp(min=1e-30))
    result = result.reshape(grad.movedim(axis, 0).shape).movedim(0, axis)
    return torch.where(is_positive, result, grad)


NAMED = {"ngd-finetune": {"forget_steps": 0}}
PLUGIN = MinMaxNGD
