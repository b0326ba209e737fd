"""CLIP score: agreement of each image with its own prompt (Hessel et al., arXiv 2104.08718).

Scales in use: the cosine itself; x100, CLIP's logits before their softmax (MACE); x2.5, Hessel et
al.'s 2.5 max(cosine, 0). Without `model` the score uses the judge's own CLIP, under the name
`clip_score`. The bundled judge's own CLIP contains the text encoder of the bundled pipeline. With
`model: tiny2` the score uses the bundled second CLIP, of which no pipeline has a part, under the
name `clip_score_tiny2`. With another `model` it uses open_clip, under `clip_score_open_clip`. A
prompt counts up to the length of CLIP's text encoder, which is 77 tokens.

Difference from Hessel et al.: no prefix "A photo depicts" stands before the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from concept_eraser import registry
from concept_eraser.evaluation.base import Evidence, Judge, Metric, Result
from concept_eraser.evaluation.features.clip import ClipFeatures
from concept_eraser.evaluation.judges.tiny2 import SecondTinyJudge, clip_fingerprint
from concept_eraser.evaluation.metrics.concept_rate import mean_result
from concept_eraser.utils.errors import UserError, unknown

SCALES = ("cosine", "x100", "x2.5")
INDEPENDENT = "tiny2"  # the bundled CLIP that no pipeline contains


@dataclass(frozen=True)
class ClipScore(Metric):
    """Mean score on the neighbour and retain groups, and the paired difference.

    Args:
        model: open_clip's name of a model, or tiny2; none for the judge's own CLIP.
        weights: The weights of that model, see the feature `clip`.
        scale: cosine, x100 or x2.5.
    """

    title: ClassVar[str] = "CLIP score"
    model: str | None = None
    weights: str | None = None
    scale: str = "cosine"

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise unknown("scale of the CLIP score", self.scale, SCALES)
        if self.weights and not self.model:
            raise UserError(
                f"clip_score: weights {self.weights!r} need the `model` they belong to, "
                "e.g. ViT-B-32"
            )
        if self.weights and self.model == INDEPENDENT:
            raise UserError("clip_score: the model tiny2 has its own weights; leave out `weights`")

    @cached_property
    def _independent(self) -> SecondTinyJudge:
        return SecondTinyJudge()

    @cached_property
    def _clip(self) -> ClipFeatures:
        arguments = {"model": self.model, "weights": self.weights}
        options = {key: value for key, value in arguments.items() if value}
        features: ClipFeatures = registry.build("feature", "clip", options)
        return features

    def result_prefix(self) -> str:
        if self.model == INDEPENDENT:
            return "clip_score_tiny2"
        return "clip_score_open_clip" if self.model else "clip_score"

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        results = []
        name, settings = self._settings(evidence.judge)
        for group in evidence.groups.values():
            if group.role == "forget":
                continue
            texts = [prompt.text for prompt in group.prompts]
            scores = {
                when: self._scores(evidence, group.images[when], texts)
                for when in ("before", "after")
            }
            results.append(
                mean_result(
                    metric=name,
                    group=group.name,
                    before=scores["before"],
                    after=scores["after"],
                    better="higher",
                    settings=settings,
                )
            )
        return results

    def _settings(self, judge: Judge) -> tuple[str, dict[str, Any]]:
        """The result's name and its settings."""
        if not self.model:
            return "clip_score", {**judge.caption_settings(), "scale": self.scale}
        if self.model == INDEPENDENT:
            settings = {"model": "tiny2", "weights": clip_fingerprint(), "scale": self.scale}
            return "clip_score_tiny2", settings
        return "clip_score_open_clip", {**self._clip.settings, "scale": self.scale}

    def _scores(self, evidence: Evidence, images: Tensor, texts: Sequence[str]) -> np.ndarray:
        if not self.model:
            cosines = evidence.judge.clip_scores(images, texts)
        elif self.model == INDEPENDENT:
            cosines = self._independent.clip_scores(images, texts)
        else:
            cosines = self._clip.cosines(images, texts)
        if self.scale == "x2.5":
            return 2.5 * cosines.clip(min=0)
        return 100 * cosines if self.scale == "x100" else cosines


PLUGIN = ClipScore
