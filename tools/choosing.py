"""Which point of its grid an entry of a study is reported at: chosen on training seeds and pictures that are not reported.

A point's score is what is retained minus what is left: retained accuracy of the concept's attribute minus the concept's
share for direct prompts; with `select: {attack: ...}` minus that attack's success too, on prompts and noise of the selection's own: of
two settings that both seem to forget, the one that does is reported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from concept_eraser import api
from concept_eraser import recipe as recipes
from concept_eraser.evaluation.suite import dumps
from tools.runs import after, erased_model, run_one, score, suite_name, suite_of

RESULTS = Path(__file__).parent.parent / "eval" / "results"


def chosen(study: dict, name: str, entry: dict, work: Path, results: Path, judge: str) -> list[dict]:
    """The scored grid of an entry: as a result of it holds it, as that of the entry has that this one is `like`, or found now."""
    if "like" in entry:
        return _elsewhere(study, entry, work, results, judge)
    return known(study, results, name, judge) or select(study, name, entry, work)


def _elsewhere(study: dict, entry: dict, work: Path, results: Path, judge: str) -> list[dict]:
    """The grid of the entry that this one takes its setting from: `like: entry`, or `like: study/entry`."""
    *other, name = entry["like"].split("/")
    if other:
        scores = known({}, RESULTS / other[0], name, judge)
        if not scores:
            raise SystemExit(f"like: {entry['like']}: eval/results holds no grid of it; run that study first")
        return scores
    return known(study, results, name, judge) or select(study, name, study["entries"][name], work)


def select(study: dict, name: str, entry: dict, work: Path) -> list[dict]:
    """The score of every point of the entry's grid on the selection seeds; [] where there is nothing to choose.

    Selection has training seeds and picture seeds of its own, so that nothing reported was chosen by its own pictures.
    """
    suite = suite_of(study, entry, study["select"]["picture_seed"])
    asked = {
        name: group for name, group in suite.groups.items() if name in ("direct", "retained")
    }  # what a score needs
    suite = suite.model_copy(update={"groups": asked})
    points = study["grids"][entry["grid"]] if entry.get("grid") else []
    scores = []
    for point in points:
        folder = work / name / ("select_" + "_".join(str(v) for v in point.values()))
        runs = [run_one(entry, point, s, suite, study["select"]["n"], Path(f"{folder}_{s}"))[0] for s in study["select"]["seeds"]]  # fmt: skip
        fell = [attacked(study["select"], suite_name(study, entry), Path(f"{folder}_{s}")) for s in study["select"]["seeds"]]  # fmt: skip
        scores.append(row(point, runs, fell))
    return scores


def row(point: dict, runs: list[dict], fell: list[float | None]) -> dict:
    """A scored point: of each run the share of direct prompts that still show the concept, and of those that an attack made."""
    share = [after(run, "concept_share", "direct") for run in runs]
    total = sum(score(run) - (back or 0.0) for run, back in zip(runs, fell, strict=True)) / len(runs)
    return {"point": point, "score": total, "share": share, **({"attacked": fell} if None not in fell else {})}


def attacked(how: dict[str, Any], suite: str, folder: Path, victim: tuple[Any, dict] | None = None) -> float | None:
    """The success of the selection's attack on a finished run (or on what is given); None where the study has none."""
    if "attack" not in how:
        return None
    kept = folder / "attacked.json"
    if not kept.exists():
        if victim is None:
            recipe = recipes.load(str(folder / "recipe.yaml"))
            run = api.erase(recipe, output=folder, resume=True)
            victim = (run.model or erased_model(run), {"before": recipe.model})
        model, told = victim
        asked = {key: how["attack"][key] for key in ("n", "seed", "options")}
        found = api.attack(model, how["attack"]["name"], suite, group="direct", output=folder / "attacked", **asked, **told)  # fmt: skip
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(dumps(found.as_dict()))
    return float(json.loads(kept.read_text())["rates"]["asr"]["value"])


def is_current(path: Path, judge: str) -> bool:
    return path.exists() and json.loads(path.read_text())["evaluation"].get("judge") == judge


def known(study: dict, results: Path, name: str, judge: str) -> list[dict]:
    """The grid of a result written earlier, perhaps on another machine; [] where it was scored in another way."""
    there = [p for p in sorted(results.glob(f"{name}_seed*.json")) if is_current(p, judge)]
    grid = json.loads(there[0].read_text())["grid"] if there else []
    return grid if scored(study, grid) else []


def scored(study: dict, grid: list[dict]) -> bool:
    """Whether a grid was scored as the study asks, with its attack if it has one."""
    return "attack" not in study.get("select", {}) or all("attacked" in row for row in grid)
