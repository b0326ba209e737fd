"""Influence unlearning: one step of the influence function with the empirical Fisher (Koh & Liang,
arXiv 1703.04730).

The baseline "IU" of the field's tables (Izzo et al., AISTATS 2021; SalUn). For a model trained to
theta^ on n samples of which m are deleted, with l the cross-entropy and g_i = grad l(z_i, theta^)
of N of the retained samples,

    theta~ = theta^ + strength (1/N sum_i g_i g_i^T + damping I)^-1  1/(n - m) sum_{z in U} grad
    l(z, theta^).

With G [p, N] of the sampled gradients the inverse is Woodbury's, an N x N system:

    (damping I + G G^T / N)^-1 v = (v - G (N damping I + G^T G)^-1 G^T v) / damping.

Deliberate differences from the public code (SalUn's `wfisher`): it updates two vectors a sample,
which is Woodbury's recursion only for the first sample; here the system is solved. Labels of the
empirical Fisher are the data's: it is no approximation of the Hessian where the model fits its
data, which is why `natural_gradient` draws them from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.methods.base import Edit, EditRequest
from concept_eraser.methods.fisher import flatten, unflatten
from concept_eraser.methods.vectors import Vec, norm


def woodbury(gradients: Tensor, v: Tensor, damping: float) -> Tensor:
    """(damping I + G G^T / N)^-1 v for G [p, N] and v [p]."""
    n = gradients.shape[1]
    small = gradients.T @ gradients + n * damping * torch.eye(
        n, dtype=gradients.dtype, device=gradients.device
    )
    weights: Tensor = torch.linalg.solve(small, gradients.T @ v)
    return (v - gradients @ weights) / damping


@dataclass(frozen=True)
class Influence(Edit):
    """Add what the forgotten samples had taken away, to first order.

    strength: factor of the step (SalUn's alpha, 1 to 20). damping: added to the Fisher. samples: N,
    the retained samples whose gradients make it (N x parameters numbers are kept). seed: which.
    """

    title: ClassVar[str] = (
        "Influence unlearning (Understanding Black-box Predictions via Influence Functions)"
    )
    source: ClassVar[str] = "arXiv 1703.04730"
    defaults: ClassVar[Mapping[str, str]] = {
        "strength": "the method itself",
        "damping": "ours",
        "samples": "ours",
        "seed": "ours",
    }
    # both say how probable a label is
    targets: ClassVar[tuple[str, ...] | None] = ("classifier", "clip")
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point"})

    strength: float = 1.0
    damping: float = 0.1
    samples: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.damping <= 0 or self.samples < 1:
            raise ValueError(
                f"damping must be > 0 and samples >= 1, found {self.damping}, {self.samples}"
            )

    def edit(self, request: EditRequest) -> Mapping[str, float]:
        order = torch.randperm(
            len(request.retain), generator=torch.Generator().manual_seed(self.seed)
        )
        rows = [request.retain[int(i)] for i in order[: self.samples]]
        columns = torch.stack([flatten(self._gradient(request, [row], "mean")) for row in rows], 1)
        gradient = self._gradient(request, request.forget, "sum")
        step = woodbury(columns, flatten(gradient) / len(request.retain), self.damping)
        parts = unflatten(self.strength * step, request.params)
        with torch.no_grad():
            for parameter, part in zip(request.params, parts, strict=True):
                parameter.add_(part)
        return {"step": float(norm(parts)), "samples": len(rows)}

    def _gradient(
        self, request: EditRequest, rows: tuple[int, ...] | list[int], reduction: str
    ) -> Vec:
        """The gradient of the cross-entropy of some samples, their mean or their sum; zero for
        none.
        """
        total = tuple(torch.zeros_like(p) for p in request.params)
        for x, y in request.batches(rows) if len(rows) else ():
            loss = F.cross_entropy(request.model(x), y, reduction=reduction)
            parts = torch.autograd.grad(
                loss, request.params, allow_unused=True, materialize_grads=True
            )
            total = tuple(a + b for a, b in zip(total, parts, strict=True))
        return total


PLUGIN = Influence
