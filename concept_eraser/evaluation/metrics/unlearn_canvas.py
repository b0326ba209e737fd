"""UA, IRA and CRA of UnlearnCanvas (arXiv 2402.11846).

The three numbers measure forgetting, retention in the domain, and retention across domains.

* UA   (forget groups) share of images in which the judge does *not* detect the concept
* IRA  (retain groups) accuracy on the concept's own attribute for other values, e.g. other shapes
* CRA  (retain groups) per image, the share of correct attributes among all others in the prompt

UnlearnCanvas has two domains, styles and objects. With `cross` the other domain is one attribute.

UA counts an image without an object as unlearned; read it with `no_object_rate` (concept_rate).
A value that the judge has no class for counts in neither IRA nor CRA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from concept_eraser.evaluation.base import Evidence, Group, Metric, Result
from concept_eraser.evaluation.metrics.concept_rate import mean_result, share_result
from concept_eraser.utils.errors import unknown


@dataclass(frozen=True)
class UnlearnCanvas(Metric):
    """The three numbers with their intervals, before and after.

    Attributes:
        cross: the only attribute that CRA counts, e.g. style for an erased shape; "" for all
            attributes other than the concept's.
    """

    title: ClassVar[str] = "UA, IRA, CRA"
    cross: str = ""

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        attribute, value = evidence.concept
        others = [name for name in evidence.judge.classes if name != attribute]
        if self.cross and self.cross not in others:
            raise unknown("attribute of cross", self.cross, others)
        results: list[Result] = []
        for group in evidence.groups.values():
            if group.role == "forget":
                is_missed = {
                    when: group.labels[when][attribute] != value for when in ("before", "after")
                }
                results.append(
                    share_result(
                        metric="ua",
                        group=group.name,
                        before=is_missed["before"],
                        after=is_missed["after"],
                        better="higher",
                    )
                )
            elif group.role == "retain":
                crossed = [self.cross] if self.cross else others
                results += self._retention(group, evidence.judge.classes, attribute, crossed)
        return results

    def _retention(
        self,
        group: Group,
        classes: Mapping[str, Sequence[str]],
        attribute: str,
        others: list[str],
    ) -> list[Result]:
        expected = {
            a: np.array([prompt.fields.get(a, "") for prompt in group.prompts])
            for a in (attribute, *others)
        }
        correct = {
            when: {a: group.labels[when][a] == expected[a] for a in expected}
            for when in ("before", "after")
        }
        results = []
        has_value = np.isin(expected[attribute], list(classes[attribute]))
        if has_value.sum() >= 2:
            results.append(
                share_result(
                    metric="ira",
                    group=group.name,
                    before=correct["before"][attribute][has_value],
                    after=correct["after"][attribute][has_value],
                    better="higher",
                )
            )
        # [attributes, images]
        has_values = np.array([np.isin(expected[a], list(classes[a])) for a in others])
        rows = has_values.any(0) if len(others) else np.zeros(len(has_value), bool)
        if rows.sum() >= 2:
            parts = {
                when: (
                    (np.array([correct[when][a] for a in others]) & has_values).sum(0)[rows]
                    / has_values.sum(0)[rows]
                )
                for when in correct
            }
            results.append(
                mean_result(
                    metric="cra",
                    group=group.name,
                    before=parts["before"],
                    after=parts["after"],
                    better="higher",
                    settings={"cross": self.cross} if self.cross else None,
                    bounds=(0, 1),
                )
            )
        return results


PLUGIN = UnlearnCanvas
