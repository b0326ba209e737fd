"""UCE: Unified Concept Editing in Diffusion Models (arXiv 2308.14761).

The paper is Gandikota, Orgad, Belinkov, Materzynska & Bau. Keys and values of cross-attention are
linear in the text's states. Take concepts c_i with anchors a_i (the empty prompt if there is no
anchor concept), and preserved states p_j. Each such matrix W becomes the minimiser over W' of

    erase sum_i ||W' c_i - W a_i||^2 + preserve sum_j ||W' p_j - W p_j||^2 + lamb ||W' - W||^2

With R = erase sum_i (a_i - c_i) c_i^T and M = erase sum_i c_i c_i^T + preserve sum_j p_j p_j^T +
lamb I it is

    W' = W (I + R M^-1)                                                                    (Eq. 7)

R and M do not depend on W, so one matrix of the states' width serves all layers. Nothing is
generated or trained.

MACE's closed-form refinement (Mass Concept Erasure, arXiv 2403.06135) is the same problem with
other tokens. It edits the tokens beside the concept, into which the text encoder's attention has
mixed the concept. They are mapped to the same tokens of the anchor's prompt. It is the setting
`mace-cfr` (tokens: context), with UCE's weights. MACE then trains a LoRA on the concept's own
tokens, with masks of Grounded-SAM, and fuses it in closed form. The recipe `tiny_star_mace` has the
LoRA without masks and fusion; `mace-cfr` alone is one stage of MACE.

Deliberate differences from the papers and their public code (UCE: trainscripts/uce_sd_erase.py,
lines 55-82, of rohitgandikota/unified-concept-editing; MACE: closed_form_refinement in
src/cfr_utils.py, line 153, of Shilin-LU/MACE):
* tokens: which tokens of a prompt are c_i. The first code takes the token of the last word and all
  behind it (`from_last`). The present code takes the last word's token only (`last`). Both expect a
  prompt that is the concept's name. Here prompts are sentences with the name anywhere, so the
  default is `all`. `context` is MACE's.
* The equation is solved for the difference, in float64, by Cholesky. With c_i = a_i not a bit
  changes. The code inverts M in single precision.
* A concept counts for each of its prompts and tokens, as in the code: the scales multiply sums, not
  means.
* Preserved prompts are preserved with all their tokens, as in the first code (`last`: with the last
  word's token). The empty prompt always is preserved. The first code's `tensor` (the anchor without
  its part along the concept) and debiasing are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.methods.base import ProjectionEdit, ProjectionRequest, Tokens

NAMED = {"mace-cfr": {"tokens": "context"}}
SINGULAR = 1e-13  # smallest over largest eigenvalue of M at which float64 has no digit left


@dataclass(frozen=True)
class UnifiedConceptEditing(ProjectionEdit):
    """Map the keys and values of the concept to those of its anchor, by least squares.

    Args:
        erase_scale: The weight of the sum over the concepts.
        preserve_scale: The weight of the sum over the preserved states.
        lamb: The weight of the change of W.
        tokens: all, context (all but the words in which concept and anchor differ), from_last (the
            last word's token and those behind it) or last.
    """

    title: ClassVar[str] = "Unified Concept Editing in Diffusion Models"
    source: ClassVar[str] = "Gandikota et al., arXiv 2308.14761"
    defaults: ClassVar[Mapping[str, str]] = {
        "erase_scale": "its code",
        "preserve_scale": "its present code (the first: 0.1)",
        "lamb": "its present code (the first: 0.1)",
        "tokens": "ours (its code: last, the first: from_last; MACE: context)",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point", "exact_on_quadratics"})

    erase_scale: float = 1.0
    preserve_scale: float = 1.0
    lamb: float = 0.5
    tokens: Tokens = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weights(self.erase_scale, self.preserve_scale, self.lamb)

    def change(self, request: ProjectionRequest) -> tuple[Tensor, Mapping[str, float]]:
        retain_moment = second_moment(request.retain, width_of(request)) * self.preserve_scale
        return replacement(
            request.forget,
            request.anchor,
            retain_moment=retain_moment,
            erase=self.erase_scale,
            lamb=self.lamb,
        ), {}


def require_weights(erase: float, preserve: float, lamb: float) -> None:
    """Raise ValueError for weights that define no least-squares problem."""
    if erase <= 0 or preserve < 0 or lamb < 0:
        raise ValueError(
            f"erase_scale must be > 0, preserve_scale and lamb >= 0; found {erase}, "
            f"{preserve}, {lamb}"
        )


def width_of(request: ProjectionRequest) -> int:
    """Return the width of the states. Raises ValueError if it differs between layers and states."""
    widths = {w.shape[1] for w in request.layers.values()} | {
        s.shape[1] for s in (*request.forget, *request.anchor, *request.retain)
    }
    if len(widths) != 1:
        raise ValueError(
            f"layers and states must have one width, found {sorted(widths) or 'no layers'}"
        )
    return widths.pop()


def second_moment(states: Sequence[Tensor], width: int) -> Tensor:
    """Return the sum of s s^T over all rows s: [width, width] float64."""
    total = torch.zeros(
        width, width, dtype=torch.float64, device=states[0].device if states else None
    )
    for rows in states:
        total += rows.double().T @ rows.double()
    return total


def replacement(
    forget: Sequence[Tensor],
    anchor: Sequence[Tensor],
    retain_moment: Tensor,
    erase: float,
    lamb: float,
) -> Tensor:
    """Return D = R M^-1 [width, width] float64, so that W (I + D) is the minimiser.

    retain_moment: preserve sum_j p_j p_j^T. Raises ValueError if M is singular (lamb is 0, and the
    states do not span the space), or if the states are not finite.
    """
    retain_moment = retain_moment.to(forget[0].device) if forget else retain_moment
    pull, moment = (
        torch.zeros_like(retain_moment),
        retain_moment
        + lamb
        * torch.eye(len(retain_moment), dtype=retain_moment.dtype, device=retain_moment.device),
    )
    for c, a in zip(forget, anchor, strict=True):
        c, a = c.double(), a.double()
        pull += erase * (a - c).T @ c
        moment += erase * c.T @ c
    return solve(moment, pull.T).T


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Return matrix^-1 right for a symmetric positive definite matrix [width, width].

    Raises ValueError for any other matrix.
    """
    if not (torch.isfinite(matrix).all() and torch.isfinite(right).all()):
        raise ValueError(
            "the states of the prompts are not finite, so there is nothing to solve; "
            "check the text encoder's weights"
        )
    spectrum = torch.linalg.eigvalsh(matrix)
    if not float(spectrum[0]) > SINGULAR * float(spectrum[-1]):
        raise ValueError(
            "the prompts leave directions of the states undetermined (eigenvalues of M "
            f"from {float(spectrum[0]):.1e} to {float(spectrum[-1]):.1e}); give a larger "
            "lamb"
        )
    return torch.cholesky_solve(right, torch.linalg.cholesky(matrix))


PLUGIN = UnifiedConceptEditing
