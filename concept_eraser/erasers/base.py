"""What all erasers share: of one module the selected tensors are trained, and its original values are the teacher."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from concept_eraser.errors import UserError
from concept_eraser.models.lora import Adapter

Teacher = Literal["frozen", "current"]
BatchNorm = Literal["frozen", "train"]


class Part:
    """A module of which the tensors named in `selected` are trained.

    The frozen teacher is not a second model: only the selected tensors' original values are kept.

    batchnorm: frozen keeps the running statistics of batch-norm layers, so that a loss is a sum over its examples. train
    computes losses with the batch's statistics, and moves the running ones once a player and step, after the step
    (`settle`): however often a method asks, and wherever it asks, a question changes nothing. No other layer is ever put
    into training mode.
    rotate: of several concepts, the players forget, forget.2, ..., one is asked a step, as the player `forget` (`turn`).
    adapter: where a LoRA is trained, the factors that `selected` names; they are at their start, so the teacher is the
    module without them.
    """

    delta: nn.Parameter | None = None  # the offset of an adversary, where a target has one

    def __init__(self, module: nn.Module, selected: Sequence[str], players: Sequence[str], *, batchnorm: BatchNorm = "frozen", batch_size: int = 2, adapter: Adapter | None = None, rotate: bool = False) -> None:  # fmt: skip
        self.module, self.selected, self.batchnorm = module, tuple(selected), batchnorm
        self.concepts = tuple(player for player in players if player.partition(".")[0] == "forget")
        self.players = tuple(player for player in players if not rotate or player not in self.concepts[1:])
        self.rotate, self.now = rotate, "forget"
        self.adapter = adapter
        self.norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if batchnorm == "train" and self.norms and batch_size < 2:
            raise UserError("batchnorm: train needs at least 2 examples a batch, found training.batch_size 1; use batchnorm: frozen or larger batches")  # fmt: skip
        parameters = dict(module.named_parameters())
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        for name in self.selected:
            parameters[name].requires_grad_(True)
        module.eval()
        self.originals = {name: parameters[name].detach().clone() for name in self.selected}
        self.original_buffers = {name: value.detach().clone() for name, value in self.buffers().items()}

    def turn(self, step: int | None) -> dict[str, str]:
        """Begin a step: where concepts take turns, choose this one's; for the log. It goes by the step alone, so a resumed
        run asks the same. None: between steps, where each player is itself.

        Every round of K steps asks each concept once, in an order of its own: with a fixed one, a method that itself does
        something at every second or fourth step (ascent and descent in turn, say) would only ever meet some of them.
        """
        if not self.rotate or step is None:
            self.now = "forget"
            return {}
        past, place = divmod(step, len(self.concepts))
        order = torch.randperm(len(self.concepts), generator=torch.Generator().manual_seed(past))
        self.now = self.concepts[int(order[place])]
        return {"concept": self.now}

    def side_of(self, player: str) -> str:
        """Whose examples and loss a player stands for: of concepts in turn `forget` is this step's."""
        return self.now if player == "forget" and self.rotate else player

    def trainable(self) -> dict[str, nn.Parameter]:
        parameters = dict(self.module.named_parameters())
        return {name: parameters[name] for name in self.selected}

    def scratch(self) -> dict[str, nn.Parameter]:
        """What a loss needs trained along and throws away at the end; nothing here."""
        return {}

    def buffers(self) -> dict[str, Tensor]:
        """The running statistics that training moves; none where they are frozen."""
        if self.batchnorm == "frozen":
            return {}
        ours = {id(value) for norm in self.norms for value in norm.buffers()}
        return {name: value for name, value in self.module.named_buffers() if id(value) in ours}

    @cached_property
    def origin(self) -> str:
        """A fingerprint of the values that training started from."""
        digest = hashlib.sha256()
        carrying = self.adapter.base() if self.adapter else {}
        for name, value in (self.originals | self.original_buffers | carrying).items():
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    def restore(self) -> None:
        """Put the trained tensors and the running statistics back to what they were; take a LoRA away."""
        if self.adapter:
            self.adapter.remove()
            return
        with torch.no_grad():
            for name, parameter in self.trainable().items():
                parameter.copy_(self.originals[name])
            for name, value in self.buffers().items():
                value.copy_(self.original_buffers[name])

    @torch.no_grad()
    def negate(self, scale: float) -> None:
        """Turn round what training did: theta* - scale (theta - theta*) (task arithmetic, arXiv 2212.04089)."""
        if self.adapter:
            self.adapter.negate(scale)
            return
        for name, parameter in self.trainable().items():
            parameter.copy_(self.originals[name] - scale * (parameter - self.originals[name]))

    def absorb(self) -> None:
        """Merge a LoRA into its layers: from now on these are what was trained, also for `restore`. Nothing without a LoRA."""
        if self.adapter is None:
            return
        adapter, kept = self.adapter, {name: weight.detach().to("cpu", copy=True) for name, weight in self.adapter.base().items()}  # fmt: skip
        adapter.remove()
        self.adapter, self.originals, self.selected = None, kept, tuple(kept)
        adapter.merge()  # last: what `restore` takes back may be a part of it

    def finish(self) -> dict[str, Tensor]:
        """End the training: the tensors that it moved, by the module's own names; a LoRA is merged into its layers."""
        return self.adapter.merge() if self.adapter else {**self.trainable(), **self.buffers()}

    def adversary(self) -> dict[str, nn.Parameter]:
        """The variable of a lower-level problem, if there is one."""
        return {} if self.delta is None else {"attack.delta": self.delta}

    def under_attack(self, player: str, draw: Any, side: Any, compute: Callable[[Any], Tensor]) -> Tensor:
        """A side's loss on a draw, where an adversary may move the forgotten prompts: the adversary's own at its offset, with
        c/2 ||delta||^2; the forgotten prompts' without it and with it, added; all others as they are."""
        if self.delta is None or player not in ("attack", "forget"):
            return side.scale * compute(draw)
        moved = replace(draw, attacked=True)
        if player == "attack":
            return compute(moved) + 0.5 * side.decay * self.delta.square().sum()
        return side.scale * (compute(draw) + compute(moved))

    def settle(self, player: str, draw: Any) -> None:
        """Move the running statistics by one batch; nothing to do where they are frozen."""

    @contextmanager
    def batch_statistics(self, *, moving: bool = False) -> Iterator[None]:
        """Inside, batch-norm layers use the batch's statistics (`batchnorm: train`) and keep theirs, unless `moving`."""
        if self.batchnorm == "frozen":
            yield
            return
        # a question moves copies: with momentum 0 an infinite activation would still leave nan, 0 x inf, behind
        kept = [] if moving else [(norm, dict(norm.named_buffers(recurse=False))) for norm in self.norms]
        try:
            for norm, statistics in kept:
                for name, value in statistics.items():
                    setattr(norm, name, value.clone())
            for norm in self.norms:
                norm.train()
            yield
        finally:
            for norm in self.norms:
                norm.eval()
            for norm, statistics in kept:
                for name, value in statistics.items():
                    setattr(norm, name, value)

    def ask(self, method: str, *inputs: Tensor, teacher: Teacher | None = None, gradients: bool = False) -> Any:
        """Call a method of the module; by a teacher, the frozen one with the original values, without gradients (unless
        they are asked for, with respect to the inputs)."""
        if teacher is None:
            return getattr(self.module, method)(*inputs)
        values: Mapping[str, Tensor] = {**self.originals, **self.original_buffers} if teacher == "frozen" else {}
        with nullcontext() if gradients else torch.no_grad():
            return torch.func.functional_call(_Caller(self.module), {f"module.{k}": v for k, v in values.items()}, (method, *inputs))  # fmt: skip


class _Caller(nn.Module):
    """Any method of a module as a forward pass, which is what functional_call can replace parameters in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *inputs: Tensor) -> Any:
        return getattr(self.module, method)(*inputs)


def one_each(rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One of some positions per generator, with replacement: the same examples however they are dealt to batches."""
    return rows[torch.cat([torch.randint(len(rows), (1,), generator=generator) for generator in generators])]
