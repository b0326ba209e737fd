"""What training, runs and targets know of an eraser, and what all erasers share.

An eraser trains the selected tensors of one module. The original values of these tensors are the
teacher.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from concept_eraser.models.lora import Adapter
from concept_eraser.utils.errors import UserError

Teacher = Literal["frozen", "current"]
BatchNorm = Literal["frozen", "train"]


class Draw(Protocol):
    """One micro-batch with everything random already drawn. Only its eraser knows what it holds."""

    @property
    def terms(self) -> int:
        """How many numbers the loss on it is the mean of."""
        ...


class Eraser(Protocol):
    """The part of a model that is trained, with a loss for each objective.

    `Part` implements everything but `draw` and `loss`, which each kind of eraser adds.
    """

    @property
    def module(self) -> nn.Module:
        """The module that holds the trained tensors."""
        ...

    @property
    def objectives(self) -> tuple[str, ...]:
        """The names of the objectives of one step, in the order the methods expect."""
        ...

    @property
    def concepts(self) -> tuple[str, ...]:
        """The names of the objectives that forget, also of those that wait for their turn."""
        ...

    @property
    def adapter(self) -> Adapter | None:
        """The LoRA in training; None where the weights themselves are trained."""
        ...

    @property
    def origin(self) -> str:
        """A fingerprint of the values that training started from."""
        ...

    def draw(self, objective: str, seeds: Sequence[int]) -> Any:
        """Draw one micro-batch of an objective, one seed an example. Returns a `Draw`."""
        ...

    def loss(self, objective: str, draw: Any) -> Tensor:
        """The loss of an objective on a micro-batch of `draw`."""
        ...

    def turn(self, step: int | None) -> dict[str, str]:
        """Begin a step, and choose its concept where concepts take turns. Returns entries of the
        log.
        """
        ...

    def settle(self, objective: str, draw: Any) -> None:
        """Move the running statistics by one micro-batch, after the step."""
        ...

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trained tensors by name."""
        ...

    def scratch(self) -> dict[str, nn.Parameter]:
        """Tensors that a loss trains along and that are discarded at the end."""
        ...

    def adversary(self) -> dict[str, nn.Parameter]:
        """The variable of a lower-level problem; empty where there is none."""
        ...

    def buffers(self) -> dict[str, Tensor]:
        """The running statistics that training moves."""
        ...

    def restore(self) -> None:
        """Put everything that training moved back to its original value."""
        ...

    def negate(self, scale: float) -> None:
        """Reverse the direction of what training changed."""
        ...

    def absorb(self) -> None:
        """Merge a LoRA into its layers, which then count as trained."""
        ...

    def finish(self) -> dict[str, Tensor]:
        """End the training. Returns the tensors that it moved, by the module's own names."""
        ...


class Part:
    """A module of which the tensors named in `selected` are trained.

    The frozen teacher is not a second model: only the selected tensors' original values are kept.

    batchnorm: frozen keeps the running statistics of batch-norm layers, so that a loss is a sum
    over its examples. train computes losses with the batch's statistics, and moves the running ones
    once an objective and step, after the step (`settle`): however often a method asks, and wherever
    it asks, a question changes nothing. No other layer is ever put into training mode.
    rotate: of several concepts, the objectives forget, forget.2, ..., one is asked a step, as the
    objective `forget` (`turn`).
    adapter: where a LoRA is trained, the factors that `selected` names; they are at their start, so
    the teacher is the module without them.
    """

    delta: nn.Parameter | None = None  # the offset of an adversary, where a target has one

    def __init__(
        self,
        module: nn.Module,
        selected_names: Sequence[str],
        objectives: Sequence[str],
        *,
        batchnorm: BatchNorm = "frozen",
        batch_size: int = 2,
        adapter: Adapter | None = None,
        rotate: bool = False,
    ) -> None:
        self.module, self.selected_names, self.batchnorm = module, tuple(selected_names), batchnorm
        self.concepts = tuple(
            objective for objective in objectives if objective.partition(".")[0] == "forget"
        )
        self.objectives = tuple(
            objective
            for objective in objectives
            if not rotate or objective not in self.concepts[1:]
        )
        self.rotate, self.now = rotate, "forget"
        self.adapter = adapter
        self.norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if batchnorm == "train" and self.norms and batch_size < 2:
            raise UserError(
                "batchnorm: train needs at least 2 examples a batch, found "
                "training.batch_size 1; use batchnorm: frozen or larger batches"
            )
        parameters = dict(module.named_parameters())
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        for name in self.selected_names:
            parameters[name].requires_grad_(True)
        module.eval()
        self.originals = {name: parameters[name].detach().clone() for name in self.selected_names}
        self.original_buffers = {
            name: value.detach().clone() for name, value in self.buffers().items()
        }

    def turn(self, step: int | None) -> dict[str, str]:
        """Begin a step: where concepts take turns, choose this one's; for the log. It goes by the
        step alone, so a resumed run asks the same. None: between steps, where each objective is
        itself.

        Every round of K steps asks each concept once, in an order of its own: with a fixed one, a
        method that itself does something at every second or fourth step (ascent and descent in
        turn, say) would only ever meet some of them.
        """
        if not self.rotate or step is None:
            self.now = "forget"
            return {}
        past, place = divmod(step, len(self.concepts))
        order = torch.randperm(len(self.concepts), generator=torch.Generator().manual_seed(past))
        self.now = self.concepts[int(order[place])]
        return {"concept": self.now}

    def objective_of(self, objective: str) -> str:
        """Whose examples and loss an objective stands for: of concepts in turn `forget` is this
        step's.
        """
        return self.now if objective == "forget" and self.rotate else objective

    def draw(self, objective: str, seeds: Sequence[int]) -> Any:
        raise NotImplementedError(
            "a part that is edited in closed form has no objectives to draw from"
        )

    def loss(self, objective: str, draw: Any) -> Tensor:
        raise NotImplementedError("a part that is edited in closed form has no losses")

    def trainable(self) -> dict[str, nn.Parameter]:
        parameters = dict(self.module.named_parameters())
        return {name: parameters[name] for name in self.selected_names}

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
            digest.update(
                value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            )
        return digest.hexdigest()[:16]

    def restore(self) -> None:
        """Put the trained tensors and the running statistics back to what they were; take a LoRA
        away.
        """
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
        """Turn round what training did: theta* - scale (theta - theta*) (task arithmetic, arXiv
        2212.04089).
        """
        if self.adapter:
            self.adapter.negate(scale)
            return
        for name, parameter in self.trainable().items():
            parameter.copy_(self.originals[name] - scale * (parameter - self.originals[name]))

    def absorb(self) -> None:
        """Merge a LoRA into its layers: from now on these are what was trained, also for `restore`.
        Nothing without a LoRA.
        """
        if self.adapter is None:
            return
        adapter, originals = (
            self.adapter,
            {
                name: weight.detach().to("cpu", copy=True)
                for name, weight in self.adapter.base().items()
            },
        )
        adapter.remove()
        self.adapter, self.originals, self.selected_names = None, originals, tuple(originals)
        adapter.merge()  # last: what `restore` takes back may be a part of it

    def finish(self) -> dict[str, Tensor]:
        """End the training: the tensors that it moved, by the module's own names; a LoRA is merged
        into its layers.
        """
        return self.adapter.merge() if self.adapter else {**self.trainable(), **self.buffers()}

    def adversary(self) -> dict[str, nn.Parameter]:
        """The variable of a lower-level problem, if there is one."""
        return {} if self.delta is None else {"attack.delta": self.delta}

    def under_attack(
        self, objective_name: str, draw: Any, objective: Any, compute: Callable[[Any], Tensor]
    ) -> Tensor:
        """An objective's loss on a draw, where an adversary may move the forgotten prompts: the
        adversary's own at its offset, with c/2 ||delta||^2; the forgotten prompts' without it and
        with it, added; all others as they are."""
        if self.delta is None or objective_name not in ("attack", "forget"):
            return objective.scale * compute(draw)
        attacked_draw = replace(draw, is_attacked=True)
        if objective_name == "attack":
            return compute(attacked_draw) + 0.5 * objective.decay * self.delta.square().sum()
        return objective.scale * (compute(draw) + compute(attacked_draw))

    def settle(self, objective: str, draw: Any) -> None:
        """Move the running statistics by one batch; nothing to do where they are frozen."""

    @contextmanager
    def batch_statistics(self, *, moving: bool = False) -> Iterator[None]:
        """Inside, batch-norm layers use the batch's statistics (`batchnorm: train`) and keep
        theirs, unless `moving`.
        """
        if self.batchnorm == "frozen":
            yield
            return
        # a question moves copies: with momentum 0 an infinite activation would still leave nan, 0 x
        # inf, behind
        statistics_by_layer = (
            []
            if moving
            else [(norm, dict(norm.named_buffers(recurse=False))) for norm in self.norms]
        )
        try:
            for norm, statistics in statistics_by_layer:
                for name, value in statistics.items():
                    setattr(norm, name, value.clone())
            for norm in self.norms:
                norm.train()
            yield
        finally:
            for norm in self.norms:
                norm.eval()
            for norm, statistics in statistics_by_layer:
                for name, value in statistics.items():
                    setattr(norm, name, value)

    def ask(
        self, method: str, *inputs: Tensor, teacher: Teacher | None = None, gradients: bool = False
    ) -> Any:
        """Call a method of the module; by a teacher, the frozen one with the original values,
        without gradients (unless they are asked for, with respect to the inputs)."""
        if teacher is None:
            return getattr(self.module, method)(*inputs)
        values: Mapping[str, Tensor] = (
            {**self.originals, **self.original_buffers} if teacher == "frozen" else {}
        )
        with nullcontext() if gradients else torch.no_grad():
            return torch.func.functional_call(
                _Caller(self.module),
                {f"module.{k}": v for k, v in values.items()},
                (method, *inputs),
            )


class _Caller(nn.Module):
    """Any method of a module as a forward pass, which is what functional_call can replace
    parameters in.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *inputs: Tensor) -> Any:
        return getattr(self.module, method)(*inputs)


def one_each(rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One of some positions per generator, with replacement: the same examples however they are
    dealt to batches.
    """
    return rows[
        torch.cat([torch.randint(len(rows), (1,), generator=generator) for generator in generators])
    ]
