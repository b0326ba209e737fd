"""The interface of erasers for training, runs and targets, and the base class of all erasers.

An eraser trains the selected tensors of one module. The original values of these tensors are the
teacher.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from concept_eraser.models.lora import Adapter
from concept_eraser.utils.errors import UserError

Teacher = Literal["frozen", "current"]
BatchNorm = Literal["frozen", "train"]


class Inseparable(Exception):
    """The gradients of several objectives cannot come from one pass. The message has the reason."""


class Draw(Protocol):
    """One micro-batch with everything random already drawn. Only its eraser reads its contents."""

    @property
    def terms(self) -> int:
        """The number of terms in the mean of a loss on this draw."""
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
        """The names of the objectives that forget, also of those whose turn it is not."""
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
        """Draw one micro-batch of an objective, with one seed for each example."""
        ...

    def loss(self, objective: str, draw: Any) -> Tensor:
        """The loss of an objective on a micro-batch of `draw`."""
        ...

    def training_loss(self, objective: str, draw: Any) -> Tensor:
        """The loss that the model was trained with, on a micro-batch of an objective.

        Without images it is the loss of the objective.
        """
        ...

    def turn(self, step: int | None) -> dict[str, str]:
        """Begin a step, and choose its concept if concepts take turns.

        Returns entries of the log.
        """
        ...

    @property
    def begins_anew(self) -> bool:
        """Whether the step that began has the original weights again, after a search."""
        ...

    def settle(self, objective: str, draw: Any) -> None:
        """Update the running statistics by one micro-batch, after the step."""
        ...

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trained tensors by name."""
        ...

    def scratch(self) -> dict[str, nn.Parameter]:
        """The tensors that a loss also trains and that are discarded at the end."""
        ...

    def adversary(self) -> dict[str, nn.Parameter]:
        """The variable of a lower-level problem; empty if there is none."""
        ...

    def buffers(self) -> dict[str, Tensor]:
        """The running statistics that training changes."""
        ...

    def restore(self) -> None:
        """Restore the original values of everything that training changed."""
        ...

    def negate(self, scale: float) -> None:
        """Reverse the direction of the change that training made."""
        ...

    def absorb(self) -> None:
        """Merge a LoRA into its layers, which then count as trained."""
        ...

    def finish(self) -> dict[str, Tensor]:
        """End the training. Returns the changed tensors, by the module's own names."""
        ...


@dataclass(frozen=True)
class AttackTerms:
    """How an adversary enters the losses. recipes/objective_fields.AttackSpec explains each key.

    Attributes:
        warmup: The number of steps at the start without an attack.
        is_sum: Whether the forget loss is the sum of its values without and with the attack.
        tokens: The number of learned tokens before the prompt; 0 for an offset of all tokens.
        seed: The seed of the random tokens from which these are learned.
        search: The rounds of a search for several attacks: their number, and in each of them the
            steps on the weights and then on the attack (`Method.search`). None for one attack.
        both_branches: Whether the empty prompt has an attack of its own.
    """

    warmup: int = 0
    is_sum: bool = True
    tokens: int = 0
    seed: int = 0
    search: tuple[int, int, int] | None = None
    both_branches: bool = False

    @property
    def kept(self) -> int:
        """The number of attacks that a search keeps."""
        return self.search[0] if self.search else 0

    def round_of(self, step: int) -> int:
        """Return the round of the search that a step is in, from 0; `kept` after the search."""
        if self.search is None:
            return 0
        rounds, on_weights, on_attack = self.search
        return min(step // (on_weights + on_attack), rounds)

    def begins_anew(self, step: int) -> bool:
        """Whether a step is the first after a search."""
        return self.search is not None and step == self.kept * sum(self.search[1:])


NO_TERMS = AttackTerms()


class Part:
    """A module of which the tensors named in `selected` are trained.

    The frozen teacher is not a second model: only the selected tensors' original values are stored.

    Attributes:
        batchnorm: "frozen" keeps the running statistics of batch-norm layers, so that a loss is a
            sum over its examples. "train" computes losses with the batch's statistics. It updates
            the running statistics once for each objective and step, after the step (`settle`), so
            the number of evaluations by a method does not matter. No other layer is ever put into
            training mode.
        rotate: With several concepts (the objectives forget, forget.2, ...), each step trains one
            of them, as the objective `forget` (`turn`).
        adapter: The LoRA whose matrices `selected` names. They have their initial values, so the
            teacher is the module without them.
        attack: How an adversary enters the losses, if there is one.
    """

    delta: nn.Parameter | None = None  # the offset of an adversary, if a target has one
    begins_anew: bool = False  # see `Eraser.begins_anew`

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
        attack: AttackTerms = NO_TERMS,
    ) -> None:
        self.attack = attack
        self.is_warming_up = attack.warmup > 0
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
                "batchnorm: train needs at least 2 examples in a batch, found "
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
        """Begin a step, and choose its concept if concepts take turns. Returns entries of the log.

        The choice depends on the step alone, so a resumed run makes the same one. None stands for
        the time between steps, in which each objective is itself.

        Every round of K steps trains each concept once, in a random order. With a fixed order, a
        method that itself alternates (ascent and descent in turn, say) would train some concepts by
        one kind of step only.

        No prompt is attacked during the warm-up of an adversary, nor between steps if it has one.
        """
        self.is_warming_up = self.attack.warmup > (0 if step is None else step)
        if not self.rotate or step is None:
            self.now = "forget"
            return {}
        past, place = divmod(step, len(self.concepts))
        order = torch.randperm(len(self.concepts), generator=torch.Generator().manual_seed(past))
        self.now = self.concepts[int(order[place])]
        return {"concept": self.now}

    def objective_of(self, objective: str) -> str:
        """Return the objective whose examples and loss a name stands for.

        If concepts take turns, `forget` stands for this step's concept.
        """
        return self.now if objective == "forget" and self.rotate else objective

    def draw(self, objective: str, seeds: Sequence[int]) -> Any:
        raise NotImplementedError(
            "a part that is edited in closed form has no objectives to draw from"
        )

    def loss(self, objective: str, draw: Any) -> Tensor:
        raise NotImplementedError("a part that is edited in closed form has no losses")

    def training_loss(self, objective: str, draw: Any) -> Tensor:
        return self.loss(objective, draw)

    def trainable(self) -> dict[str, nn.Parameter]:
        parameters = dict(self.module.named_parameters())
        return {name: parameters[name] for name in self.selected_names}

    def scratch(self) -> dict[str, nn.Parameter]:
        """The tensors that a loss also trains and that are discarded at the end; none here."""
        return {}

    def buffers(self) -> dict[str, Tensor]:
        """The running statistics that training changes; none if they are frozen."""
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
        """Restore the trained tensors and the running statistics, and remove a LoRA."""
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
        """Reverse the change by task arithmetic (arXiv 2212.04089).

        The result is theta* - scale (theta - theta*).
        """
        if self.adapter:
            self.adapter.negate(scale)
            return
        for name, parameter in self.trainable().items():
            parameter.copy_(self.originals[name] - scale * (parameter - self.originals[name]))

    def absorb(self) -> None:
        """Merge a LoRA into its layers, which then count as trained, also for `restore`.

        Without a LoRA this does nothing.
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
        adapter.merge()  # last, since `restore` may have to undo it in part

    def finish(self) -> dict[str, Tensor]:
        """End the training and merge a LoRA into its layers.

        Returns the changed tensors, by the module's own names.
        """
        return self.adapter.merge() if self.adapter else {**self.trainable(), **self.buffers()}

    def adversary(self) -> dict[str, nn.Parameter]:
        """The variable of a lower-level problem; empty if there is none."""
        return {} if self.delta is None else {"attack.delta": self.delta}

    def under_attack(
        self, objective_name: str, draw: Any, objective: Any, compute: Callable[[Any], Tensor]
    ) -> Tensor:
        """Return an objective's loss on a draw, where an adversary may shift the forgotten prompts.

        The adversary's own loss is computed at its offset, with c/2 ||delta||^2 added. The loss of
        forgotten prompts is the sum of the losses without and with the offset, or the latter alone
        (`attack.is_sum`). All others do not change. During the warm-up the adversary's loss is 0,
        so that it does not move, and forgotten prompts are not attacked.
        """
        if self.delta is None or objective_name not in ("attack", "forget"):
            return objective.scale * compute(draw)
        if objective_name == "attack" and self.is_warming_up:
            return 0.0 * self.delta.sum()
        attacked_draw = replace(draw, is_attacked=not self.is_warming_up)
        if objective_name == "attack":
            value = self.attacked_loss(attacked_draw, compute)
            return value + 0.5 * objective.decay * self.delta.square().sum()
        if not self.attack.is_sum:
            return objective.scale * self.attacked_loss(attacked_draw, compute)
        return objective.scale * (compute(draw) + self.attacked_loss(attacked_draw, compute))

    def attacked_loss(self, draw: Any, compute: Callable[[Any], Tensor]) -> Tensor:
        """Return a loss on a draw that is under attack, or about to be after the warm-up."""
        return compute(draw)

    def settle(self, objective: str, draw: Any) -> None:
        """Update the running statistics by one batch. This does nothing if they are frozen."""

    @contextmanager
    def batch_statistics(self, *, moving: bool = False) -> Iterator[None]:
        """Use the batch's statistics in batch-norm layers inside the context (`batchnorm: train`).

        The layers keep their running statistics, unless `moving`.
        """
        if self.batchnorm == "frozen":
            yield
            return
        # a pass updates copies: even with momentum 0 an infinite activation would give 0 x inf =
        # nan
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

    @property
    def module_in_use(self) -> nn.Module:
        """The layers that predict now. They may be others than `module`, with the same tensors."""
        return self.module

    @contextmanager
    def weights_of(self, teacher: Teacher) -> Iterator[Mapping[str, Tensor] | None]:
        """Yield the values with which the module is a teacher, None for its present ones.

        The frozen teacher of a LoRA is the module without it. Its layers are left out inside the
        context, which gives the same numbers as the matrices' first values in less time.

        Autocast stores no copies of weights inside the context. Those of a teacher have no
        gradients, and some versions of torch would use them for the model in training.
        """
        stores_copies = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            if teacher == "current":
                yield None
            elif self.adapter is None:
                yield self.originals
            else:
                with self.adapter.disabled(self.module_in_use):
                    yield None
        finally:
            torch.set_autocast_cache_enabled(stores_copies)

    def ask(
        self, method: str, *inputs: Tensor, teacher: Teacher | None = None, gradients: bool = False
    ) -> Any:
        """Call a method of the module.

        By a teacher, it is the frozen module with the original values. It has no gradients, unless
        they are requested with respect to the inputs.
        """
        if teacher is None:
            return call(self.module, method, *inputs)
        buffers = self.original_buffers if teacher == "frozen" else {}
        with nullcontext() if gradients else torch.no_grad(), self.weights_of(teacher) as weights:
            values = {**(weights or {}), **buffers}
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
        return call(self.module, method, *inputs)


def call(module: nn.Module, method: str, *inputs: Tensor) -> Any:
    """Call a method of a module. The forward pass runs the module's own hooks, as a call does."""
    return module(*inputs) if method == "forward" else getattr(module, method)(*inputs)


def one_each(rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Choose one of some positions for each generator, with replacement.

    The examples do not depend on how they are divided into batches.
    """
    return rows[
        torch.cat([torch.randint(len(rows), (1,), generator=generator) for generator in generators])
    ]
