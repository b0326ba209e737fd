"""Forget examples of a classifier: every method at the best setting of a grid, and retraining, over
several seeds.

    python -m studies.classifiers studies/configs/classification.yaml [--tasks class] [--methods
    munba,finetune]

For each seed, one model is trained on all examples ("original") and one without the forget set
("Retrain", from the same initial weights). Every method starts from the original through
`concept_eraser.erase`. The setting is chosen on the selection seeds and one half of the test set,
by the mean gap to Retrain of the same seed. The other half is reported. `training` of a method
holds further keys of a recipe's training, such as momentum. The study's `device` is that of all
trainings, the CPU if it has none. Each task is a result of the study (studies/result_tables.py). A
call for some methods leaves the rows of the others as they are.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from concept_eraser import api, registry
from concept_eraser.data.labelled import Labelled, choose, rest_of
from concept_eraser.evaluation.labelled.classification import (
    Table,
    likelihood_ratio,
    measure,
    predict,
)
from concept_eraser.methods.history import History
from concept_eraser.models.module import build
from concept_eraser.training.fit import Plan, fit
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from studies import grids, tasks


@dataclass
class World:
    """The models of one seed: the start of every method, and the reference."""

    seed: int
    original: nn.Module
    retrained: nn.Module
    seconds: dict[str, float]  # of the training of each


@dataclass
class Bench:
    """One task of a study: its data, and the functions that train and measure."""

    study: dict
    task: dict
    work: Path

    def __post_init__(self) -> None:
        plugin = registry.build("dataset", self.study["data"], self.study.get("options", {}))
        self.train: Labelled = plugin.load("train")
        test_data: Labelled = plugin.load("test")
        odd = torch.arange(len(test_data)) % 2 == 1
        self.tests = {
            use: _part(test_data, rows.nonzero()[:, 0])
            for use, rows in (("select", odd), ("report", ~odd))
        }
        self.forget = choose(self.train, **self.task["forget"])
        self.retain = rest_of(self.train, self.forget)
        forget_classes = self.task["forget"].get("classes", [])
        numbers = torch.tensor(
            [self.train.class_index(c) for c in forget_classes], dtype=torch.long
        )
        self.test_rows = {
            use: (~torch.isin(t.labels, numbers)).nonzero()[:, 0] for use, t in self.tests.items()
        }

    @property
    def device(self) -> str:
        """Return the name of the device of all trainings."""
        return str(self.study.get("device", "cpu"))

    def world(self, seed: int) -> World:
        """Train the original and Retrain of a seed."""
        plan = Plan(seed=seed, **{"decay": False, **self.study["training"]})
        models, seconds = {}, {}
        for name, rows in (("original", torch.arange(len(self.train))), ("retrained", self.retain)):
            torch.manual_seed(seed)
            module = build(
                self.study["model"]["architecture"], "classifier", **self.study["model"]["options"]
            ).module.to(self.device)
            history = None
            # a history is for models without batch norm
            if name == "original" and self.study.get("history"):
                history = History(
                    tuple(module.parameters()), self.study["history"], self.work / f"history_{seed}"
                )
            seconds[name] = fit(
                module, self.loss(module), rows, plan, record=history.record if history else None
            )
            models[name] = module
        return World(seed, models["original"], models["retrained"], seconds)

    def loss(self, module: nn.Module) -> Any:
        """Return the cross-entropy of a model as a function of rows."""
        device = self.device
        return lambda rows: F.cross_entropy(
            module(self.train.inputs(rows).to(device)), self.train.labels[list(rows)].to(device)
        )

    def table(self, module: nn.Module, seed: int, use: str = "report") -> Table:
        """Return the accuracies and membership attacks of a model."""
        return measure(
            module,
            data=self.train,
            forget=self.forget,
            retain=self.retain,
            test=self.tests[use],
            test_rows=self.test_rows[use],
            seed=seed,
        )

    def erase(self, spec: dict, point: dict, world: World) -> tuple[nn.Module, float]:
        """Return the original after a method at one setting, and the seconds of the method."""
        module = copy.deepcopy(world.original)
        training: dict[str, Any] = {
            "steps": spec.get("steps", 1),
            "batch_size": 64,
            "optimizer": spec.get("optimizer", "adam"),
            "seed": world.seed,
            "device": self.device,
            "save_every": 10**6,
        }
        method = seeded(spec["method"], world.seed)
        method = with_passes(method, len(self.forget), len(self.retain), training["batch_size"])
        if spec.get("recorded"):
            method["history"] = str(self.work / f"history_{world.seed}")
        if method["name"] in ("natural_gradient", "mini_unlearning", "rewind"):
            training["weight_decay"] = self.study["training"]["weight_decay"]
        settings: dict[str, Any] = {
            "target": "classifier",
            "forget": {
                "data": (self.train.inputs(range(len(self.train))), self.train.labels),
                "loss": spec["forget"],
                "indices": self.forget.tolist(),
            },
            "retain": {"data": "rest", "loss": spec["retain"], "distill": spec.get("distill", 0.0)}
            if "retain" in spec
            else None,
            "method": method,
            "training": training,
            "trainable": {"saliency": spec.get("saliency")},
        }
        if spec.get("rewinding"):  # unseen: the half of the test set that no reported number uses
            unseen = self.tests["select"]
            settings["rewinding"] = {"data": (unseen.inputs(range(len(unseen))), unseen.labels)}
        training |= spec.get("training", {})  # a paper's optimiser, as in a recipe
        for key, value in point.items():
            section, name = key.split(".")
            settings[section] = {**settings[section], name: value}
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            run = api.erase(model=module, output=Path(folder) / "run", **settings)
        return module, run.seconds


def seeded(method: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the options of a method, with the seed of the run where it draws samples itself."""
    return {**method, "seed": seed} if method["name"] in ("influence", "ssd") else dict(method)


def with_passes(method: dict[str, Any], forget: int, retain: int, batch: int) -> dict[str, Any]:
    """Return the options of a method. A turn of SCRUB is one pass over a set, as in its paper.

    Args:
        method: The options.
        forget: The number of forgotten examples.
        retain: The number of retained examples.
        batch: The number of examples in a step.
    """
    if method["name"] != "scrub":
        return method
    steps = {"forget_steps": math.ceil(forget / batch), "retain_steps": math.ceil(retain / batch)}
    return {**method, **steps}


def choose_setting(bench: Bench, spec: dict, worlds: list[World]) -> tuple[dict, list[dict]]:
    """Return the setting with the least mean gap on the selection seeds, and all settings."""
    points = grids.points(spec.get("grid", [{}]))
    if len(points) == 1:
        return points[0], []
    grid = []
    for point in points:
        try:
            gaps = [
                bench.table(bench.erase(spec, point, w)[0], w.seed, "select").gap(
                    bench.table(w.retrained, w.seed, "select")
                )
                for w in worlds
            ]
        except UserError as error:  # the loss diverged at this setting
            grid.append({"point": point, "gap": None, "failed": str(error).split(";")[0]})
            continue
        grid.append({"point": point, "gap": sum(gaps) / len(gaps)})
    finite = [s for s in grid if s["gap"] is not None]
    if not finite:
        raise UserError(f"every setting failed: {grid[-1]['failed']}")
    return min(finite, key=lambda s: s["gap"])["point"], grid


def run_task(study: dict, name: str, methods: list[str], work: Path) -> dict[str, Any]:
    """Return the result of a task."""
    bench = Bench(study, study["tasks"][name], work)
    worlds = {seed: bench.world(seed) for seed in (*study["select"]["seeds"], *study["seeds"])}
    selection, seeds = (
        [worlds[s] for s in study["select"]["seeds"]],
        [worlds[s] for s in study["seeds"]],
    )
    shadows = {
        k: [predict(getattr(w, k), bench.train, bench.forget) for w in worlds.values()]
        for k in ("original", "retrained")
    }

    def row(module: nn.Module, world: World, seconds: float) -> dict[str, Any]:
        own_index = list(worlds).index(world.seed)  # a model is not its own shadow model
        outside = [s for i, s in enumerate(shadows["retrained"]) if i != own_index]
        inside = [s for i, s in enumerate(shadows["original"]) if i != own_index]
        ratio = likelihood_ratio(predict(module, bench.train, bench.forget), inside, outside)
        table = bench.table(module, world.seed)
        return {
            "seed": world.seed,
            **asdict(table),
            "gap": table.gap(bench.table(world.retrained, world.seed)),
            "lira": 100 * float((ratio > 0).mean()),
            "rte": seconds / world.seconds["retrained"],
        }

    rows: list[dict[str, Any]] = [
        {
            "method": "original",
            "label": "original",
            "runs": [row(w.original, w, w.seconds["original"]) for w in seeds],
        },
        {
            "method": "retrain",
            "label": "Retrain",
            "runs": [row(w.retrained, w, w.seconds["retrained"]) for w in seeds],
        },
    ]
    failures: dict[str, str] = {}
    for method in methods:
        spec, start = study["methods"][method], time.monotonic()
        try:
            point, grid = choose_setting(bench, spec, selection)
            runs = [row(*_swap(bench.erase(spec, point, w), w)) for w in seeds]
        except UserError as error:
            failures[spec["label"]] = str(error)
            print(f"{name} {method}: {error}", flush=True)
            continue
        rows.append(
            {"method": method, "label": spec["label"], "point": point, "grid": grid, "runs": runs}
        )
        print(
            (
                f"{name} {method}: gap {sum(r['gap'] for r in runs) / len(runs):.2f} "
                f"({time.monotonic() - start:.0f} s)"
            ),
            flush=True,
        )
    return {
        "task": name,
        "label": bench.task["label"],
        "n": {
            "forget": len(bench.forget),
            "retain": len(bench.retain),
            "test": len(bench.test_rows["report"]),
        },
        "seeds": study["seeds"],
        "settings": {
            k: study[k]
            for k in (
                "data",
                "options",
                "device",
                "model",
                "training",
                "history",
                "select",
                "seeds",
            )
            if k in study
        },
        "shadows": len(worlds) - 1,
        "rows": rows,
        "failed": failures,
        "environment": provenance.describe(),
    }


def _part(data: Labelled, rows: torch.Tensor) -> Labelled:
    return Labelled(
        data.labels[rows],
        data.names,
        lambda indices: data.inputs(rows[list(indices)].tolist()),
        data.about,
    )


def _swap(outcome: tuple[nn.Module, float], world: World) -> tuple[nn.Module, World, float]:
    return outcome[0], world, outcome[1]


def main() -> None:
    tasks.main(__doc__, run_task)


if __name__ == "__main__":
    main()
