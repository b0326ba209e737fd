"""Any combination rule of TorchJD by name, such as UPGrad, MGDA, CAGrad, IMTL-G or Nash-MTL.

TorchJD (Quinton & Rey, arXiv 2406.16232, https://torchjd.org) maintains these rules, so they are
not written again here. A rule returns weights for the Gram matrix. Some rules of TorchJD accept the
Jacobian only. These get the factor L of G G^T = L L^T, whose rows have the same inner products.
That is right for rules that do not use single coordinates. The others (GradDrop, TrimmedMean) are
refused.

Deliberate differences: none from TorchJD. Each rule is a file of its package, such as
torchjd/aggregation/_upgrad.py. Its documentation has the paper of each rule, and its
differences from it.

TorchJD (MIT) is not installed with concept_eraser. Its solvers quadprog (GPL), qpsolvers (LGPL) and
ecos (GPL) are copyleft, so they come with `concept-eraser[torchjd]` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from concept_eraser.methods.base import Closure, Direction, GramMethod, usable
from concept_eraser.utils.extras import import_from_extra

Rule = Literal[
    "UPGrad",
    "MGDA",
    "CAGrad",
    "IMTLG",
    "PCGrad",
    "DualProj",
    "AlignedMTL",
    "GradVac",
    "ConFIG",
    "NashMTL",
    "Mean",
    "Sum",
]
_QUADPROG = "One of them, quadprog, is under the GPL; without it the method munba needs no solver"
_SOLVERS = {
    "CAGrad": "This rule also needs cvxpy: pip install 'torchjd[cagrad]'",
    "NashMTL": (
        "This rule also needs cvxpy and ecos, which is under the GPL: pip install "
        "'torchjd[nash-mtl]'"
    ),
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "CAGrad": {"c": 0.4},  # the value of CAGrad's paper (arXiv 2110.14048, section 5)
    "NashMTL": {"max_norm": 0.0, "optim_niter": 100},
}


@dataclass(frozen=True)
class TorchJD(GramMethod):
    """A rule of torchjd.aggregation. A gradient that is zero or not finite is left out.

    Args:
        rule: The name of the rule.
    """

    title: ClassVar[str] = "TorchJD: Jacobian descent for multi-objective optimization"
    source: ClassVar[str] = "arXiv 2406.16232"
    defaults: ClassVar[Mapping[str, str]] = {
        "rule": "the default of arXiv 2406.16232",
    }

    rule: Rule = "UPGrad"
    # the number of the step, from which a rule draws its order
    _place: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        feature = f"the method torchjd with rule {self.rule}"
        with import_from_extra("torchjd", feature, hint=_SOLVERS.get(self.rule, _QUADPROG)):
            self._rule(2)

    def laws(self) -> frozenset[str]:
        # UPGrad regularises its program
        return frozenset({"stationarity"}) if self.rule == "MGDA" else frozenset()

    def direction(self, closure: Closure) -> Direction:
        self._place["step"] = closure.step
        return super().direction(closure)

    def solve(self, gram: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        usable_objectives = usable(gram)
        weights = torch.zeros(len(gram), dtype=torch.float64)
        positions = usable_objectives.nonzero().flatten()
        if len(positions) == 1:
            weights[positions] = 1.0
        elif len(positions):
            # PCGrad and GradVac draw an order: the same for all ranks, and after a resumption
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._place.get("step", 0))
                weights[positions] = self._ask(gram.double()[positions][:, positions])
        return weights, {"degenerate": int(len(positions) < len(gram))}

    def _ask(self, gram: Tensor) -> Tensor:
        # the tolerances of the rules assume gradients of moderate length
        scale = gram.diagonal().max()
        rule = self._rule(len(gram))
        if type(rule).__name__ == self.rule:
            factor = _factor(gram / scale)
            solution: Tensor = torch.linalg.lstsq(
                factor.T, rule(factor)[:, None], driver="gelsd"
            ).solution
            return solution[:, 0]
        weights: Tensor = rule(gram / scale)
        return weights

    def _rule(self, objectives: int) -> Any:
        """Return TorchJD's weighting, which takes the Gram matrix.

        If there is none, return its aggregator, which takes the Jacobian.
        """
        import torchjd.aggregation as rules

        options = dict(_OPTIONS.get(self.rule, {}))
        if self.rule == "NashMTL":
            options["n_tasks"] = objectives
        return getattr(rules, f"{self.rule}Weighting", getattr(rules, self.rule))(**options)


def _factor(gram: Tensor) -> Tensor:
    """Return L [m, m] with L L^T = G G^T, also where that is singular."""
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(gram)
    return vectors * values.clamp(min=0).sqrt()


PLUGIN = TorchJD
