"""Zero-shot CLIP: which of some labels an image agrees with most.

Source: arXiv 2103.00020, section 3.1. Each label is written into "a photo of {}" and its text
embedding is compared with the image's. The label with the largest cosine is the judgement. The
labels are part of the protocol: with other labels the same image may be judged otherwise.

Difference from MACE's CLIP accuracy (Shilin-LU/MACE, metrics/evaluate_clip_accuracy.py): the script
writes "a photo of the {}" and averages the probability of the label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from concept_eraser import registry
from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation.base import Judge
from concept_eraser.evaluation.features.clip import ClipFeatures
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError, quote

ATTRIBUTE = "concept"
MOST = 1000  # labels
SENTENCE = "a photo of {}"


@dataclass(frozen=True)
class ClipJudge(Judge):
    """Judge the attribute `concept` by the labels that are given.

    Args:
        labels: The concept and what else an image may show, at least two texts.
        model: open_clip's name of the model, see the feature `clip`.
        weights: A file, or open_clip's name of weights that are on this machine.
    """

    labels: list[str] = field(default_factory=list)
    model: str = "ViT-B-32"
    weights: str = "openai"

    def __post_init__(self) -> None:
        labels = self.labels
        if not isinstance(labels, list) or not all(
            isinstance(label, str) and label.strip() for label in labels
        ):
            raise UserError(f"labels: expected a list of texts, found {quote(labels)}")
        if not 2 <= len(labels) <= MOST or len(set(labels)) < len(labels):
            raise UserError(
                f"labels: expected 2 to {MOST} different texts, found {quote(labels)}; give the "
                "concept and what else an image may show"
            )

    @property
    def classes(self) -> Mapping[str, Sequence[str]]:  # type: ignore[override]
        return {ATTRIBUTE: tuple(self.labels)}

    @cached_property
    def _clip(self) -> ClipFeatures:
        features: ClipFeatures = registry.build(
            "feature", "clip", {"model": self.model, "weights": self.weights}
        )
        return features

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        # the same weights judge otherwise with other labels or in another architecture
        rest = provenance.fingerprint([self.labels, self._clip.design])
        return f"clip-{self._clip.fingerprint}-{rest[:8]}"

    def classify(self, images: Tensor) -> dict[str, np.ndarray]:
        scores = np.stack(
            [
                self._clip.cosines(images, [SENTENCE.format(label)] * len(images))
                for label in self.labels
            ]
        )
        return {ATTRIBUTE: np.array(self.labels)[scores.argmax(0)]}

    def features(self, images: Tensor) -> np.ndarray:
        return self._clip.extract(images)

    def clip_scores(self, images: Tensor, captions: Sequence[str]) -> np.ndarray:
        return self._clip.cosines(images, captions)

    def caption_settings(self) -> Mapping[str, Any]:
        return self._clip.settings

    def reference_features(self, rows: Sequence[Prompt], seed: int) -> np.ndarray:
        raise UserError(
            "the judge clip has no real images of the prompts; give fid `reference: before` or the "
            "path of a folder of real images"
        )


PLUGIN = ClipJudge
