"""LoRA (arXiv 2106.09685): W + (alpha / rank) up @ down instead of W.

It is for some linear or convolutional layers of a part. Training uses peft's layers, which replace
the module's layers for that time. `up` starts at 0, so at the start the model is, bit for bit, the
model without the LoRA. This is the frozen teacher.

For a convolution with kernel k, down is one with the same kernel [rank, in, k, k] and up a 1x1
[out, rank, 1, 1].

A training step in fp32 adds (alpha / rank) up @ down to W where that is less work than the two
products for each position (`is_sum_better`). The results are the same within rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from concept_eraser.utils.errors import UserError

_NAME = "eraser"  # the name of the adapter inside peft's layers
Pair = tuple[Tensor, Tensor]  # down, up


@dataclass(frozen=True)
class Factors:
    """The change of one part of a model ("denoiser", "text_encoder").

    It has (down, up) by the layer's name, with one rank for all.
    """

    part: str
    layers: Mapping[str, Pair]
    rank: int
    alpha: float

    def scale_by(self, strength: float) -> Factors:
        """Multiply the change by a number.

        The number goes into `up`: readers divide by alpha, or take it from elsewhere.
        """
        return replace(
            self, layers={name: (down, up * strength) for name, (down, up) in self.layers.items()}
        )

    def change(self, layer: str) -> Tensor:
        """Return the sum that is added to the layer's weight, in the weight's own shape."""
        down, up = self.layers[layer]
        flat = (self.alpha / self.rank) * up.flatten(1) @ down.flatten(1)
        return flat.view(up.shape[0], *down.shape[1:])

    def squared_length(self, layer: str) -> float:
        """Return ||change||^2 of a layer, from the Gram matrices [rank, rank] of its factors."""
        down, up = (one.flatten(1).double() for one in self.layers[layer])
        return (self.alpha / self.rank) ** 2 * float(((up.T @ up) * (down @ down.T)).sum())


def can_adapt(layer: nn.Module, *, conv: bool) -> bool:
    return isinstance(layer, nn.Linear) or (
        conv and isinstance(layer, nn.Conv2d) and layer.groups == 1
    )


def layers_of(module: nn.Module, tensors: Iterable[str], *, conv: bool = False) -> list[str]:
    """Return the layers that get a LoRA.

    They are the linear ones (with `conv` also the convolutional ones) whose weight is among the
    named tensors. Raises UserError if there is none.
    """
    names = list(tensors)
    owners = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    layers = [name for name in owners if can_adapt(module.get_submodule(name), conv=conv)]
    if not layers:
        kinds = sorted({type(module.get_submodule(name)).__name__ for name in owners})
        convolutions = (
            "and convolutions" if conv else "(convolutions with trainable.lora.conv: true)"
        )
        raise UserError(
            f"a LoRA changes linear layers {convolutions}, and none is among the {len(names)} "
            f"selected tensors (found weights of {', '.join(kinds) or 'no layer'}); select e.g. "
            "cross_attention"
        )
    return layers


def is_sum_better(shape: torch.Size, rank: int, positions: int) -> bool:
    """Whether a training step is less work with the sum of the weight and its change.

    The forward pass and the gradients of the input and the weights have one product each. For K
    inputs and M outputs these are 3 positions x rank x (K + M) multiplications with two matrices.
    The sum takes rank x K x M for itself and twice that for the gradients of the matrices. The
    gradient of the whole weight adds positions x K x M.

    Until the backward pass the sum is in memory, K x M, in place of the output of the first matrix,
    positions x rank. It must not be larger.

    Args:
        shape: The shape of the layer's weight, [M, K] or [M, in, k, k].
        rank: The rank of the LoRA.
        positions: The number of vectors that the layer has as its output.
    """
    size, outputs, between = shape.numel(), shape[0], positions * rank
    is_less_work = size * (positions + 3 * rank) < 3 * between * (size // outputs + outputs)
    return is_less_work and size <= between


def _forward(layer: Any, x: Tensor) -> Tensor:
    """Compute a layer with its LoRA, in place of peft's forward.

    peft's multiplies by alpha / rank in a pass of its own, and converts x to fp32 and back.
    """
    base, down, up = layer.base_layer, layer.lora_A[_NAME], layer.lora_B[_NAME]
    if layer._disable_adapters:
        output: Tensor = base(x)
        return output
    scale, is_mixed = layer.scaling[_NAME], torch.is_autocast_enabled(x.device.type)
    if _can_add(base, down, up) and torch.is_grad_enabled() and not is_mixed:
        shape = base.weight.shape
        positions = x.numel() // x.shape[1 if isinstance(base, nn.Conv2d) else -1]
        if isinstance(base, nn.Conv2d):
            positions //= base.stride[0] * base.stride[1]
        if is_sum_better(shape, down.weight.shape[0], positions):
            flat = torch.addmm(
                base.weight.flatten(1), up.weight.flatten(1), down.weight.flatten(1), alpha=scale
            )
            weight = flat.view(shape)
            if isinstance(base, nn.Conv2d):
                return base._conv_forward(x, weight, base.bias)
            return F.linear(x, weight, base.bias)
    output = base(x)
    change = up(down(x if is_mixed else x.to(down.weight.dtype)))
    return torch.add(output, change, alpha=scale).to(output.dtype)


def _can_add(*layers: nn.Module) -> bool:
    """Whether nothing depends on calling a layer and the two of its LoRA, and all are in fp32.

    Training in one pass replaces their forward pass, and others may have hooks on them.
    """
    return all(
        type(layer) in (nn.Linear, nn.Conv2d)
        and layer.weight.dtype == torch.float32
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
        for layer in layers
    )


class Adapter:
    """A LoRA in training on a module's layers, until `remove` or `merge`.

    seed: of `down` (peft's start: uniform, +-1 / sqrt(in)); `up` starts at 0. The state of the
    caller's generator does not change.

    Raises UserError if the module already has adapters.
    """

    def __init__(
        self, module: nn.Module, layers: Iterable[str], *, rank: int, alpha: float, seed: int
    ) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        if any(isinstance(part, BaseTunerLayer) for part in module.modules()):
            raise UserError(
                "the model carries adapters (a LoRA) already; merge them with fuse_lora, "
                "then remove them with unload_lora_weights"
            )
        self.module, self.rank, self.alpha = module, rank, alpha
        self.original = {name: module.get_submodule(name) for name in layers}
        # a list would match by endings
        exactly = "|".join(re.escape(name) for name in self.original)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # peft draws from the global generator
            settings: dict[str, Any] = {
                "r": rank,
                "lora_alpha": alpha,
                "target_modules": f"({exactly})",
            }
            inject_adapter_in_model(LoraConfig(**settings), module, _NAME)
        for name in self.tensors:  # peft gives them the layer's precision
            factor = module.get_parameter(name)
            factor.data = factor.data.float()
        self.layers: dict[str, Any] = {name: module.get_submodule(name) for name in self.original}
        for layer in self.layers.values():
            vars(layer)["forward"] = MethodType(_forward, layer)
        # peft's attribute on the module, which would remain without the layers
        module.__dict__.pop("peft_config", None)

    @property
    def tensors(self) -> list[str]:
        """Return the names of the LoRA's matrices among the module's parameters."""
        return [name for name, _ in self.module.named_parameters() if f".{_NAME}." in name]

    @property
    def down(self) -> list[str]:
        """The names of its down matrices among the parameters of the module."""
        return [name for name in self.tensors if ".lora_A." in name]

    def factors(self, part: str) -> Factors:
        """Return the present matrices, on the CPU."""
        pairs = {
            name: tuple(
                getattr(layer, key)[_NAME].weight.detach().cpu().clone()
                for key in ("lora_A", "lora_B")
            )
            for name, layer in self.layers.items()
        }
        return Factors(part, pairs, self.rank, self.alpha)

    def base(self) -> dict[str, Tensor]:
        """Return the weights that the LoRA is added to."""
        return {
            f"{name}.weight": layer.get_parameter("weight") for name, layer in self.original.items()
        }

    @contextmanager
    def disabled(self, module: nn.Module) -> Iterator[None]:
        """Leave the LoRA out of the forward pass inside the context.

        The module then is the one without it. Its layers stay in place, and need gradients as
        before.

        module: the module in use, which may be another tree of layers around the same tensors
            (training.shard: weights).
        """
        layers: list[Any] = [module.get_submodule(name) for name in self.layers]
        try:
            for layer in layers:
                layer._disable_adapters = True  # peft's own switch would change requires_grad
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def remove(self) -> None:
        """Restore the module's own layers."""
        for layer in self.layers.values():
            vars(layer).pop("forward", None)
        for name, layer in self.original.items():
            owner, _, attribute = name.rpartition(".")
            setattr(self.module.get_submodule(owner), attribute, layer)

    @torch.no_grad()
    def negate(self, scale: float) -> None:
        """Multiply the change by -scale. The number goes into `up`, like a strength."""
        for layer in self.layers.values():
            layer.lora_B[_NAME].weight.mul_(-scale)

    @torch.no_grad()
    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that `merge` would give, by name and one at a time.

        The module does not change.
        """
        change = self.factors("")
        for name, weight in self.base().items():
            yield name, weight + change.change(name.removesuffix(".weight")).to(weight)

    @torch.no_grad()
    def merge(self) -> dict[str, Tensor]:
        """Restore the module's own layers with the change added.

        Returns the changed weights by name.
        """
        self.remove()
        change, base = self.factors(""), self.base()
        for name in self.original:
            weight = base[f"{name}.weight"]
            weight += change.change(name).to(weight)
        return base
