"""Run all methods on all tasks under one protocol, attacks included.

    python -m studies.leaderboard studies/configs/tiny_leaderboard.yaml [--tasks star] [--methods
    munba,esd] [--seeds 0] [--stage train|implicit|memory|time|attack]

Every method has a grid of the same size. Its setting is chosen on one task, on training seeds and
images that are not reported (studies/study.py). The other tasks use the same setting. The stages
then measure each model:

    implicit   prompts that do not name the concept
    memory     memory of the training steps
    time       a training with the seconds of one method, and attacks on its model
    attack     all attacks

A safeguard at inference (`guard`) has a grid of texts and no training. A gate adds the LoRA of
another method's reported run (`run`), so its row has the seconds and the size of that run. An
attack that fits it chooses its setting (`select_attack`). The method `control: true` is the model
that never learned the concept, for tasks that name one (`control`). Each run is a result of the
study (studies/result_tables.py). Other results lie in its folders implicit/, memory/, time/ and
attacks/. Existing results are not made again, so an interrupted command continues where
it stopped. `python -m studies.render_results` renders the page.
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

from concept_eraser import api
from concept_eraser.evaluation import suite as suites
from concept_eraser.models.safeguards import Guard, protected_name
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils import provenance
from studies import runs, selection
from studies import study as studies
from studies.attack_table import protocol_of as attack_protocol
from studies.attack_table import require_asked
from studies.leaderboard_entries import expand
from studies.result_tables import Content, Results
from studies.tasks import parse_names

ORIGINAL = "tiny-sd"
GATE_SEED = 0  # the training seed of the run whose LoRA a gate adds


def measure_guarded(study: dict[str, Any], name: str, work: Path, results: Results) -> None:
    """Measure the original under a safeguard at the setting of `guard_of`. Write the result."""
    key, about = f"{name}_seed0", study["entries"][name]
    suite = runs.suite_of(study, about, None)
    judge = suite.build_judge().fingerprint
    training, previous = training_of(about["guard"][0], about["task"], results), results.get(key)
    reusable = (
        previous
        if previous
        and selection.is_current(previous, judge)
        and runs.has_protocol(previous["evaluation"], suite, study["n"])
        and previous["recipe"] == training["recipe"]
        else None
    )
    if (
        reusable
        and "like" not in about
        and [row["point"]["guard"] for row in reusable["grid"]] == choices(about)
        and selection.is_scored(selecting(study, about), name, reusable["grid"], judge)
    ):
        return
    grid, best = guard_of(study, name, judge=judge, work=work, results=results)
    if reusable and reusable["grid"] == grid and reusable["point"] == {"guard": best}:
        return
    model, how = protected(best, about["task"], work, results)
    evaluation = api.evaluate(model, suite, n=study["n"], **how)
    content = untrained_result(
        name, about, {"guard": best}, grid=grid, evaluation=evaluation.as_dict()
    )
    results[key] = content = {**content, **training}
    print(f"{name}: {best}, score {runs.score(content):.3f}", flush=True)


def measure_control(study: dict[str, Any], name: str, results: Results) -> None:
    """Measure the model that never learned the concept. Write the result."""
    key, about = f"{name}_seed0", study["entries"][name]
    suite = runs.suite_of(study, about, None)
    judge = suite.build_judge().fingerprint
    point, previous = {"model": about["model"]}, results.get(key)
    if (
        previous
        and selection.is_current(previous, judge)
        and runs.has_protocol(previous["evaluation"], suite, study["n"])
        and previous["point"] == point
    ):
        return
    evaluation = api.evaluate(about["model"], suite, before=ORIGINAL, n=study["n"])
    results[key] = untrained_result(name, about, point, grid=[], evaluation=evaluation.as_dict())
    print(f"{name}: score {runs.score(results[key]):.3f}", flush=True)


def untrained_result(
    name: str, about: Mapping[str, Any], point: Content, *, grid: list[Content], evaluation: Content
) -> Content:
    """Return the result of an entry that the study does not train, in the form of a run."""
    return {
        "entry": name,
        "label": about["label"],
        "task": about["task"],
        "grid": grid,
        "conflict": {"steps": 0},
        "recipe": {"model": ORIGINAL},
        "point": point,
        "seed": 0,
        "run": {"seconds": 0.0, "cpu_seconds": 0.0, "trained_parameters": 0},
        "size_mb": 0.0,
        "evaluation": evaluation,
    }


def gate_run(guard: str, task: str, results: Mapping[str, Content]) -> Content | None:
    """Return the reported run whose LoRA a safeguard adds on a task.

    The text of a gate names its method: `spm-gate:star@spm`. The result is None for a safeguard
    without a LoRA. Raises SystemExit if the run is not reported yet.
    """
    _, at, method = guard.partition("@")
    if not at:
        return None
    key = f"{task}_{method}_seed{GATE_SEED}"
    if key not in results:
        raise SystemExit(
            f"there is no result {key} yet, whose LoRA the safeguard {guard} adds; run --methods "
            f"{method} first"
        )
    return results[key]


def training_of(guard: str, task: str, results: Mapping[str, Content]) -> Content:
    """Return the training of a safeguard's LoRA, as fields of a result.

    The fields of a safeguard without a LoRA are those of no training.
    """
    report = gate_run(guard, task, results)
    if report is None:
        return {"recipe": {"model": ORIGINAL}}
    names = ("seconds", "cpu_seconds", "trained_parameters")
    run = {name: report["run"][name] for name in names if name in report["run"]}
    return {"recipe": report["recipe"], "run": run, "size_mb": report["size_mb"]}


def protected(
    guard: str, task: str, work: Path, results: Mapping[str, Content]
) -> tuple[Any, dict[str, Any]]:
    """Return the original under a safeguard, and its options.

    The run of a gate is trained if it is not in the work folder. The model's name has the method
    of that run, and not its folder.
    """
    report = gate_run(guard, task, results)
    if report is None:
        return ORIGINAL, {"before": ORIGINAL, "guard": guard}
    folder = work / report["entry"] / f"report_{GATE_SEED}"
    train(report, folder)
    model = api.load(ORIGINAL, guard=f"{guard.partition('@')[0]}@{folder}")
    model.source = protected_name(ORIGINAL, Guard.read(guard))
    return model, {"before": ORIGINAL}


def train(report: Content, folder: Path) -> api.Run:
    """Return a reported run, trained if it is not in its folder."""
    recipe = recipes.validate(report["recipe"], report["entry"])
    runs.clear(folder, recipe)
    return api.erase(recipe, output=folder, resume=True)


def selecting(study: dict[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the study with the attack that chooses the setting of an entry."""
    if "select_attack" not in about:
        return study
    return {**study, "select": {**study["select"], "attack": about["select_attack"]}}


def choices(about: Mapping[str, Any]) -> list[str]:
    """Return the safeguards among which the setting of an entry is chosen: [] for a single one."""
    return about["guard"] if len(about["guard"]) > 1 else []


def guard_of(
    study: dict[str, Any], name: str, judge: str, work: Path, results: Mapping[str, Content]
) -> tuple[list[dict[str, Any]], str]:
    """Return the scored settings of a safeguard, and the best one.

    The scores are from images and an attack of the selection. An entry with `like` has the setting
    of another task.
    """
    about = study["entries"][name]
    if "like" in about:
        other = f"{about['like']}_seed0"
        if other not in results:
            raise SystemExit(
                f"there is no result {other} yet, which chooses the setting; run its task first"
            )
        other_result = results[other]
        kind = other_result["point"]["guard"].partition(":")[0]
        return other_result["grid"], next(
            guard for guard in about["guard"] if guard.startswith(f"{kind}:")
        )
    suite = runs.suite_of(study, about, study["select"]["image_seed"])
    selection.require_selecting_judge(suite)
    suite = suite.model_copy(
        update={"groups": {k: v for k, v in suite.groups.items() if k in ("direct", "retained")}}
    )
    choice, grid = selecting(study, about), []
    for guard in choices(about):
        model, how = protected(guard, about["task"], work, results)
        evaluation = api.evaluate(model, suite, n=study["select"]["n"], **how)
        report = gate_run(guard, about["task"], results)
        success_rate = selection.attack_success(
            choice,
            entry=about,
            judge=judge,
            folder=work
            / name
            / f"select_{guard.partition(':')[0]}{f'_{of(report)}' if report else ''}",
            victim=(model, how),
        )
        grid.append(
            selection.row(
                {"guard": guard},
                [{"evaluation": evaluation.as_dict()}],
                [success_rate],
                selection.scorer(choice, judge),
            )
        )
    best = max(grid, key=lambda row: row["score"])["point"]["guard"] if grid else about["guard"][0]
    return grid, best


def victim(
    report: dict[str, Any], folder: Path, work: Path, results: Mapping[str, Content]
) -> tuple[Any, dict[str, Any]]:
    """Return the model of a reported run, and its options: the original, a safeguard.

    Args:
        report: The reported run.
        folder: The folder of the run. It is trained there if it is not there yet.
        work: The work folder, with the runs whose LoRA a gate adds.
        results: The reported runs.
    """
    if "guard" in report["point"]:
        return protected(report["point"]["guard"], report["task"], work, results)
    if "model" in report["point"]:
        return report["point"]["model"], {"before": ORIGINAL}
    run = train(report, folder)
    return runs.model_of(run), {"before": run.recipe.model}


def implicit(
    leaderboard: dict[str, Any], name: str, seed: int, work: Path, results: Results
) -> None:
    """Measure a model on prompts that do not name the concept. A task may have none."""
    key, folder_results = f"{name}_seed{seed}", results.folder("implicit")
    report = results[key]
    suite_name = leaderboard["tasks"][report["task"]].get("implicit")
    if suite_name is None:
        return
    n, previous = leaderboard["images"]["implicit"], folder_results.get(key)
    if (
        previous is not None
        and is_of(previous, report)
        and runs.has_protocol(previous["evaluation"], suites.load(suite_name), n)
    ):
        return
    model, how = victim(report, work / name / f"report_{seed}", work, results)
    evaluation = api.evaluate(model, suite_name, n=n, **how)
    folder_results[key] = victims_result(
        name, report, {"seed": seed, "evaluation": evaluation.as_dict()}
    )


def is_of(result: Content | None, report: Content) -> bool:
    """Return whether a result exists and belongs to the reported model.

    The setting of an entry may have changed since the result.
    """
    content = result or {}
    return (
        content.get("recipe") == report["recipe"]
        and content.get("point", report["point"]) == report["point"]
    )


def victims_result(name: str, report: Content, measurement: Content) -> Content:
    """Return a measurement of a model with its setting, by which `is_of` recognises it."""
    return {"victim": name, "recipe": report["recipe"], "point": report["point"], **measurement}


def of(report: dict[str, Any]) -> str:
    """Return a short fingerprint of a reported run, for the names of its folders."""
    return provenance.fingerprint({"recipe": report["recipe"], "point": report["point"]})[:8]


def memory(name: str, seed: int, work: Path, results: Results) -> None:
    """Measure the memory of the steps of a reported run, in a process of its own.

    A closed form and a safeguard have no steps.
    """
    key, folder_results = f"{name}_seed{seed}", results.folder("memory")
    report = results[key]
    if not report["run"].get("steps") or is_of(folder_results.get(key), report):
        return
    recipe_file, output_file = (
        work / name / f"memory_{kind}.json" for kind in ("recipe", "footprint")
    )
    recipe_file.parent.mkdir(parents=True, exist_ok=True)
    recipe_file.write_text(json.dumps(report["recipe"]))
    subprocess.run(
        [sys.executable, "-m", "studies.memory_footprint", str(recipe_file), str(output_file)],
        check=True,
    )
    folder_results[key] = victims_result(name, report, json.loads(output_file.read_text()))


def same_time(steps: int, seconds: float, budget: float) -> int | None:
    """Return the number of steps that take the seconds of the budget.

    The result is None if the run already took these seconds, within a tenth.

    Args:
        steps: The steps of the run.
        seconds: The seconds of the run.
        budget: The seconds to reach.
    """
    return None if abs(seconds / budget - 1) < 0.1 else max(1, round(steps * budget / seconds))


def scaled_schedule(recipe: dict[str, Any], steps: int) -> dict[str, int]:
    """Return the settings of a recipe with this number of steps.

    The steps without an attack at its start keep their share. They take a small part of the seconds
    of a step under attack.
    """
    settings = {"training.steps": steps}
    warmup = (recipe.get("attack") or {}).get("warmup", 0)
    if warmup:
        settings["attack.warmup"] = round(warmup * steps / recipe["training"]["steps"])
    return settings


def equal_time(
    leaderboard: dict[str, Any],
    study: dict[str, Any],
    name: str,
    seed: int,
    work: Path,
    results: Results,
) -> Path | None:
    """Train once more at the method's setting, for the process seconds of the method `like`.

    Returns:
        The folder of the run. None if there is no such run, or if the reported run took these
        seconds.
    """
    key, folder_results, how = f"{name}_seed{seed}", results.folder("time"), leaderboard.get("time")
    report = results[key]
    if (
        how is None
        or seed not in how["seeds"]
        or "cpu_seconds" not in report["run"]
        or not report["run"].get("steps")
    ):
        return None
    other = f"{report['task']}_{how['like']}_seed{seed}"
    if other not in results:
        raise SystemExit(
            f"there is no result {other} yet, whose seconds are the budget; run --methods "
            f"{how['like']} first"
        )
    steps = same_time(
        report["recipe"]["training"]["steps"],
        report["run"]["cpu_seconds"],
        results[other]["run"]["cpu_seconds"],
    )
    if steps is None:
        folder_results.pop(key, None)  # of an earlier setting
        return None
    entry, point, folder = (
        study["entries"][name],
        {**report["point"], **scaled_schedule(report["recipe"], steps)},
        work / name / f"time_{seed}_{of(report)}",
    )
    is_known = key in folder_results and runs.same(
        folder_results[key], runs.recipe_of(entry, point, seed)
    )
    if not is_known:
        result, _ = runs.run_one(
            entry,
            point,
            seed=seed,
            suite=runs.suite_of(study, entry, None),
            n=study["n"],
            folder=folder,
        )
        folder_results[key] = {
            "entry": name,
            "label": report["label"],
            "task": report["task"],
            **result,
        }
    return folder


def attacked_suite(study: dict[str, Any], entry: dict[str, Any]) -> Any:
    """Return the suite with the prompts and seeds of the attacks.

    A leaderboard with an image seed of its own uses it.
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
    """Run the attacks on a model that have no result yet. Its run must be reported.

    Args:
        leaderboard: The configuration.
        study: The expanded configuration.
        name: The entry.
        seed: The training seed.
        work: The work folder.
        results: The results of the study, or of its folder time/.
        attack_names: The attacks.
        folder: The folder of the run, if it is not that of the reported run.
    """
    report, folder_results = results[f"{name}_seed{seed}"], results.folder("attacks")
    suite = attacked_suite(study, study["entries"][name])
    protocol = {**leaderboard["attack"], "suite": suite, "attacks": leaderboard["attacks"]}
    keys = {one: f"{name}_{one}_seed{seed}" for one in attack_names}
    for one in [one for one in attack_names if is_of(folder_results.get(keys[one]), report)]:
        require_asked(folder_results, keys.pop(one), attack_protocol(protocol, one))
    if not keys:
        return
    model, how = victim(report, folder or work / name / f"report_{seed}", work, results)
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
            if name not in study["entries"]:  # a control that this task does not have
                continue
            how = leaderboard["methods"][method]
            # a closed form has no random draws
            method_seeds = how.get("seeds", leaderboard["seeds"])
            # a safeguard that reads words has no images for embeddings
            fitting_attacks = [one for one in attacks if one not in how.get("unfit_attacks", ())]
            seeds = [seed for seed in reported_seeds if seed in method_seeds]
            if args.stage in ("train", "all"):
                if "guard" in how:
                    measure_guarded(study, name, args.work, results)
                elif "control" in how:
                    measure_control(study, name, results)
                else:
                    studies.run_entry(
                        study,
                        name,
                        entry=study["entries"][name],
                        work=args.work,
                        results=results,
                        seeds=seeds,
                    )
            for seed in seeds if args.stage in ("implicit", "all") else []:
                implicit(leaderboard, name, seed=seed, work=args.work, results=results)
            # the memory does not depend on the seed
            for seed in seeds[:1] if args.stage in ("memory", "all") else []:
                memory(name, seed, args.work, results)
            for seed in seeds if args.stage in ("time", "all") else []:
                folder = equal_time(
                    leaderboard, study, name=name, seed=seed, work=args.work, results=results
                )
                if folder is not None:
                    chosen_attacks = [
                        one
                        for one in leaderboard["time"].get("attacks", [])
                        if one in fitting_attacks
                    ]
                    attack(
                        leaderboard,
                        study,
                        name=name,
                        seed=seed,
                        work=args.work,
                        results=results.folder("time"),
                        attack_names=chosen_attacks,
                        folder=folder,
                    )
            for seed in seeds if args.stage in ("attack", "all") else []:
                attack(
                    leaderboard,
                    study,
                    name=name,
                    seed=seed,
                    work=args.work,
                    results=results,
                    attack_names=fitting_attacks,
                )


if __name__ == "__main__":
    main()
