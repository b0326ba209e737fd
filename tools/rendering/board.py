"""What a board's folder of results holds: its measured runs, and what else was measured of the settings that are reported."""

from __future__ import annotations

import json
from typing import Any

import yaml

from tools.rendering.common import RESULTS, ROOT

Runs = list[dict[str, Any]]
Attacked = dict[str, Runs]  # attack -> its results, one a training seed


def board_of(study: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "eval" / "studies" / f"{study}.yaml").read_text())


def reports(study: str) -> dict[str, Runs]:
    """The measured runs by entry (task_method), seeds in order; seeds that are still of an older setting than the first are left
    out, since a setting that is chosen anew is run seed by seed."""
    found: dict[str, Runs] = {}
    for path in sorted((RESULTS / study).glob("*.json")):
        content = json.loads(path.read_text())
        runs = found.setdefault(content["entry"], [])
        if not runs or alike(runs[0], content, "seed"):
            runs.append(content)
    return found


def alike(one: dict[str, Any], other: dict[str, Any], apart: str) -> bool:
    """Whether two runs are of one setting, but for a key of the training, and for being looked at meanwhile."""

    def setting_of(run: dict[str, Any]) -> Any:
        recipe = {key: value for key, value in run["recipe"].items() if key != "watch"}
        point = {key: value for key, value in run["point"].items() if key != f"training.{apart}"}
        return {**recipe, "training": {k: v for k, v in recipe.get("training", {}).items() if k != apart}}, point

    return bool(setting_of(one) == setting_of(other))


def further(study: str, folder: str) -> Runs:
    """What else was measured of the reported runs: results of a run whose setting has been chosen anew since are left out."""
    reported = {(run["entry"], run["seed"]): (run["recipe"], run["point"]) for runs in reports(study).values() for run in runs}  # fmt: skip
    found = []
    for path in sorted((RESULTS / study / folder).glob("*.json")):
        content = json.loads(path.read_text())
        recipe, point = reported.get((content["victim"], int(path.stem.rpartition("seed")[2])), (None, None))
        if content["recipe"] == recipe and content.get("point", point) == point:
            found.append(content)
    return found


def attacked(study: str) -> dict[str, Attacked]:
    found: dict[str, Attacked] = {}
    for content in further(study, "attacks"):
        found.setdefault(content["victim"], {}).setdefault(content["protocol"]["attack"], []).append(content)
    return found


def of_victims(study: str, folder: str) -> dict[str, Runs]:
    """By entry, what a folder holds of it: `implicit`, prompts without the concept's names; `memory`, the steps' footprint."""
    found: dict[str, Runs] = {}
    for content in further(study, folder):
        found.setdefault(content["victim"], []).append(content)
    return found
