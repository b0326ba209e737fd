"""What choosing a setting by its images alone would have reported, beside what was chosen under
an attack.

The runs that were reported before the selection had an attack are kept in the folder by_images/
of a leaderboard's results, with their attacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from studies.rendering.attacks import rate
from studies.rendering.common import pool, setting, share, table
from studies.result_tables import Results

Runs = list[dict[str, Any]]


def describe_run(run: dict[str, Any], attacks: Runs) -> list[str]:
    """A run's setting, what it retains, and what the attacks by prompt brought back, all
    together.
    """
    attribute = next(iter(run["evaluation"]["protocol"]["concept"]))
    return [
        setting(run["point"]).replace("_", " "),
        share(pool([run], f"accuracy_{attribute}", "retained")),
        rate(attacks),
    ]


def page(results: Results, task: str, now: Mapping[str, tuple[dict[str, Any], Runs]]) -> str:
    """The table of a task; now: by entry, the reported run of a seed and its attacks by prompt.
    Entries that are not under attack are left out; "" where there are none."""
    head = [
        "method",
        "setting by images",
        "retained %",
        "all prompt attacks %",
        "setting under attack",
        "retained %",
        "all prompt attacks %",
    ]
    rows = [head]
    attacks = results.folder("attacks")
    for name, run in results.items():
        if not fnmatch(name, f"{task}_*_seed?"):
            continue
        results_by_entry = [
            attacks[key] for key in attacks if fnmatch(key, f"{run['entry']}_*_seed{run['seed']}")
        ]
        before = [
            one
            for one in results_by_entry
            if one["victim"] == run["entry"] and one["protocol"]["attack"] != "relearning"
        ]
        if run["entry"] not in now or not before:
            continue
        report, after = now[run["entry"]]
        rows.append([run["label"], *describe_run(run, before), *describe_run(report, after)])
    return (
        f"The same methods chosen by their images alone (training seed 0):\n\n{table(rows)}"
        if len(rows) > 1
        else ""
    )
