"""The weights that the forgotten data depend on most.

Either only they are trained (SalUn), or they are reinitialised (Scissorhands). Both use the
gradient g of the model's training loss on the forget set, at the original weights theta and over 8
draws. The forget loss of the recipe does not matter. Only an objective without images
(`images: free`, or a loss on text embeddings) has no training loss; g is then that of its own loss.

* salient     1 for the share of weights with the largest |g| (SalUn, arXiv 2310.12508, Eq. 3-4)
* start_anew  the share with the largest |g theta|, the connection sensitivity (SNIP), is drawn anew
              (Scissorhands, arXiv 2401.06187, section 3.1)

SalUn's paper names the loss of gradient ascent, which has the same |g|. So have its codes:
OPTML-Group/Unlearn-Saliency, Classification/generate_mask.py and SD/train-scripts/generate_mask.py,
lines 58-64.

Differences: the papers use the whole forget set for g. For Stable Diffusion SalUn's code takes the
training loss of the prediction with guidance, 1 + w times the conditional one less w times the
unconditional one. Here it is that of the conditional prediction. Scissorhands' code draws from
Kaiming's uniform distribution, and for classifiers in the last layers only. Here all tensors are
drawn anew, from a normal with the mean and the standard deviation of each. Its code then takes the
gradient of the retain loss minus that of the forget loss, and turns it where it opposes the ascent
(JingWu321/Scissorhands_ex, Classification/unlearn/SHs/SHs_cls0_svhn.py, lines 161-243). The studies
have PCGrad in its place, and call their row so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.erasers.base import Eraser
from concept_eraser.training.closure import LossClosure, Reduce
from concept_eraser.training.first_draws import micro_batch_seeds
from concept_eraser.utils.provenance import derive_seed


def sensitivity(
    eraser: Eraser,
    params: Mapping[str, nn.Parameter],
    *,
    seed: int,
    batch_size: int,
    micro_batches: int = 1,
    reduce: Reduce,
) -> list[Tensor]:
    """Return the gradient of the training loss on the forget set, one tensor for each parameter.

    It is taken at the present weights, and is the same for a resumed run. With several concepts it
    is their sum, also if they take turns.

    Args:
        eraser: The eraser.
        params: Its trained parameters by name.
        seed: The seed of the training, from which the draws are derived.
        batch_size: The examples of a micro-batch.
        micro_batches: The micro-batches of a draw. The examples of a draw do not depend on how it
            is divided.
        reduce: Takes the mean over the ranks.
    """
    seeds = micro_batch_seeds(seed, "saliency", batch_size=batch_size, micro_batches=micro_batches)
    total: list[Tensor] = []
    eraser.turn(None)

    def piece(concept: str, draw: Any) -> Tensor:
        return eraser.training_loss(concept, draw) / len(seeds)

    for concept in eraser.concepts:
        pieces = [partial(piece, concept, eraser.draw(concept, some)) for some in seeds]
        closure = LossClosure(tuple(params.values()), {concept: pieces}, reduce=reduce)
        gradient = closure.grad(concept)
        total = [a + b for a, b in zip(total, gradient, strict=True)] if total else list(gradient)
    return total


def salient(
    gradient: Mapping[str, Tensor], share: float, *, whole: Sequence[str] = ()
) -> dict[str, Tensor | None]:
    """Return 1 where |gradient| is among the largest, else 0. A weight without gradient has 0.

    The down matrices of a LoRA have no gradient at the start, where up is 0. They are not ranked
    but trained whole. The share is then that of the up matrices.

    Args:
        gradient: The gradient of each parameter by its name.
        share: The share of the ranked entries, over all tensors together.
        whole: The names of parameters that are not ranked. They have None.
    """
    unranked = set(whole)
    ranked = {name: g for name, g in gradient.items() if name not in unranked}
    masks = dict(zip(ranked, _largest([g.abs() for g in ranked.values()], share), strict=True))
    return {
        name: masks[name].to(g.dtype) if name in masks else None for name, g in gradient.items()
    }


@torch.no_grad()
def start_anew(
    params: Mapping[str, nn.Parameter], gradient: list[Tensor], share: float, seed: int
) -> int:
    """Draw the most sensitive weights anew, in place. Returns their number."""
    masks = _largest([(g * p).abs() for g, p in zip(gradient, params.values(), strict=True)], share)
    for (name, parameter), mask in zip(params.items(), masks, strict=True):
        generator = torch.Generator().manual_seed(derive_seed(seed, "start anew", name))
        spread = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
        fresh = parameter.mean() + spread * torch.randn(parameter.shape, generator=generator).to(
            parameter
        )
        parameter.copy_(torch.where(mask, fresh, parameter))
    return sum(int(mask.sum()) for mask in masks)


def _largest(scores: list[Tensor], share: float) -> list[Tensor]:
    """Return True for the share of all entries with the largest scores, over all tensors together.

    An entry with a score of 0 is never among them.
    """
    every = torch.cat([score.flatten() for score in scores])
    count = max(1, round(share * len(every)))
    least = every.kthvalue(len(every) - count + 1).values
    return [(score >= least) & (score > 0) for score in scores]
