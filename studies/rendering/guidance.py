"""eval/results/guidance.md: what was learned with a prompt, what followed without one, and what a
sampler shows of it.
"""

from __future__ import annotations

import yaml

from studies.rendering.common import change, notes, pool, provenance, share, source, table
from studies.result_tables import STUDIES, Results

STUDY = "guidance"


def page() -> str:
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
                "# What of an erasure guidance passes on",
                source(STUDY, f"python -m studies.guidance studies/configs/{STUDY}.yaml") + ".",
                *filter(None, [notes(STUDY)]),
                *parts,
                (
                    "Learned, followed and guidance, in percent, are means over "
                    f"{states['steps']} steps of the original's sampler (guidance "
                    f"{states['guidance']:g}) on its way to\n"
                    f"{states['n']} images of the concept; in brackets the least and the "
                    "most of them. Learned: how far the answer to the concept's prompts has "
                    "moved to\n"
                    "that to the anchor's. Followed: how far the answer without a prompt has "
                    "moved the same way. Guidance: how much is left of what\n"
                    "leads to the anchor. Shares with 95 % Wilson intervals; training seed "
                    f"{study['seed']}; no closed form after the training."
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
    "none, direct %",
    "retained % (points)",
]


def _row(one: dict) -> list[str]:
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
