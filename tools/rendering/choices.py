"""What choosing a setting by its pictures alone would have reported, beside what was chosen under an attack.

The runs that were reported before the selection had an attack are kept in a board's folder by_pictures/, with their attacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.rendering.attacks import rate
from tools.rendering.common import pooled, setting, share, table

Results = list[dict[str, Any]]


def told(run: dict[str, Any], attacks: Results) -> list[str]:
    """A run's setting, what it retains, and what the attacks by prompt brought back, all together."""
    attribute = next(iter(run["evaluation"]["protocol"]["concept"]))
    return [
        setting(run["point"]).replace("_", " "),
        share(pooled([run], f"accuracy_{attribute}", "retained")),
        rate(attacks),
    ]


def page(folder: Path, task: str, now: Mapping[str, tuple[dict[str, Any], Results]]) -> str:
    """The table of a task; now: by entry, the reported run of a seed and its attacks by prompt. Entries that are not under attack are
    left out; "" where there are none."""
    head = ["method", "setting by pictures", "retained %", "all prompt attacks %", "setting under attack", "retained %", "all prompt attacks %"]  # fmt: skip
    rows = [head]
    for path in sorted(folder.glob(f"{task}_*_seed?.json")):
        run = json.loads(path.read_text())
        seed = run["seed"]
        found = [
            json.loads(p.read_text()) for p in sorted((folder / "attacks").glob(f"{run['entry']}_*_seed{seed}.json"))
        ]
        before = [one for one in found if one["victim"] == run["entry"] and one["protocol"]["attack"] != "relearning"]
        if run["entry"] not in now or not before:
            continue
        report, after = now[run["entry"]]
        rows.append([run["label"], *told(run, before), *told(report, after)])
    return (
        f"The same methods chosen by their pictures alone (training seed 0):\n\n{table(rows)}" if len(rows) > 1 else ""
    )
