"""Classifier alone: the control of classifier guidance, without any model behind the classifier.

The sampler and the classifier are those of classifier_guidance.py. The predicted noise is not the
victim's: it is the latents themselves, scaled to unit variance. So only the classifier knows
anything. The concept in these images is the classifier's, and proves nothing about a victim. The
control is ours. No published definition is followed.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.evaluation.attacks.base import Access, Family, Round, Scene
from concept_eraser.evaluation.attacks.classifier_guidance import SteeredSampling
from concept_eraser.evaluation.attacks.trajectory import Trajectory
from concept_eraser.models.base import Condition


@dataclass(frozen=True)
class ClassifierAlone(SteeredSampling):
    """Follow the gradient of a classifier of noised latents, without a victim.

    Args:
        scales: The factors of the classifier's gradient, in this order.
        tries: The number of images for each scale, each with other noise.
        images: The number of training images of the concept, and as many unrelated ones.
        training_steps: The training steps of the classifier, with 64 noised latents each.
        lr: The learning rate of its training.
        prompts: The prompt set of unrelated images, "" for the suite's retain groups.
        classifier: A safetensors file of a trained classifier, in place of the training.
        steps: The steps of the sampler, 0 for the suite's.
    """

    title: ClassVar[str] = "Classifier alone"
    source: ClassVar[str] = "a control"
    family: ClassVar[Family] = "control"
    access: ClassVar[Access] = "queries"

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        gradient_at = self.gradient_of(scene)

        def steer(
            sampler: Trajectory, x: Tensor, step: int, conditions: tuple[Condition, Condition]
        ) -> tuple[Tensor, Tensor, Tensor]:
            scale = x.flatten(1).std(dim=1)[:, None, None, None]
            # latents that are noise alone have no estimate of an image but the mean one
            return torch.zeros_like(x), x / scale, gradient_at(sampler, x, step)

        yield from self.sample(scene, steer)


PLUGIN = ClassifierAlone
