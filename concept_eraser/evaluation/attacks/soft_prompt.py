"""Soft prompt: a continuous offset of the prompt's embedding.

For each prompt one offset delta [tokens, width] minimises the training loss on images of the
concept under e + delta. The optimiser is Adam, with ||delta|| <= radius x ||e|| (Frobenius norms; 0
for no bound). The attack is ours. The inner attack of adversarially robust erasure (FORUM, arXiv
2401.09257; AdvUnlearn, arXiv 2405.15234) has this form. Nobody can type such a prompt.

The success rate is no upper bound for attacks with text. The search is a local one on a non-convex
loss. It stops after `steps`, and more steps find more. Its loss is a proxy for the decision of the
judge, so a typed prompt can succeed where the offset does not. The unconditional prediction and the
parameters are not searched.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch

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
        states = scene.victim.encode(scene.prompts).tensors["states"]
        longest = self.radius * states.flatten(1).norm(dim=1)[:, None, None]
        delta = torch.zeros_like(states, requires_grad=True)
        optimizer = torch.optim.Adam([delta], self.lr)
        generator = scene.generator("soft prompt")
        for step in range(1, self.steps + 1):
            live = scene.live
            rows = live.to(states.device)
            t = torch.randint(0, scene.victim.timesteps, (len(live),), generator=generator).to(
                states.device
            )
            noisy, target = scene.noised(live, t, generator)
            losses = (
                (
                    scene.victim.denoise(
                        noisy, t, Condition({"states": states[rows] + delta[rows]})
                    )
                    - target
                )
                .square()
                .flatten(1)
                .mean(1)
            )
            (delta.grad,) = torch.autograd.grad(losses.sum(), [delta])
            optimizer.step()
            if self.radius:
                with torch.no_grad():
                    lengths = delta.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-12)
                    delta.mul_((longest / lengths).clamp(max=1))
            scene.spend("gradient steps", len(live))
            if step % self.every == 0 or step == self.steps:
                condition = Condition({"states": states[rows] + delta.detach()[rows]})
                yield Round(live, condition=condition, loss=float(losses.detach().mean()))


PLUGIN = SoftPrompt
