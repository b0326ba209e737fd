"""Training in the directions that retained data do not use: projected gradient unlearning (PGU).

A linear layer with the weight W [out, in] gives the same output for an input x if each row of the
change of W is orthogonal to x. So the change is projected on the complement of the span of the
retained inputs,

    g <- g - g M M^T,    M [in, k] the first k left singular vectors of the retained inputs [in, n],

with the largest k for which their singular values are at most a share of the sum of all (Hoang et
al., "Learn to Unlearn for Deep Neural Networks", arXiv 2312.04095). A convolution is linear in the
patches of its input. All other parameters are held: biases, norms, embeddings and grouped
convolutions.

The paper's text was not read here. The authors' code is hnanhtuan/projected_gradient_unlearning.
The singular vectors are utils/unlearn_utils.py, lines 32-88. The share is `retained_var`, 0.95 in
exp/unlearned/smallvgg_cifar10/exp1/config.yaml; the projection is the loop over the parameters in
unlearn.py. PGU for diffusion models (arXiv 2604.21041) hardens an erased model by this projection.
Of this paper only abstract and introduction were read, so its losses and settings are not here.

Differences from the code:
* The inputs are those of 8 batches of the retain objective at the original weights. The code has
  the inputs of all training data, less those of the data to forget.
* What the optimizer makes of the projected gradient is projected again, since Adam's step and
  weight decay leave the subspace. The code takes plain steps.
* The share is one for all layers. The code can have one for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from concept_eraser.erasers.base import Eraser
from concept_eraser.training.first_draws import micro_batch_seeds
from concept_eraser.utils.errors import UserError

RETAIN = "retain"
ROUNDING = 1e-6  # of singular values, from products of numbers in fp32


@torch.no_grad()
def bases(
    eraser: Eraser,
    params: Mapping[str, nn.Parameter],
    *,
    share: float,
    seed: int,
    batch_size: int,
    micro_batches: int = 1,
) -> list[Tensor | None]:
    """Return M of each trained parameter; None for a parameter that is to be held.

    Args:
        eraser: The eraser, with the objective `retain`.
        params: Its trained parameters by name.
        share: The share of the sum of the singular values.
        seed: The seed of the training, from which the draws are derived.
        batch_size: The examples of a micro-batch.
        micro_batches: The micro-batches of a draw. The examples of a draw do not depend on how it
            is divided.

    Raises:
        UserError: As `layers_of`.
    """
    layers = layers_of(eraser.module, params)
    moments: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def add(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows = rows_of(layer, inputs[0])
            moments[name] = moments.get(name, 0) + rows.T @ rows

        return add

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        eraser.turn(None)
        for seeds in micro_batch_seeds(
            seed, "projection", batch_size=batch_size, micro_batches=micro_batches
        ):
            eraser.loss(RETAIN, eraser.draw(RETAIN, seeds))
    finally:
        for handle in handles:
            handle.remove()
    return [
        leading(moments[name], share).to(parameter) if name in moments else None
        for name, parameter in params.items()
    ]


def layers_of(module: nn.Module, names: Iterable[str]) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the layers whose weights are projected, by the names of these parameters.

    Args:
        module: The module that is trained.
        names: The names of its trained parameters.

    Raises:
        UserError: No trained parameter is the weight of a layer that can be projected.
    """
    layers = {name: layer for name in names if (layer := layer_of(module, name)) is not None}
    if not layers:
        raise UserError(
            "trainable.project: no trained parameter is the weight of a linear layer or of a "
            "convolution without groups, so nothing would be trained; select such weights"
        )
    return layers


def layer_of(module: nn.Module, name: str) -> nn.Linear | nn.Conv2d | None:
    """Return the layer whose weight a parameter is; None for other parameters and layers."""
    path, _, last = name.rpartition(".")
    layer = module.get_submodule(path) if last == "weight" else None
    if isinstance(layer, nn.Linear):
        return layer
    return layer if isinstance(layer, nn.Conv2d) and layer.groups == 1 else None


def rows_of(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return the vectors that a layer multiplies its weight by: [n, in] in float64.

    Those of a convolution are the patches, in the order of its flattened weight.
    """
    if isinstance(layer, nn.Conv2d):
        patches: Tensor = F.unfold(
            _padded(layer, inputs),
            layer.kernel_size,
            dilation=layer.dilation,
            stride=layer.stride,
        )
        return patches.transpose(1, 2).flatten(0, 1).double()
    return inputs.flatten(0, -2).double()


def _padded(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded: Tensor = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
    return padded


def leading(moment: Tensor, share: float) -> Tensor:
    """Return the leading eigenvectors of X X^T [in, in] as columns: [in, k].

    k is the largest number of singular values of X whose sum is at most `share` of the sum of all.
    Those below ROUNDING times the largest count as 0.
    """
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(moment)
    singular = values.flip(0).clamp(min=0).sqrt()
    singular = singular[(singular > 0) & (singular > ROUNDING * singular[0])]
    # a sum that equals the total counts, whatever the rounding
    k = int((singular.cumsum(0) <= share * singular.sum() * (1 + 1e-12)).sum())
    return vectors.flip(1)[:, :k]


def without(change: Tensor, basis: Tensor) -> Tensor:
    """Return the change of a weight without its part along the columns of a basis [in, k]."""
    rows = change.flatten(1)
    rest: Tensor = rows - (rows @ basis) @ basis.T
    return rest.view_as(change)
