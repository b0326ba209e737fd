"""Soft prompt: a continuous offset of the prompt's embedding.

For each prompt one offset delta [tokens, width] minimises the training loss on images of the
concept under e + delta. The optimiser is Adam, with ||delta|| <= radius x ||e|| (Frobenius norms; 0
for no bound). The attack is ours. The inner attack of adversarially robust erasure (FORUM, arXiv
2401.09257; AdvUnlearn, arXiv 2405.15234) has this form. Nobody can type such a prompt.

The success rate is no upper bound for attacks with text. The search is a local one on a non-convex
loss. It stops after `steps`, and more steps find more. Its loss is a proxy for the decision of the
judge, so a typed prompt can succeed where the offset does not. The unconditional prediction and the
parameters are not searched. soft_prompt_both.py also searches the unconditional prediction.
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
from concept_eraser.models.base import Condition


@dataclass(frozen=True)
class SoftPrompt(Attack):
    """Learn an offset of each prompt's embedding.

    Args:
        steps: The number of steps of Adam.
        every: Each prompt gets an image after this number of steps.
        lr: The learning rate.
        radius: The largest length of the offset, as a share of the embedding's; 0 for no bound.
    """

    title: ClassVar[str] = "Soft prompt"
    source: ClassVar[str] = "ours"
    family: ClassVar[Family] = "embeddings"
    access: ClassVar[Access] = "white box"

    steps: int = 200
    every: int = 20
    lr: float = 0.05
    radius: float = 0.0

    def __post_init__(self) -> None:
        require_positive(steps=self.steps, every=self.every, lr=self.lr)
        if not 0 <= self.radius < float("inf"):
            raise ValueError(f"radius must be at least 0 (no bound), found {self.radius}")

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        bases = self.bases(scene)
        device = scene.targets.device
        offsets = [torch.zeros_like(base, requires_grad=True) for base in bases]
        optimizer = torch.optim.Adam(offsets, self.lr)
        generator = scene.generator("soft prompt")
        for step in range(1, self.steps + 1):
            live = scene.live
            rows = live.to(device)
            t = torch.randint(0, scene.victim.timesteps, (len(live),), generator=generator).to(
                device
            )
            noisy, target = scene.noised(live, t, generator)
            losses = sum(
                (
                    (
                        scene.victim.denoise(
                            noisy, t, Condition({"states": base[rows] + offset[rows]})
                        )
                        - target
                    )
                    .square()
                    .flatten(1)
                    .mean(1)
                    for base, offset in zip(bases, offsets, strict=True)
                ),
                start=torch.zeros((), device=device),
            )
            gradients = torch.autograd.grad(losses.sum(), offsets)
            for offset, gradient in zip(offsets, gradients, strict=True):
                offset.grad = gradient
            optimizer.step()
            if self.radius:
                for base, offset in zip(bases, offsets, strict=True):
                    bound(offset, base, self.radius)
            scene.spend("gradient steps", len(live) * len(bases))
            if step % self.every == 0 or step == self.steps:
                conditions = [
                    Condition({"states": base[rows] + offset.detach()[rows]})
                    for base, offset in zip(bases, offsets, strict=True)
                ]
                yield self.offer(scene, live, conditions, float(losses.detach().mean()))

    def bases(self, scene: Scene) -> list[Tensor]:
        """Return the embeddings that get an offset, each [n, tokens, width]."""
        return [scene.victim.encode(scene.prompts).tensors["states"]]

    def offer(self, scene: Scene, live: Tensor, conditions: list[Condition], loss: float) -> Round:
        """Return the round of the embeddings with their offsets, one condition for each base."""
        return Round(live, condition=conditions[0], loss=loss)


@torch.no_grad()
def bound(offset: Tensor, base: Tensor, radius: float) -> None:
    """Shorten offsets [n, tokens, width] to a share of their base's length, in place."""
    longest = radius * base.flatten(1).norm(dim=1)[:, None, None]
    lengths = offset.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-12)
    offset.mul_((longest / lengths).clamp(max=1))


PLUGIN = SoftPrompt
