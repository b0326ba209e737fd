"""What a leaderboard's results hold: its measured runs, what else was measured of the settings that
are reported, and what both come to."""

from __future__ import annotations

from typing import Any

import yaml

from studies.rendering.common import pool
from studies.result_tables import STUDIES, Results

Runs = list[dict[str, Any]]
AttackRuns = dict[str, Runs]  # attack -> its results, one a training seed


def leaderboard_of(study: str) -> dict[str, Any]:
    return yaml.safe_load((STUDIES / f"{study}.yaml").read_text())


def reports(study: str) -> dict[str, Runs]:
    """The measured runs by entry (task_method), seeds in order; seeds that are still of an older
    setting than the first are left out, since a setting that is chosen anew is run seed by seed."""
    runs_by_entry: dict[str, Runs] = {}
    for content in Results(study).values():
        runs = runs_by_entry.setdefault(content["entry"], [])
        if not runs or alike(runs[0], content, "seed"):
            runs.append(content)
    return runs_by_entry


def alike(one: dict[str, Any], other: dict[str, Any], apart: str) -> bool:
    """Whether two runs are of one setting, but for a key of the training, and for being looked at
    meanwhile.
    """

    def setting_of(run: dict[str, Any]) -> Any:
        recipe = {key: value for key, value in run["recipe"].items() if key != "watch"}
        point = {key: value for key, value in run["point"].items() if key != f"training.{apart}"}
        return {
            **recipe,
            "training": {k: v for k, v in recipe.get("training", {}).items() if k != apart},
        }, point

    return bool(setting_of(one) == setting_of(other))


def further(study: str, folder: str) -> Runs:
    """What else was measured of the reported runs: results of a run whose setting has been chosen
    anew since are left out.
    """
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
    by_entry: dict[str, AttackRuns] = {}
    for content in further(study, "attacks"):
        by_entry.setdefault(content["victim"], {}).setdefault(
            content["protocol"]["attack"], []
        ).append(content)
    return by_entry


def of_victims(study: str, folder: str) -> dict[str, Runs]:
    """By entry, what a folder holds of it: `implicit`, prompts without the concept's names;
    `memory`, the steps' footprint.
    """
    by_entry: dict[str, Runs] = {}
    for content in further(study, folder):
        by_entry.setdefault(content["victim"], []).append(content)
    return by_entry


def attempts_of(attacks: AttackRuns, names: list[str]) -> Runs:
    """The attempts of all attacks of `names` on the models of those training seeds that all of them
    were made on, so that none weighs more for having been made on more; [] where there is no such
    seed. Attempts on one prompt are taken as independent."""
    seeds = [{content["training_seed"] for content in attacks.get(name, [])} for name in names]
    common = set.intersection(*seeds) if seeds else set()
    return [
        a
        for name in names
        for content in attacks.get(name, [])
        if content["training_seed"] in common
        for a in content["attempts"]
    ]


def order(runs: Runs, attacks: AttackRuns, names: list[str]) -> tuple[bool, float, float]:
    """Sorted by what a user loses: the concept's share or what attacks bring back, the larger, and
    what is no longer kept. Methods that are not under all attacks yet come last."""
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))
    concept_rate, retain_accuracy = (
        pool(runs, "concept_rate", "direct"),
        pool(runs, f"accuracy_{attribute}", "retained"),
    )
    # that one changes the weights
    attempts = attempts_of(attacks, [name for name in names if name != "relearning"])
    fell = sum(a["success"] for a in attempts) / len(attempts) if attempts else 0.0
    assert concept_rate is not None  # every suite measures both
    assert retain_accuracy is not None
    return (
        not attempts,
        max(concept_rate.value, fell) + 1 - retain_accuracy.value,
        concept_rate.value,
    )
