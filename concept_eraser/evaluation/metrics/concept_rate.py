"""Concept rate and no-object rate: the shares of images with the concept, and with no object.

Both are measured for every prompt group. Lower is better in forget groups (direct, synonyms); in
the other groups no prompt states the concept. A judge with the class "none" reports the no-object
rate separately: an image with no recognisable object is not a successful erasure. Where several
attributes have that class, the first of them decides, which is the shape in the bundled world.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from concept_eraser.evaluation.base import Evidence, Metric, Result
from concept_eraser.evaluation.statistics import (
    mcnemar,
    mean_interval,
    paired_difference,
    signed_rank,
    wilson,
)


def share_result(
    metric: str,
    group: str,
    before: np.ndarray,
    after: np.ndarray,
    better: Literal["lower", "higher", "neither"],
    settings: Mapping[str, Any] | None = None,
) -> Result:
    """A share before and after, with Wilson intervals, the paired difference and McNemar's test.

    The inputs are [n] bool.
    """
    return Result(
        metric,
        group,
        after=wilson(int(after.sum()), len(after)),
        better=better,
        before=wilson(int(before.sum()), len(before)),
        difference=paired_difference(before, after),
        settings=settings or {},
        p=mcnemar(before, after),
        per_image={"before": before, "after": after},
    )


def mean_result(
    metric: str,
    group: str,
    before: np.ndarray,
    after: np.ndarray,
    better: Literal["lower", "higher", "neither"],
    settings: Mapping[str, Any] | None = None,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Result:
    """A mean before and after, with Student's intervals, the paired difference and the signed-rank
    test.

    The inputs are [n]. bounds: the least and the largest possible value.
    """
    return Result(
        metric,
        group,
        after=mean_interval(after, *bounds),
        better=better,
        before=mean_interval(before, *bounds),
        difference=mean_interval(after - before),
        settings=settings or {},
        p=signed_rank(after - before),
        per_image={"before": before, "after": after},
    )


@dataclass(frozen=True)
class ConceptRate(Metric):
    """Shares of images in which the judge detects the concept, and in which it detects nothing."""

    title: ClassVar[str] = "Concept rate"

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        attribute, value = evidence.concept
        results = []
        for name, group in evidence.groups.items():
            labels = {when: group.labels[when][attribute] for when in ("before", "after")}
            direction: Literal["lower", "neither"] = (
                "lower" if group.role == "forget" else "neither"
            )
            results.append(
                share_result(
                    metric="concept_rate",
                    group=name,
                    before=labels["before"] == value,
                    after=labels["after"] == value,
                    better=direction,
                )
            )
            for object_attribute in [a for a, c in evidence.judge.classes.items() if "none" in c][
                :1
            ]:
                blank = {
                    when: group.labels[when][object_attribute] == "none"
                    for when in ("before", "after")
                }
                results.append(
                    share_result(
                        metric="no_object_rate",
                        group=name,
                        before=blank["before"],
                        after=blank["after"],
                        better="neither",
                    )
                )
        return results


PLUGIN = ConceptRate
