"""All methods on all tasks under one protocol, attacks included.

    python -m tools.leaderboard eval/studies/tiny_leaderboard.yaml [--tasks star] [--methods munba,esd] [--seeds 0] [--stage train|implicit|memory|time|attack]

Every method has a grid of the same size, chosen on one task with training seeds and pictures that are not reported
(tools/study.py does that); the other tasks take its setting. Then each victim is asked by prompts without the concept's
names, trained again with as many seconds as one of the methods takes (`time`, attacked there, too), its memory is measured (`memory`), and it is attacked. A safeguard at inference (`guard`) has a grid of texts and nothing to train. One JSON a run goes to
eval/results/<study>/, others to its folders implicit/, memory/, time/ and attacks/; what is there is not made again, so the command
goes on where it was stopped, also on another machine. `python -m tools.render_results` makes the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import api, environment, registry
from concept_eraser import recipe as recipes
from concept_eraser.evaluation.suite import dumps
from tools import choosing, runs
from tools import study as studies
from tools.attack_table import asked as attack_protocol
from tools.attack_table import require_asked
from tools.tasks import listed

ORIGINAL = "tiny-sd"
RESULTS = Path(__file__).parent.parent / "eval" / "results"


def entry(board: dict[str, Any], task: str, method: str) -> dict[str, Any]:
    """A method on a task, in the words of tools/study.py. Keys that a recipe does not have are not set in it."""
    where, how = board["tasks"][task], board["methods"][method]
    if "guard" in how:
        guards = [kind + ":" + where["suite"].removeprefix("tiny_") for kind in how["guard"]]
        home = {} if task == board["select"]["task"] else {"like": f"{board['select']['task']}_{method}"}
        return {"label": how["label"], "task": task, "suite": where["suite"], "guard": guards, **home}
    recipe = recipes.load(how["recipe"], [f"{k}={json.dumps(v)}" for k, v in how.get("set", {}).items()])
    changes = dict(how.get("set", {}))
    for side, prompts in (("forget", where["forget"]), ("replace", where["forget"]), ("retain", where["retain"])):
        found = getattr(recipe, side)
        if found is None:
            continue
        concept = found.prompts == recipe.forget.prompts  # some retain what stands in for the concept, or the concept
        changes[f"{side}.prompts"] = where["forget"] if concept else prompts
        if isinstance(found.anchor, dict):
            changes[f"{side}.anchor"] = where["anchor"]
    home = board["select"]["task"]
    chosen = {"grid": how.get("grid")} if task == home else {"like": f"{home}_{method}"}
    grid = chosen if "grid" in how else {"like": how["like"]} if "like" in how else {}
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


def expanded(board: dict[str, Any]) -> dict[str, Any]:
    """The board as a study of tools/study.py: one entry a task and method."""
    sizes = {name: len(points) for name, points in board["grids"].items()}
    if len(set(sizes.values())) > 1:
        raise SystemExit(f"the grids must be of one size, found {sizes}")
    entries = {f"{task}_{method}": entry(board, task, method) for task in board["tasks"] for method in board["methods"]}
    return {**board, "suite": board["tasks"][board["select"]["task"]]["suite"], "entries": entries}


def guarded(study: dict[str, Any], name: str, work: Path, results: Path) -> None:
    """Measure the original under a safeguard, at the setting that `guard_of` chooses, and write its result."""
    path, about = results / f"{name}_seed0.json", study["entries"][name]
    judge = registry.load("judge", runs.suite_of(study, about, None).judge)().fingerprint
    kept = json.loads(path.read_text()) if choosing.is_current(path, judge) else None
    if kept and "like" not in about and choosing.scored(study, name, kept["grid"], judge):
        return
    grid, best = guard_of(study, name, judge, work, results)
    if kept and kept["grid"] == grid and kept["point"] == {"guard": best}:
        return
    found = api.evaluate(ORIGINAL, runs.suite_of(study, about, None), before=ORIGINAL, n=study["n"], guard=best)
    run = {"seconds": 0.0, "cpu_seconds": 0.0, "trained_parameters": 0}
    content = {"entry": name, "label": about["label"], "task": about["task"], "grid": grid, "conflict": {"steps": 0}, "recipe": {"model": ORIGINAL}, "point": {"guard": best}, "seed": 0, "run": run, "size_mb": 0.0, "evaluation": found.as_dict()}  # fmt: skip
    results.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(content))
    print(f"{name}: {best}, score {runs.score(content):.3f}", flush=True)


def guard_of(study: dict[str, Any], name: str, judge: str, work: Path, results: Path) -> tuple[list[dict[str, Any]], str]:  # fmt: skip
    """The scored settings of a safeguard and which is the best: as seen on other pictures and under the selection's attack, or,
    as other methods' settings are, what another task chose (`like`)."""
    about = study["entries"][name]
    if "like" in about:
        other = results / f"{about['like']}_seed0.json"
        if not other.exists():
            raise SystemExit(f"{other.name} is not there yet, and chooses the setting; run its task first")
        chosen = json.loads(other.read_text())
        kind = chosen["point"]["guard"].partition(":")[0]
        return chosen["grid"], next(guard for guard in about["guard"] if guard.startswith(f"{kind}:"))
    suite = runs.suite_of(study, about, study["select"]["picture_seed"])
    suite = suite.model_copy(update={"groups": {k: v for k, v in suite.groups.items() if k in ("direct", "retained")}})
    grid = []
    for guard in about["guard"] if len(about["guard"]) > 1 else []:
        seen = {"evaluation": api.evaluate(ORIGINAL, suite, before=ORIGINAL, n=study["select"]["n"], guard=guard).as_dict()}  # fmt: skip
        victim = (ORIGINAL, {"before": ORIGINAL, "guard": guard})
        fell = choosing.attacked(study, about, judge, work / name / f"select_{guard.partition(':')[0]}", victim)
        grid.append(choosing.row({"guard": guard}, [seen], [fell], choosing.scorer(study, judge)))
    best = max(grid, key=lambda row: row["score"])["point"]["guard"] if grid else about["guard"][0]
    return grid, best


def victim(report: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of a reported run, and what else measuring it takes: the original of a run, or a safeguard."""
    if "guard" in report["point"]:
        return ORIGINAL, {"before": ORIGINAL, "guard": report["point"]["guard"]}
    recipe = recipes.validate(report["recipe"], report["entry"])
    runs.clear(folder, recipe)
    run = api.erase(recipe, output=folder, resume=True)
    return run.model or runs.erased_model(run), {"before": run.recipe.model}


def implicit(board: dict[str, Any], name: str, seed: int, work: Path, results: Path) -> None:
    """Measure one victim by prompts that show the concept without any of its names; a task may have none."""
    report = json.loads((results / f"{name}_seed{seed}.json").read_text())
    path, asked = results / "implicit" / f"{name}_seed{seed}.json", board["tasks"][report["task"]].get("implicit")
    if asked is None or is_of(path, report):
        return
    model, how = victim(report, work / name / f"report_{seed}")
    found = api.evaluate(model, asked, n=board["pictures"]["implicit"], **how)
    write(path, name, report, {"seed": seed, "evaluation": found.as_dict()})


def is_of(path: Path, report: dict[str, Any]) -> bool:
    """Whether a result is there and of the victim that is reported: an entry's setting may have been chosen anew."""
    content = json.loads(path.read_text()) if path.exists() else {}
    return content.get("recipe") == report["recipe"] and content.get("point", report["point"]) == report["point"]


def write(path: Path, name: str, report: dict[str, Any], found: dict[str, Any]) -> None:
    """Write what was measured of a victim, with the setting that `is_of` knows it by."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps({"victim": name, "recipe": report["recipe"], "point": report["point"], **found}))


def of(report: dict[str, Any]) -> str:
    """A few letters for a victim, for the names of its folders."""
    return environment.fingerprint({"recipe": report["recipe"], "point": report["point"]})[:8]


def memory(name: str, seed: int, work: Path, results: Path) -> None:
    """Measure the memory of a reported run's steps, in a process of its own; a closed form and a safeguard have no steps."""
    report = json.loads((results / f"{name}_seed{seed}.json").read_text())
    path = results / "memory" / f"{name}_seed{seed}.json"
    if not report["run"].get("steps") or is_of(path, report):
        return
    asked, told = (work / name / f"memory_{kind}.json" for kind in ("asked", "told"))
    asked.parent.mkdir(parents=True, exist_ok=True)
    asked.write_text(json.dumps(report["recipe"]))
    subprocess.run([sys.executable, "-m", "tools.footprint", str(asked), str(told)], check=True)
    write(path, name, report, json.loads(told.read_text()))


def same_time(steps: int, seconds: float, budget: float) -> int | None:
    """How many steps take the budget where so many take these seconds; None where that is within a tenth anyway."""
    return None if abs(seconds / budget - 1) < 0.1 else max(1, round(steps * budget / seconds))


def equal_time(board: dict[str, Any], study: dict[str, Any], name: str, seed: int, work: Path, results: Path) -> Path | None:  # fmt: skip
    """Train once more, at the method's setting, for as many seconds of its process as the method `like` took for its steps.
    The run's folder; None where there is no such run, or its steps took those seconds anyway."""
    report, how = json.loads((results / f"{name}_seed{seed}.json").read_text()), board.get("time")
    path = results / "time" / f"{name}_seed{seed}.json"
    if how is None or seed not in how["seeds"] or "cpu_seconds" not in report["run"] or "guard" in report["point"]:  # fmt: skip
        return None
    other = results / f"{report['task']}_{how['like']}_seed{seed}.json"
    if not other.exists():
        raise SystemExit(f"{other.name} is not there yet, and its seconds are the budget; run --methods {how['like']} first")  # fmt: skip
    steps = same_time(report["recipe"]["training"]["steps"], report["run"]["cpu_seconds"], json.loads(other.read_text())["run"]["cpu_seconds"])  # fmt: skip
    if steps is None:
        path.unlink(missing_ok=True)  # of a setting that took another time
        return None
    entry, point, folder = study["entries"][name], {**report["point"], "training.steps": steps}, work / name / f"time_{seed}_{of(report)}"  # fmt: skip
    if not path.exists() or json.loads(path.read_text())["point"] != point:
        result, _ = runs.run_one(entry, point, seed, runs.suite_of(study, entry, None), study["n"], folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dumps({"entry": name, "label": report["label"], "task": report["task"], **result}))
    return folder


def attacked_suite(study: dict[str, Any], entry: dict[str, Any]) -> Any:
    """The suite whose prompts and noise are attacked: a board that has pictures of its own is attacked at those."""
    return runs.suite_of(study, entry, study["picture_seed"]) if "picture_seed" in study else entry["suite"]


def attack(board: dict[str, Any], study: dict[str, Any], name: str, seed: int, work: Path, results: Path, chosen: list[str], folder: Path | None = None) -> None:  # fmt: skip
    """Attack one victim with the attacks that have no result yet. Its run must have been trained and reported; `folder` is
    where that was done, unless it is a row's own."""
    report = json.loads((results / f"{name}_seed{seed}.json").read_text())
    suite = attacked_suite(study, study["entries"][name])
    protocol = {**board["attack"], "suite": suite, "attacks": board["attacks"]}
    paths = {one: results / "attacks" / f"{name}_{one}_seed{seed}.json" for one in chosen}
    for one in [one for one in chosen if is_of(paths[one], report)]:
        require_asked(paths.pop(one), attack_protocol(protocol, one))
    if not paths:
        return
    model, how = victim(report, folder or work / name / f"report_{seed}")
    for one, path in paths.items():
        found = api.attack(model, one, suite, group=protocol["group"], n=protocol["n"], seed=protocol["seed"], options=board["attacks"][one], output=work / name / f"attack_{seed}_{one}_{of(report)}", **how)  # fmt: skip
        write(path, name, report, {"training_seed": seed, **found.as_dict()})
        rates = {key: round(100 * rate["value"]) for key, rate in found.rates().items()}
        print(f"{name} (seed {seed}) under {one}: {rates} % ({found.seconds:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("board", type=Path)
    parser.add_argument("--tasks", default="", help="only these, in this order")
    parser.add_argument("--methods", default="", help="only these, in this order")
    parser.add_argument("--attacks", default="", help="only these")
    parser.add_argument("--seeds", default="", help="only these training seeds")
    parser.add_argument("--stage", choices=["train", "implicit", "memory", "time", "attack", "all"], default="all")
    parser.add_argument("--work", type=Path, default=Path("runs/leaderboard"))
    args = parser.parse_args()
    board = yaml.safe_load(args.board.read_text())
    study, results = expanded(board), RESULTS / args.board.stem
    asked = [int(s) for s in args.seeds.split(",")] if args.seeds else board["seeds"]
    attacks = listed(parser, "attacks", args.attacks, board["attacks"])
    for task in listed(parser, "tasks", args.tasks, board["tasks"]):
        for method in listed(parser, "methods", args.methods, board["methods"]):
            name = f"{task}_{method}"
            own = board["methods"][method].get("seeds", board["seeds"])  # a closed form draws nothing
            seeds = [seed for seed in asked if seed in own]
            if args.stage in ("train", "all"):
                if "guard" in board["methods"][method]:
                    guarded(study, name, args.work, results)
                else:
                    studies.run_entry(study, name, study["entries"][name], args.work, results, seeds)
            for seed in seeds if args.stage in ("implicit", "all") else []:
                implicit(board, name, seed, args.work, results)
            for seed in seeds[:1] if args.stage in ("memory", "all") else []:  # the same whatever the seed
                memory(name, seed, args.work, results)
            for seed in seeds if args.stage in ("time", "all") else []:
                folder = equal_time(board, study, name, seed, args.work, results)
                if folder is not None:
                    under = [one for one in board["time"].get("attacks", []) if one in attacks]
                    attack(board, study, name, seed, args.work, results / "time", under, folder)
            for seed in seeds if args.stage in ("attack", "all") else []:
                attack(board, study, name, seed, args.work, results, attacks)


if __name__ == "__main__":
    main()
