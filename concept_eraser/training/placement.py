"""Where the parts of a pipeline lie while it is trained, and in what precision: offload, frozen, checkpointing.

The examples are made by the whole model on the training's device. Then parts that no loss needs go to the CPU. Frozen
weights (those of linear layers and convolutions; all others are small) may be held in bf16: they do not move, and the
forward pass is in bf16 anyway. Their fp32 values wait on the CPU and are put back at the end, so that an erased model
differs from the original in what was trained and in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
WIDE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # whose weights autocast reads in half precision


class Placement:
    """Of one model (parts by name, `.to(device)`, `.checkpoint(on)`, `.narrowed`) during one training.

    The order: `narrow`, the model's `to(device)`, the examples, `begin`, the training, and in any case `undo`.
    """

    def __init__(self, model: Any, *, checkpointing: bool = False, offload: bool = False, frozen: str = "fp32") -> None:
        self.model, self.checkpointing, self.offload = model, checkpointing, offload
        self.frozen = frozen
        self.away: list[str] = []  # parts on the CPU
        self._wide: dict[str, Tensor] = {}  # fp32 values of narrowed weights, by name

    def narrow(self, trained: Iterable[str]) -> None:
        """Hold the denoiser's weights in bf16 where asked for, all but those named (none: a LoRA is trained)."""
        if self.frozen != "bf16":
            return
        kept = set(trained)
        for name, weight in narrowable(self.model.denoiser):
            if name not in kept:
                self._wide[name] = weight.data.to(CPU)
                weight.data = weight.data.to(torch.bfloat16)
        self.model.narrowed = torch.bfloat16

    def begin(self, needed: Sequence[str]) -> None:
        """The examples are ready: move the parts that the training does not need, and set checkpointing."""
        if self.offload:
            self.away = [name for name in self.model.parts if name not in needed]
            for name in self.away:
                self.model.parts[name].to(CPU)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if self.checkpointing:
            self.model.checkpoint(True)

    def undo(self) -> None:
        """All parts on one device again, in fp32: that of the training, or the CPU where frozen weights were in bf16,
        since the device may not hold them all in fp32."""
        if self.checkpointing:
            self.model.checkpoint(False)
        if self._wide:
            self.model.to(CPU)
            weights = dict(narrowable(self.model.denoiser))
            for name, value in self._wide.items():
                weights[name].data = value
            self._wide, self.model.narrowed = {}, None
        elif self.away:
            self.model.to(self.model.device)
        self.away = []


def narrowable(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights of linear layers and convolutions, by the names they have without a LoRA's layers around them.

    Factors of a LoRA are none of them: peft names the layer inside its own `base_layer`.
    """
    found = []
    for name, layer in module.named_modules():
        parts = name.split(".")
        if isinstance(layer, WIDE) and not {"lora_A", "lora_B"} & set(parts):
            own = ".".join(part for part in parts if part != "base_layer")
            found.append((f"{own}.weight", layer.weight))
    return found


def needed(target: str, *, histogram: bool) -> tuple[str, ...]:
    """The parts that training some target asks: the denoiser always (it also says where the model lies)."""
    return ("denoiser", *(("text_encoder",) if target == "text_encoder" else ()), *(("vae",) if histogram else ()))
