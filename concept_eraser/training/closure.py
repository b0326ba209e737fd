"""The two losses of one step, asked on a fixed draw and averaged over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from concept_eraser.losses import Draw
from concept_eraser.vectors import Vec


class Asked(Protocol):
    """What a closure needs of an eraser."""

    def loss(self, player: str, draw: Draw) -> Tensor: ...


class StepClosure:
    """Answers `grad(player)` for one step.

    The combination of gradients is not linear, so each gradient is accumulated over all micro-batches and averaged
    over ranks first. `torch.autograd.grad` does not pass through DDP's reducer, so the reduction is done here.
    Losses seen on the way are kept in `losses`.
    """

    def __init__(
        self,
        eraser: Asked,
        params: Vec,
        draws: Mapping[str, Sequence[Draw]],
        *,
        autocast: Callable[[], AbstractContextManager],
        reduce: Callable[[Tensor], Tensor],
    ) -> None:
        self.players = tuple(draws)
        self.params = params
        self.losses: dict[str, float] = {}
        self._eraser, self._draws, self._autocast, self._reduce = eraser, draws, autocast, reduce

    def grad(self, player: str) -> Vec:
        """The gradient of a player's loss: one tensor per trainable parameter, in fp32."""
        total: list[Tensor] | None = None
        value = torch.zeros((), device=self.params[0].device)
        draws = self._draws[player]
        for draw in draws:
            with self._autocast():
                loss = self._eraser.loss(player, draw) / len(draws)
            parts = torch.autograd.grad(loss, self.params, allow_unused=True, materialize_grads=True)
            total = list(parts) if total is None else [a.add_(b) for a, b in zip(total, parts, strict=True)]
            value += loss.detach()
        assert total is not None
        self.losses[player] = float(self._reduce(value))
        return tuple(self._reduce(part) for part in total)
