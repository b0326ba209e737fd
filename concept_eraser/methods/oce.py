"""OCE: concept erasure by a rotation of the values (arXiv 2605.28902).

The paper is Sun, Yu, Xu, Miao, Xu & Xie, "Orthogonal Concept Erasure for Diffusion Models". Of the
paper only the abstract was read here, and a summary by others. The definition below is that of the
authors' code, oce.py (lines 12-40, 85-89, 102-123) and compute_Cg.py of HansSunY/OCE at commit
2609f3e.

Each matrix W of values becomes R W with a rotation R. So each value vector keeps its length, and
any two keep their angle. The columns of E are an orthonormal basis of the values W c / |W c| of the
concepts c, those of G one of the values of their anchors. N = I - G G^T removes what lies in the
span of G. The states s are those of ordinary prompts. R minimises over all rotations

    erase_scale ||R N E + E||^2 + preserve_scale mean_s |R W s - W s|^2 + lamb ||R W - W||^2

The first term turns the part of the concepts that the anchors lack to the opposite of the concepts.
The lengths of R N E, R W s and R W do not depend on R. What remains is linear in R, which makes it
the orthogonal Procrustes problem: R maximises tr(R^T M) with

    M = - erase_scale E E^T N + W (preserve_scale mean_s s s^T + lamb I) W^T

For M = U S V^T the best orthogonal matrix is U V^T. If its determinant is -1, the best rotation is
U diag(1, ..., 1, -1) V^T, where the last singular value is the smallest (Kabsch).

All columns of W, E and G lie in the span of Q, for W = Q S H^T. So does the problem: R is Q r Q^T
in that span, and it does not matter outside of it. If a layer has more outputs than W has
independent columns, a direction outside turns a reflection r into a rotation R. So r may be
any orthogonal matrix there. As every edit here this one is W (I + D), D = H S^-1 (r - I) S H^T.

The summary prints the first term as -||R E E^T - N||^2, without lamb. Its minimiser turns E away
from N E, where the code turns N E away from E. With equal other terms it is R^T.

Deliberate differences from the code:
* The code's QR returns as many columns as there are vectors. For vectors that depend on each other,
  such as the guide that its celebrity commands repeat a hundred times, most are directions of
  rounding errors. Here dependent vectors count once.
* `rank` keeps the leading directions of the unit vectors only. The code has a few names. The values
  of many sentences span all directions, and so do those of their anchors: N is 0 then.
* For a determinant of -1 the code negates the last column of U V^T (lines 121-122). This equals a
  change of the sign of W's last row before the rotation, and is no minimiser.
* The states s are those of the retain set and of the empty prompt, with the tokens that
  cross_attention_edit.py gives. The code takes all tokens but the padding of captions of COCO.
* The code adds the sum of W k (W k)^T over preserved names k, with a weight of its own (0 for
  objects and nudity). Here such names are retained prompts, and count in the mean.
* Each prompt has its own anchor. The code cuts the list of guides, or lengthens it at random.
* The code edits values only, the summary has keys too. Here `trainable.select` decides. The
  equations are solved in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.methods.base import LayerChange, ProjectionEdit, ProjectionRequest, Tokens
from concept_eraser.methods.uce import require_weights, second_moment, width_of

ROUNDING = 1e-9  # singular values below it, relative to the largest, count as 0


@dataclass(frozen=True)
class OrthogonalErasure(ProjectionEdit):
    """Rotate the values so that the concept's part that its anchor lacks is reversed.

    Args:
        erase_scale: The weight of the reversal, in the units of squared values.
        preserve_scale: The weight of the mean over the retained states.
        lamb: The weight of the change of W.
        rank: The largest number of directions of the concepts, and of the anchors. 0 for all.
        tokens: As in uce.
    """

    title: ClassVar[str] = "Orthogonal Concept Erasure for Diffusion Models"
    source: ClassVar[str] = "Sun et al., arXiv 2605.28902"
    defaults: ClassVar[Mapping[str, str]] = {
        "erase_scale": "its command for objects (styles: 500, nudity: 3000)",
        "preserve_scale": "its command for objects (nudity: 20)",
        "lamb": "its commands",
        "rank": "its code",
        "tokens": "its code",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point"})

    erase_scale: float = 2000.0
    preserve_scale: float = 10.0
    lamb: float = 10.0
    rank: int = 0
    tokens: Tokens = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weights(self.erase_scale, self.preserve_scale, self.lamb)
        if self.rank < 0:
            raise ValueError(f"rank must be >= 0 (0: all), found {self.rank}")

    def change(self, request: ProjectionRequest) -> LayerChange:
        """See `ProjectionEdit.change`. The results also have `overlap`.

        overlap is the mean over the layers of tr(E^T R N E) / tr(E^T N E). It is 1 without a
        rotation, and negative where the concepts' part points away from the concepts.
        """
        width = width_of(request)
        moment = second_moment(request.retain, width)
        moment *= self.preserve_scale / max(sum(map(len, request.retain)), 1)
        moment += self.lamb * torch.eye(width, dtype=moment.dtype, device=moment.device)
        changes, overlaps = {}, []
        for name, weight in request.layers.items():
            outputs, sizes, inputs = image_of(weight.detach().double())
            concept, anchor = (
                leading_basis([s.to(inputs) @ inputs.T * sizes for s in states], self.rank)
                for states in (request.forget, request.anchor)
            )
            own = concept - anchor @ (anchor.T @ concept)
            changes[name] = torch.zeros(width, width, dtype=inputs.dtype, device=inputs.device)
            if float(own.norm()) <= ROUNDING:
                continue
            values = sizes[:, None] * inputs
            matrix = values @ moment.to(values) @ values.T
            matrix -= self.erase_scale * concept @ own.T
            turned = closest_turn(matrix, reflections=len(outputs) > len(sizes))
            overlaps.append(float((concept * (turned @ own)).sum() / own.square().sum()))
            identity = torch.eye(len(sizes), dtype=inputs.dtype, device=inputs.device)
            changes[name] = (inputs.T / sizes) @ (turned - identity) @ values
        if request.forget and not overlaps:
            raise ValueError(
                "the values of the anchors span those of the concepts, so there is nothing to "
                "erase; give fewer prompts, another anchor or a smaller rank"
            )
        return changes, {"overlap": sum(overlaps) / max(len(overlaps), 1)}


def image_of(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q [out, k], S [k] and H [k, width] with W = Q diag(S) H for a W of rank k.

    The rank is that in fp32, in which weights are stored: an earlier edit may have left a direction
    with rounding errors alone.

    Raises ValueError if W is not finite.
    """
    require_finite(weight)
    outputs, sizes, inputs = torch.linalg.svd(weight, full_matrices=False)
    precision = torch.finfo(torch.float32).eps * max(weight.shape)
    rank = int((sizes > precision * sizes.max()).sum())
    return outputs[:, :rank], sizes[:rank], inputs[:rank]


def leading_basis(vectors: Sequence[Tensor], rank: int) -> Tensor:
    """Return the leading orthonormal directions of unit vectors.

    Args:
        vectors: Rows [n, k] of any lengths. Rows of 0 do not count.
        rank: The largest number of directions; 0 for all that the rows span.

    Returns:
        [k, directions]. Without rows there are none.
    """
    if not vectors:
        return torch.zeros(0, 0)
    rows = torch.cat(list(vectors))
    require_finite(rows)
    lengths = rows.norm(dim=1, keepdim=True)
    rows = (rows / lengths)[lengths[:, 0] > 0]
    sizes, directions = torch.linalg.svd(rows, full_matrices=False)[1:]
    count = int((sizes > ROUNDING * sizes[:1]).sum())
    basis: Tensor = directions[: min(count, rank or count)].T
    return basis


def closest_turn(matrix: Tensor, reflections: bool) -> Tensor:
    """Return the rotation r that maximises tr(r^T M): [k, k].

    Args:
        matrix: M [k, k].
        reflections: Whether r may also have the determinant -1.

    Raises:
        ValueError: M is not finite, or several rotations are equally good.
    """
    require_finite(matrix)
    left, sizes, right = torch.linalg.svd(matrix)
    turned: Tensor = left @ right
    gap = float(sizes[-1])  # it is 0 if the maximiser is not unique
    if not reflections:
        sign = float(torch.linalg.det(turned).sign())
        turned = turned + (sign - 1) * torch.outer(left[:, -1], right[-1])
        gap = float(sizes[-2]) + sign * gap if len(sizes) > 1 else math.inf
    if not gap > ROUNDING * float(sizes[0]):
        raise ValueError(
            "the prompts leave the rotation undetermined (singular values of M from "
            f"{float(sizes[-1]):.1e} to {float(sizes[0]):.1e}); give a larger lamb"
        )
    return turned


def require_finite(values: Tensor) -> None:
    """Raise ValueError for values that are not finite."""
    if not torch.isfinite(values).all():
        raise ValueError(
            "the states of the prompts or the weights are not finite, so there is nothing to "
            "solve; check the text encoder's weights"
        )


PLUGIN = OrthogonalErasure
