"""What all erasers share: of one module the selected tensors are trained, and its original values are the teacher."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

Teacher = Literal["frozen", "current"]


class Part:
    """A module of which the tensors named in `selected` are trained.

    The frozen teacher is not a second model: only the selected tensors' original values are kept.
    """

    def __init__(self, module: nn.Module, selected: Sequence[str], players: Sequence[str]) -> None:
        self.module, self.selected, self.players = module, tuple(selected), tuple(players)
        parameters = dict(module.named_parameters())
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        for name in self.selected:
            parameters[name].requires_grad_(True)
        self.originals = {name: parameters[name].detach().clone() for name in self.selected}

    def trainable(self) -> dict[str, nn.Parameter]:
        parameters = dict(self.module.named_parameters())
        return {name: parameters[name] for name in self.selected}

    def origin(self) -> str:
        """A fingerprint of the values that training started from: two sums a tensor, cheap even for large models."""
        digest = hashlib.sha256()
        for name, value in self.originals.items():
            wide = value.double()
            digest.update(f"{name} {float(wide.sum()):.12e} {float(wide.square().sum()):.12e}\n".encode())
        return digest.hexdigest()[:16]

    def adversary(self) -> dict[str, nn.Parameter]:
        """The variable of a lower-level problem; there is none here."""
        return {}

    def ask(self, method: str, *inputs: Tensor, teacher: Teacher | None = None) -> Any:
        """Call a method of the module; by a teacher without gradients, the frozen one with the original values."""
        if teacher is None:
            return getattr(self.module, method)(*inputs)
        values: Mapping[str, Tensor] = self.originals if teacher == "frozen" else {}
        with torch.no_grad():
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
