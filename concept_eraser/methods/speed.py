"""SPEED: concept erasure in the null space of the preserved states (arXiv 2503.07392).

The paper is Li, Wang, Hu, Jiang, Liang, Hao, Ma & Feng, "SPEED: Scalable, Precise, and Efficient
Concept Erasure for Diffusion Models". Its equations were not read here. The definition below is
that of the authors' code, train_erase_null.py of Ouxiang-Li/SPEED at commit 6d3df0c.

The columns of C are the states of n concepts, those of A the states of their anchors, and those of
K the invariants. The code divides sums over concepts by n. Each matrix W of keys or values gets the
change D W that minimises

    1/n ||(W + W D) C - W A||^2 + retain_scale ||W D||^2

over all D with rows in the span of a basis B:  W D = (...) B^T. The basis has two conditions.

* Null space (lines 114-115). B lies in the span of those eigenvectors of the mean of r r^T over
  the retained states r whose eigenvalue is below `threshold`.
* Invariants (line 117, with lamb 0): B^T K = 0. The columns of K are the start token of the empty
  prompt and three centres of its other tokens (lines 44-48).

With T = C C^T / n and R = (A C^T - C C^T) / n the minimiser is

    D = R B (B^T T B + retain_scale I)^-1 B^T

This is the code's formula with the projector P = U U^T of the eigenvectors and M = (T P +
retain_scale I)^-1:  R P (I - M K (K^T P M K)^-1 K^T P) M. A test compares both.

The retained states differ between layers. The code selects them in two steps.

* Filter (lines 91-99). Without the null space the change would be E = W R (T + I)^-1. A state
  counts if |E r| exceeds the mean over all states: it is one that the edit would change most.
* Augmentation (lines 21-32). Each of these states is copied `augmentations` times. Noise along the
  right singular vector of W with the smallest singular value is added, which W hardly reads. Copies
  count if their |E r| exceeds the mean over all copies.

Deliberate differences from the code:
* tokens: the code takes the token before the end token of a concept's name (`last`, line 65), and
  all tokens for nudity. Here `tokens` selects them as in uce.py, and each prompt is a concept.
  Retained prompts count with the tokens that cross_attention_edit.py gives.
* The basis replaces the inverse of K^T P M K, which does not exist if a retained state spans K. The
  empty prompt is always retained here. The equations are solved in float64.
* The centres come from Lloyd's algorithm with farthest points at the start, without random draws.
  The code's k-means draws its start.
* The copies are compared with the mean over all of them, not over chunks of 128 states.
* The code's `lamb`, a softer form of the invariants, is left out. Its default is 0.
* The code edits values only. Here `trainable.select` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.methods.base import LayerChange, ProjectionEdit, ProjectionRequest, Tokens
from concept_eraser.methods.uce import second_moment, solve, width_of

ROUNDS = 100  # of Lloyd's algorithm at most
CENTRES = 3  # centres of the empty prompt's tokens (line 46 of the code)
ROUNDING = 1e-9  # length of a unit vector below which it counts as outside of the null space


@dataclass(frozen=True)
class NullSpaceErasure(ProjectionEdit):
    """Map the concept to its anchor by a change that the retained states do not read.

    Args:
        threshold: Eigenvectors of the mean of r r^T with eigenvalues below it may change. It is in
            the units of squared states.
        retain_scale: The weight of the squared change of W.
        augmentations: The number of copies with noise of each retained state. With 0 the retained
            states are neither filtered nor copied, as in the code.
        filter: Whether only the states count that the edit would change most.
        invariants: Whether the start token and the centres of the empty prompt stay exactly.
        seed: Of the noise.
        tokens: As in uce.
    """

    title: ClassVar[str] = (
        "SPEED: Scalable, Precise, and Efficient Concept Erasure for Diffusion Models"
    )
    source: ClassVar[str] = "Li et al., arXiv 2503.07392"
    defaults: ClassVar[Mapping[str, str]] = {
        "threshold": "its code",
        "retain_scale": "its code (its command for ten celebrities: 0.05)",
        "augmentations": "its code",
        "filter": "its code (its command for ten celebrities: false)",
        "invariants": "its code",
        "seed": "its code",
        "tokens": "its code (for nudity: all)",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point"})
    remedy: ClassVar[str] = "use a larger retain_scale"

    threshold: float = 0.1
    retain_scale: float = 1.0
    augmentations: int = 10
    filter: bool = True
    invariants: bool = True
    seed: int = 0
    tokens: Tokens = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold <= 0 or self.retain_scale <= 0 or self.augmentations < 0:
            raise ValueError(
                "threshold and retain_scale must be > 0, augmentations >= 0; found "
                f"{self.threshold}, {self.retain_scale}, {self.augmentations}"
            )

    def change(self, request: ProjectionRequest) -> LayerChange:
        """See `ProjectionEdit.change`. The results also have `free`.

        free is the mean over the layers of the number of directions that may change, divided by
        the width.
        """
        width = width_of(request)
        n = max(len(request.forget), 1)
        moment = second_moment(request.forget, width) / n
        pull = -moment
        for c, a in zip(request.forget, request.anchor, strict=True):
            pull = pull.to(c.device) + a.double().T @ c.double() / n
        moment = moment.to(pull)
        identity = torch.eye(width, dtype=pull.dtype, device=pull.device)
        unconstrained = solve(moment + identity, pull.T).T
        retain = torch.cat([pull.new_zeros(0, width), *(r.to(pull) for r in request.retain)])
        fixed = pull.new_zeros(0, width)
        if self.invariants and request.empty is not None:
            fixed = invariant_states(request.empty.to(pull))
        changes, sizes = {}, []
        generator = torch.Generator().manual_seed(self.seed)
        for name, weight in request.layers.items():
            influence = unconstrained.T @ weight.detach().to(pull).T
            preserved = self.preserved_moment(
                retain, weight.detach().to(pull), influence, generator
            )
            basis = permitted(preserved, self.threshold)
            basis = orthogonal_part(basis, fixed)
            reduced = basis.T @ moment @ basis
            reduced += self.retain_scale * torch.eye(len(reduced), dtype=pull.dtype).to(pull)
            changes[name] = pull @ basis @ solve(reduced, basis.T) if len(reduced) else 0 * pull
            sizes.append(len(reduced) / width)
        return changes, {"free": sum(sizes) / len(sizes)}

    def preserved_moment(
        self, retain: Tensor, weight: Tensor, influence: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the mean of r r^T over the states r that count for one layer.

        A copy of a state s with noise is s + t v, where v is a unit vector. Noise of unit variance
        has the component t ~ N(0, 1) along v. So neither the copies nor their products are formed:
        |E (s + t v)|^2 = |E s|^2 + 2 t (E s) (E v) + t^2 |E v|^2.

        Args:
            retain: All retained states s [states, width] float64.
            weight: The layer's W [out, width] float64.
            influence: The transpose of E [width, out], which s multiplies from the left.
            generator: Of the noise, on the CPU; all layers share it, in their order.

        Returns:
            [width, width] float64; 0 without states.
        """
        if not self.augmentations or not len(retain):
            return retain.T.mm(retain).div(max(len(retain), 1))
        products = retain @ influence
        lengths = products.norm(dim=1)
        if self.filter:
            kept = lengths > lengths.mean()
            retain, products, lengths = retain[kept], products[kept], lengths[kept]
        direction = torch.linalg.svd(weight, full_matrices=False)[2][-1]
        direction = direction * direction[direction.abs().argmax()].sign()
        noise = torch.randn(
            len(retain), self.augmentations, generator=generator, dtype=torch.float64
        ).to(retain)
        along = direction @ influence
        squares = lengths[:, None] ** 2 + 2 * noise * (products @ along)[:, None]
        copy_lengths = (squares + noise**2 * (along @ along)).clamp(min=0).sqrt()
        counted = (copy_lengths > copy_lengths.mean()).to(retain)
        weights = 1 + counted.sum(1)
        cross = torch.outer(retain.T @ (counted * noise).sum(1), direction)
        along_moment = (counted * noise**2).sum() * torch.outer(direction, direction)
        total = (weights[:, None] * retain).T @ retain + cross + cross.T + along_moment
        return torch.div(total, weights.sum().clamp(min=1))


def permitted(moment: Tensor, threshold: float) -> Tensor:
    """Return the eigenvectors of a moment with eigenvalues below the threshold.

    Args:
        moment: The mean of r r^T over the retained states [width, width] float64.
        threshold: In the units of squared states.

    Returns:
        A basis [width, free] with orthonormal columns.

    Raises:
        ValueError: The moment is not finite.
    """
    if not torch.isfinite(moment).all():
        raise ValueError(
            "the states of the retained prompts are not finite; check the text encoder's weights"
        )
    values, vectors = torch.linalg.eigh(moment)
    free: Tensor = vectors[:, : int((values < threshold).sum())]  # eigenvalues ascend
    return free


def orthogonal_part(basis: Tensor, fixed: Tensor) -> Tensor:
    """Return a basis [width, fewer] of the vectors in the span of `basis` orthogonal to `fixed`.

    Args:
        basis: [width, free] with orthonormal columns.
        fixed: Vectors [number, width].
    """
    units = fixed / fixed.norm(dim=1, keepdim=True).clamp(min=torch.finfo(fixed.dtype).tiny)
    _, values, rows = torch.linalg.svd(units @ basis)
    rank = int((values > ROUNDING).sum())
    left: Tensor = basis @ rows[rank:].T
    return left


def invariant_states(empty: Tensor) -> Tensor:
    """Return the start token of the empty prompt and the centres of its other tokens.

    Args:
        empty: The states of the empty prompt [tokens, width].

    Returns:
        [1 + centres, width], with at most three centres.
    """
    return torch.cat([empty[:1], centres(empty[1:], min(CENTRES, len(empty) - 1))])


def centres(states: Tensor, count: int) -> Tensor:
    """Return k-means centres [count, width] of the rows, by Lloyd's algorithm.

    The first centre is the first row. Each further one is the row that is farthest from all before
    it. So equal rows give equal centres.
    """
    chosen = states[:1]
    while len(chosen) < count:
        farthest = torch.cdist(states, chosen).amin(1).argmax()
        chosen = torch.cat([chosen, states[farthest][None]])
    for _ in range(ROUNDS if count else 0):
        nearest = torch.cdist(states, chosen).argmin(1)
        members = [states[nearest == k] for k in range(count)]
        updated = torch.stack([m.mean(0) if len(m) else chosen[k] for k, m in enumerate(members)])
        if torch.equal(updated, chosen):
            break
        chosen = updated
    return chosen


PLUGIN = NullSpaceErasure
