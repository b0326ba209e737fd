"""CLIP score: mean cosine of each picture with its own prompt (Hessel et al., arXiv 2104.08718, without the 2.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from concept_eraser.evaluation.base import Evidence, Metric, Result
from concept_eraser.evaluation.statistics import mean_interval


@dataclass(frozen=True)
class ClipScore(Metric):
    """Mean cosine on the neighbour and retain groups, and the paired difference."""

    title: ClassVar[str] = "CLIP score"

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        results = []
        for name, group in evidence.groups.items():
            if group.role == "forget":
                continue
            texts = [prompt.text for prompt in group.prompts]
            scores = {when: evidence.judge.clip_scores(group.pictures[when], texts) for when in ("before", "after")}
            difference = mean_interval(scores["after"] - scores["before"])
            settings = {"model": "tiny CLIP", "scale": "cosine"}
            results.append(Result("clip_score", name, mean_interval(scores["after"]), "higher", mean_interval(scores["before"]), difference, settings))  # fmt: skip
        return results


PLUGIN = ClipScore
