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

from concept_eraser import api, registry
from concept_eraser.evaluation.suite import Suite, dumps
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils import provenance
from studies.leaderboard_entries import expand
from studies.result_tables import STUDIES, Content, Results
from studies.runs import after, model_of, recipe_of, run_one, same, score, suite_of


def choose_grid(
    study: dict, name: str, entry: dict, work: Path, results: Mapping[str, Content], judge: str
) -> list[dict]:
    """Return the scored grid of an entry: from its results, from the entry it is `like`, or a new
    one.
    """
    if "like" in entry:
        return _elsewhere(study, entry, work=work, results=results, judge=judge)
    return known_results(study, results, name, judge) or select(
        study, name, entry=entry, work=work, judge=judge
    )


def _elsewhere(
    study: dict, entry: dict, work: Path, results: Mapping[str, Content], judge: str
) -> list[dict]:
    """Return the grid of the entry whose setting this one uses.

    It is given as `like: entry` or `like: study/entry`.
    """
    *other, name = entry["like"].split("/")
    if other:
        scores = known_results(_study(other[0]), Results(other[0]), name, judge)
        if not scores:
            raise SystemExit(
                f"like: {entry['like']}: eval/results has no grid of its current recipe; "
                "run that study first"
            )
        return scores
    return known_results(study, results, name, judge) or select(
        study, name, entry=study["entries"][name], work=work, judge=judge
    )


def _study(name: str) -> dict:
    content: dict = yaml.safe_load((STUDIES / f"{name}.yaml").read_text())
    return expand(content) if "methods" in content else content


def select(study: dict, name: str, entry: dict, work: Path, judge: str) -> list[dict]:
    """Return the scores of all settings of the entry's grid, or [] for an entry without a grid.

    Selection has training seeds and image seeds of its own. So no setting is chosen on the reported
    images.
    """
    suite = suite_of(study, entry, study["select"]["image_seed"])
    require_selecting_judge(suite)
    groups = {name: group for name, group in suite.groups.items() if name in ("direct", "retained")}
    suite = suite.model_copy(update={"groups": groups})
    points = study["grids"][entry["grid"]] if entry.get("grid") else []
    scores = []
    for point in points:
        folder = work / name / ("select_" + "_".join(str(v) for v in point.values()))
        runs = [
            run_one(
                entry,
                point,
                seed=s,
                suite=suite,
                n=study["select"]["n"],
                folder=Path(f"{folder}_{s}"),
            )[0]
            for s in study["select"]["seeds"]
        ]
        success_rates = [
            attack_success(study, entry, judge, Path(f"{folder}_{s}"))
            for s in study["select"]["seeds"]
        ]
        scores.append(row(point, runs, success_rates, scorer(study, judge)))
    return scores


def require_selecting_judge(suite: Suite) -> None:
    """Refuse a suite whose judge only reports, or that has a second judge.

    Raises:
        SystemExit: no setting may be selected by such a suite.
    """
    judge = registry.read("judge", suite.judge).build()
    if judge.only_reports:
        raise SystemExit(
            f"select: the judge {suite.judge!r} only reports, so no setting is selected by it; "
            "select with another judge, such as tiny"
        )
    if suite.second_judge is not None:
        raise SystemExit(
            "select: a second judge is for reported images only; select with a suite without "
            "`second_judge`"
        )


def row(point: dict, runs: list[dict], success_rates: list[float | None], by: str | None) -> dict:
    """Return a scored setting, with the concept rate and the attack success rate of each run."""
    concept_rates = [after(run, "concept_rate", "direct") for run in runs]
    scores = [
        score(run) - (success or 0.0) for run, success in zip(runs, success_rates, strict=True)
    ]
    return {
        "point": point,
        "score": sum(scores) / len(runs),
        "share": concept_rates,
        **({"attacked": success_rates, "by": by} if by else {}),
    }


def attack_success(
    study: dict, entry: dict, judge: str, folder: Path, victim: tuple[Any, dict] | None = None
) -> float | None:
    """Return the success rate of the selection's attack, or None if the study has no such attack.

    The prompts and seeds are those of the selection.

    Args:
        study: The configuration.
        entry: The entry.
        judge: The fingerprint of the judge.
        folder: The folder of a finished run, for the result.
        victim: The model and its options. The model of the run by default.
    """
    if "attack" not in study["select"]:
        return None
    result_file, by = folder / "attacked.json", scorer(study, judge)
    if not result_file.exists() or json.loads(result_file.read_text())["by"] != by:
        if victim is None:
            recipe = recipes.load(str(folder / "recipe.yaml"))
            run = api.erase(recipe, output=folder, resume=True)
            victim = (model_of(run), {"before": recipe.model})
        model, model_options = victim
        how, suite = (
            study["select"]["attack"],
            suite_of(study, entry, study["select"]["image_seed"]),
        )
        require_selecting_judge(suite)
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
    """Return a short fingerprint of the selection's attack, prompts, seeds and judge."""
    select = study.get("select", {})
    return (
        provenance.fingerprint(
            {"attack": select["attack"], "images": select["image_seed"], "judge": judge}
        )[:8]
        if "attack" in select
        else None
    )


def is_current(result: Content | None, judge: str) -> bool:
    """Return whether a result exists and has this judge."""
    return result is not None and result["evaluation"].get("judge") == judge


def known_results(study: dict, results: Mapping[str, Content], name: str, judge: str) -> list[dict]:
    """Return the grid of an earlier result, or [].

    The grid must have the settings of the study, the scorer of today and the recipe of today.
    """
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
    """Return whether a grid has the settings of the study, and the scores of its attack."""
    grids = study.get("entries", {}).get(name, {}).get("grid")
    points = study["grids"][grids] if grids else [row["point"] for row in grid]
    by = scorer(study, judge)
    return [row["point"] for row in grid] == points and (
        by is None or all(row.get("by") == by for row in grid)
    )
