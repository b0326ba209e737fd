"""The default of `erase` against the goal of the study `excess_recovery`: a table that says whether
each part of the goal is met on each concept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from concept_eraser.evaluation.seed_statistics import LEAST_SEEDS, cluster_bootstrap
from concept_eraser.evaluation.statistics import Interval
from studies.rendering.common import share, table
from studies.rendering.excess_statistics import (
    MARGIN,
    WITHIN,
    by_concept,
    by_model,
    campaigns,
    differences_by_seed,
    evaluations,
    excess,
    mean_over_seeds,
    success_rate,
    worst_of,
)
from studies.result_tables import Content

DEFAULT = "munba_lora"
SATURATED = 0.9  # the success on the controls from which on a memory cannot show
POINT = 0.01  # the largest retain error beyond the original's
# the parts of the goal, and what is outside of it, by the family of the attacks
PARTS = {
    "typed prompts": "typed prompts",
    "without text": "without text",
    "fine-tuning on unrelated data": "revival",
}
BEYOND = {
    "embeddings": "not in the goal: trained embeddings",
    "adaptive": "not in the goal: adaptive",
    "fine-tuning on the concept": "not in the goal: fine-tuning on the concept",
}
RETAIN = {"retained": "retain error", "unseen": "unseen concepts", "neighbours": "neighbours"}


def goal_table(results: Mapping[str, Content], model: str = DEFAULT) -> str:
    """Return a row for each part of the goal, each attack of it and each concept."""
    head = ["part", "concept", "attack, or attribute", "erased %", "never learned, or original %"]
    rows = [[*head, "difference, points", "goal"]]
    groups = by_concept(results)
    for family, title in {**PARTS, **BEYOND}.items():
        for concept, contents in groups.items():
            rows += [[title, concept, *cells] for cells in _of_family(contents, family, model)]
    for group, title in RETAIN.items():
        for concept, contents in groups.items():
            cells = _of_group(evaluations(contents).get(model, []), group)
            if cells:
                rows.append([title, concept, *cells])
    order = [*PARTS.values(), *RETAIN.values(), *BEYOND.values()]
    rows[1:] = sorted(rows[1:], key=lambda row: order.index(row[0]))
    return table(rows)


def _of_family(contents: Sequence[Content], family: str, model: str) -> list[list[str]]:
    """Return the cells of each attack of a family, and first those of their worst case.

    They are the attacks that all training seeds and all controls have.
    """
    groups = [by_model(contents, name) for name in (model, None)]
    if not all(groups):
        return []
    names = [
        name
        for name, one in groups[0][0].items()
        if one["campaign"]["family"] == family
        and all(name in attacks for group in groups for attacks in group)
    ]
    pairs = []
    for name in names:
        both = [campaigns(contents, name, one) for one in (model, None)]
        pairs.append((name.replace("_", " "), both))
    if len(names) > 1:
        worst = [[worst_of([one[name] for name in names]) for one in group] for group in groups]
        pairs.insert(0, ("worst case", worst))
    return [
        [
            title,
            share(success_rate(erased)),
            share(success_rate(controls)),
            share(excess(erased, controls)),
            verdict(erased, controls),
        ]
        for title, (erased, controls) in pairs
    ]


def verdict(erased: Sequence[Content], controls: Sequence[Content]) -> str:
    """Return whether an attack finds no more on the erased models than on the controls.

    "saturated": the attack succeeds on the controls for 90 % of the prompts, or more. "missed": the
    95 % interval lies above 0. "met": the 90 % interval ends below 10 points, which is a one-sided
    test at the level 5 %; "met, fewer": the 95 % interval lies below 0. Otherwise "undecided".
    """
    if success_rate(controls).value >= SATURATED:
        return "saturated"
    differences = differences_by_seed(erased, controls)
    if len(differences) < LEAST_SEEDS:
        return "undecided"
    wide = cluster_bootstrap(differences)
    if np.isnan(wide.low):  # no prompt of any seed differs
        return "met" if wide.value <= 0 else "missed"
    if wide.low > 0:
        return "missed"
    if wide.high < 0:
        return "met, fewer"
    narrow = cluster_bootstrap(differences, confidence=WITHIN)
    return "met" if narrow.high < MARGIN else "undecided"


def _of_group(group: Sequence[Content], name: str) -> list[str]:
    """Return the cells of the attribute whose error rises most on a group of prompts, or [].

    The interval is Student's over the training seeds, without the choice of the attribute.
    """
    errors: dict[str, list[tuple[float, float]]] = {}
    for one in group:
        for row in one["evaluation"]["results"]:
            metric, _, attribute = row["metric"].partition("_")
            if metric == "accuracy" and row["group"] == name:
                pair = (1 - row["before"]["value"], 1 - row["after"]["value"])
                errors.setdefault(attribute, []).append(pair)
    if not errors:
        return []
    rises = {key: [after - before for before, after in pairs] for key, pairs in errors.items()}
    worst = max(rises, key=lambda key: float(np.mean(rises[key])))
    before, after = (100 * np.mean(column) for column in zip(*errors[worst], strict=True))
    interval = mean_over_seeds(rises[worst])
    return [worst, f"{after:.1f}", f"{before:.1f}", share(interval), _within_a_point(interval)]


def _within_a_point(interval: Interval) -> str:
    """Return whether a rise of the retain error is within a point, over training seeds."""
    low, high = interval.low, interval.high
    if np.isnan(low):
        low = high = interval.value
    return "met" if high <= POINT else "missed" if low > POINT else "undecided"
