"""Concept inversion: one new word, learned on the erased model itself, that recovers the concept.

Pham et al., "Circumventing Concept Erasure Methods For Text-to-Image Generative Models", ICLR 2024,
arXiv 2308.01508 (CCE), by textual inversion (arXiv 2208.01618): one embedding v in the place of the
concept's word minimises

    E || target - eps*(x_t, t, prompt with v) ||^2

on images of the concept by the original model. One v serves all prompts of a batch. It is an
embedding, not a text.

The authors' code is NYU-DICE-Lab/circumventing-concept-erasure, one script for each erased model
(for ESD esd/concept_inversion.py, the loss in line 980).

Differences: the learning rate is not scaled by the batch. All commands of the code do so (its
option scale_lr, lines 800-802), and their rate is 0.08, or 0.02 for SLD. The images are the
original's for the attacked prompts and seeds themselves. The code has 25 others with random
templates and flips. Adam has no weight decay (the code: AdamW with 0.01). The latents are not
sampled from the VAE. v starts from the word itself, or from a random word (`start`); the code takes
one given token (lines 750-765).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
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
    soft_embed,
)
from concept_eraser.models.base import Condition
from concept_eraser.models.vocabulary import Slots


@dataclass(frozen=True)
class ConceptInversion(Attack):
    """Learn one embedding for the concept's word, on images of the concept.

    Args:
        steps: The number of steps of Adam.
        every: Each prompt gets an image after this number of steps.
        batch: The number of images in a step.
        lr: The learning rate.
        start: The start of the embedding: the concept's own word, or a random word.
    """

    title: ClassVar[str] = "Concept inversion (CCE)"
    source: ClassVar[str] = "arXiv 2308.01508"
    family: ClassVar[Family] = "embeddings"
    access: ClassVar[Access] = "white box"
    learns_from_batch: ClassVar[bool] = True

    steps: int = 5000
    every: int = 500
    batch: int = 16
    lr: float = 5e-3
    start: Literal["word", "random"] = "random"

    def __post_init__(self) -> None:
        require_positive(steps=self.steps, every=self.every, batch=self.batch, lr=self.lr)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        words, table = scene.victim.words, scene.victim.table.detach()
        slots = words.in_place_of(scene.concept_prompts, scene.concept).to(table.device)
        generator = scene.generator("concept inversion")
        concept_id = words.ids(scene.concept)[0]
        pool = words.usable.nonzero()[:, 0]
        first = (
            concept_id
            if self.start == "word"
            else int(pool[torch.randint(len(pool), (1,), generator=generator)])
        )
        word = table[first].clone().requires_grad_(True)
        optimizer = torch.optim.Adam([word], self.lr)
        for step in range(1, self.steps + 1):
            rows = torch.randint(len(scene.prompts), (self.batch,), generator=generator)
            t = torch.randint(0, scene.victim.timesteps, (self.batch,), generator=generator).to(
                table.device
            )
            noisy, target = scene.noised(rows, t, generator)
            condition = self._write_word(scene, slots[rows.to(table.device)], word)
            loss = (scene.victim.denoise(noisy, t, condition) - target).square().mean()
            (word.grad,) = torch.autograd.grad(loss, [word])
            optimizer.step()
            scene.spend("gradient steps", self.batch)
            if step % self.every == 0 or step == self.steps:
                live = scene.live
                with torch.no_grad():
                    final_condition = self._write_word(scene, slots[live.to(table.device)], word)
                yield Round(live, condition=final_condition, loss=float(loss.detach()))

    @staticmethod
    def _write_word(scene: Scene, slots: Slots, word: Tensor) -> Condition:
        """Prompts with the learned word in its places."""
        rows = word.expand(*slots.places.shape, -1)
        # any token except the end token
        tokens = torch.full_like(slots.places, scene.victim.words.ids(scene.concept)[0])
        return soft_embed(scene.victim, slots, tokens, rows)


PLUGIN = ConceptInversion
