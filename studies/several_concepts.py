"""Several concepts erased at once, by turns, one by one, or one by one and added: what is left of
each, and of the rest.

    python -m studies.several_concepts studies/configs/tiny_five.yaml [--entries objectives,merged]
    [--seeds 0] [--work runs/studies] [--steps 2] [--n 4]

Every entry is a model: of a recipe (`set`: changes to it), of its concepts erased one at a time
(`alone`: one model a concept), or of those added (`merge: alone`, with `weights`). Every model is
measured by every suite of the study: one a concept, all with the same retained prompts. A `grid` is
scored on the selection seeds: retained accuracy minus the mean share of the concepts. A study that
was stopped continues where it was. Each entry and seed is a result of the study
(studies/result_tables.py); `python -m studies.render_results` makes the page. --steps and --n: a
trial, written to --work only and, with --steps, without the grids.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import api
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.suite import dumps
from concept_eraser.recipes import recipe as recipes
from studies.result_tables import Content, Results
from studies.runs import erased_model

Model = tuple[Any, dict[str, Any]]  # what is measured, and what it took


@dataclass(frozen=True)
class Bench:
    """One study, its work folder, and what a trial makes smaller."""

    study: dict[str, Any]
    work: Path
    results: MutableMapping[str, Content]
    steps: int | None = None
    n: int | None = None

    def recipe(self, entry: dict, point: dict, seed: int) -> recipes.Recipe:
        overrides = {**entry.get("set", {}), **point, "training.seed": seed}
        if self.steps is not None:
            overrides |= {"training.steps": self.steps, "forget.n": 8, "retain.n": 8}
        return recipes.load(
            entry.get("recipe", self.study["recipe"]),
            [f"{k}={json.dumps(v)}" for k, v in overrides.items()],
        )

    def suite(self, name: str, *, choosing: bool = False) -> suites.Suite:
        """With the study's number of images a group; other images where a setting is chosen."""
        suite = suites.load(name).with_at_most(
            self.n or self.study["select" if choosing else "images"]["n"]
        )
        return (
            suite.model_copy(update={"seed": self.study["select"]["image_seed"]})
            if choosing
            else suite
        )

    def train(self, recipe: recipes.Recipe, folder: Path) -> Model:
        run = api.erase(recipe, output=folder, resume=True)
        summary = json.loads((folder / "done.json").read_text())
        # weights.safetensors is enough to make it again
        shutil.rmtree(folder / "pipeline", ignore_errors=True)
        gradients = (
            0
            if "edit" in summary
            else recipe.training.steps * recipe.training.micro_batches * len(recipe.objectives)
        )
        return erased_model(run), {"seconds": summary["seconds"], "gradients": gradients, "runs": 1}

    def alone(self, entry: dict, point: dict, seed: int, folder: Path) -> list[Model]:
        """A model for each concept of the recipe, erased without the others."""
        whole = self.recipe(entry, point, seed)
        models = []
        for number, objective in enumerate(whole.forgotten, 1):
            content = {**whole.resolved(), "forget": objective.model_dump(exclude_none=True)}
            content.pop("concepts")
            models.append(self.train(recipes.load(content), folder / f"concept_{number}"))
        return models

    def models(self, entry: dict, point: dict, seed: int, folder: Path) -> list[Model]:
        """One model, or of an entry that erases its concepts alone one a suite."""
        if "merge" not in entry:
            if entry.get("alone"):
                return self.alone(entry, point, seed, folder)
            return [self.train(self.recipe(entry, point, seed), folder)]
        whole, other = (
            self.recipe(entry, point, seed),
            folder.parent.parent / entry["merge"] / folder.name,
        )
        parts = self.alone(entry, point, seed, other)
        runs = [other / f"concept_{number}" for number in range(1, len(parts) + 1)]
        target = folder / "merged"
        shutil.rmtree(target, ignore_errors=True)
        for run, (model, _) in zip(runs, parts, strict=True):
            model.save(run / "pipeline")
        merged_model = api.merge(
            *(run / "pipeline" for run in runs),
            output=target,
            weights=[entry.get("weight", 1.0)] * len(runs),
            before=whole.model,
        )
        for run in runs:
            shutil.rmtree(run / "pipeline")
        loaded_model = api.load(target)
        shutil.rmtree(target)
        took = {
            key: sum(part[key] for _, part in parts) for key in ("seconds", "gradients", "runs")
        }
        return [
            (loaded_model, {**took, "lengths": merged_model.lengths, "length": merged_model.length})
        ]

    def measure(self, models: list[Model], base: str, *, choosing: bool = False) -> dict[str, Any]:
        """By each suite; a model of its own for each, or one for all."""
        names = self.study["suites"]
        each = models if len(models) == len(names) else models * len(names)
        evaluations = {
            name: api.evaluate(model, self.suite(name, choosing=choosing), before=base).as_dict()
            for name, (model, _) in zip(names, each, strict=True)
        }
        costs = {
            key: sum(cost[key] for _, cost in models) for key in ("seconds", "gradients", "runs")
        }
        other_costs = {
            key: value for _, cost in models for key, value in cost.items() if key not in costs
        }
        return {"took": costs | other_costs, "evaluations": evaluations}

    def one(
        self, entry: dict, point: dict, seed: int, folder: Path, *, choosing: bool = False
    ) -> dict[str, Any]:
        result_file = folder / ("chosen.json" if choosing else "result.json")
        if result_file.exists():
            return json.loads(result_file.read_text())
        start, whole = time.monotonic(), self.recipe(entry, point, seed)
        result = self.measure(
            self.models(entry, point, seed, folder), whole.model, choosing=choosing
        )
        result |= {"recipe": whole.resolved(), "point": point, "seed": seed}
        folder.mkdir(parents=True, exist_ok=True)
        result_file.write_text(dumps(result))
        print(f"{folder}: {time.monotonic() - start:.0f} s, score {score(result):.3f}", flush=True)
        return result

    def grid(self, name: str) -> list[dict]:
        """The score of each point of an entry's grid, on seeds and images that are reported
        nowhere.
        """
        entry, rows = self.study["entries"][name], []
        if self.steps is not None:
            return []
        for point in self.study.get("grids", {}).get(entry.get("grid"), []):
            label = "_".join(str(value) for value in point.values())
            runs = [
                self.one(
                    entry, point, seed, self.work / name / f"select_{label}_{seed}", choosing=True
                )
                for seed in self.study["select"]["seeds"]
            ]
            rows.append({"point": point, "score": sum(map(score, runs)) / len(runs)})
        return rows

    def run(self, name: str, seeds: list[int]) -> None:
        entry = self.study["entries"][name]
        missing_seeds = [seed for seed in seeds if f"{name}_seed{seed}" not in self.results]
        if not missing_seeds:
            return
        rows = self.grid(entry.get("like", name))
        best = max(rows, key=lambda row: row["score"])["point"] if rows else {}
        for seed in missing_seeds:
            result = self.one(entry, best, seed, self.work / name / f"report_{seed}")
            self.results[f"{name}_seed{seed}"] = {
                "entry": name,
                "label": entry["label"],
                "grid": rows,
                **result,
            }


def value(evaluation: dict, metric: str, group: str, when: str = "after") -> float:
    return next(
        r[when]["value"]
        for r in evaluation["results"]
        if (r["metric"], r["group"]) == (metric, group)
    )


def score(measurement: dict) -> float:
    """Mean over the concepts of retained accuracy minus the concept's share."""
    each = [
        value(e, "accuracy_shape", "retained") - value(e, "concept_rate", "direct")
        for e in measurement["evaluations"].values()
    ]
    return sum(each) / len(each)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--entries", default="", help="only these, by name")
    parser.add_argument("--seeds", default="", help="only these of the reported seeds")
    parser.add_argument("--work", type=Path, default=Path("runs/studies"))
    parser.add_argument(
        "--steps", type=int, help="a trial: so many training steps, 8 images a side"
    )
    parser.add_argument("--n", type=int, help="a trial: so many images a group")
    args = parser.parse_args()
    study = yaml.safe_load(args.study.read_text())
    is_trial_run = args.steps is not None or args.n is not None
    work = args.work / (args.study.stem + ("_trial" if is_trial_run else ""))
    bench = Bench(study, work, {} if is_trial_run else Results(args.study.stem), args.steps, args.n)
    for name in args.entries.split(",") if args.entries else study["entries"]:
        entry_seeds = study["entries"][name].get("seeds", study["seeds"])
        bench.run(
            name, [s for s in entry_seeds if not args.seeds or str(s) in args.seeds.split(",")]
        )


if __name__ == "__main__":
    main()
