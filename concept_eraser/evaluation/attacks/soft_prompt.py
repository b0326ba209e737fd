"""Soft prompt: a continuous offset of the prompt's embedding.

For each prompt one offset delta [tokens, width] minimises the training loss on images of the
concept under e + delta. The optimiser is Adam, with ||delta|| <= radius x ||e|| (Frobenius norms; 0
for no bound). The attack is ours. The inner attack of adversarially robust erasure (FORUM, arXiv
2401.09257; AdvUnlearn, arXiv 2405.15234) has this form. Nobody can type such a prompt.

The success rate is no upper bound for attacks with text. The search is a local one on a non-convex
loss. It stops after `steps`, and more steps find more. Its loss is a proxy for the decision of the
judge, so a typed prompt can succeed where the offset does not. The parameters are not searched.

With `unconditional`, each prompt has a second offset, of the empty prompt's embedding, so that the
attack is adaptive to an erasure that changes the unconditional prediction. Both offsets minimise
the same loss, each on its own prediction: if both predictions know the concept, so does every
guidance between and near them. Guidance then follows their difference, as in the sampler. The
images are sampled by the deterministic sampler of `trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.evaluation.attacks.base import Access, Attack, Round, Scene, require_positive
from concept_eraser.evaluation.attacks.trajectory import Trajectory, noise_for
from concept_eraser.models.base import Condition


@dataclass(frozen=True)
class SoftPrompt(Attack):
    """Learn an offset of each prompt's embedding.

    Args:
        steps: The number of steps of Adam.
        every: Each prompt gets an image after this number of steps.
        lr: The learning rate.
        radius: The largest length of the offset, as a share of the embedding's; 0 for no bound.
        unconditional: Also learn an offset of the empty prompt's embedding.
    """

    title: ClassVar[str] = "Soft prompt"
    source: ClassVar[str] = "ours"
    access: ClassVar[Access] = "white box"

    steps: int = 200
    every: int = 20
    lr: float = 0.05
    radius: float = 0.0
    unconditional: bool = False

    def __post_init__(self) -> None:
        require_positive(steps=self.steps, every=self.every, lr=self.lr)
        if not 0 <= self.radius < float("inf"):
            raise ValueError(f"radius must be at least 0 (no bound), found {self.radius}")

    @property
    def samples_itself(self) -> bool:  # type: ignore[override]
        """Whether the attack samples by itself, which an offset of the empty prompt needs."""
        return self.unconditional

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        states = scene.victim.encode(scene.prompts).tensors["states"]
        # one offset for each prompt, or two: of the prompt, and of the empty prompt
        bases = [states]
        if self.unconditional:
            bases.append(scene.victim.null().repeat(len(states)).tensors["states"])
        offsets = [torch.zeros_like(base, requires_grad=True) for base in bases]
        optimizer = torch.optim.Adam(offsets, self.lr)
        generator = scene.generator("soft prompt")
        for step in range(1, self.steps + 1):
            live = scene.live
            rows = live.to(states.device)
            t = torch.randint(0, scene.victim.timesteps, (len(live),), generator=generator).to(
                states.device
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
                start=torch.zeros(()).to(states),
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
                yield self._round(scene, live, conditions, float(losses.detach().mean()))

    @staticmethod
    def _round(scene: Scene, live: Tensor, conditions: list[Condition], loss: float) -> Round:
        """Return a round of conditions, or of images if the empty prompt has an offset too."""
        condition, *others = conditions
        if not others:
            return Round(live, condition=condition, loss=loss)
        sampler = Trajectory(scene)
        x = sampler.run(noise_for(scene, live), condition, null=others[0])
        return Round(live, images=sampler.images(x), loss=loss)


@torch.no_grad()
def bound(offset: Tensor, base: Tensor, radius: float) -> None:
    """Shorten offsets [n, tokens, width] to a share of their base's length, in place."""
    longest = radius * base.flatten(1).norm(dim=1)[:, None, None]
    lengths = offset.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-12)
    offset.mul_((longest / lengths).clamp(max=1))


PLUGIN = SoftPrompt
