"""Influence unlearning: one step of the influence function with the empirical Fisher.

The influence function is Koh & Liang's (arXiv 1703.04730). The method is the baseline "IU" of
published tables (Izzo et al., AISTATS 2021; SalUn). The model was trained to theta^ on n samples,
of which m, the set U, are deleted and the others, R, are retained. l is the cross-entropy, and g_i
= grad l(z_i, theta^) for N of the retained samples. Then

    theta~ = theta^ + strength (1/N sum_i g_i g_i^T + damping I)^-1 v,
    v = 1/n sum_{z in U} grad l(z, theta^) - m / (n (n - m)) sum_{z in R} grad l(z, theta^).

Where the gradients of all samples sum to zero, v is the first sum divided by n - m.

With G [p, N] of the sampled gradients the inverse is Woodbury's, an N x N system:

    (damping I + G G^T / N)^-1 v = (v - G (N damping I + G^T G)^-1 G^T v) / damping.

Deliberate differences from the public code (OPTML-Group/Unlearn-Saliency,
Classification/unlearn/Wfisher.py, lines 47-70 and 99 on):
* The code updates two vectors for each sample, which is Woodbury's recursion for the first sample
  only. Here the system is solved.
* The labels of the empirical Fisher are those of the data. It does not approximate the Hessian
  where the model fits its data. So `natural_gradient` draws the labels from the model.
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
    """Return (damping I + G G^T / N)^-1 v for G [p, N] and v [p]."""
    n = gradients.shape[1]
    small = gradients.T @ gradients + n * damping * torch.eye(
        n, dtype=gradients.dtype, device=gradients.device
    )
    weights: Tensor = torch.linalg.solve(small, gradients.T @ v)
    return (v - gradients @ weights) / damping


@dataclass(frozen=True)
class Influence(Edit):
    """Add to the parameters what the forgotten samples had subtracted, to first order.

    Args:
        strength: The factor of the step (SalUn's alpha, 1 to 20).
        damping: Added to the diagonal of the Fisher.
        samples: N, the number of retained samples whose gradients make the Fisher. N x parameters
            numbers are stored.
        seed: Selects these samples.
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
    # both give a likelihood of labels
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
        forget, retain = (
            flatten(self._gradient(request, some, "sum"))
            for some in (request.forget, request.retain)
        )
        m, n = len(request.forget), len(request.forget) + len(request.retain)
        v = forget / n - retain * (m / (n * (n - m)))
        step = woodbury(columns, v, self.damping)
        parts = unflatten(self.strength * step, request.params)
        with torch.no_grad():
            for parameter, part in zip(request.params, parts, strict=True):
                parameter.add_(part)
        return {"step": float(norm(parts)), "samples": len(rows)}

    def _gradient(
        self, request: EditRequest, rows: tuple[int, ...] | list[int], reduction: str
    ) -> Vec:
        """Return the gradient of the cross-entropy of some samples, their mean or their sum.

        It is zero for no samples.
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
