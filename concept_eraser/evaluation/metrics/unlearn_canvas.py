"""UA, IRA and CRA of UnlearnCanvas (arXiv 2402.11846): what is gone, what is kept in the domain, what is kept across domains.

* UA   share of the forgotten prompts' pictures in which the concept is *not* seen                (forget groups)
* IRA  accuracy on the concept's own attribute for other values: other shapes if a shape is erased (retain groups)
* CRA  accuracy on all other attributes a prompt states: colour, style, ... ; a picture's part of them that is right

UA counts a picture of nothing as unlearned; read it beside `none_share` (concept_share).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from concept_eraser.evaluation.base import Evidence, Group, Metric, Result
from concept_eraser.evaluation.metrics.concept_share import mean_result, share_result


@dataclass(frozen=True)
class UnlearnCanvas(Metric):
    """The three numbers with their intervals, before and after."""

    title: ClassVar[str] = "UA, IRA, CRA"

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        attribute, value = evidence.concept
        results: list[Result] = []
        for group in evidence.groups.values():
            if group.role == "forget":
                missed = {when: group.seen[when][attribute] != value for when in ("before", "after")}
                results.append(share_result("ua", group.name, missed["before"], missed["after"], "higher"))
            elif group.role == "retain":
                results += self._kept(group, attribute, [a for a in evidence.judge.classes if a != attribute])
        return results

    def _kept(self, group: Group, attribute: str, others: list[str]) -> list[Result]:
        asked = {a: np.array([prompt.fields.get(a, "") for prompt in group.prompts]) for a in (attribute, *others)}
        right = {when: {a: group.seen[when][a] == asked[a] for a in asked} for when in ("before", "after")}
        results = []
        stated = asked[attribute] != ""
        if stated.sum() >= 2:
            results.append(share_result("ira", group.name, right["before"][attribute][stated], right["after"][attribute][stated], "higher"))  # fmt: skip
        told = np.array([asked[a] != "" for a in others])  # [attributes, pictures]
        rows = told.any(0) if len(others) else np.zeros(len(stated), bool)
        if rows.sum() >= 2:
            parts = {when: ((np.array([right[when][a] for a in others]) & told).sum(0)[rows] / told.sum(0)[rows]) for when in right}  # fmt: skip
            results.append(mean_result("cra", group.name, parts["before"], parts["after"], "higher", bounds=(0, 1)))
        return results


PLUGIN = UnlearnCanvas
