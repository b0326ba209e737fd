"""The entries of a leaderboard: each method on each task, in the form of a study.

A leaderboard's file has tasks and methods. A study of studies/study.py has entries, each with a
recipe, what is set in it, and its grid.
"""

from __future__ import annotations

import json
from typing import Any

from concept_eraser.recipes import recipe as recipes
from studies.rendering.leaderboard_rows import has_entry

GIVEN = "given"  # the grid of a recipe that is measured as it is, without a choice


def entry(leaderboard: dict[str, Any], task: str, method: str) -> dict[str, Any]:
    """Return a method on a task as an entry of studies/study.py.

    Only keys that the recipe has are set in it.
    """
    where, how = leaderboard["tasks"][task], leaderboard["methods"][method]
    if "control" in how:
        return {
            "label": how["label"],
            "task": task,
            "suite": where["suite"],
            "model": where["control"],
        }
    if "guard" in how:
        # a gate's text ends with the method whose LoRA it adds
        concept = where["suite"].removeprefix("tiny_") + (f"@{how['run']}" if "run" in how else "")
        guards = [f"{kind}:{concept}" for kind in how["guard"]]
        home = (
            {}
            if task == leaderboard["select"]["task"]
            else {"like": f"{leaderboard['select']['task']}_{method}"}
        )
        return {
            "label": how["label"],
            "task": task,
            "suite": where["suite"],
            "guard": guards,
            **({"select_attack": how["select_attack"]} if "select_attack" in how else {}),
            **home,
        }
    recipe = recipes.load(
        how["recipe"], [f"{k}={json.dumps(v)}" for k, v in how.get("set", {}).items()]
    )
    overrides = dict(how.get("set", {}))
    forget: Any = recipe.forget
    for objective, prompts in (
        ("forget", where["forget"]),
        ("replace", where["forget"]),
        ("relearn", where["forget"]),
        ("retain", where["retain"]),
    ):
        spec = getattr(recipe, objective)
        if spec is None:
            continue
        # some retain sets hold the anchor or the concept
        concept = spec.prompts == forget.prompts
        overrides[f"{objective}.prompts"] = where["forget"] if concept else prompts
        if isinstance(spec.anchor, dict):
            overrides[f"{objective}.anchor"] = where["anchor"]
    home = leaderboard["select"]["task"]
    choice = {"grid": how.get("grid")} if task == home else {"like": f"{home}_{method}"}
    grid = choice if "grid" in how else {"like": how["like"]} if "like" in how else {}
    label = how.get("label", method)
    return {
        "recipe": how["recipe"],
        "label": label,
        "task": task,
        "suite": where["suite"],
        "set": overrides,
        "watch": how.get("watch", True),
        **grid,
    }


def expand(leaderboard: dict[str, Any]) -> dict[str, Any]:
    """Return the leaderboard as a study of studies/study.py: an entry for each task and method.

    Raises:
        SystemExit: Two grids have different sizes, or `given` has more than one point.
    """
    sizes = {name: len(points) for name, points in leaderboard["grids"].items()}
    given = sizes.pop(GIVEN, 1)
    if len(set(sizes.values())) > 1 or given != 1:
        raise SystemExit(
            f"the grids must be of one size, and {GIVEN!r} of 1, found {sizes}, {given}"
        )
    entries = {
        f"{task}_{method}": entry(leaderboard, task, method)
        for task in leaderboard["tasks"]
        for method in leaderboard["methods"]
        if has_entry(leaderboard, task, method)
    }
    return {
        **leaderboard,
        "suite": leaderboard["tasks"][leaderboard["select"]["task"]]["suite"],
        "entries": entries,
    }
