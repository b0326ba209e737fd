"""MUNBa: Machine Unlearning via Nash Bargaining (Wu & Harandi, arXiv 2411.15537), Eqs. 6-8.

Two objectives, retain and forget, offer the gradients g_r, g_f of losses that are both to be
minimised. They bargain for a common direction g = a_r g_r + a_f g_f. The Nash solution has a > 0
and

    G^T G a = 1 / a   (elementwise),   G = [g_r g_f].                                   (Eq. 6)

Closed form. With c = cos(g_r, g_f) and u_i = a_i ||g_i|| the two equations read u_r^2 + c u_r u_f =
1 and u_f^2 + c u_r u_f = 1, hence u_r = u_f = (1 + c)^(-1/2):

    a_i = 1 / (||g_i|| sqrt(1 + c)).

Consequences (each a test): ||g|| = sqrt(2). <g, g_i> = 1 / a_i > 0, so both losses fall to first
order. Rescaling either loss changes nothing. Both objectives contribute equally. The direction is
parallel to NGDiff's. If both norms are at most M, then a_i >= 1 / (sqrt(2) M) (Lemma 2.8). If both
losses are L-smooth, a step of length min_i 1 / (L a_i) along -g raises neither (Theorem 2.9).

Deliberate differences from the paper and its code:
* Eq. 8 as first printed gives a_f = sqrt(sin^2(phi) (1 - c)) / ||g_f||; the proof's Eq. 35 loses a
  division by sin^2(phi). Its residual a_i (G^T G a)_i is (0.98, 0.85) at c = 0.3 instead of (1, 1).
  `formula="printed"` reproduces it for comparison; the default is exact. The fourth version on
  arXiv has, by a public transcription of it, a_i = sqrt((1 - c) / (sin^2(phi) + xi)) / ||g_i||:
  corrected, and at xi = 0 equal to the closed form above. With xi > 0 it goes to 0 where the
  gradients agree (c -> 1). Here xi acts at c -> -1 only, where the bargaining has no solution.
* Lemma 2.8 of the first versions also has an upper bound, which follows from that Eq. 8: its
  weight of the forget objective is at most sqrt(32 / 27) / ||g_f||. The solution has no such bound.
  a_i grows like (1 + c)^(-1/2) as c -> -1, and exceeds the bound for c < -5/32. The fourth version
  has the lower bound only, which holds.
* Opposed gradients, 1 + c < xi. There is no common descent, and the weights diverge. With 1 + c
  clamped at xi the step is rounding noise, 4e-5 long in a test in fp32. Adam turns it into 93 % of
  a full step. So `opposed: stop` takes no step. `noise` is Remark 2.7: noise is added to
  the shorter gradient, and the bargaining is repeated. Its step is as long as any other, and
  almost all of it is noise. `half` is a plain mean of the gradients. Remark 2.7 has the weights
  (0.5, 0.5) for aligned gradients, where the closed form needs no exception. The public code falls
  back to a weighted sum of its own. `clamp` is what this package did before. The log has each case.
* An objective without a usable gradient is left out, which the log counts.
* `every=k` computes the weights at every k-th step only and keeps them in between, as the paper
  offers. Both gradients are still needed at every step, so it saves the solution of two equations
  only.
* More than two objectives (several concepts and retain) are solved by Newton's method on the
  strictly convex 1/2 u^T C u - sum_i log u_i, whose stationarity condition is Eq. 6 for unit
  gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from concept_eraser.methods.base import Closure, Direction, GramMethod, usable
from concept_eraser.methods.vectors import Vec, combine, combine_and_free, norm

ROUNDING = 1e-9  # the relative error of 1 + c at c near -1, where c has one of 1e-16


def exact_weights(gram: Tensor, xi: float) -> tuple[Tensor, bool]:
    """Return the weights for two objectives, and whether xi was used.

    a_i = 1 / (||g_i|| sqrt(max(1 + c, xi))).
    """
    norms = gram.diagonal().sqrt()
    slack = 1 + gram[0, 1] / norms[0] / norms[1]
    return 1 / (norms * slack.clamp(min=xi).sqrt()), bool(slack < xi * (1 - ROUNDING))


def printed_weights(gram: Tensor) -> Tensor:
    """Return the weights of Eq. 8 as first printed, which is wrong for the forget objective.

    There are two objectives, in the order (retain, forget).
    """
    norms = gram.diagonal().sqrt()
    c = (gram[0, 1] / norms[0] / norms[1]).clamp(-1, 1)
    sine2 = 1 - c * c
    return torch.stack(
        [1 / (norms[0] * (1 + c).clamp(min=1e-12).sqrt()), (sine2 * (1 - c)).sqrt() / norms[1]]
    )


def nash_weights(gram: Tensor, xi: float) -> tuple[Tensor, bool]:
    """Solve a_i (G^T G a)_i = 1 for any number m of objectives.

    Returns the weights, and whether the cosines had to be regularised. With u_i = a_i ||g_i|| and C
    the matrix of cosines, u minimises 1/2 u^T C u - sum log u. At the solution u^T C u = m, so w =
    u / sum(u) has w^T C w = m / sum(u)^2. Where 0 lies in the convex hull of the unit gradients
    there is no common descent, and u diverges. Beyond sum(u) = m / sqrt(xi), C + xi I is solved
    instead. For two objectives this bound is 1 + c = xi.
    """
    norms = gram.diagonal().sqrt()
    cosines = gram / norms[:, None] / norms[None, :]
    limit = len(gram) / xi**0.5
    u = _newton(cosines, 10 * limit)
    is_clamped = bool(u.sum() > limit)
    if is_clamped:
        u = _newton(cosines + xi * torch.eye(len(gram), dtype=gram.dtype), float("inf"))
    return u / norms, is_clamped


def _newton(cosines: Tensor, limit: float) -> Tensor:
    """Minimise 1/2 u^T C u - sum log u. Gives up where sum(u) exceeds the limit.

    The function is self-concordant. The step is -(C + diag(1/u^2))^-1 (C u - 1/u), divided by 1 +
    its Newton decrement while that is large. Such steps never leave u > 0 and converge from any
    start.
    """
    u = torch.ones(len(cosines), dtype=cosines.dtype)
    for _ in range(200):
        slope = cosines @ u - 1 / u
        # in units of u: (diag(u) C diag(u) + I) is well conditioned where C + diag(1/u^2) is not
        relative_step = torch.linalg.solve(
            u[:, None] * cosines * u[None, :] + torch.eye(len(u), dtype=u.dtype), u * slope
        )
        decrement = float((u * slope @ relative_step).clamp(min=0).sqrt())
        u = u - u * relative_step / (1 + decrement if decrement > 0.25 else 1)
        if decrement < 1e-13 or float(u.sum()) > limit:
            break
    return u


@dataclass(frozen=True)
class Munba(GramMethod):
    """Nash bargaining between forgetting and preserving.

    Args:
        formula: "exact" (the solution of Eq. 6) or "printed" (Eq. 8 as first printed, two
            objectives only).
        xi: The smallest value of 1 + cos that is used. Below it the gradients are opposed and the
            weights would diverge.
        opposed: What to do with opposed gradients: stop (no step), noise (Remark 2.7: add noise to
            the shorter gradient and bargain again), half (weights of 0.5) or clamp (take 1 + cos
            for xi).
        noise: The length of the noise of opposed: noise, as a share of the shorter gradient's.
        every: Compute the weights at every `every`-th step, and keep them in between.
    """

    title: ClassVar[str] = "MUNBa: Machine Unlearning via Nash Bargaining"
    source: ClassVar[str] = "arXiv 2411.15537"
    defaults: ClassVar[Mapping[str, str]] = {
        "formula": "ours (the paper first printed the other)",
        "xi": "ours",
        "opposed": "ours (the paper, Remark 2.7: noise)",
        "noise": "ours",
        "every": "the paper computes the weights at every step",
    }
    theorems: ClassVar[frozenset[str]] = frozenset(
        {"pareto_descent", "scale_invariance", "permutation", "equal_contribution", "stationarity"}
    )

    formula: Literal["exact", "printed"] = "exact"
    xi: float = 1e-6
    opposed: Literal["stop", "noise", "half", "clamp"] = "stop"
    noise: float = 0.01
    every: int = 1
    _state: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise ValueError(f"every must be >= 1, found {self.every}")
        if not 0 < self.xi < 1:
            raise ValueError(f"xi must lie in (0, 1), found {self.xi}")
        if self.noise <= 0:
            raise ValueError(f"noise must be > 0, found {self.noise}")

    def laws(self) -> frozenset[str]:
        if self.formula == "printed":
            return frozenset({"scale_invariance"})
        # noise and the mean of the gradients move where no step serves both objectives
        is_stationary = self.opposed in ("stop", "clamp")
        return self.theorems if is_stationary else self.theorems - {"stationarity"}

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if self.formula == "printed" and len(objectives) != 2:
            raise ValueError(
                "formula='printed' is Eq. 8 of the paper, which knows two objectives only; "
                f"found {', '.join(objectives)}. Use 'exact'"
            )

    def direction(self, closure: Closure) -> Direction:
        weights = self._state.get("weights")
        if self.every > 1 and closure.step % self.every and weights is not None:
            grads = [closure.grad(objective) for objective in closure.objectives]
            gram = closure.gramian(grads)
            return Direction.weighted_sum(weights, grads, gram, notes={"kept": 1})
        grads = [closure.grad(objective) for objective in closure.objectives]
        gram = closure.gramian(grads)
        weights, notes = self.solve(gram)
        is_opposed = bool(notes.get("opposed"))
        if is_opposed and self.opposed == "noise":
            grads = _add_noise(grads, gram, self.noise, closure.step)
            weights, notes = self._bargain(closure.gramian(grads))
            notes = {**notes, "opposed": 1}
        if self.every > 1 and is_opposed:
            self._state.pop("weights", None)  # the next step bargains
        elif self.every > 1 and not notes["degenerate"]:
            self._state["weights"] = weights
        if is_opposed and self.opposed == "noise":  # gram is of the gradients without noise
            return Direction(combine_and_free(weights, grads), gram, weights, notes)
        is_held = is_opposed and self.opposed == "stop"
        return Direction.weighted_sum(weights, grads, gram, notes=notes, hold=is_held)

    def solve(self, gram: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        """Return the weights, and for opposed gradients those of the option `opposed`.

        For `noise`, which a Gram matrix cannot have, they are those of `clamp`.
        """
        weights, notes = self._bargain(gram)
        if not notes["clamped"]:
            return weights, notes
        opposed_notes = {**notes, "clamped": int(self.opposed == "clamp"), "opposed": 1}
        if self.opposed == "stop":
            return torch.zeros_like(weights), opposed_notes
        if self.opposed == "half":
            return (weights != 0).double() / int((weights != 0).sum()), opposed_notes
        return weights, opposed_notes

    def _bargain(self, gram: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the weights with 1 + c clamped at xi, and notes for the log."""
        usable_objectives = usable(gram)
        weights = torch.zeros(len(gram), dtype=torch.float64)
        positions = usable_objectives.nonzero().flatten()
        if len(positions) == 0:
            return weights, {"degenerate": 1, "clamped": 0}
        usable_gram = gram.double()[positions][:, positions]
        is_clamped = False
        if len(positions) == 1:
            solution = 1 / usable_gram.diagonal().sqrt()
        elif len(positions) > 2:
            if self.formula == "printed":
                raise ValueError(
                    "formula='printed' is Eq. 8 of the paper, which knows two objectives "
                    "only; use 'exact'"
                )
            solution, is_clamped = nash_weights(usable_gram, self.xi)
        elif self.formula == "printed":
            solution = printed_weights(usable_gram)
        else:
            solution, is_clamped = exact_weights(usable_gram, self.xi)
        weights[positions] = solution
        return weights, {"degenerate": int(len(positions) < len(gram)), "clamped": int(is_clamped)}


def _add_noise(grads: list[Vec], gram: Tensor, share: float, step: int) -> list[Vec]:
    """Add noise to the shortest gradient that is usable, where its entries are not 0.

    The noise has a share of the gradient's length. It is the same for every process and after a
    resume, since it is drawn from the number of the step.
    """
    lengths = gram.diagonal().sqrt().where(usable(gram), torch.inf)
    shortest = int(lengths.argmin())
    generator = torch.Generator().manual_seed(step)
    noise = tuple(
        torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part) * (part != 0)
        for part in grads[shortest]
    )
    scale = share * float(lengths[shortest]) / float(norm(noise))
    noisy = combine([1.0, scale], [grads[shortest], noise])
    return [noisy if i == shortest else gradient for i, gradient in enumerate(grads)]


NAMED = {"munba-printed": {"formula": "printed"}}
PLUGIN = Munba
