"""eval/results/guidance.md: the predictions with and without a prompt after an erasure, and the
guidance that is left.
"""

from __future__ import annotations

import yaml

from studies.rendering.common import (
    LIMITS,
    change,
    notes,
    pool,
    provenance,
    share,
    source,
    table,
)
from studies.result_tables import STUDIES, Results

STUDY = "guidance"


def page() -> str:
    """Return the page."""
    study = yaml.safe_load((STUDIES / f"{STUDY}.yaml").read_text())
    order = list(study["cases"])
    cases = [
        one
        for one in Results(STUDY).values()
        if one["case"] in order and one["task"] in study["tasks"]
    ]
    parts = []
    for task in study["tasks"]:
        of = sorted(
            (one for one in cases if one["task"] == task), key=lambda one: order.index(one["case"])
        )
        if of:
            parts.append(f"## {task}\n\n{table([HEAD, *(_row(one) for one in of)])}")
    states = study["states"]
    return (
        "\n\n".join(
            [
                "# Guidance after an erasure",
                source(STUDY, f"python -m studies.guidance studies/configs/{STUDY}.yaml") + ".",
                LIMITS,
                *filter(None, [notes(STUDY)]),
                *parts,
                (
                    "Learned, followed and guidance are means in percent over "
                    f"{states['steps']} steps of the original's sampler (guidance "
                    f"{states['guidance']:g}) for\n"
                    f"{states['n']} images of the concept. The brackets hold the least and the "
                    "largest value of a step. Learned: the change of the prediction for the\n"
                    "concept's prompts, relative to the way to the anchor's prediction. Followed: "
                    "the same for the unconditional prediction. Guidance: the\n"
                    "difference of the two predictions, relative to the original's for the "
                    "anchor. Rates have 95 % Wilson intervals. The training seed is "
                    f"{study['seed']}.\n"
                    "No closed form follows the training."
                ),
                provenance({"": cases}),
            ]
        )
        + "\n"
    )


HEAD = [
    "trained",
    "learned %",
    "followed %",
    "guidance %",
    "direct %",
    "no-object rate, direct %",
    "retain accuracy % (points)",
]


def _row(one: dict) -> list[str]:
    """Return the row of a case."""

    def over(key: str) -> str:
        values = [100 * row[key] for row in one["rows"]]
        return f"{sum(values) / len(values):.0f} ({min(values):.0f} to {max(values):.0f})"

    accuracy = f"accuracy_{next(iter(one['evaluation']['protocol']['concept']))}"
    retain_text = (
        f"{share(pool([one], accuracy, 'retained'))} ({change([one], accuracy, 'retained'):+.1f})"
    )
    return [
        one["label"],
        over("learned"),
        over("followed"),
        over("guidance"),
        share(pool([one], "concept_rate", "direct")),
        share(pool([one], "no_object_rate", "direct")),
        retain_text,
    ]


PAGES = {STUDY: page}
