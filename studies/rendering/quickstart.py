"""The result of `make quickstart` in the README, from one JSON file."""

from __future__ import annotations

import json
from typing import Any

from concept_eraser.evaluation.statistics import Interval
from studies.rendering.common import results, share
from studies.result_tables import TABLES

FILE = TABLES / "quickstart.json"
ROWS = (
    ("concept_rate", "direct"),
    ("accuracy_shape", "retained"),
)


def block() -> str:
    """Return what the command printed: two rows and the seconds."""
    facts = json.loads(FILE.read_text())
    lines = ["metric            group         before                after                 n"]
    for metric, group, row in _rows(facts):
        cells = (share(Interval(**row[when])) for when in ("before", "after"))
        lines.append(
            f"{metric:<17} {group:<13} "
            + "".join(f"{cell:<22}" for cell in cells)
            + str(row["after"]["n"])
        )
    seconds = facts["seconds"]
    times = (
        f"erasing {seconds['erasing']:.0f} s (of which training {seconds['training']:.0f} s), "
        f"measuring {seconds['measuring']:.0f} s"
    )
    if "installing" in seconds:
        times += f"; installing took {seconds['installing']:.0f} s, once"
    return "```text\n" + "\n".join([*lines, "...", times]) + "\n```"


def _rows(facts: Any) -> list[tuple[str, str, Any]]:
    rows = [(metric, group, results(facts, metric, group)) for metric, group in ROWS]
    return [row for row in rows if row[2]]
