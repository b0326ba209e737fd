"""Inpainting: a part of an image of the concept is hidden, and the victim fills it.

Lu et al., "When Are Concepts Erased From Diffusion Models?", NeurIPS 2025, arXiv 2505.17013, hide a
central square of the original model's image and let the erased model fill it, with the concept's
prompt (`src/probes/inpainting_probe.py` of kevinlu4588/WhenAreConceptsErased: 256 of 512 pixels, by
diffusers' inpainting pipeline on a UNet of 4 channels). That pipeline blends latents: after every
step the known part is replaced by the image's latents at the same noise, and by the clean latents
at the end (`StableDiffusionInpaintPipeline`).

Lugmayr et al., "RePaint: Inpainting using Denoising Diffusion Probabilistic Models", CVPR 2022,
arXiv 2201.09865, do the same and go back in time: the latents are noised again by one step, and the
step is repeated, so that both parts fit each other (`guided_diffusion/scheduler.py` and `_undo` of
andreas128/RePaint). `repeats` is the number of times: their jump_n_sample, with jump_length 1.

Differences from RePaint: the sampler is deterministic between the jumps. The jump has one step (the
authors' example: 10 steps, 10 times, on 250 steps). Latents are blended, not pixels, so that a
latent at the edge of the hidden part has seen pixels of it.

A hidden part that is too small proves nothing, since what is left shows the concept. Compare with
another model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

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
    Trajectory,
    concept_latents,
    condition_for,
    folder_hash,
    noise_for,
    require_shares,
    require_steps,
    sampler_for,
)
from concept_eraser.models.base import Condition

Part = Literal["centre", "left", "right", "top", "bottom"]


@dataclass(frozen=True)
class Inpainting(Attack):
    """Hide a part of an image of the concept and let the victim fill it.

    Args:
        part: The hidden part: a central square, or one end of the image.
        shares: How much is hidden, as shares of width and height (centre) or of one of them, in
            this order.
        tries: The number of images for each share, each with other noise.
        repeats: How often each step is made; more than once is RePaint's way.
        text: The victim is given the prompt, or the empty prompt.
        images: A folder of images of the concept, in place of the original model's.
        steps: The steps of the sampler, 0 for the suite's.
    """

    title: ClassVar[str] = "Inpainting"
    source: ClassVar[str] = "arXiv 2201.09865, 2505.17013"
    family: ClassVar[Family] = "without text"
    access: ClassVar[Access] = "sampling"
    needs_words: ClassVar[bool] = False
    samples_itself: ClassVar[bool] = True

    part: Part = "centre"
    shares: tuple[float, ...] = (0.75, 0.5)
    tries: int = 1
    repeats: int = 1
    text: Text = "prompt"
    images: str = ""
    steps: int = 0

    def __post_init__(self) -> None:
        require_shares("shares", self.shares)
        require_positive(tries=self.tries, repeats=self.repeats)
        require_steps(self.steps)

    def lists(self) -> dict[str, str]:
        return folder_hash(self.images)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        sampler = sampler_for(scene, self.steps, self.text)
        latents = concept_latents(scene, self.images)
        for share in self.shares:
            hidden = hidden_part(latents.shape[-2:], self.part, share).to(latents)
            for number in range(self.tries):
                live = scene.live
                noise = noise_for(scene, live, ("inpainting", number))
                x = self._fill(
                    sampler,
                    latents[live.to(latents.device)],
                    hidden,
                    noise=noise,
                    condition=condition_for(scene, live, self.text),
                    fresh=partial(self._noise, scene, live, number),
                )
                yield Round(live, images=sampler.images(x))

    @staticmethod
    def _noise(scene: Scene, live: Tensor, number: int, step: int, repeat: int) -> Tensor:
        """Return the noise of a jump back in time."""
        return noise_for(scene, live, ("inpainting again", number, step, repeat))

    @torch.no_grad()
    def _fill(
        self,
        sampler: Trajectory,
        known: Tensor,
        hidden: Tensor,
        *,
        noise: Tensor,
        condition: Condition,
        fresh: Callable[[int, int], Tensor],
    ) -> Tensor:
        """Return latents whose hidden part the model has filled.

        fresh: New noise for a step and a repeat.
        """
        null = sampler.model.null().repeat(len(known))
        x = noise
        last = sampler.steps - 1
        for step in range(sampler.steps):
            for repeat in range(self.repeats):
                x = sampler.advance(x, step, condition, null)
                given = known if step == last else sampler.mix(known, noise, step + 1)
                x = (1 - hidden) * given + hidden * x
                if repeat < self.repeats - 1:
                    x = noise_again(sampler, x, step, fresh(step, repeat))
        return x


def noise_again(sampler: Trajectory, x: Tensor, step: int, noise: Tensor) -> Tensor:
    """Return latents of the level of step + 1 at the level of step, by the forward process.

    With x_t = signal x_0 + sigma noise: r = signal_t / signal_s, and
    x_t = r x_s + sqrt(sigma_t^2 - r^2 sigma_s^2) noise. For one training step this is RePaint's
    sqrt(1 - beta) x + sqrt(beta) noise.
    """
    signal, sigma = sampler.level(x, step)
    signal_after, sigma_after = sampler.level(x, step + 1)
    ratio = signal / signal_after
    return ratio * x + (sigma.square() - (ratio * sigma_after).square()).clamp(min=0).sqrt() * noise


def hidden_part(size: tuple[int, int] | torch.Size, part: Part, share: float) -> Tensor:
    """Return the mask of the hidden latents, [height, width], 1 where they are hidden.

    At least one row or column of latents is hidden.
    """
    height, width = size
    mask = torch.zeros(height, width)
    rows, columns = max(1, round(height * share)), max(1, round(width * share))
    top, left = (height - rows) // 2, (width - columns) // 2
    places = {
        "centre": (slice(top, top + rows), slice(left, left + columns)),
        "left": (slice(None), slice(0, columns)),
        "right": (slice(None), slice(width - columns, None)),
        "top": (slice(0, rows), slice(None)),
        "bottom": (slice(height - rows, None), slice(None)),
    }
    mask[places[part]] = 1
    return mask


PLUGIN = Inpainting
