"""One plug-in of each kind, as in a package of somebody else."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from concept_eraser.evaluation.attacks.base import Access, Attack, Family, Round, Scene
from concept_eraser.evaluation.base import Evidence, Metric, Result
from concept_eraser.evaluation.judges.tiny import TinyJudge
from concept_eraser.evaluation.metrics.concept_rate import mean_result
from concept_eraser.losses.base import Loss, LossSettings
from concept_eraser.methods.base import GramMethod


@dataclass(frozen=True)
class UnitSum(GramMethod):
    """The sum of the gradients, each divided by its norm.

    scale: the factor of the sum.
    """

    title: ClassVar[str] = "Sum of unit gradients"
    source: ClassVar[str] = "an example"
    theorems: ClassVar[frozenset[str]] = frozenset(
        {"equal_contribution", "pareto_descent", "permutation", "scale_invariance"}
    )

    scale: float = 1.0

    def solve(self, gram: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        norms = gram.diagonal().double().sqrt()
        return torch.where(norms > 0, self.scale / norms, 0.0), {}


@dataclass(frozen=True)
class Huber(Loss):
    """The Huber loss of the prediction.

    delta: where the square ends.
    """

    title = "Huber loss"
    source = "an example"
    needs_images = True

    delta: float = 1.0

    def compute(self, model: Any, draw: Any, settings: LossSettings) -> Tensor:
        prediction, target = model.predict(draw).float(), draw.target.float()
        return torch.nn.functional.huber_loss(prediction, target, delta=self.delta)


@dataclass(frozen=True)
class CautiousJudge(TinyJudge):
    """The tiny judge, with "none" where its probability of the shape is low.

    threshold: the lowest probability with which an image counts as the shape.
    """

    threshold: float = 0.5

    @torch.no_grad()
    def classify(self, images: Tensor) -> dict[str, np.ndarray]:
        names = super().classify(images)
        sure = self.net(self._scale(images))["shape"].softmax(1).max(1).values.numpy()
        return {**names, "shape": np.where(sure >= self.threshold, names["shape"], "none")}


@dataclass(frozen=True)
class Brightness(Metric):
    """The mean brightness of the images of each group."""

    title: ClassVar[str] = "Brightness"

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        results = []
        for group in evidence.groups.values():
            before, after = (
                group.images[when].float().flatten(1).mean(1).numpy()
                for when in ("before", "after")
            )
            results.append(mean_result("brightness", group.name, before, after, "neither"))
        return results


@dataclass(frozen=True)
class PlainWords(Attack):
    """The prompts that name the concept, as they are.

    tries: the number of rounds.
    """

    title: ClassVar[str] = "Plain words"
    source: ClassVar[str] = "an example"
    family: ClassVar[Family] = "typed prompts"
    access: ClassVar[Access] = "queries"

    tries: int = 2

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        for _ in range(self.tries):
            yield Round(scene.live, texts=[scene.concept_prompts[i] for i in scene.live.tolist()])
