"""Any combination rule of TorchJD by name: UPGrad, MGDA, CAGrad, IMTL-G, PCGrad, DualProj, Nash-MTL and others.

TorchJD (Quinton & Rey, arXiv 2406.16232, https://torchjd.org) keeps these rules well, so they are not written again
here. A rule is asked for weights on the Gram matrix. Where TorchJD has only the form that takes the Jacobian, it is
given the factor L of G G^T = L L^T, whose rows have the same inner products; that is right for the rules that do not
look at single coordinates, and the others (GradDrop, TrimmedMean) are refused.

TorchJD (MIT) is not installed with concept_eraser: its solvers quadprog (GPL), qpsolvers (LGPL) and ecos (GPL) are
copyleft, so they come with `concept-eraser[torchjd]` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from concept_eraser.methods.base import GramMethod, usable

Rule = Literal["UPGrad", "MGDA", "CAGrad", "IMTLG", "PCGrad", "DualProj", "AlignedMTL", "GradVac", "ConFIG", "NashMTL", "Mean", "Sum"]  # fmt: skip
_QUADPROG = "One of them, quadprog, is under the GPL; without it the method munba needs no solver"
_SOLVERS = {
    "CAGrad": "This rule also needs cvxpy: pip install 'torchjd[cagrad]'",
    "NashMTL": "This rule also needs cvxpy and ecos, which is under the GPL: pip install 'torchjd[nash-mtl]'",
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "CAGrad": {"c": 0.4},  # the value of CAGrad's paper (arXiv 2110.14048, section 5)
    "NashMTL": {"max_norm": 0.0, "optim_niter": 100},
}


@dataclass(frozen=True)
class TorchJD(GramMethod):
    """rule: a rule of torchjd.aggregation. A player whose gradient is zero or not finite is left out."""

    title: ClassVar[str] = "TorchJD: Jacobian descent for multi-objective optimization"
    source: ClassVar[str] = "arXiv 2406.16232"
    defaults: ClassVar[Mapping[str, str]] = {
        "rule": "the default of arXiv 2406.16232",
    }

    rule: Rule = "UPGrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._rule(2)
        except ImportError as error:
            raise ValueError(
                f"the method torchjd with rule {self.rule} needs TorchJD and its solvers, which "
                f"cannot be imported here ({error}); install them with: pip install "
                f"'concept-eraser[torchjd]'. {_SOLVERS.get(self.rule, _QUADPROG)}"
            ) from None

    def laws(self) -> frozenset[str]:
        return frozenset({"stationarity"}) if self.rule == "MGDA" else frozenset()  # UPGrad regularises its program

    def solve(self, gram: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        alive = usable(gram)
        weights = torch.zeros(len(gram), dtype=torch.float64)
        players = alive.nonzero().flatten()
        if len(players) == 1:
            weights[players] = 1.0
        elif len(players):
            weights[players] = self._ask(gram.double()[players][:, players])
        return weights, {"degenerate": int(len(players) < len(gram))}

    def _ask(self, gram: Tensor) -> Tensor:
        scale = gram.diagonal().max()  # the rules' own tolerances suppose gradients of ordinary length
        rule = self._rule(len(gram))
        if type(rule).__name__ == self.rule:
            factor = _factor(gram / scale)
            return torch.linalg.lstsq(factor.T, rule(factor)[:, None], driver="gelsd").solution[:, 0]
        return rule(gram / scale)

    def _rule(self, players: int) -> Any:
        """TorchJD's weighting, which asks for the Gram matrix, or else its aggregator, which asks for the Jacobian."""
        import torchjd.aggregation as rules

        options = dict(_OPTIONS.get(self.rule, {}))
        if self.rule == "NashMTL":
            options["n_tasks"] = players
        return getattr(rules, f"{self.rule}Weighting", getattr(rules, self.rule))(**options)


def _factor(gram: Tensor) -> Tensor:
    """L [m, m] with L L^T = G G^T, also where that is singular."""
    values, vectors = torch.linalg.eigh(gram)
    return vectors * values.clamp(min=0).sqrt()


PLUGIN = TorchJD
