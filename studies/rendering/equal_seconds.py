"""The methods with as many seconds as one of them takes, on a page of a leaderboard."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

from studies.leaderboard import same_time
from studies.rendering.attacks import rate
from studies.rendering.common import change, pool, share, table
from studies.rendering.leaderboard_rows import (
    AttackRuns,
    Runs,
    alike,
    attack_runs,
    attempts_of,
    leaderboard_of,
    order,
    reports,
)
from studies.result_tables import Results

Run = dict[str, Any]


def timed_table(study: str, task: str) -> str:
    """The runs with equal seconds, and those that took within a tenth of as many anyway; which are
    not run so yet.
    """
    how = leaderboard_of(study).get("time")
    runs = again(study, task)
    if how is None or not runs:
        return ""
    near, pending = others(study, task, how, {run["entry"] for run in runs})
    names, later, steps = how.get("attacks", []), attack_runs(f"{study}/time"), attack_runs(study)
    fallen = [(run, attacks_on(run, later)) for run in runs] + [
        (run, attacks_on(run, steps)) for run in near
    ]
    head = [
        "method",
        "steps",
        "s",
        "direct %",
        "synonyms %",
        "retained % (points)",
        "all prompt attacks %",
    ]
    rows = [
        row(run, on, names)
        for run, on in sorted(fallen, key=lambda pair: order([pair[0]], pair[1], names))
    ]
    remaining = (
        f"\n\nNot run with as many seconds yet: {'; '.join(run['label'] for run in pending)}."
        if pending
        else ""
    )
    return (
        f"With as many seconds as {how['like']}'s steps take (seed "
        f"{', '.join(map(str, how['seeds']))}):\n\n{table([head, *rows])}{remaining}"
    )


def again(study: str, task: str) -> Runs:
    """What was run with other steps, where its setting is still the reported one."""
    seeds = {(run["entry"], run["seed"]): run for runs in reports(study).values() for run in runs}
    stored_runs = [
        run for key, run in Results(f"{study}/time").items() if fnmatch(key, f"{task}_*")
    ]
    return [
        run
        for run in stored_runs
        if (report := seeds.get((run["entry"], run["seed"]))) and alike(report, run, "steps")
    ]


def others(study: str, task: str, how: Run, run_again: set[str]) -> tuple[Runs, Runs]:
    """Of the rest: what took the seconds anyway, and what still has to be run."""
    every = reports(study)
    budget = {run["seed"]: run["run"]["cpu_seconds"] for run in every[f"{task}_{how['like']}"]}
    remaining = [
        run
        for name, runs in every.items()
        if name not in run_again and runs[0]["task"] == task
        for run in runs
        if run["seed"] in how["seeds"] and run["run"].get("steps")
    ]
    steps = [
        same_time(run["run"]["steps"], run["run"]["cpu_seconds"], budget[run["seed"]])
        for run in remaining
    ]
    near = [run for run, other in zip(remaining, steps, strict=True) if other is None]
    return near, [run for run, other in zip(remaining, steps, strict=True) if other is not None]


def attacks_on(run: Run, attacks: dict[str, AttackRuns]) -> AttackRuns:
    """The attacks on this run's model alone."""
    by_attack = {
        name: [result for result in results if result["training_seed"] == run["seed"]]
        for name, results in attacks.get(run["entry"], {}).items()
    }
    return {name: results for name, results in by_attack.items() if results}


def row(run: Run, attacks: AttackRuns, names: list[str]) -> list[str]:
    attribute = next(iter(run["evaluation"]["protocol"]["concept"]))
    retain_text = (
        f"{share(pool([run], f'accuracy_{attribute}', 'retained'))} "
        f"({change([run], f'accuracy_{attribute}', 'retained'):+.1f})"
    )
    fell = rate([{"attempts": attempts_of(attacks, names)}])
    return [
        run["label"],
        str(run["run"]["steps"]),
        f"{run['run']['cpu_seconds']:.0f}",
        share(pool([run], "concept_rate", "direct")),
        share(pool([run], "concept_rate", "synonyms")),
        retain_text,
        fell,
    ]
