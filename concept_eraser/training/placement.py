"""Where the parts of a pipeline lie while it is trained, and in what precision: offload, frozen,
checkpointing.

With offload no two parts lie on the device that are not asked together: the text encoders while the
prompts of all examples are read, the denoiser while their images are drawn, the VAE while these
are decoded and encoded, and then what the losses need. The others wait on the CPU.

Frozen weights (those of linear layers and convolutions; all others are small) may be held in bf16:
they do not move, and the forward pass is in bf16 anyway. Their fp32 values wait on the CPU and are
put back at the end, so that an erased model differs from the original in what was trained and in
nothing else. The VAE stays in fp32: its 84 million weights are small beside what it holds at work,
which stays as it is, and the latents it makes are what the losses compare with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
# whose weights autocast reads in half precision
WIDE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Placement:
    """Of one model (parts by name, `.to(device)`, `.checkpoint(on)`, `.frozen_dtype`,
    `.reader_dtype`, `.working`) during one training.

    The order: `narrow`, `arrive`, the examples (which call `only`), `begin`, the training, and in
    any case `undo`.
    """

    def __init__(
        self,
        model: Any,
        *,
        checkpointing: bool = False,
        offload: bool = False,
        frozen: str = "fp32",
    ) -> None:
        self.model, self.checkpointing, self.offload = model, checkpointing, offload
        self.frozen = frozen
        self.away: list[str] = []  # parts on the CPU
        # fp32 values of narrowed weights, by part and name
        self._wide: dict[str, dict[str, Tensor]] = {}

    def narrow(self, names: Iterable[str]) -> None:
        """Hold the weights of denoiser and text encoders in bf16 where asked for, all but those of
        the denoiser that are named (none: a LoRA is trained)."""
        if self.frozen != "bf16":
            return
        trained_names = set(names)
        for part, name, weight in narrowable_of(self.model, trained_names):
            self._wide.setdefault(part, {})[name] = weight.data.to(CPU)
            weight.data = weight.data.to(torch.bfloat16)
        self.model.frozen_dtype = self.model.reader_dtype = torch.bfloat16

    def arrive(self, device: torch.device) -> None:
        """Bring the model to the training's device; with offload its parts come when they are asked
        (`only`).
        """
        if self.offload:
            self.model.working = device
        else:
            self.model.to(device)

    def only(self, parts: Sequence[str]) -> None:
        """With offload: these parts on the device, and no others."""
        if not self.offload:
            return
        self.away = [name for name in self.model.parts if name not in parts]
        for name in self.away:  # first of all, since the device may not hold both
            self.model.parts[name].to(CPU)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for name in parts:
            self.model.parts[name].to(self.model.device)

    def begin(self, needed: Sequence[str]) -> None:
        """The examples are ready: move the parts that the training does not need, and set
        checkpointing.
        """
        self.only(needed)
        if self.checkpointing:
            self.model.checkpoint(True)

    def undo(self) -> None:
        """All parts on one device again, in fp32: that of the training, or the CPU where parts came
        and went or frozen weights were in bf16, since the device may not hold them all in fp32."""
        if self.checkpointing:
            self.model.checkpoint(False)
        self.model.working = None
        if self.offload or self._wide:
            self.model.to(CPU)
        for part, values in self._wide.items():
            weights = dict(narrowable(self.model.parts[part]))
            for name, value in values.items():
                weights[name].data = value
        if self._wide:
            self.model.frozen_dtype = self.model.reader_dtype = None
        self._wide, self.away = {}, []


def narrowable_of(model: Any, excluded_names: Iterable[str] = ()) -> list[tuple[str, str, Tensor]]:
    """The weights of a model that may be held in bf16 while it trains: (part, name, weight) of the
    denoiser, all but those kept, and of the text encoders."""
    own = set(excluded_names)
    readers = [(part, *pair) for part in model.readers for pair in narrowable(model.parts[part])]
    return [
        ("denoiser", *pair) for pair in narrowable(model.denoiser) if pair[0] not in own
    ] + readers


def narrowable(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights of linear layers and convolutions, by the names they have without a LoRA's layers
    around them.

    Factors of a LoRA are none of them: peft names the layer inside its own `base_layer`.
    """
    weights = []
    for name, layer in module.named_modules():
        parts = name.split(".")
        if isinstance(layer, WIDE) and not {"lora_A", "lora_B"} & set(parts):
            own = ".".join(part for part in parts if part != "base_layer")
            weights.append((f"{own}.weight", layer.weight))
    return weights


def needed(target: str, *, histogram: bool) -> tuple[str, ...]:
    """The parts that training some target asks: the denoiser always (it also says where the model
    lies).
    """
    return (
        "denoiser",
        *(("text_encoder",) if target == "text_encoder" else ()),
        *(("vae",) if histogram else ()),
    )
