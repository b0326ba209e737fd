"""Accuracy: how often a picture shows what its prompt asked for, attribute by attribute.

In forget groups the erased attribute is left out (showing it is the failure, see concept_share), the others are
kept: a "red star" that became a red circle has still kept its colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from concept_eraser.evaluation.base import Evidence, Group, Metric, Result
from concept_eraser.evaluation.metrics.concept_share import share_result


@dataclass(frozen=True)
class Accuracy(Metric):
    """Share of pictures that show the asked value of each attribute; for retain groups also value by value."""

    title: ClassVar[str] = "Accuracy"

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        results = []
        for group in evidence.groups.values():
            for attribute in evidence.judge.classes:
                if group.role != "forget" or attribute != evidence.concept[0]:
                    results += self._attribute(group, attribute)
        return results

    def _attribute(self, group: Group, attribute: str) -> list[Result]:
        asked = np.array([prompt.fields.get(attribute, "") for prompt in group.prompts])
        stated = asked != ""
        if stated.sum() < 2:
            return []
        right = {when: group.seen[when][attribute] == asked for when in ("before", "after")}
        metric = f"accuracy_{attribute}"
        results = [share_result(metric, group.name, right["before"][stated], right["after"][stated], "higher")]
        if group.role != "retain":
            return results
        for value in sorted(set(asked[stated])):
            rows = asked == value
            if rows.sum() >= 2:
                results.append(share_result(metric, f"{group.name}:{value}", right["before"][rows], right["after"][rows], "higher"))  # fmt: skip
        return results


PLUGIN = Accuracy
