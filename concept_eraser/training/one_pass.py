"""Gradients of several objectives from one forward and one backward pass (training.one_pass).

The micro-batches of the objectives are one batch, in which each objective has consecutive rows.
The denoiser predicts for all of them at once. Each trained layer reads its weights through one
alias for each objective. An alias is a leaf of the graph with the weight's own storage. Only the
rows of its objective give it a gradient. So one backward pass of the sum of the losses gives one
gradient for each objective. This needs layers that treat the rows of a batch separately.

* Linear layers and convolutions compute the output and the gradient of the input for all rows at
  once. Only the products for the gradients of the weights are separate (`_Linear`,
  `_Convolution`). The matrices of a LoRA are such layers.
* Norms and embeddings are evaluated for each objective.

The results are those of separate passes within the rounding of fp32, since matrix products of
another size may add in another order. The activations of all objectives are in memory at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from concept_eraser.erasers.base import Eraser, Inseparable

_LOG = logging.getLogger(__name__)
# The largest batches for which `auto` uses one pass, in positions of latents, by the device of a
# single process: at those the measured gain was at least 3 % of a step (benchmarks/README.md). The
# second number is for a module of which most weights are trained themselves.
LARGEST: Mapping[str, tuple[int, int]] = {"cpu": (1024, 256), "cuda": (4096, 4096)}
Gradients = Mapping[str, tuple[Tensor, list[Tensor]]]  # loss and gradient of each objective
Sizes = tuple[int, ...]  # the rows of each objective

# layer -> its output from an input and from other values of its parameters; the rows of the output
# depend on the same rows of the input only
BY_OBJECTIVE: Mapping[type, Callable[[Any, Tensor, Any, Any], Tensor]] = {
    nn.Linear: lambda layer, x, weight, bias: F.linear(x, weight, bias),
    nn.Conv2d: lambda layer, x, weight, bias: layer._conv_forward(x, weight, bias),
    nn.GroupNorm: lambda layer, x, weight, bias: F.group_norm(
        x, layer.num_groups, weight=weight, bias=bias, eps=layer.eps
    ),
    nn.LayerNorm: lambda layer, x, weight, bias: F.layer_norm(
        x, layer.normalized_shape, weight=weight, bias=bias, eps=layer.eps
    ),
    nn.Embedding: lambda layer, x, weight, bias: F.embedding(x, weight, layer.padding_idx),
}


@runtime_checkable
class Together(Protocol):
    """An eraser that computes the losses of several objectives from one prediction."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def positions(self) -> int:
        """The positions of one example's latents, height x width."""
        ...

    def losses(self, draws: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the loss of each objective on its micro-batch.

        The rows of the micro-batches follow each other, in the order of `draws`.

        Raises:
            Inseparable: A loss cannot be computed from a shared prediction.
        """
        ...


@dataclass(frozen=True)
class Setting:
    """What decides whether the objectives of a training share a pass.

    Attributes:
        mode: training.one_pass. "auto" uses one pass only where it was measured to be faster.
        batch_size: The examples of each objective in a micro-batch.
        micro_batches: The number of micro-batches.
        device: The type of the device, such as `cpu`, if one process trains alone; else None.
        uses_all: Whether the method uses the gradients of all objectives at the same parameters.
        recomputes: Whether the backward pass recomputes activations (training.checkpointing).
        frees_weights: Whether weights are freed after each pass (training.shard: weights).
    """

    mode: Literal["auto", "on", "off"] = "off"
    batch_size: int = 1
    micro_batches: int = 1
    device: str | None = "cpu"
    uses_all: bool = True
    recomputes: bool = False
    frees_weights: bool = False


def choose(eraser: Eraser, setting: Setting) -> OnePass | None:
    """Return the joint pass of an eraser's objectives, or None for a pass for each objective.

    The reason for None is logged, as a warning if one pass was requested.
    """
    if setting.mode == "off":
        return None
    try:
        _require_use(eraser, setting)
        assert isinstance(eraser, Together)
        return OnePass(eraser, eraser.trainable())
    except Inseparable as reason:
        tell(setting.mode, str(reason))
        return None


def tell(mode: str, reason: str) -> None:
    """Log that each objective has its own pass, and why."""
    level = logging.WARNING if mode == "on" else logging.INFO
    _LOG.log(level, "training.one_pass: each objective has its own pass, since %s", reason)


def _require_use(eraser: Eraser, setting: Setting) -> None:
    """Raise Inseparable if the training does not allow one pass, or does not gain from it."""
    reasons = {
        "there are fewer than two objectives": len(eraser.objectives) < 2,
        "the target is not a denoiser": not isinstance(eraser, Together),
        "there is an adversary": bool(eraser.adversary()),
        "training.micro_batches is more than 1": setting.micro_batches > 1,
        "training.checkpointing recomputes activations": setting.recomputes,
        "training.shard: weights frees weights after each pass": setting.frees_weights,
    }
    if setting.mode == "auto" and isinstance(eraser, Together):
        size = setting.batch_size * eraser.positions
        largest = LARGEST.get(setting.device or "", (0, 0))[_trains_most(eraser)]
        reasons |= {
            "the method does not use all gradients at the same weights": not setting.uses_all,
            "a gain was measured for one process on a CPU or CUDA only": not largest,
            f"a gain was measured for up to {largest} positions of latents, found {size}": (
                bool(largest) and size > largest
            ),
        }
    for reason, applies in reasons.items():
        if applies:
            raise Inseparable(reason)


def _trains_most(eraser: Eraser) -> bool:
    """Whether most weights of the module are trained themselves, without a LoRA."""
    trained = sum(parameter.numel() for parameter in eraser.trainable().values())
    every = sum(parameter.numel() for parameter in eraser.module.parameters())
    return eraser.adapter is None and 2 * trained > every


class OnePass:
    """The gradients of several objectives from one pass.

    Args:
        eraser: The eraser, with the module whose layers are trained.
        params: The trained tensors by the module's own names.

    Raises:
        Inseparable: A trained tensor belongs to a layer that is not covered.
    """

    def __init__(self, eraser: Together, params: Mapping[str, nn.Parameter]) -> None:
        self.eraser, self.params = eraser, tuple(params.values())
        places = {id(parameter): place for place, parameter in enumerate(self.params)}
        self.layers: list[tuple[nn.Module, dict[str, int]]] = []
        covered_places: set[int] = set()
        for layer in eraser.module.modules():
            own = {
                name: places[id(parameter)]
                for name, parameter in layer.named_parameters(recurse=False)
                if id(parameter) in places
            }
            if own and _is_covered(layer):
                self.layers.append((layer, own))
                covered_places |= set(own.values())
        missing = [name for place, name in enumerate(params) if place not in covered_places]
        if missing:
            owner = eraser.module.get_submodule(missing[0].rpartition(".")[0])
            raise Inseparable(
                f"{len(missing)} of {len(params)} trained tensors belong to other layers than "
                f"{', '.join(kind.__name__ for kind in BY_OBJECTIVE)}, e.g. {missing[0]} to a "
                f"{type(owner).__name__}"
            )

    def gradients(self, draws: Mapping[str, Any], sizes: Sizes) -> Gradients:
        """Return the loss of each objective, and its gradient with one tensor for each parameter.

        Args:
            draws: One micro-batch for each objective.
            sizes: The number of rows of each micro-batch.

        Raises:
            Inseparable: A loss, or a layer's input, cannot be separated by rows.
        """
        count = len(self.params)
        aliases = [
            [parameter.detach().requires_grad_() for parameter in self.params] for _ in sizes
        ]
        leaves = [alias for some in aliases for alias in some]
        with self._reading(aliases, sizes):
            losses = self.eraser.losses(draws)
            total = torch.stack([losses[objective] for objective in draws]).sum()
            # a tensor that is also used outside of its layer has a gradient itself
            flat = torch.autograd.grad(total, [*leaves, *self.params], allow_unused=True)
        if any(gradient is not None for gradient in flat[len(leaves) :]):
            raise Inseparable("a trained tensor is used outside of its layer")
        return {
            objective: (
                losses[objective].detach(),
                [
                    torch.zeros_like(parameter) if gradient is None else gradient
                    for gradient, parameter in zip(
                        flat[place * count : (place + 1) * count], self.params, strict=True
                    )
                ],
            )
            for place, objective in enumerate(draws)
        }

    @contextmanager
    def _reading(self, aliases: Sequence[Sequence[Tensor]], sizes: Sizes) -> Iterator[None]:
        """Let the trained layers read their weights through the aliases inside the context."""
        try:
            for layer, places in self.layers:
                values = [{name: some[place] for name, place in places.items()} for some in aliases]
                vars(layer)["forward"] = _Forward(layer, values, sizes)
            yield
        finally:
            for layer, _ in self.layers:
                vars(layer).pop("forward", None)


def _is_covered(layer: nn.Module) -> bool:
    """Whether a layer is one of BY_OBJECTIVE itself, and its output depends on rows only."""
    if type(layer) not in BY_OBJECTIVE or "forward" in vars(layer):
        return False
    # such embeddings change their own weights, or divide by the counts of the whole batch
    return not (
        isinstance(layer, nn.Embedding)
        and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse)
    )


class _Forward:
    """The forward pass of a layer whose rows belong to several objectives.

    Without gradients, which is how a teacher predicts, it is the layer's own.

    Args:
        layer: The layer.
        values: For each objective the aliases of the trained parameters, by name.
        sizes: The rows of each objective.
    """

    def __init__(
        self, layer: nn.Module, values: Sequence[Mapping[str, Tensor]], sizes: Sizes
    ) -> None:
        self.layer: Any = layer
        self.values, self.sizes = values, sizes

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.layer
        if not torch.is_grad_enabled():
            output: Tensor = type(layer).forward(layer, x)
            return output
        if x.shape[0] != sum(self.sizes):
            raise Inseparable(
                f"a {type(layer).__name__} has an input of the shape {list(x.shape)} for "
                f"{sum(self.sizes)} examples"
            )
        weights = [some.get("weight", layer.weight) for some in self.values]
        biases = [some.get("bias", getattr(layer, "bias", None)) for some in self.values]
        if isinstance(layer, nn.Linear):
            return _apply(_Linear, x, self.sizes, weights=weights, biases=biases)
        if _is_plain_convolution(layer):
            form = (layer.stride, layer.padding, layer.dilation, layer.groups)
            return _apply(_Convolution, x, self.sizes, weights=weights, biases=biases, form=form)
        forward = BY_OBJECTIVE[type(layer)]
        return torch.cat(
            [
                forward(layer, rows, weight, bias)
                for rows, weight, bias in zip(x.split(self.sizes), weights, biases, strict=True)
            ]
        )


def _is_plain_convolution(layer: nn.Module) -> bool:
    """Whether a layer is a convolution with zeros around its input, given by numbers."""
    return (
        isinstance(layer, nn.Conv2d)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _apply(
    function: type[torch.autograd.Function],
    x: Tensor,
    sizes: Sizes,
    *,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    form: tuple[Any, ...] = (),
) -> Tensor:
    """Apply _Linear or _Convolution, in the precision of autocast if it is on."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    output: Tensor = function.apply(x, dtype, sizes, form, *weights, *biases)
    return output


class _Linear(torch.autograd.Function):
    """x W^T + b of all rows, with one gradient of W and b for the rows of each objective."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, sizes: Sizes, form: tuple[Any, ...], *values: Any
    ) -> Tensor:
        inputs, weight, bias = _as_type(dtype, x, values[0], values[len(sizes)])
        ctx.save_for_backward(inputs, weight)
        ctx.sizes = sizes
        return F.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        count, needed = len(ctx.sizes), ctx.needs_input_grad[4:]
        of_x = slope @ weight if ctx.needs_input_grad[0] else None
        pairs = [
            (rows.flatten(0, -2), inputs.flatten(0, -2))
            for rows, inputs in zip(slope.split(ctx.sizes), x.split(ctx.sizes), strict=True)
        ]
        of_weights = [
            rows.T @ inputs if need else None
            for (rows, inputs), need in zip(pairs, needed[:count], strict=True)
        ]
        of_biases = [
            rows.sum(0) if need else None
            for (rows, _), need in zip(pairs, needed[count:], strict=True)
        ]
        return of_x, None, None, None, *of_weights, *of_biases


class _Convolution(torch.autograd.Function):
    """A convolution of all rows, with one gradient of W and b for the rows of each objective."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, sizes: Sizes, form: tuple[Any, ...], *values: Any
    ) -> Tensor:
        inputs, weight, bias = _as_type(dtype, x, values[0], values[len(sizes)])
        ctx.save_for_backward(inputs, weight)
        ctx.sizes, ctx.form = sizes, form
        return F.conv2d(inputs, weight, bias, *form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        count, needed = len(ctx.sizes), ctx.needs_input_grad[4:]

        def derive(slope: Tensor, x: Tensor, mask: tuple[bool, bool, bool]) -> Any:
            stride, padding, dilation, groups = ctx.form
            return torch.ops.aten.convolution_backward(
                slope,
                x,
                weight,
                [len(weight)],
                stride=stride,
                padding=padding,
                dilation=dilation,
                transposed=False,
                output_padding=[0, 0],
                groups=groups,
                output_mask=mask,
            )

        of_x = derive(slope, x, (True, False, False))[0] if ctx.needs_input_grad[0] else None
        of_values = [
            derive(rows, inputs, (False, of_weight, of_bias))[1:]
            if of_weight or of_bias
            else (None, None)
            for rows, inputs, of_weight, of_bias in zip(
                slope.split(ctx.sizes),
                x.split(ctx.sizes),
                needed[:count],
                needed[count:],
                strict=True,
            )
        ]
        of_weights, of_biases = zip(*of_values, strict=True)
        return of_x, None, None, None, *of_weights, *of_biases


def _as_type(dtype: torch.dtype, *values: Tensor | None) -> list[Any]:
    return [None if value is None else value.to(dtype) for value in values]
