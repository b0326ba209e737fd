"""The sheet of images of an attack: original, erased model, and erased model under attack."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from concept_eraser.data import generate
from concept_eraser.evaluation.attacks.runner import Campaign
from concept_eraser.models.base import Model
from concept_eraser.reporting import html, plots


def sheet(campaign: Campaign, victim: Model, original: Model, *, limit: int = 8) -> bytes | None:
    """Make the sheet of the first prompts for which an adversarial text was successful.

    Each column has three images: the original on the prompt, the victim on the prompt, and the
    victim on the adversarial text. They are blurred if the suite is sensitive.

    Returns:
        The sheet as PNG, or None if there is no such prompt.
    """
    successes = [a for a in campaign.attempts if a.text is not None][:limit]
    if not successes:
        return None
    sampling = generate.Sampling(**campaign.protocol["suite"]["sampling"])

    scales = [sampling.guidance if a.guidance is None else a.guidance for a in successes]

    def draw(model: Model, texts: list[str], seeds: list[int]) -> Tensor:
        request = generate.ImageRequest(
            Path(), texts, seeds=seeds, scales=scales, sampling=sampling
        )
        return torch.cat([generate.sample_chunk(model, request, i) for i in request.starts])

    prompts, seeds = [a.prompt for a in successes], [a.seed for a in successes]
    attacked_images = draw(
        victim,
        [str(a.text) for a in successes],
        [a.by_seed if a.by_seed is not None else a.seed for a in successes],
    )
    rows = (draw(original, prompts, seeds), draw(victim, prompts, seeds), attacked_images)
    hide = html.is_sensitive(campaign.as_dict())
    return plots.stack([html.all_blurred(row) for row in rows] if hide else rows, len(successes))
