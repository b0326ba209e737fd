"""The sheet of images of an attack: original, erased model, and erased model under attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from concept_eraser.data import generate, images
from concept_eraser.evaluation.attacks.runner import Attempt, Campaign
from concept_eraser.models.base import Model
from concept_eraser.reporting import html, plots


def sheet(campaign: Campaign, victim: Model, original: Model, *, limit: int = 8) -> bytes | None:
    """Make the sheet of the first prompts for which the attack was successful.

    Each column has three images: the original on the prompt, the victim on the prompt, and the
    victim under the attack. The last one is read from the attack's folder, or drawn again from the
    adversarial text. A prompt with neither has no column. The images are blurred if the suite is
    sensitive.

    Returns:
        The sheet as PNG, or None if there is no such prompt.
    """
    stored = campaign.images
    successes = {
        position: attempt
        for position, attempt in enumerate(campaign.attempts)
        if attempt.success and not attempt.pre
        if attempt.text is not None or position in stored
    }
    shown = dict(list(successes.items())[:limit])
    if not shown:
        return None
    sampling = generate.Sampling(**campaign.protocol["suite"]["sampling"])

    def draw(model: Model, attempts: Sequence[Attempt], texts: list[str]) -> Tensor:
        request = generate.ImageRequest(
            Path(),
            texts,
            seeds=[a.seed for a in attempts],
            scales=[sampling.guidance if a.guidance is None else a.guidance for a in attempts],
            sampling=sampling,
        )
        return torch.cat([generate.sample_chunk(model, request, i) for i in request.starts])

    def attacked_image(position: int, attempt: Attempt) -> Tensor:
        if position in stored:
            return torch.tensor(images.read_image(stored[position]))
        seed = attempt.seed if attempt.by_seed is None else attempt.by_seed
        return draw(victim, [replace(attempt, seed=seed)], [str(attempt.text)])[0]

    attempts = list(shown.values())
    prompts = [a.prompt for a in attempts]
    rows = (
        draw(original, attempts, prompts),
        draw(victim, attempts, prompts),
        torch.stack([attacked_image(*item) for item in shown.items()]),
    )
    hide = html.is_sensitive(campaign.as_dict())
    return plots.stack([html.all_blurred(row) for row in rows] if hide else rows, len(shown))
