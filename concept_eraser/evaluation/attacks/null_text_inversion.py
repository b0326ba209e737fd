"""Null-text inversion: an unconditional embedding for each step that leads to a given image.

Mokady et al., "Null-text Inversion for Editing Real Images using Guided Diffusion Models", CVPR
2023, arXiv 2211.09794. An image of the concept is inverted with guidance 1 (see ddim_inversion.py),
which gives latents z*_t for every step. From the noise on, each step optimises the unconditional
embedding so that the guided step from the present latents leads to z*_{t-1}:

    min over null_t of || z*_{t-1} - step(z_t, prompt, null_t, guidance) ||^2

The next step starts from the optimised one, with its embedding. Numbers as in the authors' code
(class NullInversion of `null_text_w_ptp.ipynb` in google/prompt-to-prompt, of which a copy was read
here): 50 steps, guidance 7.5, 10 iterations of Adam a step with learning rate 0.01 (1 - i / 100) in
step i, and an end of step i at a loss below 1e-5 + 2e-5 i. Rusanovsky et al., arXiv 2412.00782, use
it on erased models.

Differences: the guidance is the suite's unless it is given. The images of a batch are optimised
together, each with its own loss and end. The inversion uses the prediction at the less noisy level,
the authors' the same latents with the noisier level's time step. The factor of the learning rate is
1 - i / (2 steps), which is theirs for 50 steps.

The attack has many free numbers for each image. A model that never learned the concept may follow
them too. Compare with one.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

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
    Trajectory,
    concept_latents,
    condition_for,
    folder_hash,
    require_guidance,
    require_steps,
)
from concept_eraser.models.base import Condition


@dataclass(frozen=True)
class NullTextInversion(Attack):
    """Optimise the unconditional embedding of every step for an image of the concept.

    Args:
        iterations: The steps of Adam in each step of the sampler.
        lr: The learning rate at the first step; at the last step it is half of that.
        tolerance: The loss at which the first step ends; it rises by 2 x tolerance a step.
        images: A folder of images of the concept, in place of the original model's.
        steps: The steps of both ways, 0 for the suite's.
        guidance: The guidance of the generation, 0 for the suite's.
    """

    title: ClassVar[str] = "Null-text inversion"
    source: ClassVar[str] = "arXiv 2211.09794, 2412.00782"
    family: ClassVar[Family] = "without text"
    access: ClassVar[Access] = "white box"
    samples_itself: ClassVar[bool] = True

    iterations: int = 10
    lr: float = 0.01
    tolerance: float = 1e-5
    images: str = ""
    steps: int = 50
    guidance: float = 0.0

    def __post_init__(self) -> None:
        require_positive(iterations=self.iterations, lr=self.lr)
        require_steps(self.steps)
        if self.tolerance < 0:
            raise ValueError(f"tolerance must be at least 0, found {self.tolerance}")
        require_guidance(self.guidance)

    def lists(self) -> dict[str, str]:
        return folder_hash(self.images)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        live = scene.live
        latents = concept_latents(scene, self.images)
        condition = condition_for(scene, live, "prompt")
        inverter = Trajectory(scene, self.steps, guidance=1)
        path = inverter.invert(latents[live.to(latents.device)], condition)
        sampler = Trajectory(scene, self.steps, guidance=self.guidance or None)
        x = path[0]
        null = scene.victim.null().repeat(len(live)).tensors["states"].clone()
        losses = torch.zeros(len(live))
        for step in range(sampler.steps):
            null, losses = self._optimise(
                sampler, x, step, goal=path[step + 1], null=null, condition=condition
            )
            with torch.no_grad():
                x = sampler.advance(x, step, condition, Condition({"states": null}))
        yield Round(live, images=sampler.images(x), loss=float(losses.mean()))

    def _optimise(
        self,
        sampler: Trajectory,
        x: Tensor,
        step: int,
        *,
        goal: Tensor,
        null: Tensor,
        condition: Condition,
    ) -> tuple[Tensor, Tensor]:
        """Return the unconditional embeddings of a step, [n, tokens, width], and the losses [n]."""
        model, scene = sampler.model, sampler.scene
        null = null.detach().clone().requires_grad_(True)
        rate = self.lr * (1 - step / (2 * sampler.steps))
        optimizer = torch.optim.Adam([null], rate)
        enough = self.tolerance * (1 + 2 * step)
        t = sampler.time(x, step)
        with torch.no_grad():
            conditional = model.denoise(x, t, condition)
        active = torch.ones(len(x), dtype=torch.bool, device=x.device)
        losses = torch.zeros(len(x), device=x.device)
        for _ in range(self.iterations):
            unconditional = model.denoise(x, t, Condition({"states": null}))
            prediction = unconditional + float(sampler.guidance or 0) * (
                conditional - unconditional
            )
            reached = sampler.mix(*sampler.split(x, step, prediction), step=step + 1)
            each = (reached - goal).square().flatten(1).mean(1)
            (null.grad,) = torch.autograd.grad(each.sum(), [null])
            scene.spend("gradient steps", int(active.sum()))
            before = null.detach().clone()
            optimizer.step()
            losses = torch.where(active, each.detach(), losses)
            with torch.no_grad():  # images that are done keep their embedding
                null.copy_(torch.where(active[:, None, None], null, before))
            active = active & (each.detach() >= enough)
            if not active.any():
                break
        return null.detach(), losses.cpu()


PLUGIN = NullTextInversion
