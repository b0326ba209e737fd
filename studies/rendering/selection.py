"""The table of settings chosen by images alone, beside those chosen under an attack.

The first selections had no attack. Their reported runs and attacks lie in the folder by_images/ of
a leaderboard's results.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from studies import grids
from studies.rendering.attacks import rate
from studies.rendering.common import pool, setting, share, table
from studies.result_tables import Results

Runs = list[dict[str, Any]]


def describe_run(run: dict[str, Any], attacks: Runs) -> list[str]:
    """Return the setting of a run, its retain accuracy and its attack success rate."""
    attribute = next(iter(run["evaluation"]["protocol"]["concept"]))
    return [
        setting(run["point"], grids.of_row(run)).replace("_", " "),
        share(pool([run], f"accuracy_{attribute}", "retained")),
        rate(attacks),
    ]


def page(results: Results, task: str, now: Mapping[str, tuple[dict[str, Any], Runs]]) -> str:
    """Return the table of a task, or "" without results.

    Args:
        results: The results of the leaderboard's folder by_images/.
        task: The task.
        now: By entry, the reported run of a training seed and its prompt attacks.
    """
    head = [
        "method",
        "setting by images",
        "retain accuracy %",
        "ASR, all prompt attacks %",
        "setting under attack",
        "retain accuracy %",
        "ASR, all prompt attacks %",
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
        "Settings chosen by images alone, beside the reported settings (training seed 0):\n\n"
        f"{grids.with_note(table(rows))}"
        if len(rows) > 1
        else ""
    )
