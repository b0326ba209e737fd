"""Selection of an entry's setting on training seeds and images that are not reported.

The score of a setting is the retained accuracy of the concept's attribute minus the concept rate
for direct prompts. With `select: {attack: ...}` that attack's success is subtracted too, on prompts
and noise of the selection's own. Of two settings that both seem to forget, the attack selects the
one that does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import api
from concept_eraser.evaluation.suite import dumps
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils import provenance
from studies.result_tables import STUDIES, Content, Results
from studies.runs import after, erased_model, recipe_of, run_one, same, score, suite_of


def choose_grid(
    study: dict, name: str, entry: dict, work: Path, results: Mapping[str, Content], judge: str
) -> list[dict]:
    """The scored grid of an entry: as a result of it holds it, as that of the entry has that this
    one is `like`, or found now.
    """
    if "like" in entry:
        return _elsewhere(study, entry, work, results, judge)
    return known_results(study, results, name, judge) or select(study, name, entry, work, judge)


def _elsewhere(
    study: dict, entry: dict, work: Path, results: Mapping[str, Content], judge: str
) -> list[dict]:
    """The grid of the entry that this one takes its setting from: `like: entry`, or `like:
    study/entry`.
    """
    *other, name = entry["like"].split("/")
    if other:
        scores = known_results(_study(other[0]), Results(other[0]), name, judge)
        if not scores:
            raise SystemExit(
                f"like: {entry['like']}: eval/results holds no grid of it as it is now; "
                "run that study first"
            )
        return scores
    return known_results(study, results, name, judge) or select(
        study, name, study["entries"][name], work, judge
    )


def _study(name: str) -> dict:
    from studies.leaderboard import expand  # which chooses by what is here

    content: dict = yaml.safe_load((STUDIES / f"{name}.yaml").read_text())
    return expand(content) if "methods" in content else content


def select(study: dict, name: str, entry: dict, work: Path, judge: str) -> list[dict]:
    """The score of every point of the entry's grid on the selection seeds; [] where there is
    nothing to choose.

    Selection has training seeds and image seeds of its own, so that nothing reported was chosen
    by its own images.
    """
    suite = suite_of(study, entry, study["select"]["image_seed"])
    groups = {
        name: group for name, group in suite.groups.items() if name in ("direct", "retained")
    }  # what a score needs
    suite = suite.model_copy(update={"groups": groups})
    points = study["grids"][entry["grid"]] if entry.get("grid") else []
    scores = []
    for point in points:
        folder = work / name / ("select_" + "_".join(str(v) for v in point.values()))
        runs = [
            run_one(entry, point, s, suite, study["select"]["n"], Path(f"{folder}_{s}"))[0]
            for s in study["select"]["seeds"]
        ]
        fell = [
            attack_success(study, entry, judge, Path(f"{folder}_{s}"))
            for s in study["select"]["seeds"]
        ]
        scores.append(row(point, runs, fell, scorer(study, judge)))
    return scores


def row(point: dict, runs: list[dict], fell: list[float | None], by: str | None) -> dict:
    """A scored point: of each run the share of direct prompts that still show the concept, and of
    those that an attack made.
    """
    share = [after(run, "concept_rate", "direct") for run in runs]
    total = sum(score(run) - (back or 0.0) for run, back in zip(runs, fell, strict=True)) / len(
        runs
    )
    return {
        "point": point,
        "score": total,
        "share": share,
        **({"attacked": fell, "by": by} if by else {}),
    }


def attack_success(
    study: dict, entry: dict, judge: str, folder: Path, victim: tuple[Any, dict] | None = None
) -> float | None:
    """The success of the selection's attack on a finished run (or on what is given), with the
    selection's own prompts and noise; None where the study has none."""
    if "attack" not in study["select"]:
        return None
    result_file, by = folder / "attacked.json", scorer(study, judge)
    if not result_file.exists() or json.loads(result_file.read_text())["by"] != by:
        if victim is None:
            recipe = recipes.load(str(folder / "recipe.yaml"))
            run = api.erase(recipe, output=folder, resume=True)
            victim = (run.model or erased_model(run), {"before": recipe.model})
        model, model_options = victim
        how, suite = (
            study["select"]["attack"],
            suite_of(study, entry, study["select"]["image_seed"]),
        )
        options = {key: how[key] for key in ("n", "seed", "options")}
        result = api.attack(
            model,
            how["name"],
            suite,
            group="direct",
            output=folder / f"attacked_{by}",
            **options,
            **model_options,
        )
        result_file.parent.mkdir(parents=True, exist_ok=True)
        result_file.write_text(dumps({"by": by, **result.as_dict()}))
    return float(json.loads(result_file.read_text())["rates"]["asr"]["value"])


def scorer(study: dict, judge: str) -> str | None:
    """A few letters for what scores a study's points beside their images: the attack, its prompts
    and noise, the judge.
    """
    select = study.get("select", {})
    return (
        provenance.fingerprint(
            {"attack": select["attack"], "images": select["image_seed"], "judge": judge}
        )[:8]
        if "attack" in select
        else None
    )


def is_current(result: Content | None, judge: str) -> bool:
    return result is not None and result["evaluation"].get("judge") == judge


def known_results(study: dict, results: Mapping[str, Content], name: str, judge: str) -> list[dict]:
    """The grid of a result written earlier, perhaps on another machine; [] where it is another, was
    scored in another way, or is of a recipe that has changed since."""
    entry = study.get("entries", {}).get(name, {})
    rows = [
        result
        for key, result in results.items()
        if fnmatch(key, f"{name}_seed*") and is_current(result, judge)
    ]
    ours = [
        one["grid"]
        for one in rows
        if "recipe" not in entry
        or same(one, recipe_of(entry, one["point"], one["seed"]), with_watch=False)
    ]
    return next((grid for grid in ours if is_scored(study, name, grid, judge)), [])


def is_scored(study: dict, name: str, grid: list[dict], judge: str) -> bool:
    """Whether a grid is the one that the study asks for (where it says), and scored by its attack
    if it has one.
    """
    grids = study.get("entries", {}).get(name, {}).get("grid")
    points = study["grids"][grids] if grids else [row["point"] for row in grid]
    by = scorer(study, judge)
    return [row["point"] for row in grid] == points and (
        by is None or all(row.get("by") == by for row in grid)
    )
