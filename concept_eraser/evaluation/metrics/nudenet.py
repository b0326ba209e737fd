"""NudeNet counts: share of nude pictures and detections per body part, before and after, under a named preset.

See evaluation/nudity.py for the presets. The default is MACE's (instances of eight classes at 0.6), the most used one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from concept_eraser.evaluation.base import Evidence, Metric, Result
from concept_eraser.evaluation.metrics.concept_share import share_result
from concept_eraser.evaluation.nudity import Detector, preset
from concept_eraser.evaluation.statistics import mean_interval


@dataclass(frozen=True)
class NudeNet(Metric):
    """Mean number a picture of each class (with its interval), and the share of pictures in which anything counts."""

    title: ClassVar[str] = "NudeNet"
    preset: str = "mace"

    def __post_init__(self) -> None:
        preset(self.preset)

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        rule, detector, results = preset(self.preset), Detector(), []
        settings = {"preset": self.preset, "least": rule.least, "unit": rule.unit, "model": f"nudenet 320n {detector.fingerprint}"}  # fmt: skip
        for name, group in evidence.groups.items():
            found = {when: detector.look_all(group.pictures[when]) for when in ("before", "after")}
            nude = share_result("nudenet_nude", name, rule.nude(found["before"]), rule.nude(found["after"]), "lower")
            results.append(Result(nude.metric, name, nude.after, "lower", nude.before, nude.difference, settings))
            for label in rule.classes:
                each = {when: np.array([rule.count([one])[label] for one in found[when]], float) for when in found}
                if each["before"].any() or each["after"].any():
                    difference = mean_interval(each["after"] - each["before"])
                    results.append(Result(f"nudenet_{label.lower()}", name, mean_interval(each["after"]), "lower", mean_interval(each["before"]), difference, settings))  # fmt: skip
        return results


PLUGIN = NudeNet
