"""The losses of one step, on fixed draws and averaged over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from concept_eraser.erasers.base import Draw, Eraser
from concept_eraser.methods.base import Direction, HessianProduct, NoSecondDerivative
from concept_eraser.methods.vectors import (
    Vec,
    clip,
    fetch,
    gramian_and_scalars,
    has_finite_sums,
    norm,
    scaled_difference,
)
from concept_eraser.training.projection import without
from concept_eraser.utils.errors import UserError

Piece = Callable[[], Tensor]
Reduce = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # the mean of each tensor over the ranks
# the loss and the gradient of each objective at the present params, from one pass; {} if they need
# a pass for each objective
Joint = Callable[[], Mapping[str, tuple[Tensor, list[Tensor]]]]


class NoExactProduct(UserError, NoSecondDerivative):
    """The same for methods and for users."""


class LossClosure:
    """The gradients and Hessian products that a method needs.

    Args:
        params: The trainable parameters.
        losses: For each objective the parts whose sum is its loss, as functions without arguments
            that read the present `params`.
        terms: The number of terms in the mean of an objective's loss.
        step: The number of the step, from 0.
        inner: The positions in `params` of the variable of a lower-level problem (an attack).
        mask: For each parameter 1 where it is trained and 0 elsewhere, or None. Methods get masked
            gradients, so every inner product is one of the trained weights.
        bases: For each parameter the columns [in, k] that its gradient must be orthogonal to, or
            None (projection.py). Methods get projected gradients, after the mask.
        reduce: Averages tensors over the ranks.
        frees_weights: Whether weights are freed between the passes, so that no exact Hessian
            product is possible (training.shard: weights).
        clip: The largest norm of the gradients that `grad` returns of all parameters, or None.
        joint: Computes the gradients of all objectives at once (one_pass.py), or None. It is used
            for the first gradient of each objective, if the parameters have not changed since.

    The graph of one part is freed before the next is built, which saves memory with micro-batches.
    The combination of gradients is not linear. So each gradient is summed over all parts, and
    averaged over ranks, before a method gets it. `torch.autograd.grad` does not use DDP's reducer.

    For the log, the attribute `losses` has the first loss computed of each objective, `last_loss`
    the last one, and `clipped` the number of gradients that were scaled down. Losses stay on the
    device until one of these attributes, `gramian` or `is_finite` reads them, since the host waits
    for that.
    """

    def __init__(
        self,
        params: Vec,
        losses: Mapping[str, Sequence[Piece]],
        *,
        terms: Mapping[str, int] | None = None,
        step: int = 0,
        inner: Sequence[int] = (),
        mask: Sequence[Tensor | None] | None = None,
        bases: Sequence[Tensor | None] | None = None,
        reduce: Reduce = list,
        frees_weights: bool = False,
        clip: float | None = None,
        joint: Joint | None = None,
    ) -> None:
        self.clipped = 0
        self._joint = joint
        self._ready: dict[str, tuple[Tensor, list[Tensor]]] = {}
        self._versions: list[int] = []  # of the parameters that `_ready` belongs to
        self._clip = clip
        self.mask = mask if mask is not None else [None] * len(params)
        self.bases = bases if bases is not None else [None] * len(params)
        self.objectives = tuple(losses)
        self.params = params
        self.step = step
        self.inner = tuple(inner)
        self._first_losses: dict[str, Tensor] = {}
        self._last_loss: Tensor | None = None
        self._losses: dict[str, float] = {}  # those that were read
        self._pieces, self._terms, self._reduce = losses, terms or {}, reduce
        self._frees_weights = frees_weights

    def terms(self, objective: str) -> int:
        return self._terms.get(objective, 1)

    @property
    def losses(self) -> dict[str, float]:
        if self._losses.keys() != self._first_losses.keys():
            values = fetch(list(self._first_losses.values()))
            self._losses = dict(zip(self._first_losses, values, strict=True))
        return dict(self._losses)

    @property
    def last_loss(self) -> float:
        return float("nan") if self._last_loss is None else float(self._last_loss)

    def gramian(self, gradients: Sequence[Vec]) -> Tensor:
        """Return all inner products of m gradients, and read the losses computed so far."""
        gram, values = gramian_and_scalars(gradients, list(self._first_losses.values()))
        self._losses = dict(zip(self._first_losses, values, strict=True))
        return gram

    def is_finite(self, direction: Direction) -> bool:
        """Whether the losses and all entries of a direction are finite.

        A direction with a bound is not read. Otherwise the losses and its sums are read at once.
        """
        if direction.bound is not None and all(
            direction.bound < torch.finfo(part.dtype).max / 2 for part in direction.vec
        ):
            return all(map(math.isfinite, self.losses.values()))
        losses = list(self._first_losses.values())
        values = fetch([*losses, *(part.sum() for part in direction.vec)])
        self._losses = dict(zip(self._first_losses, values, strict=False))
        return all(map(math.isfinite, self._losses.values())) and has_finite_sums(
            direction.vec, values[len(losses) :]
        )

    def grad(self, objective: str, of: Sequence[int] | None = None) -> Vec:
        """Return the gradient of an objective's loss in fp32.

        It has one tensor for each parameter, or for each parameter listed in `of`. That of all
        parameters is scaled down to the norm `clip`, after the sum over all parts and ranks.
        """
        gradient = self._gradient(objective, of)
        if self._clip is None or of is not None:
            return gradient
        clipped = clip(gradient, self._clip)
        self.clipped += clipped is not gradient
        return clipped

    def _gradient(self, objective: str, of: Sequence[int] | None = None) -> Vec:
        ready = self._from_one_pass(objective) if of is None else None
        if ready is not None:
            value, gradient = ready
            self._note_loss(objective, value)
            return self._masked(gradient, range(len(self.params)))
        params = self._listed(of)
        total: list[Tensor] | None = None
        value = torch.zeros((), device=params[0].device)
        for compute in self._pieces[objective]:
            piece = compute()
            parts = torch.autograd.grad(piece, params, allow_unused=True, materialize_grads=True)
            # autograd may return one tensor twice, or a view, so copy before adding in place
            if total is None:
                total = (
                    [p.clone() for p in parts] if len(self._pieces[objective]) > 1 else list(parts)
                )
            else:
                total = [a.add_(b) for a, b in zip(total, parts, strict=True)]
            value = value + piece.detach()
        assert total is not None
        self._note_loss(objective, value)
        return self._masked(total, range(len(self.params)) if of is None else of)

    def _from_one_pass(self, objective: str) -> tuple[Tensor, list[Tensor]] | None:
        """Return the loss and the gradient of an objective if one pass gives them, else None."""
        if self._joint is not None:
            joint, self._joint = self._joint, None  # the first gradient of a step starts it
            self._ready = dict(joint())
            self._versions = [parameter._version for parameter in self.params]
        if self._ready and self._versions != [parameter._version for parameter in self.params]:
            self._ready = {}
        return self._ready.pop(objective, None)

    def _note_loss(self, objective: str, value: Tensor) -> None:
        self._last_loss = self._reduce([value])[0]
        self._first_losses.setdefault(objective, self._last_loss)

    def _masked(self, parts: Sequence[Tensor], places: Sequence[int]) -> Vec:
        """Return the gradients averaged over ranks, with 0 where the mask is 0, and projected."""
        masks = [self.mask[i] for i in places]
        masked = [part if m is None else part * m for part, m in zip(parts, masks, strict=True)]
        bases = [self.bases[i] for i in places]
        return tuple(
            self._reduce(
                [
                    part if basis is None else without(part, basis)
                    for part, basis in zip(masked, bases, strict=True)
                ]
            )
        )

    @contextmanager
    def at(
        self, offset: Vec, factor: float = 1.0, *, of: Sequence[int] | None = None
    ) -> Iterator[None]:
        """Take gradients at params + factor * offset inside the context.

        Only the parameters listed in `of` are copied and moved, by the tensors of `offset` in this
        order; without it all are.
        """
        params = self._listed(of)
        original_values = [p.detach().clone() for p in params]
        try:
            with torch.no_grad():
                for parameter, by in zip(params, offset, strict=True):
                    parameter.add_(by, alpha=factor)
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(params, original_values, strict=True):
                    parameter.copy_(value)

    def _listed(self, of: Sequence[int] | None) -> Vec:
        return self.params if of is None else tuple(self.params[i] for i in of)

    def hvp(
        self,
        objective: str,
        v: Vec,
        how: HessianProduct = "difference",
        size: float = 0.01,
        *,
        base: Vec | None = None,
        of: Sequence[int] | None = None,
    ) -> Vec:
        """Return H v for the Hessian H of an objective's loss.

        v has one tensor for each parameter, or for each parameter listed in `of`. The others are
        zero in v, and differences neither copy nor move them.

        difference: ||v|| (grad(params + size u) - grad(params - size u)) / (2 size) with u = v /
        ||v||. It takes two passes, the memory of one, and any attention kernel. Its error is
        O(size^2) plus the rounding error of the gradients / size.
        forward: ||v|| (grad(params + size u) - base) / size, with base = grad(params). It takes one
        pass where `base` is there. Its error is O(size).
        exact: double backward of <grad, v>, one loss at a time, with an attention kernel that has
        it.
        """
        length = float(norm(v))
        if length == 0:
            return tuple(torch.zeros_like(part) for part in (v if of is None else self.params))
        if how == "exact":
            return self._double_backward(objective, v, of)
        if how == "forward":
            # a clipped gradient is not that of the loss
            start = self._gradient(objective) if base is None or self._clip is not None else base
            with self.at(v, size / length, of=of):
                plus = list(self._gradient(objective))
            return scaled_difference(plus, start, length / size)
        with self.at(v, size / length, of=of):
            plus = list(self._gradient(objective))
        with self.at(v, -size / length, of=of):
            minus = self._gradient(objective)
        return scaled_difference(plus, minus, length / (2 * size))

    def _double_backward(self, objective: str, v: Vec, of: Sequence[int] | None) -> Vec:
        if self._frees_weights:
            raise NoExactProduct(
                "hvp: exact needs the weights of a block for the second derivative, and "
                "training.shard: weights has freed them; use hvp: difference"
            )
        total: Vec | None = None
        with sdpa_kernel(SDPBackend.MATH):
            for compute in self._pieces[objective]:
                try:
                    gradient = torch.autograd.grad(
                        compute(), self._listed(of), create_graph=True, materialize_grads=True
                    )
                    slope = torch.stack(
                        [(g * part).sum() for g, part in zip(gradient, v, strict=True)]
                    ).sum()
                    if not slope.requires_grad:  # a loss that is linear in the parameters
                        slope = slope + sum((p * 0).sum() for p in self.params)
                    parts = torch.autograd.grad(
                        slope, self.params, allow_unused=True, materialize_grads=True
                    )
                except RuntimeError as error:
                    if "derivative" not in str(error):
                        raise
                    raise NoExactProduct(
                        "hvp: exact needs a second derivative that a layer of this "
                        f"model does not have ({str(error).splitlines()[0][:100]}); use "
                        "hvp: difference"
                    ) from error
                total = (
                    parts
                    if total is None
                    else tuple(a + b for a, b in zip(total, parts, strict=True))
                )
        assert total is not None
        return self._masked([part.detach() for part in total], range(len(self.params)))


def of_step(
    eraser: Eraser,
    params: Vec,
    draws: Mapping[str, Sequence[Draw]],
    *,
    step: int = 0,
    inner: Sequence[int] = (),
    mask: Sequence[Tensor | None] | None = None,
    bases: Sequence[Tensor | None] | None = None,
    ranks: int = 1,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    reduce: Reduce = list,
    frees_weights: bool = False,
    clip: float | None = None,
    joint: Joint | None = None,
) -> LossClosure:
    """Return the losses of one training step, on fixed draws.

    Each is the mean over an objective's micro-batches and ranks.
    """

    def piece(objective: str, draw: Draw) -> Tensor:
        with autocast():
            return eraser.loss(objective, draw) / len(draws[objective])

    losses = {
        objective: [partial(piece, objective, draw) for draw in some]
        for objective, some in draws.items()
    }
    terms = {
        objective: ranks * sum(draw.terms for draw in some) for objective, some in draws.items()
    }
    return LossClosure(
        params,
        losses,
        terms=terms,
        step=step,
        inner=inner,
        mask=mask,
        bases=bases,
        reduce=reduce,
        frees_weights=frees_weights,
        clip=clip,
        joint=joint,
    )
