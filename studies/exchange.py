"""Exchange parts of the denoisers of two models: weights of a group, or a range of time steps.

Two models of one architecture are compared: a recipient, and a donor of weights or of time steps.
Both functions change the recipient inside their context only. The donor never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from concept_eraser.models import cross_attention
from concept_eraser.models.base import Model
from concept_eraser.utils.errors import UserError

ENDS = "ends"  # conv_in, conv_norm_out, conv_out and the embedding of the time step
CROSS_ATTENTION, OTHERS = "cross_attention", "others"


def block_groups(network: nn.Module) -> dict[str, list[str]]:
    """Return the tensors of a UNet by block: down_0, ..., mid, up_0, ..., ends.

    Args:
        network: A UNet of diffusers.

    Returns:
        The names of the tensors of its state dict. Each tensor is in exactly one group.

    Raises:
        UserError: The denoiser has no down blocks, mid-block and up blocks.
    """
    _require_unet(network)
    groups: dict[str, list[str]] = {}
    for name in network.state_dict():
        groups.setdefault(_block_of(name), []).append(name)
    names = [name for name in groups if name != ENDS]
    return {name: groups[name] for name in [*sorted(names, key=_position), ENDS]}


def layer_groups(network: nn.Module) -> dict[str, list[str]]:
    """Return the tensors of a UNet in two groups: its cross-attention layers, and all others.

    Raises:
        UserError: The denoiser is no UNet, or has no cross-attention layers.
    """
    _require_unet(network)
    layers = cross_attention.layers(network)
    prefixes = tuple(
        f"{name}." for name, module in network.named_modules() if any(module is x for x in layers)
    )
    if not prefixes:
        raise UserError("the denoiser has no cross-attention layers; give a model with prompts")
    names = list(network.state_dict())
    return {
        CROSS_ATTENTION: [name for name in names if name.startswith(prefixes)],
        OTHERS: [name for name in names if not name.startswith(prefixes)],
    }


def weight_groups(network: nn.Module) -> dict[str, list[str]]:
    """Return all groups: those of `block_groups`, then those of `layer_groups`."""
    return {**block_groups(network), **layer_groups(network)}


def _require_unet(network: nn.Module) -> None:
    missing = [n for n in ("down_blocks", "mid_block", "up_blocks") if not hasattr(network, n)]
    if missing:
        raise UserError(
            f"the denoiser is a {type(network).__name__} without {missing[0]}; groups of weights "
            "are defined for UNets of Stable Diffusion 1, 2 and XL"
        )


def _block_of(name: str) -> str:
    """Return the group of a tensor."""
    first, second = (*name.split("."), "")[:2]
    if first in ("down_blocks", "up_blocks"):
        return f"{first.removesuffix('_blocks')}_{second}"
    return "mid" if first == "mid_block" else ENDS


def _position(group: str) -> tuple[int, int]:
    """Return the place of a block on the way through the network."""
    kind, _, number = group.partition("_")
    return ("down", "mid", "up").index(kind), int(number or 0)


@contextmanager
def exchange_weights(recipient: Model, donor: Model, names: Sequence[str]) -> Iterator[None]:
    """Give a model the donor's weights of some tensors of its denoiser inside the context.

    The recipient has its own weights afterwards, bit by bit, also after an error.

    Args:
        recipient: The model that changes.
        donor: A model with the same architecture.
        names: Names of tensors of the denoiser's state dict.

    Raises:
        UserError: A name or a shape differs between the two denoisers.
    """
    own, other = (dict(model.denoiser.state_dict()) for model in (recipient, donor))
    _require_equal_shapes(own, other, names)
    previous = {name: own[name].clone() for name in names}
    try:
        _write(own, other, names)
        yield
    finally:
        _write(own, previous, names)


def _require_equal_shapes(
    own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], names: Sequence[str]
) -> None:
    for name in names:
        if name not in own or name not in other or own[name].shape != other[name].shape:
            raise UserError(
                f"the denoisers differ in {name}, so their weights cannot be exchanged; give two "
                "models of one architecture"
            )


@torch.no_grad()
def _write(
    own: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], names: Sequence[str]
) -> None:
    for name in names:
        own[name].copy_(values[name])


@dataclass
class Calls:
    """The time steps at which each of two denoisers predicted, one entry a call."""

    recipient: list[int] = field(default_factory=list)
    donor: list[int] = field(default_factory=list)


@contextmanager
def exchange_time_steps(recipient: Model, donor: Model, low: float, high: float) -> Iterator[Calls]:
    """Let the donor's denoiser predict in a range of time steps inside the context.

    Prompts, latents and the sampler stay the recipient's.

    Args:
        recipient: The model that samples.
        donor: The model whose denoiser predicts where low <= t < high.
        low: The first time step of the range, of the training schedule.
        high: The end of the range.

    Returns:
        The time steps of the calls, which fill while the model samples.
    """
    network: Any = recipient.denoiser
    own, calls = network.forward, Calls()

    def forward(sample: Any, timestep: Any, *arguments: Any, **options: Any) -> Any:
        t = int(torch.as_tensor(timestep).flatten()[0])
        is_in_range = low <= t < high
        (calls.donor if is_in_range else calls.recipient).append(t)
        predict = donor.denoiser.forward if is_in_range else own
        return predict(sample, timestep, *arguments, **options)

    outer_forward = vars(network).get("forward")  # of another context around this one
    network.forward = forward  # the attribute of this object hides the method of its class
    try:
        yield calls
    finally:
        del network.forward
        if outer_forward is not None:
            network.forward = outer_forward
