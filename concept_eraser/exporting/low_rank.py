"""The best matrices of a rank for a change of weights (Eckart and Young).

Each layer's change D [out, in * kernel] is replaced by its largest singular values. The relative
error

    sqrt(sum ||D - up down||^2 / sum ||D||^2)

counts all tensors that changed, also those that a LoRA cannot hold (biases, norms).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from concept_eraser.models import lora_files
from concept_eraser.models.base import Model
from concept_eraser.models.lora import Factors, Pair, can_adapt
from concept_eraser.utils.errors import UserError

Changes = dict[str, dict[str, tuple[Tensor, Tensor]]]  # part -> tensor -> (before, after)
Place = tuple[str, str]  # part and layer


@dataclass(frozen=True)
class Spectrum:
    """The singular value decomposition of the change of one layer.

    Attributes:
        left: Its left singular vectors [out, count].
        values: Its singular values [count], the largest first.
        right: Its right singular vectors [count, in * kernel].
        inner: The shape of the weight without its first dimension: [in] or [in, k, k].
    """

    left: Tensor
    values: Tensor
    right: Tensor
    inner: tuple[int, ...]

    def factors(self, rank: int) -> Pair:
        """Return (down, up) of the `rank` largest singular values."""
        root = self.values[:rank].sqrt()
        down, up = root[:, None] * self.right[:rank], self.left[:, :rank] * root
        shape = (len(up), up.shape[1], *[1] * (len(self.inner) - 1))
        return down.view(-1, *self.inner).float(), up.reshape(shape).float()

    def remainder(self, rank: int) -> float:
        """Return ||D - up down||^2 for the factors of a rank."""
        return float(self.values[rank:].double().square().sum())


@dataclass(frozen=True)
class LayerErrors:
    """The relative errors of single layers, sqrt(||D - up down||^2 / ||D||^2).

    Attributes:
        mean: Their mean.
        worst: The largest one.
        worst_layer: Its layer.
    """

    mean: float
    worst: float
    worst_layer: str


@dataclass(frozen=True)
class Approximation:
    """A LoRA of a rank, and what it leaves out.

    Attributes:
        factors: The LoRA, one entry for each part.
        error: The relative error of the whole change.
        layers: The relative errors of the layers; None if nothing was left out.
        reduced_from: The rank of the LoRA that was reduced; None for other changes.
    """

    factors: list[Factors]
    error: float
    layers: LayerErrors | None
    reduced_from: int | None = None


def spectra_of_changes(model: Model, changes: Changes) -> tuple[dict[Place, Spectrum], float]:
    """Decompose the difference of two models.

    Returns the spectrum of each layer, and the squared length of the changes outside of layers.
    """
    spectra, other_square = {}, 0.0
    for part, tensors in changes.items():
        for name, (before, after) in tensors.items():
            change = after.float().cpu() - before.float().cpu()
            layer, _, kind = name.rpartition(".")
            if kind == "weight" and can_adapt(model.parts[part].get_submodule(layer), conv=True):
                left, values, right = torch.linalg.svd(change.flatten(1), full_matrices=False)
                spectra[part, layer] = Spectrum(left, values, right, tuple(change.shape[1:]))
            else:
                other_square += float(change.double().square().sum())
    return spectra, other_square


def spectra_of_factors(factors: Sequence[Factors]) -> dict[Place, Spectrum]:
    """Decompose the changes of a LoRA, in float64, without forming them.

    With the QR decompositions up = Q R and down^T = P S the change is Q (R S^T) P^T. Only R S^T
    [rank, rank] needs a singular value decomposition.
    """
    spectra = {}
    for one in factors:
        for layer, (down, up) in one.layers.items():
            left, upper = torch.linalg.qr((one.alpha / one.rank) * up.flatten(1).double())
            right, lower = torch.linalg.qr(down.flatten(1).double().T)
            u, values, v = torch.linalg.svd(upper @ lower.T, full_matrices=False)
            inner = tuple(down.shape[1:])
            spectra[one.part, layer] = Spectrum(left @ u, values, v @ right.T, inner)
    return spectra


def approximate(
    spectra: Mapping[Place, Spectrum], other_square: float, rank: int | None, max_error: float
) -> Approximation:
    """Return the best LoRA of a rank.

    Args:
        spectra: The change of each layer.
        other_square: The squared length of the changes outside of layers.
        rank: The rank (default: the smallest one with an error of at most `max_error`).
        max_error: The largest relative error.

    Returns:
        The LoRA and its errors.

    Raises:
        UserError: The error is larger.
    """
    total = other_square + sum(one.remainder(0) for one in spectra.values())
    widest = max((len(one.values) for one in spectra.values()), default=0)
    errors = [
        ((other_square + sum(one.remainder(r) for one in spectra.values())) / total) ** 0.5
        if total
        else 0.0
        for r in range(widest + 1)
    ]
    least_rank = next((r for r in range(1, widest + 1) if errors[r] <= max_error), None)
    best_rank = least_rank if rank is None else min(rank, widest)
    if not best_rank or errors[best_rank] > max_error:
        hint = (
            f"rank {least_rank} leaves {errors[least_rank]:.3f}"
            if least_rank
            else (
                f"no rank leaves less than {errors[-1]:.3f} (biases, norms and embeddings "
                "are not part of a LoRA)"
            )
        )
        request = (
            f"of rank {best_rank} leaves {errors[best_rank]:.3f} of the change"
            if best_rank
            else "cannot hold this change"
        )
        needed = errors[best_rank or widest]
        advice = ["export --to diffusers"]
        if widest and needed < 1:
            advice.insert(0, f"--max-error {math.ceil(100 * needed) / 100:g}")
        if least_rank:
            advice.insert(0, f"--rank {least_rank}")
        raise UserError(
            f"a LoRA {request}, more than --max-error {max_error:g}; {hint}. Give "
            f"{' or '.join(advice)}"
        )
    pairs: dict[str, dict[str, Pair]] = {}
    for (part, layer), spectrum in spectra.items():
        pairs.setdefault(part, {})[layer] = spectrum.factors(best_rank)
    factors = [lora_files.of_pairs(part, layers) for part, layers in pairs.items()]
    return Approximation(factors, errors[best_rank], _layer_errors(spectra, best_rank))


def _layer_errors(spectra: Mapping[Place, Spectrum], rank: int) -> LayerErrors:
    errors = {
        layer if part == "denoiser" else f"{part}.{layer}": (
            (one.remainder(rank) / one.remainder(0)) ** 0.5 if one.remainder(0) else 0.0
        )
        for (part, layer), one in spectra.items()
    }
    worst_layer = max(errors, key=lambda name: errors[name])
    return LayerErrors(sum(errors.values()) / len(errors), errors[worst_layer], worst_layer)
