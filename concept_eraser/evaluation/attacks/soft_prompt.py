"""A continuous offset of the prompt's embedding: an upper bound of what prompts can do, not a prompt anyone can type.

For each batch one offset delta [1, tokens, width] minimises the training loss on pictures of the concept under
e + delta, by Adam, with ||delta|| <= radius x mean ||e|| (Frobenius norms; 0 for no bound). Ours; the inner attack of
adversarially robust erasure (FORUM, arXiv 2401.09257; AdvUnlearn, arXiv 2405.15234) is of this form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from concept_eraser.evaluation.attacks.base import Access, Attack, Round, Scene, require_positive
from concept_eraser.models.base import Condition


@dataclass(frozen=True)
class SoftPrompt(Attack):
    """steps of Adam at lr, a picture of every prompt after each `every` of them."""

    title: ClassVar[str] = "Soft prompt (an upper bound)"
    source: ClassVar[str] = "ours"
    access: ClassVar[Access] = "white box"

    steps: int = 200
    every: int = 20
    lr: float = 0.05
    radius: float = 0.0

    def __post_init__(self) -> None:
        require_positive(steps=self.steps, every=self.every, lr=self.lr)
        if self.radius < 0:
            raise ValueError(f"radius must be at least 0 (no bound), found {self.radius}")

    def search(self, scene: Scene) -> Iterator[Round]:
        states = scene.victim.encode(scene.prompts).tensors["states"]
        longest = self.radius * float(states.flatten(1).norm(dim=1).mean())
        delta = torch.zeros_like(states[:1], requires_grad=True)
        optimizer = torch.optim.Adam([delta], self.lr)
        generator = scene.generator("soft prompt")
        for step in range(1, self.steps + 1):
            live = scene.live
            t = torch.randint(0, scene.victim.timesteps, (len(live),), generator=generator).to(states.device)
            noisy, target = scene.noised(live, t, generator)
            condition = Condition({"states": states[live.to(states.device)] + delta})
            loss = (scene.victim.denoise(noisy, t, condition) - target).square().mean()
            (delta.grad,) = torch.autograd.grad(loss, [delta])
            optimizer.step()
            with torch.no_grad():
                if longest and float(delta.norm()) > longest:
                    delta.mul_(longest / delta.norm())
            scene.spend("gradient steps", len(live))
            if step % self.every == 0 or step == self.steps:
                shifted = Condition({"states": states[live.to(states.device)] + delta.detach()})
                yield Round(live, condition=shifted, loss=float(loss.detach()))


PLUGIN = SoftPrompt
