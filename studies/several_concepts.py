"""Erase several concepts: at once, in turn, one at a time, or one at a time and added.

    python -m studies.several_concepts studies/configs/tiny_five.yaml [--entries objectives,merged]
    [--seeds 0] [--work runs/studies] [--steps 2] [--n 4]

An entry is one of these:

    a recipe with overrides (`set`)
    a model for each concept of the recipe (`alone`)
    the sum of these models' changes (`merge: alone`, with `weight`)

Every model is measured with every suite of the study. There is a suite for each concept, and all
have the same retain prompts. The score of a setting is the retain accuracy minus the concept rate,
as a mean over the concepts. An interrupted study continues where it stopped. Each entry and seed is
a result of the study (studies/result_tables.py). `python -m studies.render_results` renders the
page. --steps and --n make a short run. It writes to --work only. With --steps it has no grids.
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
from studies.runs import clear, erased_model, has_protocol, same
from studies.tasks import parse_names

Model = tuple[Any, dict[str, Any]]  # the model, and its costs


@dataclass(frozen=True)
class Bench:
    """One study, its work folder, and the sizes of a short run."""

    study: dict[str, Any]
    work: Path
    results: MutableMapping[str, Content]
    steps: int | None = None
    n: int | None = None

    def recipe(self, entry: dict, point: dict, seed: int) -> recipes.Recipe:
        """Return the recipe of an entry at one setting and one training seed."""
        overrides = {**entry.get("set", {}), **point, "training.seed": seed}
        if self.steps is not None:
            overrides |= {"training.steps": self.steps, "forget.n": 8, "retain.n": 8}
        return recipes.load(
            entry.get("recipe", self.study["recipe"]),
            [f"{k}={json.dumps(v)}" for k, v in overrides.items()],
        )

    def suite(self, name: str, *, choosing: bool = False) -> suites.Suite:
        """Return a suite with the images per group of the study; other images for selection."""
        suite = suites.load(name).with_at_most(
            self.n or self.study["select" if choosing else "images"]["n"]
        )
        return (
            suite.model_copy(update={"seed": self.study["select"]["image_seed"]})
            if choosing
            else suite
        )

    def train(self, recipe: recipes.Recipe, folder: Path) -> Model:
        """Return the model of a recipe."""
        clear(folder, recipe)
        run = api.erase(recipe, output=folder, resume=True)
        summary = json.loads((folder / "done.json").read_text())
        # weights.safetensors is enough to load it again
        shutil.rmtree(folder / "pipeline", ignore_errors=True)
        gradients = (
            0
            if "edit" in summary
            else recipe.training.steps * recipe.training.micro_batches * len(recipe.objectives)
        )
        return erased_model(run), {"seconds": summary["seconds"], "gradients": gradients, "runs": 1}

    def alone(self, entry: dict, point: dict, seed: int, folder: Path) -> list[Model]:
        """Return a model for each concept of the recipe, erased without the others."""
        whole = self.recipe(entry, point, seed)
        models = []
        for number, objective in enumerate(whole.forgotten, 1):
            content = {**whole.resolved(), "forget": objective.model_dump(exclude_none=True)}
            content.pop("concepts")
            models.append(self.train(recipes.load(content), folder / f"concept_{number}"))
        return models

    def models(self, entry: dict, point: dict, seed: int, folder: Path) -> list[Model]:
        """Return one model, or one for each suite if the entry erases its concepts alone."""
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
        merged_model = api.merge(
            *runs,
            output=target,
            weights=[entry.get("weight", 1.0)] * len(runs),
            before=whole.model,
        )
        loaded_model = api.load(target)
        shutil.rmtree(target)
        costs = {
            key: sum(part[key] for _, part in parts) for key in ("seconds", "gradients", "runs")
        }
        return [
            (
                loaded_model,
                {**costs, "lengths": merged_model.lengths, "length": merged_model.length},
            )
        ]

    def measure(self, models: list[Model], base: str, *, choosing: bool = False) -> dict[str, Any]:
        """Return the evaluations by suite, of one model for all or of one model for each."""
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
        """Return the result of an entry at one setting and one training seed."""
        result_file = folder / ("chosen.json" if choosing else "result.json")
        if result_file.exists():
            stored: dict[str, Any] = json.loads(result_file.read_text())
            if self.is_current(stored, entry, point, seed, choosing=choosing):
                return stored
        start, whole = time.monotonic(), self.recipe(entry, point, seed)
        result = self.measure(
            self.models(entry, point, seed, folder), whole.model, choosing=choosing
        )
        result |= {"recipe": whole.resolved(), "point": point, "seed": seed}
        if "weight" in entry:
            result["weight"] = entry["weight"]
        folder.mkdir(parents=True, exist_ok=True)
        result_file.write_text(dumps(result))
        print(f"{folder}: {time.monotonic() - start:.0f} s, score {score(result):.3f}", flush=True)
        return result

    def is_current(
        self, result: dict, entry: dict, point: dict, seed: int, *, choosing: bool = False
    ) -> bool:
        """Return whether a result has the recipe, the weight and the protocols of an entry.

        Results of older versions do not state the weight.
        """
        suites_by_name = {
            name: self.suite(name, choosing=choosing) for name in self.study["suites"]
        }
        weight = entry.get("weight")
        return (
            same({**result, "entry": ""}, self.recipe(entry, point, seed))
            and result.get("weight", weight) == weight
            and result["evaluations"].keys() == suites_by_name.keys()
            and all(
                has_protocol(result["evaluations"][name], suite, None)
                for name, suite in suites_by_name.items()
            )
        )

    def grid(self, name: str) -> list[dict]:
        """Return the score of each setting of an entry's grid, on the selection's images."""
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
        """Choose the setting of an entry, and write the results of the training seeds.

        Seeds with a result of this entry under these protocols are left as they are.
        """
        entry = self.study["entries"][name]
        stored = {seed: self.results.get(f"{name}_seed{seed}") for seed in seeds}
        missing_seeds = [
            seed
            for seed, one in stored.items()
            if one is None or not self.is_current(one, entry, one["point"], seed)
        ]
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
    """Return the value of a metric on a group."""
    return next(
        r[when]["value"]
        for r in evaluation["results"]
        if (r["metric"], r["group"]) == (metric, group)
    )


def score(measurement: dict) -> float:
    """Return the retain accuracy minus the concept rate, as a mean over the concepts."""
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
        "--steps", type=int, help="short run: training steps, with 8 images for each objective"
    )
    parser.add_argument("--n", type=int, help="short run: images of each group")
    args = parser.parse_args()
    study = yaml.safe_load(args.study.read_text())
    is_short_run = args.steps is not None or args.n is not None
    work = args.work / (args.study.stem + ("_short" if is_short_run else ""))
    bench = Bench(
        study,
        work,
        results={} if is_short_run else Results(args.study.stem),
        steps=args.steps,
        n=args.n,
    )
    for name in parse_names(parser, "entries", args.entries, study["entries"]):
        entry_seeds = study["entries"][name].get("seeds", study["seeds"])
        bench.run(
            name, [s for s in entry_seeds if not args.seeds or str(s) in args.seeds.split(",")]
        )


if __name__ == "__main__":
    main()
