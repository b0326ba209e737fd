"""Accuracy: the share of images that match their prompt, per attribute.

Forget groups leave out the erased attribute, because showing it is the failure (see concept_rate).
The other attributes still count: a "red star" that became a red circle has kept its colour.

A prompt whose value the judge has no class for (a lighthouse, by ImageNet's names) does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from concept_eraser.evaluation.base import Evidence, Group, Metric, Result
from concept_eraser.evaluation.metrics.concept_rate import share_result


@dataclass(frozen=True)
class Accuracy(Metric):
    """Share of images with the prompt's value of each attribute; retain groups also per value."""

    title: ClassVar[str] = "Accuracy"

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        results = []
        for group in evidence.groups.values():
            for attribute in evidence.judge.classes:
                if group.role != "forget" or attribute != evidence.concept[0]:
                    results += self._attribute(group, attribute, evidence.judge.classes[attribute])
        return results

    def _attribute(self, group: Group, attribute: str, classes: Sequence[str]) -> list[Result]:
        expected = np.array([prompt.fields.get(attribute, "") for prompt in group.prompts])
        has_value = np.isin(expected, list(classes))
        if has_value.sum() < 2:
            return []
        correct = {when: group.labels[when][attribute] == expected for when in ("before", "after")}
        metric = f"accuracy_{attribute}"
        results = [
            share_result(
                metric,
                group=group.name,
                before=correct["before"][has_value],
                after=correct["after"][has_value],
                better="higher",
            )
        ]
        if group.role != "retain":
            return results
        for value in sorted(set(expected[has_value])):
            rows = expected == value
            if rows.sum() >= 2:
                results.append(
                    share_result(
                        metric,
                        group=f"{group.name}:{value}",
                        before=correct["before"][rows],
                        after=correct["after"][rows],
                        better="higher",
                    )
                )
        return results


PLUGIN = Accuracy
