"""Device and precision of the parts of a pipeline in training: offload, frozen, checkpointing.

With offload, the device holds only the parts that are used together. The text encoders encode the
prompts of all examples, the denoiser generates their images, and the VAE decodes and encodes these.
Then the device holds the parts that the losses need. The other parts are on the CPU.

Frozen weights of linear layers and convolutions (all others are small) may be in bf16. They do not
change, and the forward pass is in bf16 anyway. Their values are stored on the CPU and restored at
the end, so that an erased model differs from the original in the trained weights only. Values that
a checkpoint had in half precision are stored in it. The VAE stays in fp32. Its 84 million weights
are small beside its activations, and the losses compare its latents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.utils.devices import gpu_module
from concept_eraser.utils.heap import own_pages

CPU = torch.device("cpu")
# layers whose weights autocast converts to half precision
WIDE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Placement:
    """The placement of one model during one training.

    The model has parts by name, `.to(device)`, `.checkpoint(on)`, `.frozen_dtype`, `.reader_dtype`
    and `.working`. The order of calls is: `narrow`, `arrive`, the examples (which call `only`),
    `begin`, the training, and in any case `undo`.
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
        # values of narrowed weights, by part and name
        self._originals: dict[str, dict[str, Tensor]] = {}

    def narrow(self, names: Iterable[str]) -> None:
        """Convert the frozen weights of denoiser and text encoders to bf16, if the recipe says so.

        The named weights of the denoiser are excluded, since they are trained. There are none with
        a LoRA.
        """
        if self.frozen != "bf16":
            return
        trained_names = set(names)
        with own_pages():
            for part, name, weight in narrowable_of(self.model, trained_names):
                narrow = weight.data.to(torch.bfloat16)
                value = _without_loss(weight.data, narrow).to(CPU)
                self._originals.setdefault(part, {})[name] = value
                weight.data = narrow
        self.model.frozen_dtype = self.model.reader_dtype = torch.bfloat16

    def arrive(self, device: torch.device) -> None:
        """Move the model to the training's device. With offload its parts follow later (`only`)."""
        if self.offload:
            self.model.working = device
        else:
            self.model.to(device)

    def only(self, parts: Sequence[str]) -> None:
        """Move these parts to the device and all others away, with offload."""
        if not self.offload:
            return
        self.away = [name for name in self.model.parts if name not in parts]
        for name in self.away:  # first, since the device may not have space for both
            self.model.parts[name].to(CPU)
        gpu = gpu_module()
        if gpu is not None:
            gpu.empty_cache()
        for name in parts:
            self.model.parts[name].to(self.model.device)

    def begin(self, needed: Sequence[str]) -> None:
        """Move away the parts that the training does not need, and set checkpointing.

        It is called when the examples are ready.
        """
        self.only(needed)
        if self.checkpointing:
            self.model.checkpoint(True)

    def undo(self) -> None:
        """Move all parts to one device again, in fp32.

        It is the device of the training. With offload or frozen weights in bf16 it is the CPU,
        since the device may not have space for all parts in fp32.
        """
        if self.checkpointing:
            self.model.checkpoint(False)
        self.model.working = None
        if self.offload or self._originals:
            self.model.to(CPU)
        if self._originals:
            self.model.frozen_dtype = self.model.reader_dtype = None
            with own_pages():
                self._restore()
        self.away = []

    def _restore(self) -> None:
        """Give the narrowed weights their values, in fp32. Each value goes as its weight comes."""
        for part, values in self._originals.items():
            weights = dict(narrowable(self.model.parts[part]))
            while values:
                name, value = values.popitem()
                weights[name].data = value.float()
        self._originals = {}


def _without_loss(value: Tensor, bf16: Tensor) -> Tensor:
    """Return a weight in half precision if that has the same numbers, else the weight itself."""
    for narrow in (bf16, value.to(torch.float16)):
        if torch.equal(narrow.to(value.dtype), value):
            return narrow
    return value


def narrowable_of(model: Any, excluded_names: Iterable[str] = ()) -> list[tuple[str, str, Tensor]]:
    """Return the weights of a model that may be in bf16 in training, as (part, name, weight).

    They are those of the text encoders, and those of the denoiser that are not excluded.
    """
    own = set(excluded_names)
    readers = [(part, *pair) for part in model.readers for pair in narrowable(model.parts[part])]
    return [
        ("denoiser", *pair) for pair in narrowable(model.denoiser) if pair[0] not in own
    ] + readers


def narrowable(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the weights of linear layers and convolutions, by their names without a LoRA's layers.

    Matrices of a LoRA are not among them: peft names the layer inside its own `base_layer`.
    """
    weights = []
    for name, layer in module.named_modules():
        parts = name.split(".")
        if isinstance(layer, WIDE) and not {"lora_A", "lora_B"} & set(parts):
            own = ".".join(part for part in parts if part != "base_layer")
            weights.append((f"{own}.weight", layer.weight))
    return weights


def needed(target: str, *, histogram: bool) -> tuple[str, ...]:
    """Return the parts that the training of a target needs.

    The denoiser is always among them, since it also determines the device of the model.
    """
    return (
        "denoiser",
        *(("text_encoder",) if target == "text_encoder" else ()),
        *(("vae",) if histogram else ()),
    )
