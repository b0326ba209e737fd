"""Split the optimizer's state among processes (ZeRO stage 1, arXiv 1910.02054).

Each process stores the state of some tensors (for Adam twice their size), steps these, and sends
them to the others. If all processes have the same gradients, the weights are equal bit for bit to
those of the whole optimizer.

Gradients and trained weights are not split. A method needs one gradient for each objective and
their inner products. A wrapper that works by hooks on `.grad` (FSDP, DeepSpeed) does not provide
them, so launches with these are refused (`refuse_wrappers`). For frozen weights under a LoRA see
fsdp.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.utils.errors import UserError

FSDP = "ACCELERATE_USE_FSDP"
_WRAPPERS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def refuse_wrappers(shard: str = "none") -> None:
    """Raise UserError if accelerate is configured to wrap the model.

    The wrapper would do nothing, and would save no memory. FSDP 2 is allowed with training.shard:
    weights, which uses it.
    """
    if _is_set(FSDP):
        version = os.environ.get("FSDP_VERSION", "1")
        if shard != "weights" or version != "2":
            raise UserError(
                f"accelerate was launched with FSDP (version {version}), which the "
                "training does not use: it would keep the gradient of one loss, and a "
                "method combines one for each objective. To split the denoiser's weights set "
                "training.shard=weights with a LoRA (trainable.lora), and leave "
                "--use_fsdp out or give it with --fsdp_version 2 (docs/scale.md)"
            )
        os.environ[FSDP] = "false"  # the training splits the weights itself
    for variable, name in _WRAPPERS.items():
        if _is_set(variable):
            raise UserError(
                f"accelerate was launched with {name}, which the training cannot use: a "
                f"method combines one gradient for each objective, and {name} keeps only the "
                "gradient of one loss. Launch without it (accelerate launch --multi_gpu "
                "--num_processes N ...); to save memory use trainable.lora, "
                "training.checkpointing, training.precision bf16 and training.shard "
                "weights or optimizer (docs/scale.md)"
            )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true")


AT_ONCE = 2**24  # numbers sent together: 64 MB in fp32


def mean(values: Sequence[Tensor], at_once: int = AT_ONCE) -> list[Tensor]:
    """Return the mean of each tensor over the processes. Small tensors are sent together.

    All must be on one device and have one type.
    """
    means: list[Tensor] = []
    for parts in _bundles(values, at_once):
        # a copy, so that the inputs do not change
        buffer = torch.cat([part.reshape(-1) for part in parts])
        torch.distributed.all_reduce(buffer)
        buffer /= torch.distributed.get_world_size()
        means += [
            part.view_as(like).to(like.dtype)
            for part, like in zip(buffer.split([p.numel() for p in parts]), parts, strict=True)
        ]
    return means


def _bundles(values: Sequence[Tensor], at_once: int) -> Iterator[list[Tensor]]:
    bundle: list[Tensor] = []
    for value in values:
        if bundle and sum(part.numel() for part in bundle) + value.numel() > at_once:
            yield bundle
            bundle = []
        bundle.append(value)
    if bundle:
        yield bundle


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class _Form:
    """The shape and the type of a tensor that a process sends."""

    shape: torch.Size
    dtype: torch.dtype


class ShardedOptimizer:
    """An optimizer of which each process holds the state of some tensors.

    make: returns the optimizer of some parameters. Every process must call `step`, `state_dict` and
    `load_state_dict` together. The first process returns the state of the whole optimizer; the
    others return an empty one. So a run may be resumed with or without sharding.
    """

    def __init__(self, make: Make, params: Sequence[nn.Parameter], rank: int, ranks: int) -> None:
        self.params, self.rank, self.ranks = list(params), rank, ranks
        self.owner = owners([p.numel() for p in params], ranks)
        self.mine = [i for i, owner in enumerate(self.owner) if owner == rank]
        self.own = make([self.params[i] for i in self.mine]) if self.mine else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.own.param_groups if self.own else []

    def step(self) -> None:
        if self.own:
            self.own.step()
        for parameter, owner in zip(self.params, self.owner, strict=True):
            torch.distributed.broadcast(parameter.data, owner)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.params:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in the first process.

        It is sent tensor by tensor, so that only the CPU of the first process needs memory for
        all. NCCL sends objects through a buffer on the GPU, so an object has the sizes only.
        """
        own = self.own.state_dict() if self.own else {"state": {}, "param_groups": []}
        states = {self.mine[i]: state for i, state in own["state"].items()}
        outlines: list[Any] | None = [None] * self.ranks if self.rank == 0 else None
        outline = {
            position: {name: self._outlined(position, value) for name, value in state.items()}
            for position, state in states.items()
        }
        torch.distributed.gather_object((outline, own["param_groups"]), outlines)
        if outlines is None:
            for position in self.mine:
                for value in states.get(position, {}).values():
                    if self._is_sent(position, value):
                        torch.distributed.send(value.contiguous(), 0)
            return {}
        state = {
            position: {
                name: self._received(position, states.get(position, {}).get(name, value))
                for name, value in outlines[owner][0][position].items()
            }
            for position, owner in enumerate(self.owner)
            if position in outlines[owner][0]
        }
        group = next(groups[0] for _, groups in outlines if groups)
        return {
            "state": state,
            "param_groups": [{**group, "params": list(range(len(self.params)))}],
        }

    def _is_sent(self, position: int, value: Any) -> bool:
        """Whether a value of a parameter's state is a tensor on the parameter's device.

        Others are part of the outline, such as Adam's number of steps, which is on the CPU.
        """
        return isinstance(value, Tensor) and value.device == self.params[position].device

    def _outlined(self, position: int, value: Any) -> Any:
        """Return a value of a parameter's state, or the form of a tensor that is sent."""
        return _Form(value.shape, value.dtype) if self._is_sent(position, value) else value

    def _received(self, position: int, value: Any) -> Any:
        """Return a value of the first process's own state, or one that is in an outline.

        The owner sends the tensor of a form.
        """
        if not isinstance(value, _Form):
            return value.detach().cpu() if isinstance(value, Tensor) else value
        buffer = torch.empty(value.shape, dtype=value.dtype, device=self.params[position].device)
        torch.distributed.recv(buffer, self.owner[position])
        return buffer.cpu()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the whole state, which every process has read."""
        if self.own:
            part = {
                i: state["state"][position]
                for i, position in enumerate(self.mine)
                if position in state["state"]
            }
            group = {**state["param_groups"][0], "params": list(range(len(self.mine)))}
            self.own.load_state_dict({"state": part, "param_groups": [group]})


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that holds each tensor.

    The largest come first, each to the rank with the smallest load.
    """
    loads, owner_ranks = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner_ranks[i] = loads.index(min(loads))
        loads[owner_ranks[i]] += sizes[i]
    return owner_ranks
