"""The table and the figure of the README: what attacks recover under five combination rules, beside
a model that never learned the concept. Both show the study `combination_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from concept_eraser.evaluation.statistics import Interval
from studies.rendering.common import pool, table
from studies.rendering.excess_recovery import by_concept, campaigns, evaluations, success_rate
from studies.rendering.figures import Figure, canvas
from studies.rendering.leaderboard_plot import OKABE_ITO
from studies.result_tables import ROOT, STUDIES, Content, Results

STUDY = "combination_rules"
CONCEPT = "heart"
FIGURE = ROOT / "docs" / "recovery.svg"
NEVER = "never learned"
# of the README's table: their names in the study, and there
ATTACKS = {
    "completion": "half-noised image",
    "soft_prompt": "soft prompt",
    "relearning": "fine-tuning",
}
IN_TABLE = ("munba", "sum", "forum")  # the figure has all
# of the figure, from weak to strong
SHOWN = ("random_tokens", "other_sampling", "inpainting", *ATTACKS)
RATES = {
    "drawn by name": ("concept_rate", "direct"),
    "other shapes": ("accuracy_shape", "retained"),
    "unseen shapes": ("accuracy_shape", "unseen"),
}


def block() -> str:
    """Return the table of the README: rates in percent, a row for each model.

    It is "" without results.
    """
    contents = _contents()
    if not contents:
        return ""
    groups = _in_order(contents)
    first = next(iter(groups.values()))
    rows = [["model", *RATES, *ATTACKS.values()]]
    rows.append(
        [
            NEVER,
            *(_percent(_control_rate(first[0], *rate)) for rate in RATES.values()),
            *(_percent(success_rate(campaigns(contents, attack))) for attack in ATTACKS),
        ]
    )
    for model in IN_TABLE:
        group = groups[model]
        rows.append(
            [
                group[0]["label"],
                *(_percent(pool(list(group), *rate)) for rate in RATES.values()),
                *(_percent(success_rate(campaigns(contents, attack, model))) for attack in ATTACKS),
            ]
        )
    return table(rows)


def figures() -> dict[Path, Figure]:
    """Return the figure of the README: the success of each attack, in percent with intervals."""
    contents = _contents()
    if not contents:
        return {}
    labels = {model: group[0]["label"] for model, group in _in_order(contents).items()}
    content = [
        [
            ATTACKS.get(attack, attack.replace("_", " ")),
            [
                [NEVER, *_values(success_rate(campaigns(contents, attack)))],
                *(
                    [label, *_values(success_rate(campaigns(contents, attack, model)))]
                    for model, label in labels.items()
                ),
            ],
        ]
        for attack in SHOWN
    ]
    return {FIGURE: Figure(content, partial(_draw, content))}


def _contents() -> list[Content]:
    return by_concept(dict(Results(STUDY))).get(CONCEPT, [])


def _in_order(contents: Sequence[Content]) -> dict[str, list[Content]]:
    """Return the evaluations of each erasure, in the order of the study's configuration."""
    groups = evaluations(contents)
    entries = yaml.safe_load((STUDIES / f"{STUDY}.yaml").read_text())["entries"]
    return {name: groups[name] for name in entries if name in groups}


def _control_rate(content: Content, metric: str, name: str) -> Interval:
    """Return a rate of the model that never learned, from the evaluation beside it."""
    for row in content["evaluation"]["control"]["results"]:
        if (row["metric"], row["group"], row["control"]) == (metric, name, 0):
            return Interval(**row["before"])
    raise KeyError(f"no {metric} of {name} for the control")


def _percent(rate: Interval | None) -> str:
    return f"{100 * rate.value:.0f} %" if rate else "-"


def _values(rate: Interval) -> list[float]:
    return [100 * value for value in (rate.low, rate.value, rate.high)]


def _draw(content: list[Any]) -> Any:
    """Draw a row for each attack, with a mark for each model."""
    figure = canvas(7.5, 4.4)
    axes = figure.add_subplot()
    names = [name for name, *_ in content[0][1]]
    colors = ("#000000", *OKABE_ITO)
    for place, (_, rates) in enumerate(content):
        for number, (name, low, value, high) in enumerate(rates):
            y = place + 0.13 * (number - (len(names) - 1) / 2)
            axes.plot([low, high], [y, y], color=colors[number], linewidth=1.3)
            axes.plot(
                value,
                y,
                "D" if name == NEVER else "o",
                color=colors[number],
                markersize=5,
                markerfacecolor="white" if name == NEVER else colors[number],
                label=name if place == 0 else None,
            )
    axes.set_yticks(range(len(content)), [attack for attack, _ in content])
    axes.invert_yaxis()
    axes.set_xlim(-2, 102)
    axes.set_xlabel("prompts on which the attack recovers the concept, %")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False, fontsize=8.5)
    return figure
