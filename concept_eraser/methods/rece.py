"""RECE: Reliable and Efficient Concept Erasure (arXiv 2407.12383).

The paper is Gong, Chen, Wei, Chen & Jiang, "Reliable and Efficient Concept Erasure of Text-to-Image
Diffusion Models". Other states often still produce a concept that UCE erased. RECE finds them in
closed form and erases them too, in rounds. W are the original keys and values, W_k those after k
rounds (W_0: after UCE). c is a concept's state and a its anchor's:

    c' = argmin_x sum_layers ||W_k x - W c||^2 + reg ||x||^2                                (Eq. 8)
       = (sum W_k^T W_k + reg I)^-1 (sum W_k^T W) c
    W_{k+1} = the minimiser of Eq. 3 for c' with anchor a, from W_k:
              sum ||W' c' - W_k a||^2 + preserve sum ||W' p - W_k p||^2 + lamb ||W' - W_k||^2

All W_k are W times a matrix T_k of the states' width (see uce.py). So with G = sum W^T W the rounds
need G only: c' = (T^T G T + reg I)^-1 T^T G c.

The term reg ||x||^2 keeps c' short, and limits the damage of erasing it. Without this term the best
x gives W c exactly wherever T is invertible and the layers have more outputs than the states are
wide.

Deliberate differences from the paper and its public code (CharlesGong12/RECE, Eq. 8 in
utils/embedding_calculation/close_form_emb.py, Eq. 3 in erase_methods/uce.py, lines 53-109):
* The first edit and the rounds use the same weights of the sums. The paper starts from UCE's own
  checkpoints.
* The code edits all 77 tokens, paired by position. See `tokens` in uce.py for the pairs here.
* The code's other regularisations (towards an earlier target, surrogate) are left out. The paper
  has only the one above.
* The equations are solved in float64. The differences of uce.py apply too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.methods.base import ProjectionEdit, ProjectionRequest, Tokens
from concept_eraser.methods.uce import replacement, require_weights, second_moment, solve, width_of


@dataclass(frozen=True)
class ReliableEfficientErasure(ProjectionEdit):
    """UCE, then rounds that find the states that regenerate the concept, and erase these too.

    Args:
        epochs: The number of rounds after UCE.
        reg: Keeps the regenerating states short.
        erase_scale: As in uce, in every round.
        preserve_scale: As in uce, in every round.
        lamb: As in uce, in every round.
        tokens: As in uce, in every round.
    """

    title: ClassVar[str] = (
        "Reliable and Efficient Concept Erasure of Text-to-Image Diffusion Models"
    )
    source: ClassVar[str] = "Gong et al., arXiv 2407.12383"
    defaults: ClassVar[Mapping[str, str]] = {
        "epochs": "the paper, nudity (other unsafe concepts 2, styles and objects 1)",
        "reg": "the paper, nudity (styles and hard objects 1e-3)",
        "erase_scale": "its code",
        "preserve_scale": "the paper",
        "lamb": "the paper",
        "tokens": "its code",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point"})

    epochs: int = 3
    reg: float = 0.1
    erase_scale: float = 1.0
    preserve_scale: float = 0.1
    lamb: float = 0.1
    tokens: Tokens = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weights(self.erase_scale, self.preserve_scale, self.lamb)
        if self.epochs < 0 or self.reg <= 0:
            raise ValueError(f"epochs must be >= 0 and reg > 0, found {self.epochs} and {self.reg}")

    def change(self, request: ProjectionRequest) -> tuple[Tensor, Mapping[str, float]]:
        """See `ProjectionEdit.change`. The results also have back_k for each round k.

        back_k is the distance of the best c' from the concept after k rounds,
        sqrt(sum |T_k c' - c|^2 / sum |a - c|^2). At 0 the concept is regenerated exactly; at 1 it
        is as far away as the anchor.
        """
        gram, retain_moment = (
            request.gram(),
            second_moment(request.retain, width_of(request)) * self.preserve_scale,
        )
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        total = identity + replacement(
            request.forget,
            request.anchor,
            retain_moment=retain_moment,
            erase=self.erase_scale,
            lamb=self.lamb,
        )
        distances = {}
        for k in range(self.epochs + 1):
            regenerated_states = [
                states.double() @ regenerating(gram, total, self.reg).T for states in request.forget
            ]
            distances[f"back_{k}"] = _distance(gram, total, regenerated_states, request)
            if k < self.epochs:
                total = total @ (
                    identity
                    + replacement(
                        forget=regenerated_states,
                        anchor=request.anchor,
                        retain_moment=retain_moment,
                        erase=self.erase_scale,
                        lamb=self.lamb,
                    )
                )
        return total - identity, distances


def regenerating(gram: Tensor, total: Tensor, reg: float) -> Tensor:
    """Return B [width, width] with c' = B c = (T^T G T + reg I)^-1 T^T G c.

    Raises ValueError if it is not finite.
    """
    right = total.T @ gram
    return solve(
        right @ total + reg * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), right
    )


def _distance(
    gram: Tensor, total: Tensor, regenerated_states: Sequence[Tensor], request: ProjectionRequest
) -> float:
    above = below = 0.0
    for back, c, a in zip(regenerated_states, request.forget, request.anchor, strict=True):
        difference, anchor_difference = back @ total.T - c.double(), a.double() - c.double()
        above, below = (
            above + float(((difference @ gram) * difference).sum()),
            below + float(((anchor_difference @ gram) * anchor_difference).sum()),
        )
    return (above / below) ** 0.5 if below > 0 else 0.0


PLUGIN = ReliableEfficientErasure
