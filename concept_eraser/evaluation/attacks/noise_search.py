"""Noise search: initial noise from which the victim generates the concept for the same prompt.

Ma et al., "Inference-Time Scaling for Diffusion Models beyond Scaling Denoising Steps", 2025, arXiv
2501.09732: candidates of the initial noise are scored by a verifier. Random search draws them anew.
Zero-order search draws them around the best one so far, the pivot, and goes on from the best. (The
paper's text and code were not read here, a summary of it was: figure 2.)

The objective is what the attacker has:

* reward  The agreement of the image with the concept prompt (CLIP score). The judge sees every
          candidate, so that each is a query, and the first success counts. The control is
          `seed_search` with the same number of images.
* image   The distance of the latents to an image of the concept. No judge is asked: only the best
          candidate is offered, every few rounds.

Neighbours of the pivot are sqrt(1 - r^2) pivot + r noise, so that they stay standard normal. With
radius 1 this is random search. noise_gradient.py uses the gradient through the sampler.

Difference: one candidate a prompt and round (the paper: several around each pivot), so that no
candidate is judged without being counted.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from concept_eraser.evaluation.attacks.base import (
    Access,
    Attack,
    Family,
    Round,
    Scene,
    require_positive,
)
from concept_eraser.evaluation.attacks.trajectory import (
    Text,
    concept_latents,
    condition_for,
    folder_hash,
    noise_for,
    require_shares,
    require_steps,
    sampler_for,
)


@dataclass(frozen=True)
class NoiseSearch(Attack):
    """Search the initial noise, with prompt and weights unchanged.

    Args:
        objective: The score of a candidate: reward or image.
        rounds: The number of candidates a prompt.
        every: The objective image offers its best one after this number of rounds.
        radius: The size of a change of the noise, in (0, 1]; 1 for random search.
        text: The victim is given the prompt, or the empty prompt.
        images: A folder of images of the concept, in place of the original model's.
        steps: The steps of the sampler, 0 for the suite's.
    """

    title: ClassVar[str] = "Noise search"
    source: ClassVar[str] = "arXiv 2501.09732"
    family: ClassVar[Family] = "without text"
    access: ClassVar[Access] = "sampling"
    needs_words: ClassVar[bool] = False
    samples_itself: ClassVar[bool] = True

    objective: Literal["reward", "image"] = "image"
    rounds: int = 100
    every: int = 20
    radius: float = 0.3
    text: Text = "prompt"
    images: str = ""
    steps: int = 0

    def __post_init__(self) -> None:
        require_positive(rounds=self.rounds, every=self.every)
        require_shares("radius", [self.radius])
        require_steps(self.steps)

    def lists(self) -> dict[str, str]:
        return folder_hash(self.images)

    @property
    def needs_captions(self) -> bool:  # type: ignore[override]
        """Whether the judge must measure the agreement of images with prompts."""
        return self.objective == "reward"

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        pivot = noise_for(scene, torch.arange(len(scene.prompts)))
        sampler = sampler_for(scene, self.steps, self.text)
        goal = concept_latents(scene, self.images)
        best = torch.full((len(pivot),), -math.inf, device=pivot.device)
        final = torch.zeros_like(pivot)
        for number in range(self.rounds):
            live = scene.live
            places = live.to(pivot.device)
            candidates = pivot[places]
            if number:
                fresh = noise_for(scene, live, ("noise search", number))
                candidates = math.sqrt(1 - self.radius**2) * candidates + self.radius * fresh
            x = sampler.run(candidates, condition_for(scene, live, self.text))
            if self.objective == "reward":
                yield Round(live, images=sampler.images(x), has_rewards=True)
                if scene.rewards is None:
                    raise ValueError("the objective reward needs a judge's rewards")
                scores = scene.rewards.to(best)
            else:
                scores = -(x - goal[places]).square().flatten(1).mean(1)
            better = scores > best[places]
            winners = places[better]
            pivot[winners], best[winners] = candidates[better], scores[better]
            final[winners] = x[better]
            if self.objective == "image" and self._is_due(number + 1):
                loss = -float(best[places].mean())
                yield Round(live, images=sampler.images(final[places]), loss=loss)

    def _is_due(self, number: int) -> bool:
        return number % self.every == 0 or number == self.rounds


PLUGIN = NoiseSearch
NAMED = {
    "noise_search-reward": {"objective": "reward"},
}
