"""P4D: hard prompts by projected embeddings that reproduce the original model's prediction.

Chin et al., "Prompting4Debugging: Red-Teaming Text-to-Image Diffusion Models by Finding Problematic
Prompts", ICML 2024, arXiv 2309.06135, with the optimiser of PEZ (arXiv 2302.03668). The free tokens
have continuous embeddings. The forward pass replaces each by the nearest embedding (cosine) of the
vocabulary. The gradient there updates the continuous ones.

    min E || eps*(x_t, t, adversarial prompt) - eps_original(x_t, t, concept prompt) ||^2
    with t ~ U[0, T)

    variant N   `tokens` free tokens and nothing else
    variant K   the prompt is kept; one free token before it and one after every `spacing` of its
                tokens, n // spacing + 1 for a prompt of n tokens

The authors' code is joycenerd/P4D. The places of the variant K are those of
prompt_optimization/optimize_k.py, lines 26 and 39.

Differences: an image is judged after each `every` steps, and the first one with the concept ends
the prompt's search. The paper keeps the best by CLIP and judges once. Prompts of a batch share the
random time steps, not their tokens. The attack that UnlearnDiffAtk's repository calls P4D is a
different one.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.evaluation.attacks.base import (
    Access,
    Attack,
    Family,
    Round,
    Scene,
    require_positive,
    soft_embed,
)
from concept_eraser.models.vocabulary import Slots


def nearest(rows: Tensor, table: Tensor, usable: Tensor) -> Tensor:
    """The usable token with the largest cosine to each embedding: [..., width] -> [...]."""
    likeness = F.normalize(rows, dim=-1) @ F.normalize(table, dim=-1).T
    return likeness.masked_fill(~usable, -torch.inf).argmax(-1)


@dataclass(frozen=True)
class P4D(Attack):
    """Learn tokens with which the victim predicts what the original predicts.

    The defaults of `steps`, `lr` and `weight_decay` are the paper's.

    Args:
        variant: N for free tokens alone, K for the prompt with free tokens in between.
        tokens: The number of free tokens of the variant N.
        spacing: The variant K has a free token before the prompt and after each such number of its
            tokens.
        steps: The number of steps of the optimiser.
        every: Each prompt gets an image after this number of steps.
        lr: The learning rate.
        weight_decay: The weight decay.
    """

    title: ClassVar[str] = "P4D"
    source: ClassVar[str] = "arXiv 2309.06135"
    family: ClassVar[Family] = "typed prompts"
    access: ClassVar[Access] = "white box"

    variant: Literal["N", "K"] = "N"
    tokens: int = 16
    spacing: int = 3
    steps: int = 3000
    every: int = 50
    lr: float = 0.1
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        require_positive(
            tokens=self.tokens, spacing=self.spacing, steps=self.steps, every=self.every, lr=self.lr
        )
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(
                f"weight_decay must be at least 0 and finite, found {self.weight_decay}"
            )

    def _slots(self, scene: Scene) -> list[Slots]:
        """The slots of each prompt. Under K the number of free tokens depends on the prompt's
        length.
        """
        words, device = scene.victim.words, scene.victim.device
        if self.variant == "N":
            return [words.slots([""], self.tokens).to(device) for _ in scene.prompts]
        return [words.free_token_every(prompt, self.spacing).to(device) for prompt in scene.prompts]

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        words, table = scene.victim.words, scene.victim.table.detach()
        usable = words.usable.to(table.device)
        slots = self._slots(scene)
        generator = scene.generator("p4d")
        pool = words.usable.nonzero()[:, 0]
        starts = [
            pool[torch.randint(len(pool), s.places.shape, generator=generator)].to(table.device)
            for s in slots
        ]
        soft = [table[start].clone().requires_grad_(True) for start in starts]
        optimizer = torch.optim.AdamW(soft, self.lr, weight_decay=self.weight_decay)
        concept_condition = scene.original.encode(scene.concept_prompts)
        for step in range(1, self.steps + 1):
            live = scene.live.tolist()
            t = torch.randint(0, scene.victim.timesteps, (len(live),), generator=generator).to(
                table.device
            )
            noisy, _ = scene.noised(scene.live, t, generator)
            with torch.no_grad():
                goal = scene.original.denoise(
                    noisy, t, concept_condition[scene.live.to(table.device)]
                )
            total = 0.0
            for i, row in enumerate(live):  # each has its own length and graph
                tokens = nearest(soft[row].detach(), table, usable)
                # its gradient is taken at the projected point
                hard = soft[row] + (table[tokens] - soft[row]).detach()
                condition = soft_embed(scene.victim, slots[row], tokens, hard)
                prediction = scene.victim.denoise(noisy[i : i + 1], t[i : i + 1], condition)
                loss = (prediction - goal[i : i + 1]).square().mean()
                (soft[row].grad,) = torch.autograd.grad(loss, [soft[row]])
                total += float(loss.detach())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scene.spend("gradient steps", len(live))
            if step % self.every == 0 or step == self.steps:
                texts = [
                    words.texts(slots[r].fill(nearest(soft[r].detach(), table, usable)))[0]
                    for r in live
                ]
                yield Round(scene.live, texts=texts, loss=total / len(live))


NAMED = {"p4d-n": {"variant": "N"}, "p4d-k": {"variant": "K"}}
PLUGIN = P4D
