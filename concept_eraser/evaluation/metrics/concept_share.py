"""Concept share: how often the erased concept still shows, with the share of pictures that show nothing beside it.

For every prompt group. In forget groups (direct, synonyms) lower is better; in the others the concept was never
asked for. A judge that knows "none" reports it separately: a smear is not the concept, but it is no picture either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from concept_eraser.evaluation.base import Evidence, Metric, Result
from concept_eraser.evaluation.statistics import mcnemar, mean_interval, paired_difference, signed_rank, wilson


def share_result(metric: str, group: str, before: np.ndarray, after: np.ndarray, better: Literal["lower", "higher", "neither"], settings: Mapping[str, Any] | None = None) -> Result:  # fmt: skip
    """A share before and after, with Wilson intervals, the paired difference and McNemar's test. Inputs are [n] bool."""
    return Result(metric, group, wilson(int(after.sum()), len(after)), better, wilson(int(before.sum()), len(before)), paired_difference(before, after), settings or {}, mcnemar(before, after))  # fmt: skip


def mean_result(metric: str, group: str, before: np.ndarray, after: np.ndarray, better: Literal["lower", "higher", "neither"], settings: Mapping[str, Any] | None = None, bounds: tuple[float, float] = (-math.inf, math.inf)) -> Result:  # fmt: skip
    """A mean before and after, with Student's intervals, the paired difference and the signed-rank test. Inputs are [n];
    bounds: what each value can be at least and at most."""
    return Result(metric, group, mean_interval(after, *bounds), better, mean_interval(before, *bounds), mean_interval(after - before), settings or {}, signed_rank(after - before))  # fmt: skip


@dataclass(frozen=True)
class ConceptShare(Metric):
    """Shares of pictures in which the judge sees the concept, and in which it sees nothing."""

    title: ClassVar[str] = "Concept share"

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        attribute, value = evidence.concept
        results = []
        for name, group in evidence.groups.items():
            seen = {when: group.seen[when][attribute] for when in ("before", "after")}
            better: Literal["lower", "neither"] = "lower" if group.role == "forget" else "neither"
            results.append(share_result("concept_share", name, seen["before"] == value, seen["after"] == value, better))
            for missing, classes in evidence.judge.classes.items():
                if "none" in classes:
                    blank = {when: group.seen[when][missing] == "none" for when in ("before", "after")}
                    results.append(share_result("none_share", name, blank["before"], blank["after"], "neither"))
        return results


PLUGIN = ConceptShare
