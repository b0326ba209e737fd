"""Noise gradient: the initial noise is optimised through all steps of the victim's sampler.

The noise x_T of each prompt minimises the distance of the sampled latents to an image of the
concept, by Adam on the gradient through the deterministic sampler:

    min over x_T of || sampler(x_T, prompt) - z ||^2

After each step the noise is scaled back to the length that it had, so that it stays as probable as
its start under a standard normal distribution. The attack is ours. noise_search.py is the search
without gradients, after arXiv 2501.09732.

A victim that reaches the image from such noise can generate it. Whether a model that never learned
the concept can do so too, only the attack on such a model says. The image of the concept serves as
the goal, so no judge is asked: one image every few steps.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch.utils.checkpoint import checkpoint

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
    require_steps,
    sampler_for,
)


@dataclass(frozen=True)
class NoiseGradient(Attack):
    """Optimise the initial noise by its gradient.

    Args:
        iterations: The number of steps of Adam.
        every: Each prompt gets an image after this number of steps.
        lr: The learning rate.
        text: The victim is given the prompt, or the empty prompt.
        images: A folder of images of the concept, in place of the original model's.
        steps: The steps of the sampler, 0 for the suite's.
    """

    title: ClassVar[str] = "Noise gradient"
    source: ClassVar[str] = "ours"
    family: ClassVar[Family] = "without text"
    access: ClassVar[Access] = "white box"
    needs_words: ClassVar[bool] = False
    samples_itself: ClassVar[bool] = True

    iterations: int = 100
    every: int = 20
    lr: float = 0.05
    text: Text = "prompt"
    images: str = ""
    steps: int = 0

    def __post_init__(self) -> None:
        require_positive(iterations=self.iterations, every=self.every, lr=self.lr)
        require_steps(self.steps)

    def lists(self) -> dict[str, str]:
        return folder_hash(self.images)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        everyone = torch.arange(len(scene.prompts))
        sampler = sampler_for(scene, self.steps, self.text)
        goal = concept_latents(scene, self.images)
        condition = condition_for(scene, everyone, self.text)
        null = scene.victim.null().repeat(len(everyone))
        noise = noise_for(scene, everyone).requires_grad_(True)
        lengths = noise.detach().flatten(1).norm(dim=1)[:, None, None, None]
        optimizer = torch.optim.Adam([noise], self.lr)
        for number in range(1, self.iterations + 1):
            live = scene.live
            rows = live.to(noise.device)
            x = noise[rows]
            for step in range(sampler.steps):  # activations of one step at a time
                advance = partial(
                    sampler.advance, step=step, condition=condition[rows], null=null[rows]
                )
                x = checkpoint(advance, x, use_reentrant=False)
            losses = (x - goal[rows]).square().flatten(1).mean(1)
            (noise.grad,) = torch.autograd.grad(losses.sum(), [noise])
            optimizer.step()
            with torch.no_grad():
                noise.mul_(lengths / noise.flatten(1).norm(dim=1)[:, None, None, None])
            scene.spend("gradient steps", len(live))
            if number % self.every == 0 or number == self.iterations:
                x = sampler.run(noise.detach()[rows], condition[rows], null=null[rows])
                loss = float(losses.detach().mean())
                yield Round(live, images=sampler.images(x), loss=loss)


PLUGIN = NoiseGradient
