"""Revival: fine-tuning on unrelated data, and the concept rate along the way.

Suriyakumar et al., "Unstable Unlearning: The Hidden Risk of Concept Resurgence in Diffusion
Models", arXiv 2410.08074: a model that was fine-tuned on seemingly unrelated images after an
erasure may generate the erased concept again. (Abstract and introduction were read here.)

Differences: the settings below are ours. The authors' data, numbers of steps and code were not read
here.

The victim is trained by the plain denoising loss, as a LoRA on the denoiser's attention (arXiv
2106.09685) or in all weights of the denoiser. The data are images by the original model of prompts
that do not state the concept: a prompt set, or the suite's retain groups. A folder of images with
captions can be given in their place. After every few steps all prompts are generated again, also
those that showed the concept before. The share of their images that show the concept is the `rate`
in the attack's curve. The victim itself is not changed: its weights are restored at the end.

Nobody attacks here. The same training of a model that never learned the concept is the control:
what unrelated data bring to that model is no memory.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch

from concept_eraser.data import prompts as prompt_sets
from concept_eraser.evaluation.attacks.base import (
    Access,
    Attack,
    Family,
    Round,
    Scene,
    require_positive,
)
from concept_eraser.evaluation.attacks.fine_tuning import FineTuning, all_weights, low_rank
from concept_eraser.evaluation.attacks.training_images import (
    folder_latents,
    original_latents,
    unrelated_prompts,
)
from concept_eraser.evaluation.attacks.trajectory import folder_hash


@dataclass(frozen=True)
class Revival(Attack):
    """Fine-tune the victim on unrelated images.

    Args:
        images: The number of training images.
        rank: The rank of the LoRA, 0 to train all weights of the denoiser.
        steps: The number of training steps.
        every: All prompts get an image after this number of steps.
        batch: The number of images in a step.
        lr: The learning rate.
        prompts: The prompt set of the training images, "" for the suite's retain groups.
        folder: A folder of training images with captions, in place of generated ones.
    """

    title: ClassVar[str] = "Revival (unrelated data)"
    source: ClassVar[str] = "arXiv 2410.08074"
    family: ClassVar[Family] = "fine-tuning on unrelated data"
    access: ClassVar[Access] = "weights"
    needs_words: ClassVar[bool] = False
    measures_rate: ClassVar[bool] = True

    images: int = 64
    rank: int = 8
    steps: int = 500
    every: int = 50
    batch: int = 8
    lr: float = 1e-3
    prompts: str = ""
    folder: str = ""

    def __post_init__(self) -> None:
        require_positive(
            images=self.images,
            steps=self.steps,
            every=self.every,
            batch=self.batch,
            lr=self.lr,
        )
        if self.rank < 0:
            raise ValueError(f"rank must be at least 0 (all weights), found {self.rank}")
        if self.prompts and self.folder:
            raise ValueError("give prompts or a folder of training images, not both")

    def lists(self) -> dict[str, str]:
        named = {self.prompts: prompt_sets.load(self.prompts).hash} if self.prompts else {}
        return {**named, **folder_hash(self.folder)}

    @property
    def finetuning_steps(self) -> int:
        return self.steps

    def steps_after(self, round: int) -> int:
        return min(round * self.every, self.steps)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        if self.folder:
            latents, captions = folder_latents(scene, self.folder, self.images)
        else:
            captions = unrelated_prompts(scene, self.prompts, self.images)
            latents = original_latents(scene, captions, "revival")
        training = FineTuning(
            latents=latents,
            captions=scene.victim.encode(captions),
            steps=self.steps,
            every=self.every,
            batch=self.batch,
            lr=self.lr,
        )
        denoiser = scene.victim.denoiser
        context = low_rank(denoiser, self.rank, scene.seed) if self.rank else all_weights(denoiser)
        everyone = torch.arange(len(scene.prompts))
        with context as parameters:
            for _, loss in training.train(scene, parameters, "revival"):
                yield Round(everyone, texts=list(scene.prompts), loss=loss)


PLUGIN = Revival
# the learning rate of the LoRA damages the bundled model when all weights are trained
NAMED = {"revival-full": {"rank": 0, "lr": 1e-4}}
