"""The losses of one step, asked on a fixed draw and averaged over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from concept_eraser.errors import UserError
from concept_eraser.methods.base import HessianProduct
from concept_eraser.vectors import Vec, norm

Piece = Callable[[], Tensor]
Reduce = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # the mean of each tensor over the ranks


class LossClosure:
    """Answers what a method asks, for losses that are functions of parameters held elsewhere.

    losses: for each player the parts whose sum is its loss, as functions without arguments that see `params` as they
        stand. The graph of one part is freed before the next is built: that is what micro-batches are for. The
        combination of gradients is not linear, so each gradient is summed over all parts, and averaged over ranks
        (`reduce`; `torch.autograd.grad` does not pass through DDP's reducer), before a method sees it.
    terms: how many numbers the mean in a player's loss is taken over.
    inner: which of `params`, by position, are the variable of a lower-level problem (an attack).
    mask: for each parameter 1 where it may move and 0 elsewhere, or None. Methods see gradients that are masked already,
        so every inner product is one of the weights that can move.

    The first loss seen of each player is kept in `losses`, for the log; the last one seen in `seen`.
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
        reduce: Reduce = list,
    ) -> None:
        self.mask = mask if mask is not None else [None] * len(params)
        self.players = tuple(losses)
        self.params = params
        self.step = step
        self.inner = tuple(inner)
        self.losses: dict[str, float] = {}
        self.seen = float("nan")
        self._pieces, self._terms, self._reduce = losses, terms or {}, reduce

    def terms(self, player: str) -> int:
        return self._terms.get(player, 1)

    def grad(self, player: str, of: Sequence[int] | None = None) -> Vec:
        """The gradient of a player's loss: one tensor per parameter, or per parameter listed in `of`, in fp32."""
        wanted = self.params if of is None else tuple(self.params[i] for i in of)
        total: list[Tensor] | None = None
        value = torch.zeros((), device=wanted[0].device)
        for compute in self._pieces[player]:
            piece = compute()
            parts = torch.autograd.grad(piece, wanted, allow_unused=True, materialize_grads=True)
            if total is None:  # autograd may hand out one tensor twice, or a view: copy what is to be added to
                total = [p.clone() for p in parts] if len(self._pieces[player]) > 1 else list(parts)
            else:
                total = [a.add_(b) for a, b in zip(total, parts, strict=True)]
            value = value + piece.detach()
        assert total is not None
        self.seen = float(self._reduce([value])[0])
        self.losses.setdefault(player, self.seen)
        return self._masked(total, range(len(self.params)) if of is None else of)

    def _masked(self, parts: Sequence[Tensor], places: Sequence[int]) -> Vec:
        """Averaged over ranks, and 0 where nothing may move."""
        masks = [self.mask[i] for i in places]
        return tuple(self._reduce([part if m is None else part * m for part, m in zip(parts, masks, strict=True)]))

    @contextmanager
    def at(self, offset: Vec) -> Iterator[None]:
        """Ask at params + offset."""
        kept = [p.detach().clone() for p in self.params]
        try:
            with torch.no_grad():
                for parameter, by in zip(self.params, offset, strict=True):
                    parameter.add_(by)
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.params, kept, strict=True):
                    parameter.copy_(value)

    def hvp(self, player: str, v: Vec, how: HessianProduct = "difference", size: float = 0.01) -> Vec:
        """H v for the Hessian H of a player's loss.

        difference: ||v|| (grad(params + size u) - grad(params - size u)) / (2 size) with u = v / ||v||. Two passes,
        the memory of one, any attention kernel; its error is O(size^2) and the rounding of the gradients / size.
        exact: double backward of <grad, v>, one loss at a time, with the attention kernel that can do it.
        """
        length = float(norm(v))
        if length == 0:
            return tuple(torch.zeros_like(part) for part in v)
        if how == "exact":
            return self._double_backward(player, v)
        ahead = tuple(part * (size / length) for part in v)
        with self.at(ahead):
            plus = self.grad(player)
        with self.at(tuple(-part for part in ahead)):
            minus = self.grad(player)
        return tuple((p - m) * (length / (2 * size)) for p, m in zip(plus, minus, strict=True))

    def _double_backward(self, player: str, v: Vec) -> Vec:
        total: Vec | None = None
        with sdpa_kernel(SDPBackend.MATH):
            for compute in self._pieces[player]:
                try:
                    first = torch.autograd.grad(compute(), self.params, create_graph=True, materialize_grads=True)
                    along = torch.stack([(g * part).sum() for g, part in zip(first, v, strict=True)]).sum()
                    if not along.requires_grad:  # a loss that is linear in the parameters
                        along = along + sum((p * 0).sum() for p in self.params)
                    parts = torch.autograd.grad(along, self.params, allow_unused=True, materialize_grads=True)
                except RuntimeError as error:
                    if "derivative" not in str(error):
                        raise
                    raise UserError(f"hvp: exact needs a second derivative that a layer of this model does not have ({str(error).splitlines()[0][:100]}); use hvp: difference") from error  # fmt: skip
                total = parts if total is None else tuple(a + b for a, b in zip(total, parts, strict=True))
        assert total is not None
        return self._masked([part.detach() for part in total], range(len(self.params)))


class Draw(Protocol):
    """One micro-batch with everything random already drawn; what is in it is the eraser's business."""

    @property
    def terms(self) -> int: ...


class Asked(Protocol):
    """What a step's closure needs of an eraser."""

    def loss(self, player: str, draw: Any) -> Tensor: ...


def of_step(
    eraser: Asked,
    params: Vec,
    draws: Mapping[str, Sequence[Draw]],
    *,
    step: int = 0,
    inner: Sequence[int] = (),
    mask: Sequence[Tensor | None] | None = None,
    ranks: int = 1,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    reduce: Reduce = list,
) -> LossClosure:
    """The losses of one training step: the mean over a player's micro-batches (and ranks), on fixed draws."""

    def piece(player: str, draw: Draw) -> Tensor:
        with autocast():
            return eraser.loss(player, draw) / len(draws[player])

    losses = {player: [partial(piece, player, draw) for draw in some] for player, some in draws.items()}
    terms = {player: ranks * sum(draw.terms for draw in some) for player, some in draws.items()}
    return LossClosure(params, losses, terms=terms, step=step, inner=inner, mask=mask, reduce=reduce)
