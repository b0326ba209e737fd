r"""Faster Machine Unlearning via Natural Gradient Descent (Lev & Wilson, arXiv 2407.08169).

The method is one Fisher step. The risk is L(S, theta) = 1/n sum_{z in S} l(z, theta) + ridge/2
||theta||^2 with l a negative log-likelihood. theta^ is its minimiser on S (n samples), U are the m
samples to delete, and F(R) is the Fisher matrix of the retained samples R = S \ U:

    theta~ = theta^ + (F(R) + ridge I)^-1  1/(n - m) sum_{z in U} (grad l(z, theta^) + ridge theta^)

This is one Newton step of L(R) from theta^, with the Fisher in place of the Hessian. The two are
equal for every model that is linear in theta. It follows from grad L(R, theta^) = -1/(n - m) sum_U
(grad l + ridge theta^). Labels of the Fisher come from the model, not from the data: F = mean J^T
Sigma J with Sigma = diag(p) - p p^T (softmax) or I (Gaussian).

Deliberate differences from the paper:
* Its normalisation. With L(U) a mean the factor is m/(n - m), not n/(n - m) (Alg. 1). The ridge
  term does not drop out unless the target is the one with 1/n kept (`objective: fixed_n`). On ridge
  regression this formula is exact; the printed step is 8.8 times as far off as doing nothing.
* The proximal form (Eq. 11) lacks F^-1 grad L(S, theta^, 0), so that deleting nothing moves the
  model. `proximal_step` has it.
* LiSSA's recursion lacks its "x +" (Eqs. 73, 76). The printed recursion returns nearly 0. Even
  corrected it is a spectral filter (1 - (1 - a/sigma)^(T+1)) / a with an implicit damping of about
  sigma / (T + 1).
* The (epsilon, delta) noise is in gaussian_mechanism.py.
* Fisher products and solvers are in fisher.py. K-FAC is from curvlinops, and cg from scipy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from concept_eraser.methods.base import Edit, EditRequest
from concept_eraser.methods.fisher import Batches, Fisher, Risk, Solver, count, solve
from concept_eraser.methods.vectors import Vec, dot, is_finite, norm


def proximal(center: Tensor, metric: Tensor, penalty: float, iterations: int = 20000) -> Tensor:
    """Minimise (center - theta)^T metric (center - theta) + 2 penalty ||theta||_1 by FISTA.

    Shapes: center [p], metric [p, p]; returns [p].
    """
    step = 1 / float(torch.linalg.eigvalsh(metric).max())
    theta = momentum = center.clone()
    t = 1.0
    for _ in range(iterations):
        gradient_step = momentum - step * metric @ (momentum - center)
        after = gradient_step.sign() * (gradient_step.abs() - step * penalty).clamp(min=0)
        t_after = (1 + (1 + 4 * t * t) ** 0.5) / 2
        momentum = after + (t - 1) / t_after * (after - theta)
        if float((after - theta).abs().max()) < 1e-16:
            return after
        theta, t = after, t_after
    return theta


def proximal_step(
    theta: Tensor, metric: Tensor, retained_gradient: Tensor, penalty: float
) -> Tensor:
    """Apply the corrected Eq. 11 for an L1 penalty: prox(theta - F(R)^-1 grad L(R, theta, 0)), [p].

    retained_gradient: that of the smooth part on the retained samples, n/(n - m) grad L(S) - 1/(n -
    m) sum_U grad l. Deleting nothing is a fixed point, since theta minimises the penalised risk.
    """
    return proximal(theta - torch.linalg.solve(metric, retained_gradient), metric, penalty)


# a residual this many times the right-hand side is no solution; kfac and diagonal may pass 1
DIVERGED = 10.0


@dataclass(frozen=True)
class NaturalStep:
    """The result of a step.

    Its direction and length, and ||grad L(R)|| before and after (of the retain_mean target). Also
    the relative residual of the linear system, ||A x - b|| / ||b||, and the factor of the trust
    region.
    """

    step: Vec
    before: float
    after: float
    residual: float
    shrunk: float

    @property
    def length(self) -> float:
        return float(norm(self.step))


@dataclass(frozen=True)
class NaturalGradient(Edit):
    """Delete samples by one Fisher step.

    Args:
        objective: retain_mean (retrain on R with 1/(n - m), the paper's definition) or fixed_n (1/n
            is kept).
        fisher_on: retain, or all for F(S). F(S) can be computed before the forget set is known, and
            has an O((m/n)^2) error.
        solver: cg, exact (dense), diagonal, kfac or lissa.
        iterations: The largest number of iterations of cg, or the number of iterations of lissa.
        tolerance: The relative tolerance of cg.
        sigma: The scale of lissa; 0 chooses it from the matrix.
        damping: Added to the ridge in the matrix. Deep networks need it.
        kl: The step is shortened so that the retained outputs move by at most this KL divergence
            (nats per sample, second order); 0 for no limit.
    """

    title: ClassVar[str] = "Faster Machine Unlearning via Natural Gradient Descent"
    source: ClassVar[str] = "Lev & Wilson, arXiv 2407.08169"
    defaults: ClassVar[Mapping[str, str]] = {
        "objective": "the paper's definition of retraining",
        "fisher_on": "the paper, Alg. 1",
        "solver": "ours",
        "iterations": "ours",
        "tolerance": "ours",
        "sigma": "chosen from the matrix",
        "damping": "the paper: none",
        "kl": "ours: no limit",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point", "exact_on_quadratics"})

    objective: Literal["retain_mean", "fixed_n"] = "retain_mean"
    fisher_on: Literal["retain", "all"] = "retain"
    solver: Solver = "cg"
    iterations: int = 200
    tolerance: float = 1e-10
    sigma: float = 0.0
    damping: float = 0.0
    kl: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.damping < 0
            or self.kl < 0
            or self.iterations < 1
            or self.sigma < 0
            or self.tolerance <= 0
        ):
            raise ValueError(
                "damping and kl must be >= 0, iterations >= 1, sigma >= 0, tolerance > "
                f"0; found {self.damping}, {self.kl}, {self.iterations}, {self.sigma}, "
                f"{self.tolerance}"
            )

    def apply(self, risk: Risk, forget: Batches, retain: Batches) -> NaturalStep:
        """Move the model of `risk` in place.

        forget, retain: batches (inputs, targets), which together are all its data.
        """
        forget_count, retain_count = count(forget), count(retain)
        if retain_count == 0:
            raise ValueError(
                "there are no retained samples, so the step has no target; give the "
                "retained samples"
            )
        n = forget_count + retain_count
        divisor = retain_count if self.objective == "retain_mean" else n
        ridge = risk.ridge * (forget_count if self.objective == "retain_mean" else 0)
        push = tuple(
            (g + ridge * p.detach()) / divisor
            for g, p in zip(risk.sum_gradient(forget), risk.params, strict=True)
        )
        basis = [*retain, *forget] if self.fisher_on == "all" else list(retain)
        # fixed_n divides F_sum(R) by n: F + shift = kept/n (F(R) + n/kept shift)
        scale = (
            retain_count / n if self.objective == "fixed_n" and self.fisher_on == "retain" else 1.0
        )
        fisher = Fisher(risk, basis, (risk.ridge + self.damping) / scale)
        right_side = tuple(p / scale for p in push)
        step = solve(
            fisher,
            right_side,
            self.solver,
            iterations=self.iterations,
            tolerance=self.tolerance,
            sigma=self.sigma,
        )
        if not is_finite(step):
            raise ValueError(
                f"the step of solver {self.solver!r} is not finite, so nothing was "
                "changed; give the risk a ridge or damping > 0 (lissa: a larger sigma)"
            )
        errors = tuple(a - b for a, b in zip(fisher.product(step), right_side, strict=True))
        residual = float(norm(errors) / norm(right_side)) if float(norm(right_side)) > 0 else 0.0
        if not residual <= DIVERGED:
            raise ValueError(
                f"solver {self.solver!r} diverged (residual {residual:.2g} of the "
                "right-hand side's length), so nothing was changed; give damping > 0 "
                "(lissa: a larger sigma, or 0 to choose it)"
            )
        factor = self._shrink(Fisher(risk, retain), step)
        step = tuple(factor * part for part in step)
        before = float(norm(risk.gradient(retain)))
        with torch.no_grad():
            for parameter, part in zip(risk.params, step, strict=True):
                parameter.add_(part)
        return NaturalStep(
            step, before, after=float(norm(risk.gradient(retain))), residual=residual, shrunk=factor
        )

    def edit(self, request: EditRequest) -> Mapping[str, float]:
        risk = Risk(request.model, "softmax", request.ridge)
        outcome = self.apply(risk, request.batches(request.forget), request.batches(request.retain))
        return {
            "step": outcome.length,
            "gradient_before": outcome.before,
            "gradient_after": outcome.after,
            "residual": outcome.residual,
            "shrunk": outcome.shrunk,
        }

    def _shrink(self, fisher: Fisher, step: Vec) -> float:
        """Return s = min(1, sqrt(2 kl / d^T F(R) d)).

        To second order, KL(theta, theta + s d) = s^2/2 d^T F d.
        """
        if self.kl == 0:
            return 1.0
        curvature = float(dot(step, fisher.product(step)))
        return min(1.0, (2 * self.kl / curvature) ** 0.5) if curvature > 0 else 1.0


PLUGIN = NaturalGradient
