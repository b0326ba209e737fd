"""The table and the figure of the README: what attacks recover of three erased concepts, beside
models that never learned them. Both show the study `excess_recovery`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from concept_eraser.evaluation.statistics import Interval
from studies.rendering.common import pool, table
from studies.rendering.excess_statistics import (
    by_concept,
    campaigns,
    evaluations,
    never_learned_rates,
    success_rate,
)
from studies.rendering.figures import Figure, canvas
from studies.rendering.leaderboard_plot import OKABE_ITO
from studies.result_tables import ROOT, STUDIES, Content, Results

STUDY = "excess_recovery"
FIGURE = ROOT / "docs" / "recovery.svg"
NEVER = "never learned"
DEFAULT = "munba_lora"
# of the README's table: their names in the study, and there
ATTACKS = {
    "unlearn_diff": "searched words (UnlearnDiffAtk)",
    "soft_prompt": "soft prompt",
    "completion": "completing a half-noised image",
    "relearning": "fine-tuning on ten images",
    "revival": "fine-tuning on other images",
}
# of the figure, from weak to strong
SHOWN = (
    "random_tokens",
    "revival",
    "other_sampling",
    "inpainting",
    "concept_inversion",
    "unlearn_diff",
    "completion",
    "soft_prompt",
    "relearning",
)


def block() -> str:
    """Return the table of the README: for each concept and attack the success on the default's
    models, and on the models that never learned the concept.

    It is "" without results.
    """
    concepts = _in_order()
    if not concepts:
        return ""
    rows = [["prompts whose image shows it: default / never learned", *concepts]]
    rows.append(["by its name", *map(_by_name, concepts.values())])
    rows += [
        [title, *(_pair(contents, attack) for contents in concepts.values())]
        for attack, title in ATTACKS.items()
    ]
    return table(rows)


def figures() -> dict[Path, Figure]:
    """Return the figure of the README: the success of each attack, in percent with intervals."""
    labels = _labels()
    content = [
        [
            concept,
            [
                [
                    ATTACKS.get(attack, attack.replace("_", " ")),
                    [
                        [label, *_values(success_rate(found))]
                        for model, label in labels.items()
                        if (found := campaigns(contents, attack, model))
                    ],
                ]
                for attack in SHOWN
            ],
        ]
        for concept, contents in _in_order().items()
    ]
    return {FIGURE: Figure(content, partial(_draw, content))} if content else {}


def _in_order() -> dict[str, list[Content]]:
    """Return the results of each concept, in the order of the study's configuration."""
    found = by_concept(dict(Results(STUDY)))
    return {name: found[name] for name in _study()["concepts"] if name in found}


def _labels() -> dict[str | None, str]:
    """Return the label of each erasure by its name, and that of the controls by None."""
    labels = {name: entry["label"] for name, entry in _study()["entries"].items()}
    return {None: NEVER, **labels}


def _study() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((STUDIES / f"{STUDY}.yaml").read_text())
    return content


def _by_name(contents: Sequence[Content]) -> str:
    group = evaluations(contents)[DEFAULT]
    own = pool(list(group), "concept_rate", "direct")
    controls = never_learned_rates(group[0])
    return f"{100 * own.value:.0f} / {100 * sum(controls) / len(controls):.0f} %" if own else "-"


def _pair(contents: Sequence[Content], attack: str) -> str:
    groups = [campaigns(contents, attack, model) for model in (DEFAULT, None)]
    rates = [f"{100 * success_rate(group).value:.0f}" if group else "-" for group in groups]
    return " / ".join(rates) + " %"


def _values(rate: Interval) -> list[float]:
    return [100 * value for value in (rate.low, rate.value, rate.high)]


def _draw(content: list[Any]) -> Any:
    """Draw a panel for each concept with a row for each attack and a mark for each model."""
    figure = canvas(10, 6.5)
    all_axes = figure.subplots(1, len(content), sharey=True, squeeze=False)[0]
    names = list(
        dict.fromkeys(name for _, rows in content for _, rates in rows for name, *_ in rates)
    )
    colors = dict(zip(names, ("#000000", *OKABE_ITO), strict=False))
    step = 0.75 / len(names)  # so that the rows of two attacks stay apart
    for axes, (concept, rows) in zip(all_axes, content, strict=True):
        for place, (_, rates) in enumerate(rows):
            for name, low, value, high in rates:
                y = place + step * (names.index(name) - (len(names) - 1) / 2)
                axes.plot([low, high], [y, y], color=colors[name], linewidth=1.3)
                axes.plot(
                    value,
                    y,
                    "D" if name == NEVER else "o",
                    color=colors[name],
                    markersize=4.5,
                    markerfacecolor="white" if name == NEVER else colors[name],
                    label=name,
                )
        axes.set_title(concept, fontsize=10)
        axes.set_xlim(-3, 103)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_yticks(range(len(content[0][1])), [attack for attack, _ in content[0][1]])
    all_axes[0].invert_yaxis()
    all_axes[len(content) // 2].set_xlabel("prompts on which the attack draws the concept, %")
    handles, labels = all_axes[0].get_legend_handles_labels()
    marks = dict(zip(labels, handles, strict=True))  # one for each name
    figure.legend(
        marks.values(),
        marks.keys(),
        loc="outside upper center",
        ncols=len(marks),
        frameon=False,
        fontsize=8.5,
    )
    return figure
