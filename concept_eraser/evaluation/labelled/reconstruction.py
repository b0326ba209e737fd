"""The reconstruction quality of a VAE: PSNR of images decoded from the mean of their code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from concept_eraser.data.labelled import Labelled
from concept_eraser.evaluation.statistics import mean_interval
from concept_eraser.models.base import moments, to_pixels
from concept_eraser.utils.errors import UserError


@torch.no_grad()
def psnr(
    module: nn.Module, data: Labelled, rows: Tensor, *, limit: int = 500, batch_size: int = 64
) -> np.ndarray:
    """PSNR of each image in dB, [n]: 10 log10(range^2 / mean squared error).

    The range is 1 where the data have no negative values, else 2 ([-1, 1]).

    Args:
        module: The VAE.
        data: The labelled images.
        rows: The positions of the measured images in `data`, [m].
        limit: The largest number of measured images. Of more rows a random subset of this size is
            measured, in the order of `rows`. Its seed is fixed, so it is the same in each call.
        batch_size: The number of images decoded at once.

    Returns:
        The PSNR of each measured image, [min(m, limit)].

    Raises:
        UserError: There are no rows.
    """
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:limit]
    subset = rows[chosen.sort().values]
    if len(subset) == 0:
        raise UserError(f"no examples of {data.about} to measure on")
    vae: Any = module.eval()
    device = next(module.parameters()).device
    batch_errors, minimum = [], 0.0
    for part in subset.split(batch_size):
        x = data.inputs(part.tolist()).to(device)
        mean, _ = moments(vae.encode(x))
        reconstruction = to_pixels(vae.decode(mean)).reshape(x.shape).float()
        batch_errors.append((reconstruction - x).square().flatten(1).mean(1).cpu())
        minimum = min(minimum, float(x.min()))
    span = 2.0 if minimum < 0 else 1.0
    errors = torch.cat(batch_errors).double().clamp(min=1e-12).numpy()
    return 10 * np.log10(span**2 / errors)


def intervals(
    module: nn.Module, sets: dict[str, tuple[Labelled, Tensor]]
) -> dict[str, dict[str, float]]:
    """Mean PSNR in dB with its 95 % interval on each named set."""
    results = {}
    for name, (data, rows) in sets.items():
        value = mean_interval(psnr(module, data, rows))
        results[name] = {"value": value.value, "low": value.low, "high": value.high, "n": value.n}
    return results
