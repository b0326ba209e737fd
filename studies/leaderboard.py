"""All methods on all tasks under one protocol, attacks included.

    python -m studies.leaderboard studies/configs/tiny_leaderboard.yaml [--tasks star] [--methods
    munba,esd] [--seeds 0] [--stage train|implicit|memory|time|attack]

Every method has a grid of the same size, chosen on one task with training seeds and images that
are not reported (studies/study.py does that); the other tasks take its setting. Then each victim is
asked by prompts without the concept's names, trained again with as many seconds as one of the
methods takes (`time`, attacked there, too), its memory is measured (`memory`), and it is attacked.
A safeguard at inference (`guard`) has a grid of texts and nothing to train. Each run is a result of
the study (studies/result_tables.py); others stand in its folders implicit/, memory/, time/ and
attacks/. A result that is there is not made again, so the command continues where it was stopped.
`python -m studies.render_results` makes the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import api, registry
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils import provenance
from studies import runs, selection
from studies import study as studies
from studies.attack_table import protocol_of as attack_protocol
from studies.attack_table import require_asked
from studies.result_tables import Content, Results
from studies.tasks import parse_names

ORIGINAL = "tiny-sd"


def entry(leaderboard: dict[str, Any], task: str, method: str) -> dict[str, Any]:
    """A method on a task, in the words of studies/study.py. Keys that a recipe does not have are
    not set in it.
    """
    where, how = leaderboard["tasks"][task], leaderboard["methods"][method]
    if "guard" in how:
        guards = [kind + ":" + where["suite"].removeprefix("tiny_") for kind in how["guard"]]
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
            **home,
        }
    recipe = recipes.load(
        how["recipe"], [f"{k}={json.dumps(v)}" for k, v in how.get("set", {}).items()]
    )
    changes = dict(how.get("set", {}))
    for objective, prompts in (
        ("forget", where["forget"]),
        ("replace", where["forget"]),
        ("retain", where["retain"]),
    ):
        spec = getattr(recipe, objective)
        if spec is None:
            continue
        # some retain what stands in for the concept, or the concept
        concept = spec.prompts == recipe.forget.prompts
        changes[f"{objective}.prompts"] = where["forget"] if concept else prompts
        if isinstance(spec.anchor, dict):
            changes[f"{objective}.anchor"] = where["anchor"]
    home = leaderboard["select"]["task"]
    choice = {"grid": how.get("grid")} if task == home else {"like": f"{home}_{method}"}
    grid = choice if "grid" in how else {"like": how["like"]} if "like" in how else {}
    label = how.get("label", method)
    return {
        "recipe": how["recipe"],
        "label": label,
        "task": task,
        "suite": where["suite"],
        "set": changes,
        "watch": how.get("watch", True),
        **grid,
    }


def expand(leaderboard: dict[str, Any]) -> dict[str, Any]:
    """The leaderboard as a study of studies/study.py: one entry a task and method."""
    sizes = {name: len(points) for name, points in leaderboard["grids"].items()}
    if len(set(sizes.values())) > 1:
        raise SystemExit(f"the grids must be of one size, found {sizes}")
    entries = {
        f"{task}_{method}": entry(leaderboard, task, method)
        for task in leaderboard["tasks"]
        for method in leaderboard["methods"]
    }
    return {
        **leaderboard,
        "suite": leaderboard["tasks"][leaderboard["select"]["task"]]["suite"],
        "entries": entries,
    }


def measure_guarded(study: dict[str, Any], name: str, work: Path, results: Results) -> None:
    """Measure the original under a safeguard, at the setting that `guard_of` chooses, and write its
    result.
    """
    key, about = f"{name}_seed0", study["entries"][name]
    judge = registry.load("judge", runs.suite_of(study, about, None).judge)().fingerprint
    previous = results.get(key)
    reusable = previous if selection.is_current(previous, judge) else None
    if (
        reusable
        and "like" not in about
        and selection.is_scored(study, name, reusable["grid"], judge)
    ):
        return
    grid, best = guard_of(study, name, judge, work, results)
    if reusable and reusable["grid"] == grid and reusable["point"] == {"guard": best}:
        return
    evaluation = api.evaluate(
        ORIGINAL, runs.suite_of(study, about, None), before=ORIGINAL, n=study["n"], guard=best
    )
    run = {"seconds": 0.0, "cpu_seconds": 0.0, "trained_parameters": 0}
    content = {
        "entry": name,
        "label": about["label"],
        "task": about["task"],
        "grid": grid,
        "conflict": {"steps": 0},
        "recipe": {"model": ORIGINAL},
        "point": {"guard": best},
        "seed": 0,
        "run": run,
        "size_mb": 0.0,
        "evaluation": evaluation.as_dict(),
    }
    results[key] = content
    print(f"{name}: {best}, score {runs.score(content):.3f}", flush=True)


def guard_of(
    study: dict[str, Any], name: str, judge: str, work: Path, results: Mapping[str, Content]
) -> tuple[list[dict[str, Any]], str]:
    """The scored settings of a safeguard and which is the best: as seen on other images and under
    the selection's attack, or, as other methods' settings are, what another task chose (`like`)."""
    about = study["entries"][name]
    if "like" in about:
        other = f"{about['like']}_seed0"
        if other not in results:
            raise SystemExit(
                f"{other} is not there yet, and chooses the setting; run its task first"
            )
        other_result = results[other]
        kind = other_result["point"]["guard"].partition(":")[0]
        return other_result["grid"], next(
            guard for guard in about["guard"] if guard.startswith(f"{kind}:")
        )
    suite = runs.suite_of(study, about, study["select"]["image_seed"])
    suite = suite.model_copy(
        update={"groups": {k: v for k, v in suite.groups.items() if k in ("direct", "retained")}}
    )
    grid = []
    for guard in about["guard"] if len(about["guard"]) > 1 else []:
        scores = {
            "evaluation": api.evaluate(
                ORIGINAL, suite, before=ORIGINAL, n=study["select"]["n"], guard=guard
            ).as_dict()
        }
        victim = (ORIGINAL, {"before": ORIGINAL, "guard": guard})
        fell = selection.attack_success(
            study, about, judge, work / name / f"select_{guard.partition(':')[0]}", victim
        )
        grid.append(
            selection.row({"guard": guard}, [scores], [fell], selection.scorer(study, judge))
        )
    best = max(grid, key=lambda row: row["score"])["point"]["guard"] if grid else about["guard"][0]
    return grid, best


def victim(report: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of a reported run, and what else measuring it takes: the original of a run, or a
    safeguard.
    """
    if "guard" in report["point"]:
        return ORIGINAL, {"before": ORIGINAL, "guard": report["point"]["guard"]}
    recipe = recipes.validate(report["recipe"], report["entry"])
    runs.clear(folder, recipe)
    run = api.erase(recipe, output=folder, resume=True)
    return run.model or runs.erased_model(run), {"before": run.recipe.model}


def implicit(
    leaderboard: dict[str, Any], name: str, seed: int, work: Path, results: Results
) -> None:
    """Measure one victim by prompts that show the concept without any of its names; a task may have
    none.
    """
    key, folder_results = f"{name}_seed{seed}", results.folder("implicit")
    report = results[key]
    suite_name = leaderboard["tasks"][report["task"]].get("implicit")
    if suite_name is None or is_of(folder_results.get(key), report):
        return
    model, how = victim(report, work / name / f"report_{seed}")
    evaluation = api.evaluate(model, suite_name, n=leaderboard["images"]["implicit"], **how)
    folder_results[key] = victims_result(
        name, report, {"seed": seed, "evaluation": evaluation.as_dict()}
    )


def is_of(result: Content | None, report: Content) -> bool:
    """Whether there is a result and it is of the victim that is reported: an entry's setting may
    have been chosen anew.
    """
    content = result or {}
    return (
        content.get("recipe") == report["recipe"]
        and content.get("point", report["point"]) == report["point"]
    )


def victims_result(name: str, report: Content, measurement: Content) -> Content:
    """What was measured of a victim, with the setting by which `is_of` recognises it."""
    return {"victim": name, "recipe": report["recipe"], "point": report["point"], **measurement}


def of(report: dict[str, Any]) -> str:
    """A few letters for a victim, for the names of its folders."""
    return provenance.fingerprint({"recipe": report["recipe"], "point": report["point"]})[:8]


def memory(name: str, seed: int, work: Path, results: Results) -> None:
    """Measure the memory of a reported run's steps, in a process of its own; a closed form and a
    safeguard have no steps.
    """
    key, folder_results = f"{name}_seed{seed}", results.folder("memory")
    report = results[key]
    if not report["run"].get("steps") or is_of(folder_results.get(key), report):
        return
    recipe_file, output_file = (work / name / f"memory_{kind}.json" for kind in ("asked", "told"))
    recipe_file.parent.mkdir(parents=True, exist_ok=True)
    recipe_file.write_text(json.dumps(report["recipe"]))
    subprocess.run(
        [sys.executable, "-m", "studies.memory_footprint", str(recipe_file), str(output_file)],
        check=True,
    )
    folder_results[key] = victims_result(name, report, json.loads(output_file.read_text()))


def same_time(steps: int, seconds: float, budget: float) -> int | None:
    """How many steps take the budget where so many take these seconds; None where that is within a
    tenth anyway.
    """
    return None if abs(seconds / budget - 1) < 0.1 else max(1, round(steps * budget / seconds))


def equal_time(
    leaderboard: dict[str, Any],
    study: dict[str, Any],
    name: str,
    seed: int,
    work: Path,
    results: Results,
) -> Path | None:
    """Train once more, at the method's setting, for as many seconds of its process as the method
    `like` took for its steps. The run's folder; None where there is no such run, or its steps took
    those seconds anyway."""
    key, folder_results, how = f"{name}_seed{seed}", results.folder("time"), leaderboard.get("time")
    report = results[key]
    if (
        how is None
        or seed not in how["seeds"]
        or "cpu_seconds" not in report["run"]
        or "guard" in report["point"]
    ):
        return None
    other = f"{report['task']}_{how['like']}_seed{seed}"
    if other not in results:
        raise SystemExit(
            f"{other} is not there yet, and its seconds are the budget; run --methods "
            f"{how['like']} first"
        )
    steps = same_time(
        report["recipe"]["training"]["steps"],
        report["run"]["cpu_seconds"],
        results[other]["run"]["cpu_seconds"],
    )
    if steps is None:
        folder_results.pop(key, None)  # of a setting that took another time
        return None
    entry, point, folder = (
        study["entries"][name],
        {**report["point"], "training.steps": steps},
        work / name / f"time_{seed}_{of(report)}",
    )
    if key not in folder_results or folder_results[key]["point"] != point:
        result, _ = runs.run_one(
            entry, point, seed, runs.suite_of(study, entry, None), study["n"], folder
        )
        folder_results[key] = {
            "entry": name,
            "label": report["label"],
            "task": report["task"],
            **result,
        }
    return folder


def attacked_suite(study: dict[str, Any], entry: dict[str, Any]) -> Any:
    """The suite whose prompts and noise are attacked: a leaderboard that has images of its own is
    attacked at those.
    """
    return (
        runs.suite_of(study, entry, study["image_seed"])
        if "image_seed" in study
        else entry["suite"]
    )


def attack(
    leaderboard: dict[str, Any],
    study: dict[str, Any],
    name: str,
    seed: int,
    work: Path,
    results: Results,
    attack_names: list[str],
    folder: Path | None = None,
) -> None:
    """Attack one victim with the attacks that have no result yet. Its run must have been trained
    and reported; `folder` is where that was done, unless it is a row's own."""
    report, folder_results = results[f"{name}_seed{seed}"], results.folder("attacks")
    suite = attacked_suite(study, study["entries"][name])
    protocol = {**leaderboard["attack"], "suite": suite, "attacks": leaderboard["attacks"]}
    keys = {one: f"{name}_{one}_seed{seed}" for one in attack_names}
    for one in [one for one in attack_names if is_of(folder_results.get(keys[one]), report)]:
        require_asked(folder_results, keys.pop(one), attack_protocol(protocol, one))
    if not keys:
        return
    model, how = victim(report, folder or work / name / f"report_{seed}")
    for one, key in keys.items():
        result = api.attack(
            model,
            one,
            suite,
            group=protocol["group"],
            n=protocol["n"],
            seed=protocol["seed"],
            options=leaderboard["attacks"][one],
            output=work / name / f"attack_{seed}_{one}_{of(report)}",
            **how,
        )
        folder_results[key] = victims_result(
            name, report, {"training_seed": seed, **result.as_dict()}
        )
        rates = {key: round(100 * rate["value"]) for key, rate in result.rates().items()}
        print(f"{name} (seed {seed}) under {one}: {rates} % ({result.seconds:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("leaderboard", type=Path)
    parser.add_argument("--tasks", default="", help="only these, in this order")
    parser.add_argument("--methods", default="", help="only these, in this order")
    parser.add_argument("--attacks", default="", help="only these")
    parser.add_argument("--seeds", default="", help="only these training seeds")
    parser.add_argument(
        "--stage", choices=["train", "implicit", "memory", "time", "attack", "all"], default="all"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/leaderboard"))
    args = parser.parse_args()
    leaderboard = yaml.safe_load(args.leaderboard.read_text())
    study, results = expand(leaderboard), Results(args.leaderboard.stem)
    reported_seeds = [int(s) for s in args.seeds.split(",")] if args.seeds else leaderboard["seeds"]
    attacks = parse_names(parser, "attacks", args.attacks, leaderboard["attacks"])
    for task in parse_names(parser, "tasks", args.tasks, leaderboard["tasks"]):
        for method in parse_names(parser, "methods", args.methods, leaderboard["methods"]):
            name = f"{task}_{method}"
            # a closed form draws nothing
            method_seeds = leaderboard["methods"][method].get("seeds", leaderboard["seeds"])
            seeds = [seed for seed in reported_seeds if seed in method_seeds]
            if args.stage in ("train", "all"):
                if "guard" in leaderboard["methods"][method]:
                    measure_guarded(study, name, args.work, results)
                else:
                    studies.run_entry(
                        study, name, study["entries"][name], args.work, results, seeds
                    )
            for seed in seeds if args.stage in ("implicit", "all") else []:
                implicit(leaderboard, name, seed, args.work, results)
            # the same whatever the seed
            for seed in seeds[:1] if args.stage in ("memory", "all") else []:
                memory(name, seed, args.work, results)
            for seed in seeds if args.stage in ("time", "all") else []:
                folder = equal_time(leaderboard, study, name, seed, args.work, results)
                if folder is not None:
                    under = [
                        one for one in leaderboard["time"].get("attacks", []) if one in attacks
                    ]
                    attack(
                        leaderboard,
                        study,
                        name,
                        seed,
                        args.work,
                        results.folder("time"),
                        under,
                        folder,
                    )
            for seed in seeds if args.stage in ("attack", "all") else []:
                attack(leaderboard, study, name, seed, args.work, results, attacks)


if __name__ == "__main__":
    main()
