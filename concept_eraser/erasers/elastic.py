"""Elastic weights (Selective Amnesia, EWC): a penalty on changes of the weights that matter.

The penalty is Eq. 5 of Heng & Soh, "Selective Amnesia: A Continual Learning Approach to Forgetting
in Deep Generative Models" (arXiv 2305.10120). It is elastic weight consolidation (arXiv
1612.00796), which preserves more than replayed examples alone:

    lambda / 2 sum_i F_i (theta_i - theta*_i)^2,
    F_i = mean over examples of (d loss / d theta_i)^2 at theta*

F is the diagonal of the empirical Fisher information: squares of the gradients of single examples,
not of their mean.

Differences: the paper computes F on images of all concepts; here it is computed on the objective's
own images. The public code adds the gradients of all 1000 time steps of an image before it squares
them, and leaves out the 1/2. Here the gradient of one time step and one noise is squared. The
code's lambda is about lambda / (2 x 1000^2) of the one here, or less, since single time steps add
to the square.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def fisher(losses: Iterable[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean of the squared gradients of some losses: a tensor for every parameter.

    Each loss is that of one example.
    """
    total, n = [torch.zeros_like(p) for p in params], 0
    for loss in losses:
        for mean, part in zip(
            total,
            torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True),
            strict=True,
        ):
            mean.add_(part.square())
        n += 1
    return [part.div_(max(n, 1)) for part in total]


def penalty(
    params: Sequence[Tensor], originals: Sequence[Tensor], importance: Sequence[Tensor]
) -> Tensor:
    """Return 1/2 sum_i F_i (theta_i - theta*_i)^2."""
    parts = [
        (f * (p - o).square()).sum() for p, o, f in zip(params, originals, importance, strict=True)
    ]
    return 0.5 * torch.stack(parts).sum()
