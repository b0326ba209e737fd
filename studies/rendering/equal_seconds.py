"""The table of a leaderboard in which all methods have the seconds of one method."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

from concept_eraser.recipes import recipe as recipes
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
TOLERANCE = 0.5  # of the budget's seconds: those of a step depend on what else the machine does


def timed_table(study: str, task: str) -> str:
    """Return the table of runs with equal seconds.

    It includes reported runs that took these seconds within a tenth. Sentences name the methods
    that were not run with these seconds, and those that have no training steps to change.
    """
    how = leaderboard_of(study).get("time")
    if how is None:
        return ""
    budgets = budgets_of(study, task, how)
    runs = again(study, task, budgets)
    if not runs:
        return ""
    near, pending = others(
        study, task, how, budgets=budgets, run_again={run["entry"] for run in runs}
    )
    names, later, steps = how.get("attacks", []), attack_runs(f"{study}/time"), attack_runs(study)
    attacked_runs = [(run, attacks_on(run, later)) for run in runs] + [
        (run, attacks_on(run, steps)) for run in near
    ]
    head = [
        "method",
        "steps",
        "s",
        "direct %",
        "synonyms %",
        "retain accuracy % (points)",
        "ASR, all prompt attacks %",
    ]
    rows = [
        row(run, attacks, names)
        for run, attacks in sorted(attacked_runs, key=lambda pair: order([pair[0]], pair[1], names))
    ]
    sentences = "".join(
        f"\n\n{reason}: {'; '.join(run['label'] for run in runs_of_reason)}."
        for reason, runs_of_reason in (
            ("Not run with these seconds, since they train without steps", edits(study, task, how)),
            ("Not run with these seconds yet", pending),
        )
        if runs_of_reason
    )
    return (
        f"Methods with the training seconds of {how['like']} (training seed "
        f"{', '.join(map(str, how['seeds']))}):\n\n{table([head, *rows])}{sentences}"
    )


def again(study: str, task: str, budgets: dict[int, float]) -> Runs:
    """Return the runs with other steps whose setting is the reported one.

    A run is left out where it took other seconds than its seed's budget: its number of steps was
    computed from the seconds of a step, which a step of another kind does not have.
    """
    seeds = {(run["entry"], run["seed"]): run for runs in reports(study).values() for run in runs}
    stored_runs = [
        run for key, run in Results(f"{study}/time").items() if fnmatch(key, f"{task}_*")
    ]
    return [
        run
        for run in stored_runs
        if (report := seeds.get((run["entry"], run["seed"])))
        and alike(with_defaults(report), with_defaults(run), "training.steps", "attack.warmup")
        and abs(run["run"]["cpu_seconds"] / budgets[run["seed"]] - 1) < TOLERANCE
    ]


def with_defaults(run: Run) -> Run:
    """Return a run whose recipe has the fields that its version of the package did not have yet."""
    return {**run, "recipe": recipes.validate(run["recipe"], run["entry"]).resolved()}


def budgets_of(study: str, task: str, how: Run) -> dict[int, float]:
    """Return the seconds of the method whose seconds all have, by training seed."""
    runs = reports(study)[f"{task}_{how['like']}"]
    return {run["seed"]: run["run"]["cpu_seconds"] for run in runs}


def others(
    study: str, task: str, how: Run, budgets: dict[int, float], run_again: set[str]
) -> tuple[Runs, Runs]:
    """Return the other reported runs: those that took the seconds, and those still to be run."""
    other_runs = [
        run
        for name, runs in reports(study).items()
        if name not in run_again and runs[0]["task"] == task
        for run in runs
        if run["seed"] in how["seeds"] and run["run"].get("steps")
    ]
    steps = [
        same_time(run["run"]["steps"], run["run"]["cpu_seconds"], budgets[run["seed"]])
        for run in other_runs
    ]
    near = [run for run, other in zip(other_runs, steps, strict=True) if other is None]
    return near, [run for run, other in zip(other_runs, steps, strict=True) if other is not None]


def edits(study: str, task: str, how: Run) -> Runs:
    """Return the reported runs that have no training steps: closed forms and CPE's gate.

    Methods at inference and the control that never learned are not among them.
    """
    return [
        run
        for runs in reports(study).values()
        for run in runs
        if run["task"] == task and run["seed"] in how["seeds"] and "edit" in run["run"]
        if not run["run"].get("steps")
    ]


def attacks_on(run: Run, attacks: dict[str, AttackRuns]) -> AttackRuns:
    """Return the attacks on the model of this run."""
    by_attack = {
        name: [result for result in results if result["training_seed"] == run["seed"]]
        for name, results in attacks.get(run["entry"], {}).items()
    }
    return {name: results for name, results in by_attack.items() if results}


def row(run: Run, attacks: AttackRuns, names: list[str]) -> list[str]:
    """Return the row of a run."""
    attribute = next(iter(run["evaluation"]["protocol"]["concept"]))
    retain_text = (
        f"{share(pool([run], f'accuracy_{attribute}', 'retained'))} "
        f"({change([run], f'accuracy_{attribute}', 'retained'):+.1f})"
    )
    return [
        run["label"],
        str(run["run"]["steps"]),
        f"{run['run']['cpu_seconds']:.0f}",
        share(pool([run], "concept_rate", "direct")),
        share(pool([run], "concept_rate", "synonyms")),
        retain_text,
        rate([{"attempts": attempts_of(attacks, names)}]),
    ]
