"""Several concepts erased at once, by turns, one by one, or one by one and added: what is left of each, and of the rest.

    python -m tools.many eval/studies/tiny_five.yaml [--entries players,merged] [--seeds 0] [--work runs/studies] [--steps 2] [--n 4]

Every entry is a model: of a recipe (`set`: changes to it), of its concepts erased one at a time (`alone`: one model a
concept), or of those added (`merge: alone`, with `weights`). Every model is measured by every suite of the study: one a
concept, all with the same retained prompts. A `grid` is scored on the selection seeds: retained accuracy minus the mean
share of the concepts. Runs are kept, so an interrupted study goes on where it stopped. One JSON an entry and seed goes to
eval/results/<study>/; `python -m tools.render_results` makes the table. --steps and --n: a trial, written to --work only and, with --steps, without the grids.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import api
from concept_eraser import recipe as recipes
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.suite import dumps
from tools.runs import erased_model
from tools.study import RESULTS

Model = tuple[Any, dict[str, Any]]  # what is measured, and what it took


@dataclass(frozen=True)
class Bench:
    """One study, its work folder, and what a trial makes smaller."""

    study: dict[str, Any]
    work: Path
    results: Path
    steps: int | None = None
    n: int | None = None

    def recipe(self, entry: dict, point: dict, seed: int) -> recipes.Recipe:
        asked = {**entry.get("set", {}), **point, "training.seed": seed}
        if self.steps is not None:
            asked |= {"training.steps": self.steps, "forget.n": 8, "retain.n": 8}
        return recipes.load(entry.get("recipe", self.study["recipe"]), [f"{k}={json.dumps(v)}" for k, v in asked.items()])  # fmt: skip

    def suite(self, name: str, *, choosing: bool = False) -> suites.Suite:
        """With the study's number of pictures a group; other pictures where a setting is chosen."""
        suite = suites.load(name).scaled(self.n or self.study["select" if choosing else "pictures"]["n"])
        return suite.model_copy(update={"seed": self.study["select"]["picture_seed"]}) if choosing else suite

    def train(self, recipe: recipes.Recipe, folder: Path) -> Model:
        run = api.erase(recipe, output=folder, resume=True)
        done = json.loads((folder / "done.json").read_text())
        shutil.rmtree(folder / "pipeline", ignore_errors=True)  # weights.safetensors is enough to make it again
        gradients = 0 if "edit" in done else recipe.training.steps * recipe.training.micro_batches * len(recipe.players)
        return erased_model(run), {"seconds": done["seconds"], "gradients": gradients, "runs": 1}

    def alone(self, entry: dict, point: dict, seed: int, folder: Path) -> list[Model]:
        """A model for each concept of the recipe, erased without the others."""
        whole = self.recipe(entry, point, seed)
        made = []
        for number, side in enumerate(whole.forgotten, 1):
            content = {**whole.resolved(), "forget": side.model_dump(exclude_none=True)}
            content.pop("concepts")
            made.append(self.train(recipes.load(content), folder / f"concept_{number}"))
        return made

    def models(self, entry: dict, point: dict, seed: int, folder: Path) -> list[Model]:
        """One model, or of an entry that erases its concepts alone one a suite."""
        if "merge" not in entry:
            if entry.get("alone"):
                return self.alone(entry, point, seed, folder)
            return [self.train(self.recipe(entry, point, seed), folder)]
        whole, other = self.recipe(entry, point, seed), folder.parent.parent / entry["merge"] / folder.name
        parts = self.alone(entry, point, seed, other)
        runs = [other / f"concept_{number}" for number in range(1, len(parts) + 1)]
        target = folder / "merged"
        shutil.rmtree(target, ignore_errors=True)
        for run, (model, _) in zip(runs, parts, strict=True):
            model.save(run / "pipeline")
        told = api.merge(*(run / "pipeline" for run in runs), output=target, weights=[entry.get("weight", 1.0)] * len(runs), before=whole.model)  # fmt: skip
        for run in runs:
            shutil.rmtree(run / "pipeline")
        found = api.load(target)
        shutil.rmtree(target)
        took = {key: sum(part[key] for _, part in parts) for key in ("seconds", "gradients", "runs")}
        return [(found, {**took, "lengths": told.lengths, "length": told.length})]

    def measure(self, models: list[Model], base: str, *, choosing: bool = False) -> dict[str, Any]:
        """By each suite; a model of its own for each, or one for all."""
        names = self.study["suites"]
        each = models if len(models) == len(names) else models * len(names)
        found = {name: api.evaluate(model, self.suite(name, choosing=choosing), before=base).as_dict() for name, (model, _) in zip(names, each, strict=True)}  # fmt: skip
        took = {key: sum(cost[key] for _, cost in models) for key in ("seconds", "gradients", "runs")}
        more = {key: value for _, cost in models for key, value in cost.items() if key not in took}
        return {"took": took | more, "evaluations": found}

    def one(self, entry: dict, point: dict, seed: int, folder: Path, *, choosing: bool = False) -> dict[str, Any]:
        done = folder / ("chosen.json" if choosing else "result.json")
        if done.exists():
            return json.loads(done.read_text())
        began, whole = time.monotonic(), self.recipe(entry, point, seed)
        found = self.measure(self.models(entry, point, seed, folder), whole.model, choosing=choosing)
        found |= {"recipe": whole.resolved(), "point": point, "seed": seed}
        folder.mkdir(parents=True, exist_ok=True)
        done.write_text(dumps(found))
        print(f"{folder}: {time.monotonic() - began:.0f} s, score {score(found):.3f}", flush=True)
        return found

    def grid(self, name: str) -> list[dict]:
        """The score of each point of an entry's grid, on seeds and pictures that are reported nowhere."""
        entry, rows = self.study["entries"][name], []
        if self.steps is not None:
            return []
        for point in self.study.get("grids", {}).get(entry.get("grid"), []):
            label = "_".join(str(value) for value in point.values())
            runs = [self.one(entry, point, seed, self.work / name / f"select_{label}_{seed}", choosing=True) for seed in self.study["select"]["seeds"]]  # fmt: skip
            rows.append({"point": point, "score": sum(map(score, runs)) / len(runs)})
        return rows

    def run(self, name: str, seeds: list[int]) -> None:
        entry = self.study["entries"][name]
        missing = [seed for seed in seeds if not (self.results / f"{name}_seed{seed}.json").exists()]
        if not missing:
            return
        rows = self.grid(entry.get("like", name))
        best = max(rows, key=lambda row: row["score"])["point"] if rows else {}
        self.results.mkdir(parents=True, exist_ok=True)
        for seed in missing:
            found = self.one(entry, best, seed, self.work / name / f"report_{seed}")
            content = {"entry": name, "label": entry["label"], "grid": rows, **found}
            (self.results / f"{name}_seed{seed}.json").write_text(dumps(content))


def value(evaluation: dict, metric: str, group: str, when: str = "after") -> float:
    return next(r[when]["value"] for r in evaluation["results"] if (r["metric"], r["group"]) == (metric, group))


def score(found: dict) -> float:
    """Mean over the concepts of retained accuracy minus the concept's share."""
    each = [value(e, "accuracy_shape", "retained") - value(e, "concept_share", "direct") for e in found["evaluations"].values()]  # fmt: skip
    return sum(each) / len(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--entries", default="", help="only these, by name")
    parser.add_argument("--seeds", default="", help="only these of the reported seeds")
    parser.add_argument("--work", type=Path, default=Path("runs/studies"))
    parser.add_argument("--steps", type=int, help="a trial: so many training steps, 8 pictures a side")
    parser.add_argument("--n", type=int, help="a trial: so many pictures a group")
    args = parser.parse_args()
    study = yaml.safe_load(args.study.read_text())
    trial = args.steps is not None or args.n is not None
    work = args.work / (args.study.stem + ("_trial" if trial else ""))
    bench = Bench(study, work, work / "results" if trial else RESULTS / args.study.stem, args.steps, args.n)
    for name in args.entries.split(",") if args.entries else study["entries"]:
        own = study["entries"][name].get("seeds", study["seeds"])
        bench.run(name, [s for s in own if not args.seeds or str(s) in args.seeds.split(",")])


if __name__ == "__main__":
    main()
