"""The sheet of images of an attack: the original, the erased model, and the erased model under
attack.
"""

from __future__ import annotations

from torch import Tensor

from concept_eraser.data import generate
from concept_eraser.evaluation.attacks.runner import Campaign
from concept_eraser.models.base import Model
from concept_eraser.reporting import html, plots


def sheet(campaign: Campaign, victim: Model, original: Model, *, limit: int = 8) -> bytes | None:
    """Of the first prompts that fell to a text: the attacked prompt by the original and by the
    victim, and the adversarial one by the victim, one above the other, as PNG, blurred where the
    suite is sensitive; None where there is none."""
    fell = [a for a in campaign.attempts if a.text is not None][:limit]
    if not fell:
        return None
    sampling = generate.Sampling(**campaign.protocol["suite"]["sampling"])

    def draw(model: Model, texts: list[str], seeds: list[int]) -> Tensor:
        return model.sample(
            texts,
            seeds=seeds,
            steps=sampling.steps,
            guidance=sampling.guidance,
            autocast=sampling.autocast,
        )

    prompts, seeds = [a.prompt for a in fell], [a.seed for a in fell]
    attacked_images = draw(
        victim,
        [str(a.text) for a in fell],
        [a.by_seed if a.by_seed is not None else a.seed for a in fell],
    )
    rows = (draw(original, prompts, seeds), draw(victim, prompts, seeds), attacked_images)
    hide = html.is_sensitive(campaign.as_dict())
    return plots.stack([html.all_blurred(row) for row in rows] if hide else rows, len(fell))
