"""What a VAE can still reconstruct: PSNR of pictures decoded from the mean of their code, by set."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from concept_eraser.data.labelled import Labelled
from concept_eraser.errors import UserError
from concept_eraser.evaluation.statistics import mean_interval
from concept_eraser.models.base import moments, pictures


@torch.no_grad()
def psnr(module: nn.Module, data: Labelled, rows: Tensor, *, limit: int = 500, batch_size: int = 64) -> np.ndarray:
    """10 log10(range^2 / mean squared error) of each picture in dB, [n]; at most `limit` pictures, the first ones.

    The range is 1 where the data have no negative values, else 2 ([-1, 1]).
    """
    chosen = rows[:limit]
    if len(chosen) == 0:
        raise UserError(f"no examples of {data.about} to measure on")
    vae: Any = module.eval()
    device = next(module.parameters()).device
    found, low = [], 0.0
    for part in chosen.split(batch_size):
        x = data.inputs(part.tolist()).to(device)
        mean, _ = moments(vae.encode(x))
        shown = pictures(vae.decode(mean)).reshape(x.shape).float()
        found.append((shown - x).square().flatten(1).mean(1).cpu())
        low = min(low, float(x.min()))
    span = 2.0 if low < 0 else 1.0
    errors = torch.cat(found).double().clamp(min=1e-12).numpy()
    return 10 * np.log10(span**2 / errors)


def intervals(module: nn.Module, sets: dict[str, tuple[Labelled, Tensor]]) -> dict[str, dict[str, float]]:
    """Mean PSNR in dB with its 95 % interval on each named set."""
    found = {}
    for name, (data, rows) in sets.items():
        value = mean_interval(psnr(module, data, rows))
        found[name] = {"value": value.value, "low": value.low, "high": value.high, "n": value.n}
    return found
