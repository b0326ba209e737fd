"""FORUM: first-order multi-gradient multi-objective bi-level optimisation (arXiv 2401.09257).

The paper is Ye et al., "A first-order multi-gradient algorithm for multi-objective bi-level
optimization". The problem is

    min_z (F_1, ..., F_m)(alpha, omega) subject to omega = argmin_w f(alpha, w), z = (alpha, omega),

as one level with the value-function constraint q(z) = f(z) - f*(alpha) <= 0. For erasing, alpha are
the weights, omega is an attack on the prompt's embedding, f is what the attack minimises, and F =
(retain, forget under attack).

One step at z uses the same examples, time steps and noise for all gradients of an objective. The
objective of f draws its own:
1. T gradient steps on f from omega (warm start) give w~; q~ = f(z) - f(alpha, w~) and
   grad q~ = (grad_alpha f(z) - grad_alpha f(alpha, w~); grad_omega f(z))   (w~ is a constant)
2. g_i = grad_z F_i; the direction d minimises max_i <g_i, d> + 1/2 ||d||^2 with <grad q~, d> <=
   -rho_e ||grad q~||^2 (Eq. 7). By duality (Eq. 10) d = -(G lam + nu grad q~), where lam, nu
   minimise

       1/2 ||G lam + nu grad q~||^2 - nu rho_e ||grad q~||^2    over the simplex and nu >= 0.
3. lam~_k = (1 - beta_k) lam~_{k-1} + beta_k lam_k with beta_k = (k + 1)^(-3/4); nu for lam~_k; z
   moves along d.

Deliberate differences from the paper and its code (Baijiong-Lin/FORUM):
* rho. The constraint in the text has phi = rho/2 ||grad q~||^2. Its Eqs. 9 and 17 (and the code)
  use twice the multiplier that follows from it. `rho_e` is the number in the constraint above:
  rho/2 in the text, rho in Eq. 9.
* The code adds a constraint on nu. With the right multiplier it would be redundant; as it is, it
  gives a wrong lam. Here the quadratic program is solved exactly: in closed form for two
  objectives, by trying all supports for more.
* beta_0 = 1, because the paper's constant beta with lam~_{-1} = 0 leaves the simplex. beta counts
  steps, not epochs.
* With u = grad q~ / ||grad q~|| the unknown is c = nu ||grad q~||, which stays bounded as grad q~
  -> 0. At grad q~ = 0 the constraint is dropped, which leaves MGDA.
* `normalize`: every g_i is divided by its length. The code does so, the paper does not mention it.
  At a pretrained model grad F_retain is nearly 0, so the printed version gives it all the weight
  and hardly moves. The default is true. An objective whose gradient is exactly 0 is left out.
* The warm start is the default: from a fixed omega_0 the iterates stop at a bias, and the theory
  needs the warm start.
* FORUM is the optimistic bi-level problem: omega also descends F. `move_inner: false` leaves that
  part out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.methods.base import Closure, Direction, Method, usable
from concept_eraser.methods.vectors import Vec, combine, gramian, is_finite

ATTACK = "attack"  # the objective whose loss is f


def multipliers(gram: Tensor, rho_e: float, floor: float = 0.0) -> tuple[Tensor, float]:
    """Solve the direction problem for (lam [m], nu).

    Args:
        gram: The Gram matrix [m + 1, m + 1] of g_1..g_m and grad q~.
        rho_e: The number in the constraint.
        floor: The least lam_i, at most 1/m. At 1/m all objectives have equal weights.
    """
    m = len(gram) - 1
    square = float(gram[m, m])
    length = square**0.5
    inner = gram[:m, m] / length if length > 0 else torch.zeros(m, dtype=gram.dtype)  # <u, g_i>
    tau = rho_e * length if length > 0 else -float("inf")  # no constraint: c = 0
    mix = floor * torch.ones(m, m, dtype=gram.dtype) + (1 - m * floor) * torch.eye(
        m, dtype=gram.dtype
    )
    mixed_gram, mixed_inner = mix.T @ gram[:m, :m] @ mix, mix.T @ inner
    mu = (
        two_objectives(mixed_gram, mixed_inner, tau)
        if m == 2
        else any_objectives(mixed_gram, mixed_inner, tau)
    )
    lam = mix @ mu
    return lam, slack_multiplier(lam, inner, tau) / length if length > 0 else 0.0


def slack_multiplier(lam: Tensor, inner: Tensor, tau: float) -> float:
    """Return c = max(tau - <u, G lam>, 0)."""
    return max(tau - float(inner @ lam), 0.0)


def dual_value(lam: Tensor, gram: Tensor, inner: Tensor, tau: float) -> float:
    """Return psi(lam), the dual with the best c.

    psi(lam) = 1/2 ||G lam||^2 - 1/2 max(tau - <u, G lam>, 0)^2.
    """
    return 0.5 * float(lam @ gram @ lam) - 0.5 * slack_multiplier(lam, inner, tau) ** 2


def two_objectives(gram: Tensor, inner: Tensor, tau: float) -> Tensor:
    """Return the minimiser of psi for m = 2, with lam = (l, 1 - l).

    It is the best of the ends, the kink and the minima of both branches.
    """
    candidates = [0.0, 1.0]
    across = float(gram[0, 0] - 2 * gram[0, 1] + gram[1, 1])  # ||g_1 - g_2||^2
    if across > 0:
        candidates.append(float(gram[1, 1] - gram[0, 1]) / across)
    if tau > -float("inf"):
        off = gram - torch.outer(inner, inner)  # inner products of p_i = g_i - <u, g_i> u
        apart = float(off[0, 0] - 2 * off[0, 1] + off[1, 1])
        step = float(inner[0] - inner[1])
        if apart > 0:
            candidates.append((float(off[1, 1] - off[0, 1]) - tau * step) / apart)
        if step != 0:
            candidates.append((tau - float(inner[1])) / step)
    points = [
        torch.tensor([c, 1 - c], dtype=gram.dtype)
        for c in (min(max(c, 0.0), 1.0) for c in candidates)
    ]
    return min(points, key=lambda lam: dual_value(lam, gram, inner, tau))


def any_objectives(gram: Tensor, inner: Tensor, tau: float) -> Tensor:
    """Return the minimiser of psi for any m up to 10.

    It is the best feasible point among the stationary points of all supports, with the constraint
    on q active or not. That takes 2^(m+1) linear systems. Raises ValueError for more than 10
    objectives.
    """
    m = len(gram)
    if m > 10:
        raise ValueError(
            "FORUM solves its quadratic program by trying all supports, for at most 10 "
            f"objectives; found {m}"
        )
    # The minimiser does not depend on the gradients' common length, but the rank that a solver
    # finds would.
    size = float(gram.diagonal().max())
    if size > 0:
        gram, inner, tau = gram / size, inner / size**0.5, tau / size**0.5
    bowls = [(gram, torch.zeros(m, dtype=gram.dtype))]
    if tau > -float("inf"):  # where c > 0: 1/2 ||G lam||^2 - 1/2 (tau - <u, G lam>)^2
        bowls.append((gram - torch.outer(inner, inner), tau * inner))
    best, lowest = None, float("inf")
    for (bowl, slope), n in itertools.product(bowls, range(1, m + 1)):
        for support in itertools.combinations(range(m), n):
            lam = _stationary(bowl, slope, list(support))
            if lam is not None and (value := dual_value(lam, gram, inner, tau)) < lowest:
                best, lowest = lam, value
    if best is None:
        raise ValueError("FORUM's quadratic program has no solution; are all gradients finite?")
    return best


def _stationary(bowl: Tensor, slope: Tensor, support: list[int]) -> Tensor | None:
    """Return the stationary point of 1/2 x^T bowl x + slope^T x on sum x = 1 within a support.

    Returns None if x < 0. The system is solved for y_i = x_i sqrt(bowl_ii), so that the lengths of
    the objectives cancel.
    """
    n = len(support)
    inside = bowl[support][:, support]
    lengths = inside.diagonal().abs().sqrt()
    lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    system = torch.zeros(n + 1, n + 1, dtype=bowl.dtype)
    system[:n, :n] = inside / torch.outer(lengths, lengths)
    # sum x = 1 as sum y_i level / length_i = level, so that its row is of order one
    level = float(lengths.min())
    system[n, :n] = system[:n, n] = level / lengths
    right = torch.cat([-slope[support] / lengths, torch.full((1,), level, dtype=bowl.dtype)])
    solution = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[:n, 0] / lengths
    if float(solution.min()) < -1e-12 or abs(float(solution.sum()) - 1) > 1e-9:
        return None
    lam = torch.zeros(len(bowl), dtype=bowl.dtype)
    lam[support] = solution.clamp(min=0)
    return lam


@dataclass(frozen=True)
class Forum(Method):
    """Retain and forget under the best attack, which is the solution of a lower-level problem.

    Args:
        rho_e: How strongly a step must lower q~: <grad q~, d> <= -rho_e ||grad q~||^2.
        inner_steps: T of the lower level.
        inner_lr: eta of the lower level. If its steps diverge, the step is skipped and counted.
        outer_lr: The step size of the attack's variable along d. The weights move by the optimiser.
        normalize: Divide every g_i by its length.
        floor: The least weight of an objective, 0 to 1/m.
        warm: Start the lower level at the present attack, else at the attack of the first step.
        momentum: The exponent of beta_k = (k + 1)^-momentum; 0 for none.
        move_inner: Whether the attack's variable also descends F.
    """

    title: ClassVar[str] = (
        "FORUM: a first-order multi-gradient algorithm for multi-objective bi-level optimization"
    )
    source: ClassVar[str] = "arXiv 2401.09257"
    defaults: ClassVar[Mapping[str, str]] = {
        "rho_e": "the paper's rho = 0.5 (Table 5), read as rho_e = rho/2",
        "inner_steps": "T = 5: the paper's multi-task runs",
        "inner_lr": "eta = 0.1: the paper's multi-task runs",
        "outer_lr": "ours",
        "normalize": "the authors' code (not in the paper)",
        "floor": "ours: none",
        "warm": "the authors' code",
        "momentum": "the paper: beta_k = (k + 1)^(-3/4)",
        "move_inner": "the paper, Alg. 1",
    }
    needs_fp32: ClassVar[bool] = True  # grad q~ is a difference of gradients
    needs_attack: ClassVar[bool] = True
    theorems: ClassVar[frozenset[str]] = frozenset({"scale_invariance", "permutation"})

    rho_e: float = 0.25
    inner_steps: int = 5
    inner_lr: float = 0.1
    outer_lr: float = 0.1
    normalize: bool = True
    floor: float = 0.0
    warm: bool = True
    momentum: float = 0.75
    move_inner: bool = True
    _state: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rho_e < 0 or self.inner_steps < 1 or self.inner_lr <= 0 or self.outer_lr <= 0:
            raise ValueError(
                "rho_e must be >= 0, inner_steps >= 1, inner_lr and outer_lr > 0; found "
                f"{self.rho_e}, {self.inner_steps}, {self.inner_lr}, {self.outer_lr}"
            )
        if not 0 <= self.floor <= 0.5 or not 0 <= self.momentum <= 1:
            raise ValueError(
                "floor must lie in [0, 1/objectives] and momentum in [0, 1], found "
                f"{self.floor}, {self.momentum}"
            )

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if ATTACK not in objectives:
            raise ValueError(
                f"FORUM needs a lower-level problem, the objective {ATTACK!r}; found "
                f"{', '.join(objectives)}. Give the recipe an `attack:` section"
            )
        if self.floor * (len(objectives) - 1) > 1:
            raise ValueError(
                f"floor must be at most 1/{len(objectives) - 1} for {len(objectives) - 1} "
                f"losses, found {self.floor}"
            )

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        uppers = [objective for objective in closure.objectives if objective != ATTACK]
        slope, gap = self._constraint(closure)
        if not (
            is_finite(slope) and math.isfinite(gap)
        ):  # T steps of eta were too long: the step is skipped, because the constraint is unknown
            return Direction(
                tuple(torch.full_like(p, float("nan")) for p in slope), notes={"inner_diverged": 1}
            )
        grads = [self._upper(closure, objective) for objective in uppers]
        raw = gramian([*grads, slope])
        lengths = raw.diagonal().sqrt()
        scale = torch.ones_like(lengths)
        if self.normalize:
            scale[:-1] = torch.where(lengths[:-1] > 0, 1 / lengths[:-1], 1.0)
        gram = raw * torch.outer(scale, scale)
        lam = self._smooth(closure.step, self._weigh(gram))
        length = float(lengths[-1])
        nu = (
            slack_multiplier(lam, gram[:-1, -1] / length, self.rho_e * length) / length
            if length > 0
            else 0.0
        )
        weights = torch.cat([lam * scale[:-1], torch.tensor([nu], dtype=lam.dtype)])
        step = combine(weights, [*grads, slope])
        vec = tuple(
            part * self.outer_lr if i in closure.inner else part for i, part in enumerate(step)
        )
        kkt = float((weights @ raw @ weights).clamp(min=0).sqrt())
        return Direction(
            vec,
            raw[:-1, :-1],
            weights[:-1],
            {"q": gap, "kkt": kkt, "nu": nu, "q_negative": int(self.warm and gap < 0)},
        )

    def _weigh(self, gram: Tensor) -> Tensor:
        """Return lam over the objectives that have a gradient.

        An objective at the minimum of its loss gets no weight.
        """
        usable_objectives = usable(gram[:-1, :-1]).nonzero().flatten()
        lam = torch.zeros(len(gram) - 1, dtype=gram.dtype)
        if len(usable_objectives):
            positions = torch.cat([usable_objectives, torch.tensor([len(gram) - 1])])
            lam[usable_objectives] = multipliers(
                gram[positions][:, positions], self.rho_e, self.floor
            )[0]
        return lam

    def _upper(self, closure: Closure, objective: str) -> Vec:
        """Return grad_z F_i, without its lower-level part if move_inner is false."""
        grad = closure.grad(objective)
        if self.move_inner:
            return grad
        return tuple(torch.zeros_like(p) if i in closure.inner else p for i, p in enumerate(grad))

    def _constraint(self, closure: Closure) -> tuple[Vec, float]:
        """Return grad q~ and q~."""
        offset = start_inner(closure, self._state, self.warm)
        return value_gap(closure, offset, self.inner_steps, self.inner_lr)

    def _smooth(self, step: int, lam: Tensor) -> Tensor:
        """Return lam~_k = (1 - beta_k) lam~_{k-1} + beta_k lam_k."""
        beta = (step + 1) ** -self.momentum
        previous = self._state.get("lam", lam)
        average: Tensor = (1 - beta) * previous + beta * lam
        self._state["lam"] = average
        return average


def start_inner(closure: Closure, state: dict[str, Tensor], warm: bool) -> list[Tensor]:
    """Return where the lower level starts, relative to omega.

    Args:
        closure: The losses of the step.
        state: The state of the method. A cold start stores the omega of the first step in it.
        warm: Start at omega, else at the omega of the first step.
    """
    values = [closure.params[i].detach() for i in closure.inner]
    if warm:
        return [torch.zeros_like(v) for v in values]
    for position, value in enumerate(values):
        state.setdefault(f"start_{position}", value.clone())
    return [state[f"start_{position}"].to(value) - value for position, value in enumerate(values)]


def value_gap(closure: Closure, start: list[Tensor], steps: int, lr: float) -> tuple[Vec, float]:
    """Return grad q~ and q~ = f(z) - f(alpha, w~), with w~ after some steps on f from a start."""
    full_gradient = closure.grad(ATTACK)
    value = closure.last_loss
    offset = descend_inner(closure, start, steps, lr)
    outer = [i for i in range(len(closure.params)) if i not in closure.inner]
    with at_inner(closure, offset):
        minimum_gradient = dict(zip(outer, closure.grad(ATTACK, of=outer), strict=True))
    slope = tuple(
        part - minimum_gradient[i] if i in minimum_gradient else part
        for i, part in enumerate(full_gradient)
    )
    return slope, value - closure.last_loss


def descend_inner(closure: Closure, offset: list[Tensor], steps: int, lr: float) -> list[Tensor]:
    """Take `steps` gradient steps on f from omega + offset.

    Returns the end as an offset from omega.
    """
    for _ in range(steps):
        with at_inner(closure, offset):
            grads = closure.grad(ATTACK, of=closure.inner)
        offset = [o - lr * g for o, g in zip(offset, grads, strict=True)]
    return offset


@contextmanager
def at_inner(closure: Closure, offset: Sequence[Tensor]) -> Iterator[None]:
    """Take gradients at omega + offset inside the context, and at the same alpha.

    Only omega is copied: a copy of alpha is 3.4 GB for the UNet of Stable Diffusion 1.4.
    """
    variables = [closure.params[i] for i in closure.inner]
    original_values = [variable.detach().clone() for variable in variables]
    try:
        with torch.no_grad():
            for variable, by in zip(variables, offset, strict=True):
                variable.add_(by)
        yield
    finally:
        with torch.no_grad():
            for variable, value in zip(variables, original_values, strict=True):
                variable.copy_(value)


PLUGIN = Forum
