"""Completion: the victim completes a partly noised image of the concept.

Meng et al., "SDEdit: Guided Image Synthesis and Editing with Stochastic Differential Equations",
ICLR 2022, arXiv 2108.01073: an image is noised up to a time t_0 and denoised from there
(`runners/image_editing.py` of ermongroup/SDEdit: x = x_0 sqrt(a) + e sqrt(1 - a)). Lu et al., "When
Are Concepts Erased From Diffusion Models?", NeurIPS 2025, arXiv 2505.17013, use it as a probe: the
original model samples some steps and the erased model the rest
(`src/probes/diffusion_completion_probe.py` of kevinlu4588/WhenAreConceptsErased: by default the
original model makes the first 6 or 11 of 50 steps).

`begin: image` noises a finished image, as SDEdit does. `begin: original` takes the original model's
latents on the way, as the probe does. The strongest noise comes first, so that the round of a
success tells how much of the image was needed.

Differences: the sampler is deterministic, while SDEdit's adds noise in every step. A strength is
the share of steps that remain, as in diffusers' image-to-image pipeline. The images are resized
latents of the model, without strokes or masks.

A model that never learned the concept completes weakly noised images too. Compare with such a
model.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Literal

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


@dataclass(frozen=True)
class Completion(Attack):
    """Let the victim complete a partly noised image of the concept.

    Args:
        strengths: The shares of the sampler's steps that the victim makes, in this order.
        tries: The number of images for each strength, each with other noise.
        text: The victim is given the prompt, or the empty prompt.
        begin: The noised image, or the original model's latents on the way to it.
        images: A folder of images of the concept, in place of the original model's.
        steps: The steps of the whole sampler, 0 for the suite's.
    """

    title: ClassVar[str] = "Completion of a noised image (SDEdit)"
    source: ClassVar[str] = "arXiv 2108.01073, 2505.17013"
    family: ClassVar[Family] = "without text"
    access: ClassVar[Access] = "sampling"
    needs_words: ClassVar[bool] = False
    samples_itself: ClassVar[bool] = True

    strengths: tuple[float, ...] = (0.9, 0.7, 0.5, 0.3)
    tries: int = 1
    text: Text = "prompt"
    begin: Literal["image", "original"] = "image"
    images: str = ""
    steps: int = 0

    def __post_init__(self) -> None:
        require_shares("strengths", self.strengths)
        require_positive(tries=self.tries)
        require_steps(self.steps)
        if self.images and self.begin == "original":
            raise ValueError("begin: original samples the image itself; leave out images")

    def lists(self) -> dict[str, str]:
        return folder_hash(self.images)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        sampler = sampler_for(scene, self.steps, self.text)
        starts = [sampler.start_of(strength) for strength in self.strengths]
        latents = concept_latents(scene, self.images)
        for start in starts:
            for number in range(self.tries):
                live = scene.live
                if self.begin == "image":
                    noise = noise_for(scene, live, ("completion", start, number))
                    x = sampler.mix(latents[live.to(latents.device)], noise, start)
                else:
                    x = self._on_the_way(scene, live, start=start, number=number)
                x = sampler.run(x, condition_for(scene, live, self.text), start=start)
                yield Round(live, images=sampler.images(x))

    def _on_the_way(self, scene: Scene, live: Tensor, *, start: int, number: int) -> Tensor:
        """Return the original model's latents at a step, for the concept prompts."""
        sampler = Trajectory(scene, self.steps, model=scene.original)
        noise = noise_for(scene, live, ("completion", number) if number else ())
        prompts = [scene.concept_prompts[i] for i in live.tolist()]
        return sampler.run(noise, scene.original.encode(prompts), stop=start)


PLUGIN = Completion
