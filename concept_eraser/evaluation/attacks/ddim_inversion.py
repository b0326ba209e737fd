"""DDIM inversion: noise from which the victim generates a given image of the concept.

Song et al., "Denoising Diffusion Implicit Models", ICLR 2021, arXiv 2010.02502: the sampler without
noise is an ordinary differential equation, so that it can be followed backwards from an image to
noise. Rusanovsky et al., "Memories of Forgotten Concepts", CVPR 2025, arXiv 2412.00782, invert
images of the erased concept on the erased model, and generate from the noise. They also report how
probable the noise is (`src/nti.py` and `tensor_to_nll` in `src/utils.py` of
matanr/Memories_of_Forgotten_Concepts).

The inversion has guidance 1, as in null-text inversion (arXiv 2211.09794). Each guidance of
`guidances` gives one image from the noise. The loss of a round is the mean negative log-likelihood
of the noise under a standard normal distribution, in nats per latent (a draw from it has
0.5 log(2 pi e) = 1.42).

Difference: Rusanovsky et al. sum the log-likelihood over the latents, and treat the image as if it
had the noise of the first time step.

The success of guidance 1 alone proves no memory. A network that predicts nothing at all returns the
image, because the way back undoes the way there. Compare with a model that never learned the
concept, and read the likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from concept_eraser.evaluation.attacks.base import Access, Attack, Family, Round, Scene
from concept_eraser.evaluation.attacks.trajectory import (
    Text,
    Trajectory,
    concept_latents,
    condition_for,
    folder_hash,
    require_guidances,
    require_steps,
)


@dataclass(frozen=True)
class DDIMInversion(Attack):
    """Invert an image of the concept to noise, and generate from the noise.

    Args:
        guidances: The guidance of each image from the noise, in this order; 1 is the prompt alone.
        text: The prompt of inversion and generation, or the empty prompt.
        images: A folder of images of the concept, in place of the original model's.
        steps: The steps of both ways, 0 for the suite's.
    """

    title: ClassVar[str] = "DDIM inversion"
    source: ClassVar[str] = "arXiv 2010.02502, 2412.00782"
    family: ClassVar[Family] = "without text"
    access: ClassVar[Access] = "sampling"
    needs_words: ClassVar[bool] = False
    samples_itself: ClassVar[bool] = True

    guidances: tuple[float, ...] = (5.0, 3.0, 1.0)
    text: Text = "prompt"
    images: str = ""
    steps: int = 50

    def __post_init__(self) -> None:
        require_steps(self.steps)
        require_guidances(self.guidances)
        if not self.guidances:
            raise ValueError("guidances must have at least one value")

    def lists(self) -> dict[str, str]:
        return folder_hash(self.images)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        latents = concept_latents(scene, self.images)
        live = scene.live
        condition = condition_for(scene, live, self.text)
        inverter = Trajectory(scene, self.steps, guidance=1)
        noise = inverter.invert(latents[live.to(latents.device)], condition)[0]
        for guidance in self.guidances:
            rows = scene.live
            places = rows.to(noise.device)
            sampler = Trajectory(scene, self.steps, guidance=guidance)
            x = sampler.run(noise[places], condition[places])
            yield Round(rows, images=sampler.images(x), loss=surprise(noise[places]))


def surprise(noise: Tensor) -> float:
    """Return the mean negative log-likelihood of standard normal noise, in nats per number."""
    return 0.5 * (float(noise.square().mean()) + math.log(2 * math.pi))


PLUGIN = DDIMInversion
