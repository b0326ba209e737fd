"""Relearning: the number of fine-tuning steps on a few images that recover the concept.

The attack is ours. No published definition is followed.

A LoRA (arXiv 2106.09685, by peft) on the denoiser's attention is trained on `images` of the
original model's images of the concept. The captions are the attacked prompts, and the loss is the
plain denoising loss. After every few steps the remaining prompts are generated again. The attack
succeeds on a prompt when one of its images shows the concept. Training and evaluation use the same
prompts: the attack measures how much of the concept remains, not generalisation. The victim itself
is not changed: its adapter is removed at the end.

The attacker needs the weights, as anyone has who can download the model.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from concept_eraser.evaluation.attacks.base import (
    Access,
    Attack,
    Family,
    Round,
    Scene,
    require_positive,
)
from concept_eraser.evaluation.attacks.fine_tuning import FineTuning, low_rank


@dataclass(frozen=True)
class Relearning(Attack):
    """Fine-tune a LoRA on a few images of the concept.

    Args:
        images: The number of training images, the first ones of the batch.
        rank: The rank of the LoRA.
        steps: The number of training steps.
        every: Each prompt gets an image after this number of steps.
        batch: The number of images in a step.
        lr: The learning rate.
    """

    title: ClassVar[str] = "Relearning (LoRA)"
    source: ClassVar[str] = "ours"
    family: ClassVar[Family] = "fine-tuning on the concept"
    access: ClassVar[Access] = "weights"
    needs_words: ClassVar[bool] = False

    images: int = 10
    rank: int = 4
    steps: int = 100
    every: int = 10
    batch: int = 4
    lr: float = 1e-3

    def __post_init__(self) -> None:
        require_positive(
            images=self.images,
            rank=self.rank,
            steps=self.steps,
            every=self.every,
            batch=self.batch,
            lr=self.lr,
        )

    @property
    def finetuning_steps(self) -> int:
        return self.steps

    def steps_after(self, round: int) -> int:
        return min(round * self.every, self.steps)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        count = min(self.images, len(scene.prompts))
        training = FineTuning(
            latents=scene.targets[:count],
            captions=scene.victim.encode(scene.prompts),
            steps=self.steps,
            every=self.every,
            batch=self.batch,
            lr=self.lr,
        )
        with low_rank(scene.victim.denoiser, self.rank, scene.seed) as parameters:
            for _, loss in training.train(scene, parameters, "relearning"):
                live = scene.live
                yield Round(live, texts=[scene.prompts[i] for i in live.tolist()], loss=loss)


PLUGIN = Relearning
