"""The methods with as many seconds as one of them takes, on a page of a board."""

from __future__ import annotations

import json
from typing import Any

from tools.leaderboard import same_time
from tools.rendering.attacks import rate
from tools.rendering.board import Attacked, Runs, alike, attacked, attempts_of, board_of, order, reports
from tools.rendering.common import RESULTS, change, pooled, share, table

Run = dict[str, Any]


def timed(study: str, task: str) -> str:
    """The runs with equal seconds, and those that took within a tenth of as many anyway; which are not run so yet."""
    how = board_of(study).get("time")
    found = again(study, task)
    if how is None or not found:
        return ""
    near, pending = others(study, task, how, {run["entry"] for run in found})
    names, later, steps = how.get("attacks", []), attacked(f"{study}/time"), attacked(study)
    fallen = [(run, attacks_on(run, later)) for run in found] + [(run, attacks_on(run, steps)) for run in near]
    head = ["method", "steps", "s", "direct %", "synonyms %", "retained % (points)", "all prompt attacks %"]
    rows = [row(run, on, names) for run, on in sorted(fallen, key=lambda pair: order([pair[0]], pair[1], names))]
    left = f"\n\nNot run with as many seconds yet: {'; '.join(run['label'] for run in pending)}." if pending else ""
    return f"With as many seconds as {how['like']}'s steps take (seed {', '.join(map(str, how['seeds']))}):\n\n{table([head, *rows])}{left}"


def again(study: str, task: str) -> Runs:
    """What was run with other steps, where its setting is still the reported one."""
    reported = {(run["entry"], run["seed"]): run for runs in reports(study).values() for run in runs}
    there = [json.loads(path.read_text()) for path in sorted((RESULTS / study / "time").glob(f"{task}_*.json"))]
    return [run for run in there if (report := reported.get((run["entry"], run["seed"]))) and alike(report, run, "steps")]  # fmt: skip


def others(study: str, task: str, how: Run, run_again: set[str]) -> tuple[Runs, Runs]:
    """Of the rest: what took the seconds anyway, and what still has to be run."""
    every = reports(study)
    budget = {run["seed"]: run["run"]["cpu_seconds"] for run in every[f"{task}_{how['like']}"]}
    rest = [run for name, runs in every.items() if name not in run_again and runs[0]["task"] == task for run in runs if run["seed"] in how["seeds"] and run["run"].get("steps")]  # fmt: skip
    steps = [same_time(run["run"]["steps"], run["run"]["cpu_seconds"], budget[run["seed"]]) for run in rest]
    near = [run for run, other in zip(rest, steps, strict=True) if other is None]
    return near, [run for run, other in zip(rest, steps, strict=True) if other is not None]


def attacks_on(run: Run, attacks: dict[str, Attacked]) -> Attacked:
    """The attacks on this run's model alone."""
    kept = {name: [found for found in results if found["training_seed"] == run["seed"]] for name, results in attacks.get(run["entry"], {}).items()}  # fmt: skip
    return {name: results for name, results in kept.items() if results}


def row(run: Run, attacks: Attacked, names: list[str]) -> list[str]:
    attribute = next(iter(run["evaluation"]["protocol"]["concept"]))
    kept = f"{share(pooled([run], f'accuracy_{attribute}', 'retained'))} ({change([run], f'accuracy_{attribute}', 'retained'):+.1f})"
    fell = rate([{"attempts": attempts_of(attacks, names)}])
    return [run["label"], str(run["run"]["steps"]), f"{run['run']['cpu_seconds']:.0f}", share(pooled([run], "concept_share", "direct")), share(pooled([run], "concept_share", "synonyms")), kept, fell]  # fmt: skip
