"""Selective synaptic dampening: shrink the weights that matter most to the forgotten examples.

The paper is arXiv 2308.07707. The importance of a weight is the diagonal of the empirical Fisher
matrix, with l the cross-entropy, for all examples D and for the forgotten examples D_f:

    F_S = 1/|S| sum_{(x, y) in S} (grad l(f(x), y))^2

Selection and dampening, weight by weight, without training:

    where F_{D_f} > alpha F_D:   theta <- beta theta,   beta = min(lambda F_D / F_{D_f}, 1).

The factor is at most 1, and below lambda/alpha: where alpha >= lambda all selected weights shrink.
Multiplying the loss by a constant changes nothing.

D contains D_f, so F_D >= |D_f|/|D| F_{D_f} for every weight. So **alpha >= |D|/|D_f| selects
nothing**: the paper's alpha of 10 is the bound for one class of ten. Such an alpha is refused.

The authors' code (github.com/if-loops/selective-synaptic-dampening) does not have this bound. It
squares the mean gradient of a batch of 64 examples, in which the gradients of one class add up and
those of many cancel. Both are available: `batch: 1`, the default, is the equation, and `batch: 64`
the code (src/ssd.py, lines 151-217). Deliberate differences from the code:
* The last, smaller batch counts by its number of examples. The code counts it like a full one.
* The forgotten examples come in the order of the data, all examples in one random order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.methods.base import Edit, EditRequest
from concept_eraser.methods.vectors import Vec


def factors(everything: Tensor, forget: Tensor, alpha: float, lamb: float) -> Tensor:
    """Return the factor of each weight from its importances for all and for the forgotten examples.

    It is 1 for a weight that is not selected.
    """
    is_selected = forget > alpha * everything
    return torch.where(
        is_selected, (lamb * everything / torch.where(is_selected, forget, 1.0)).clamp(max=1.0), 1.0
    )


@dataclass(frozen=True)
class SelectiveDampening(Edit):
    """Shrink the weights that matter more to the forgotten examples than to all.

    Args:
        alpha: How much more a weight must matter to the forgotten examples to be selected.
        lamb: lambda, the strength. A smaller value shrinks more.
        batch: The number of examples whose mean gradient is squared. 1 is the Fisher matrix, 64 the
            authors' code.
        seed: The order of all examples, for a batch above 1.
    """

    title: ClassVar[str] = (
        "SSD (Fast Machine Unlearning Without Retraining Through Selective Synaptic Dampening)"
    )
    source: ClassVar[str] = "arXiv 2308.07707"
    defaults: ClassVar[Mapping[str, str]] = {
        "alpha": "the paper",
        "lamb": "the paper",
        "batch": "the paper (the authors' code: 64)",
        "seed": "ours",
    }
    # both give a likelihood of labels
    targets: ClassVar[tuple[str, ...] | None] = ("classifier", "clip")
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point"})

    alpha: float = 10.0
    lamb: float = 1.0
    batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha <= 0 or self.lamb <= 0 or self.batch < 1:
            raise ValueError(
                f"alpha and lamb must be > 0 and batch >= 1, found {self.alpha}, "
                f"{self.lamb}, {self.batch}"
            )

    def edit(self, request: EditRequest) -> Mapping[str, float]:
        """See `Edit.edit`. Returns the share of selected weights, and their mean factor."""
        rows = [*request.forget, *request.retain]
        alpha_limit = len(rows) / max(1, len(request.forget))
        if self.batch == 1 and request.forget and self.alpha >= alpha_limit:
            raise ValueError(
                f"alpha {self.alpha:g} selects no weight: with {len(request.forget)} of "
                f"{len(rows)} examples to be forgotten no weight can matter to them more "
                f"than {alpha_limit:.3g} times as much as to all; use a smaller alpha (half of "
                "that, say), or batch: 64 like the authors' code"
            )
        order = torch.randperm(
            len(rows), generator=torch.Generator().manual_seed(self.seed)
        ).tolist()
        forget_importance, all_importance = (
            self.importance(request, request.forget),
            self.importance(request, [rows[i] for i in order]),
        )
        selected_count, total = 0, 0.0
        with torch.no_grad():
            for parameter, of_all, of_some in zip(
                request.params, all_importance, forget_importance, strict=True
            ):
                is_selected = of_some > self.alpha * of_all
                factor = factors(of_all, of_some, self.alpha, self.lamb)
                parameter.mul_(factor)
                selected_count, total = (
                    selected_count + int(is_selected.sum()),
                    total + float(factor[is_selected].sum()),
                )
        size = sum(p.numel() for p in request.params)
        return {
            "selected": selected_count / size,
            "factor": total / selected_count if selected_count else 1.0,
        }

    def importance(self, request: EditRequest, rows: Sequence[int]) -> Vec:
        """Return F_S of some examples.

        It is the mean of the squared mean gradients of batches of `batch` examples, weighted by
        their sizes.
        """
        total = tuple(torch.zeros_like(p) for p in request.params)
        for start in range(0, len(rows), self.batch):
            batch_rows = rows[start : start + self.batch]
            mean = tuple(torch.zeros_like(p) for p in request.params)
            # in parts, where they are more than training.batch_size
            for x, y in request.batches(batch_rows):
                loss = F.cross_entropy(request.model(x), y, reduction="sum") / len(batch_rows)
                parts = torch.autograd.grad(
                    loss, request.params, allow_unused=True, materialize_grads=True
                )
                mean = tuple(a + b for a, b in zip(mean, parts, strict=True))
            total = tuple(
                a + len(batch_rows) / len(rows) * b.square()
                for a, b in zip(total, mean, strict=True)
            )
        return total


PLUGIN = SelectiveDampening
