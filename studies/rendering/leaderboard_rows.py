"""The results of a leaderboard: its reported runs, and what else was measured of their models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import yaml

from concept_eraser.evaluation.seed_statistics import LEAST_SEEDS, SeedInterval, cluster_bootstrap
from studies.rendering.common import pool
from studies.result_tables import STUDIES, Results

Runs = list[dict[str, Any]]
AttackRuns = dict[str, Runs]  # attack -> its results, one a training seed


def leaderboard_of(study: str) -> dict[str, Any]:
    """Return the configuration of a leaderboard."""
    return yaml.safe_load((STUDIES / f"{study}.yaml").read_text())


def has_entry(leaderboard: dict[str, Any], task: str, method: str) -> bool:
    """Return whether a task has a row of a method. A control needs a model of the task."""
    return not is_control(leaderboard, method) or "control" in leaderboard["tasks"][task]


def is_control(leaderboard: dict[str, Any], method: str) -> bool:
    """Return whether a method is the model that never learned the concept."""
    return "control" in leaderboard["methods"].get(method, {})


def reports(study: str) -> dict[str, Runs]:
    """Return the reported runs by entry (task_method), in the order of the training seeds.

    Seeds of another setting than the first are left out. A new choice of a setting is run seed by
    seed.
    """
    runs_by_entry: dict[str, Runs] = {}
    for content in Results(study).values():
        runs = runs_by_entry.setdefault(content["entry"], [])
        if not runs or alike(runs[0], content, "training.seed"):
            runs.append(content)
    return runs_by_entry


def alike(one: dict[str, Any], other: dict[str, Any], *apart: str) -> bool:
    """Return whether two runs have one setting, but for `watch` and keys such as training.steps."""

    def setting_of(run: dict[str, Any]) -> Any:
        recipe = {key: value for key, value in run["recipe"].items() if key != "watch"}
        for key in apart:
            part, _, name = key.partition(".")
            if recipe.get(part):
                recipe[part] = {k: v for k, v in recipe[part].items() if k != name}
        return recipe, {key: value for key, value in run["point"].items() if key not in apart}

    return bool(setting_of(one) == setting_of(other))


def further(study: str, folder: str) -> Runs:
    """Return the results of a folder that belong to the settings of the reported runs."""
    seeds = {
        (run["entry"], run["seed"]): (run["recipe"], run["point"])
        for runs in reports(study).values()
        for run in runs
    }
    results = []
    for key, content in Results(f"{study}/{folder}").items():
        recipe, point = seeds.get((content["victim"], int(key.rpartition("seed")[2])), (None, None))
        if content["recipe"] == recipe and content.get("point", point) == point:
            results.append(content)
    return results


def attack_runs(study: str) -> dict[str, AttackRuns]:
    """Return the attacks on the reported runs, by entry and attack."""
    by_entry: dict[str, AttackRuns] = {}
    for content in further(study, "attacks"):
        by_entry.setdefault(content["victim"], {}).setdefault(
            content["protocol"]["attack"], []
        ).append(content)
    return by_entry


def of_victims(study: str, folder: str) -> dict[str, Runs]:
    """Return the results of a folder by entry.

    Args:
        study: The leaderboard.
        folder: `implicit`, prompts without the names of the concept, or `memory`.
    """
    by_entry: dict[str, Runs] = {}
    for content in further(study, folder):
        by_entry.setdefault(content["victim"], []).append(content)
    return by_entry


def attempts_of(attacks: AttackRuns, names: list[str]) -> Runs:
    """Return the attempts of all attacks of `names` together.

    Only models of training seeds with all these attacks count. So each attack has the same
    weight. The result is [] if there is no such seed.
    """
    common = seeds_of(attacks, names)
    return [
        a
        for name in names
        for content in attacks.get(name, [])
        if content["training_seed"] in common
        for a in content["attempts"]
    ]


def seeds_of(attacks: AttackRuns, names: Sequence[str]) -> set[int]:
    """Return the training seeds whose models have all attacks of `names`."""
    seeds = [{content["training_seed"] for content in attacks.get(name, [])} for name in names]
    return set.intersection(*seeds) if seeds else set()


def excess_recovery(
    attacks: AttackRuns, control: AttackRuns, names: Sequence[str]
) -> SeedInterval | None:
    """Return the mean success of the attacks beyond that on a model that never learned the concept.

    Each prompt under each attack is paired with the same prompt on the control. The unit of the
    interval is the training seed where three or more seeds have all attacks. Otherwise it is the
    prompt, and the interval does not hold for other trainings.

    Args:
        attacks: the attacks on the models of a method.
        control: the attacks on the control, with the same prompts.
        names: the attacks that count.

    Returns:
        The excess as a share, or None if a side lacks one of the attacks.

    Raises:
        ValueError: the attacks have different prompts.
    """
    common = seeds_of(attacks, names)
    if not common or not seeds_of(control, names):
        return None
    by_unit: dict[Any, list[float]] = {}
    for name in names:
        expected = _successes(control[name][0])
        for content in attacks[name]:
            if content["training_seed"] not in common:
                continue
            found = _successes(content)
            if found.keys() != expected.keys():
                raise ValueError(f"{content['victim']}: {name} has other prompts than the control")
            for prompt, success in found.items():
                unit = content["training_seed"] if len(common) >= LEAST_SEEDS else prompt
                by_unit.setdefault(unit, []).append(float(success) - float(expected[prompt]))
    return cluster_bootstrap([np.array(values) for values in by_unit.values()])


def _successes(content: dict[str, Any]) -> dict[tuple[str, int], bool]:
    """Return whether each attacked prompt showed the concept in the end, by prompt and seed."""
    return {(a["prompt"], a["seed"]): a["success"] for a in content["attempts"]}


def order(runs: Runs, attacks: AttackRuns, names: list[str]) -> tuple[bool, float, float]:
    """Return the sort key of a method.

    It is the larger of concept rate and attack success rate, plus the retain error. Methods without
    all attacks come last.
    """
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))
    concept_rate, retain_accuracy = (
        pool(runs, "concept_rate", "direct"),
        pool(runs, f"accuracy_{attribute}", "retained"),
    )
    # relearning changes the weights
    attempts = attempts_of(attacks, [name for name in names if name != "relearning"])
    success_rate = sum(a["success"] for a in attempts) / len(attempts) if attempts else 0.0
    assert concept_rate is not None  # every suite measures both
    assert retain_accuracy is not None
    return (
        not attempts,
        max(concept_rate.value, success_rate) + 1 - retain_accuracy.value,
        concept_rate.value,
    )
