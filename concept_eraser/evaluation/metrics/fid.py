"""FID on the judge's features: Frechet distance of the retained pictures from real pictures of the same prompts.

The distance is that of FID (Heusel et al., arXiv 1706.08500); the features are the judge's, not Inception's, and
the pictures are few. It says how far a model has moved, and is comparable with nothing outside this suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from concept_eraser.evaluation.base import Evidence, Metric, Result
from concept_eraser.evaluation.statistics import Interval, frechet_of_features


@dataclass(frozen=True)
class FID(Metric):
    """Frechet distance on judge features, retain groups. It has no interval: it is one number of all pictures."""

    title: ClassVar[str] = "FID (judge features)"

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        results = []
        for name, group in evidence.groups.items():
            if group.role != "retain":
                continue
            reference = evidence.judge.reference_features(group.prompts, evidence.seed)
            values = {}
            for when in ("before", "after"):
                value = frechet_of_features(evidence.judge.features(group.pictures[when]), reference)
                values[when] = Interval(value, float("nan"), float("nan"), len(reference))
            settings = {
                "features": f"judge, {reference.shape[1]}-d",
                "reference": "painted pictures of the same prompts",
            }
            results.append(Result("fid_judge", name, values["after"], "lower", values["before"], settings=settings))
        return results


PLUGIN = FID
