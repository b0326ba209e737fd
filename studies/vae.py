"""UNO's benchmark (arXiv 2506.04712, Tables 1 and 2): how long until a VAE makes no more of a
class, by nine algorithms and a control that only trains on what is retained.

    python -m studies.vae [--data fonts|digits] [--runs 10] [--algorithms UNO,S] [--batchnorm
    frozen]

A VAE and a classifier are trained on all classes; each algorithm then unlearns the class that the
VAE draws most `runs` times through `concept_eraser.erase`, every run with another seed, at the
paper's settings (Adam 1e-3, batch 128, sum-reduced losses, beta_o = beta_h = 1e3, alpha = 1e-8).
Time to unlearn: training time until the class's share among prior samples is first below 2 %,
interpolated, looks not counted; by a second classifier that no algorithm trains against. With
`--batchnorm frozen` the running statistics stay as they are (the paper's move); that goes to the
result <data>_frozen. Each algorithm runs in a process of its own; its peak memory is that over its
start, with the data and the world, and includes the looks. Writes the result <data> of the study
`vae` (studies/result_tables.py) after each algorithm.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser import api, registry
from concept_eraser.data.labelled import Labelled
from concept_eraser.erasers import vae as erasers
from concept_eraser.evaluation.statistics import frechet_of_features
from concept_eraser.evaluation.time_to_unlearn import crossing
from concept_eraser.losses.labelled import VAE_LOSSES, VaeDraw
from concept_eraser.models.module import build
from concept_eraser.training.fit import Plan, fit
from concept_eraser.training.log import peak_memory, reset_peak_memory
from concept_eraser.utils import provenance
from studies.result_tables import Results

STUDY = "vae"
BELOW, SAMPLES, FID_SAMPLES = 0.02, 1000, 5000
LOOKS = (*range(21), *range(25, 101, 5), *range(120, 1001, 20))  # steps at which the share is asked
DEAR = (0, 1, 2, 5, 10, 20, 50, 100, 200, 300, 400, 530)  # ... and the FID
DATA: dict[str, dict[str, Any]] = {
    "fonts": {
        "options": {},
        "inputs": 784,
        "hidden": 400,
        "latent": 2,
        "vae_epochs": 60,
        "judge_epochs": 3,
        "steps": 530,
    },
    "digits": {
        "options": {},
        "inputs": 64,
        "hidden": 400,
        "latent": 2,
        "vae_epochs": 200,
        "judge_epochs": 30,
        "steps": 530,
    },
}
UNO = {"strength": 1000.0, "reduction": "sum"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "retain only": {"forget": "data", "retain": "data", "method": {"name": "finetune"}},  # control
    "A": {"forget": "ascent", "method": {"name": "a"}},
    "A-D": {"forget": "ascent", "retain": "data", "method": {"name": "a-d"}},
    "S": {"forget": "ascent", "retain": "data", "method": {"name": "s"}},
    "UNO": {"forget": "data", "retain": "data", "method": {"name": "uno", **UNO}},
    "UNO-S": {"forget": "data", "retain": "data", "method": {"name": "uno-s", **UNO}},
    "H": {
        "forget": "data",
        "retain": "data",
        "method": {"name": "uno", "rule": "none", "histogram": 1000.0, "reduction": "sum"},
    },
    "S^": {
        "forget": "data",
        "retain": "data",
        "method": {"name": "uno", "rule": "surgery", "histogram": 1000.0, "reduction": "sum"},
    },
    "UNO^": {
        "forget": "data",
        "retain": "data",
        "method": {"name": "uno", "histogram": 1000.0, **UNO},
    },
    "UNO^-S^": {
        "forget": "data",
        "retain": "data",
        "method": {"name": "uno", "alternate": True, "histogram": 1000.0, **UNO},
    },
}


@dataclass
class World:
    """The data, the trained VAE and the classifier. gone: the class to forget, of all the one that
    the VAE draws most;
    reference: features of real images of the other classes."""

    name: str
    forgotten_class: int
    data: Labelled
    vae: nn.Module
    judge: nn.Module  # the hat versions train against it
    witness: nn.Module  # says how much is left, and makes the features
    reference: np.ndarray
    accuracy: float

    @torch.no_grad()
    def samples(self, module: nn.Module, n: int, seed: int) -> Tensor:
        z = torch.randn(n, *module.latent_shape, generator=torch.Generator().manual_seed(seed))  # type: ignore[misc, arg-type]
        return module.eval().decode(z)  # type: ignore[operator]

    @torch.no_grad()
    def shares(self, module: nn.Module) -> Tensor:
        """The share of each class among prior samples: [classes]."""
        classes = self.witness(self.samples(module, SAMPLES, 1)).argmax(1)
        return torch.bincount(classes, minlength=10) / SAMPLES

    def share(self, module: nn.Module) -> float:
        return float(self.shares(module)[self.forgotten_class])

    @torch.no_grad()
    def fid(self, module: nn.Module) -> float:
        witness: Any = self.witness
        features = witness.features(self.samples(module, FID_SAMPLES, 2)).double().numpy()
        return frechet_of_features(features, self.reference)


def make_judge(data: Labelled, settings: dict[str, Any], seed: int) -> nn.Module:
    """UNO's classifier, trained on all classes."""
    torch.manual_seed(seed)
    net = build("mlp", "classifier", inputs=settings["inputs"]).module
    fit(
        net,
        lambda rows: F.cross_entropy(net(data.inputs(rows)), data.labels[list(rows)]),
        torch.arange(len(data)),
        Plan(settings["judge_epochs"], 128, 1e-3, "adam", seed=seed),
    )
    return net


def make_world(name: str, seed: int = 0) -> World:
    settings = DATA[name]
    plugin = registry.build("dataset", name, settings["options"])
    data, test = plugin.load("train"), plugin.load("test")
    everything = torch.arange(len(data))
    judge, witness = (make_judge(data, settings, seed + i) for i in range(2))
    with torch.no_grad():
        accuracy = float(
            (witness(test.inputs(range(len(test)))).argmax(1) == test.labels).float().mean()
        )
    torch.manual_seed(seed)
    vae = build("vae_mlp", "vae", **{k: settings[k] for k in ("inputs", "hidden", "latent")}).module
    objective = erasers.VaeObjective(data, everything, "data")
    eraser = erasers.Vae(
        vae,
        {"retain": objective},
        [n for n, _ in vae.named_parameters()],
        batchnorm="train",
        batch_size=128,
    )
    generator = torch.Generator().manual_seed(seed)

    def loss(rows: Any) -> Tensor:
        vae.train()
        noise = torch.randn(len(rows), *eraser.code_shape, generator=generator)
        draw = VaeDraw(data.inputs(rows), noise)
        value = VAE_LOSSES["data"].compute(eraser, draw, objective.settings)
        eraser.settle("retain", draw)  # a loss alone moves no running statistics
        return value

    fit(vae, loss, everything, Plan(settings["vae_epochs"], 128, 1e-3, "adam"), what="VAE")
    world = World(name, -1, data, vae, judge, witness, np.zeros(0), accuracy)
    world.forgotten_class = int(world.shares(vae).argmax())
    others = (data.labels != world.forgotten_class).nonzero()[:, 0][:FID_SAMPLES]
    with torch.no_grad():
        world.reference = witness.features(data.inputs(others.tolist())).double().numpy()  # type: ignore[operator]
    return world


def unlearn(
    world: World, algorithm: str, seed: int, steps: int, dear: bool, batchnorm: str = "train"
) -> dict[str, Any]:
    """One run: the looks, when the share crossed the bound, and the FID there and at the end."""
    spec, module, looks = ALGORITHMS[algorithm], copy.deepcopy(world.vae), []

    def look(step: int, seconds: float) -> None:
        if step in LOOKS or step == steps:
            row = {"step": step, "seconds": seconds, "share": world.share(module)}
            is_below = row["share"] < BELOW and all(r["share"] >= BELOW for r in looks)
            if is_below or step == steps or (dear and step in DEAR):
                row["fid"] = world.fid(module)
            looks.append(row)

    x = world.data.inputs(range(len(world.data)))
    settings: dict[str, Any] = {
        "forget": {
            "data": (x, world.data.labels),
            "classes": [world.forgotten_class],
            "loss": spec["forget"],
        },
        "retain": {"data": "rest", "loss": spec["retain"]} if "retain" in spec else None,
        "method": spec["method"],
        "trainable": {"batchnorm": batchnorm},
        "training": {
            "steps": steps,
            "batch_size": 128,
            "lr": 1e-3,
            "seed": seed,
            "device": "cpu",
            "save_every": 10**6,
        },
    }
    if spec["method"].get("histogram"):
        settings["histogram"] = {
            "concept": {"class": str(world.forgotten_class)},
            "judge": world.judge,
        }
    with tempfile.TemporaryDirectory() as folder:
        run = api.erase(
            model=module, target="vae", output=Path(folder) / "run", look=look, **settings
        )
    end = crossing(looks, BELOW)
    at = next((row["fid"] for row in looks if row["share"] < BELOW), None)
    return {
        "seed": seed,
        "steps": end["steps"],
        "seconds": end["seconds"],
        "fid_there": at,
        "fid": looks[-1]["fid"],
        "share": looks[-1]["share"],
        "per_step": run.seconds / steps,
        "looks": looks if dear else [],
    }


def _work(path: str, algorithm: str, runs: int, steps: int, batchnorm: str, queue: Any) -> None:
    """In a process of its own: all runs of one algorithm, and the process's peak memory."""
    try:
        world = torch.load(path, weights_only=False)  # written by this program a moment ago
        world.data = registry.build("dataset", world.name, DATA[world.name]["options"]).load(
            "train"
        )
        before = reset_peak_memory()
        results = [
            unlearn(world, algorithm, seed, steps, seed == 0, batchnorm) for seed in range(runs)
        ]
        queue.put({"runs": results, "memory_mb": peak_memory(), "memory_before_mb": before})
    except Exception as error:  # else the parent would wait for ever
        queue.put({"error": f"{type(error).__name__}: {error}"})


def _answer(process: Any, queue: Any) -> dict[str, Any]:
    """What a process puts into the queue, or an error where it ends without a word (killed for
    memory, say).
    """
    while True:
        alive = process.is_alive()
        try:
            message = queue.get(timeout=1)
        except Empty:
            if alive:
                continue
            return {"error": f"its process ended with {process.exitcode} and said nothing"}
        process.join()
        return message


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=sorted(DATA), default="fonts")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--batchnorm", choices=("train", "frozen"), default="train")
    args = parser.parse_args()
    strange = set(args.algorithms.split(",")) - set(ALGORITHMS)
    if strange:
        parser.error(f"unknown algorithm {strange.pop()!r}; available: {', '.join(ALGORITHMS)}")
    settings, start = DATA[args.data], time.monotonic()
    world = make_world(args.data)
    share, fid, train_seconds = (
        world.share(world.vae),
        world.fid(world.vae),
        time.monotonic() - start,
    )
    print(
        f"world in {train_seconds:.0f} s: judge {world.accuracy:.3f}, share {share:.3f}, "
        f"FID {fid:.1f}",
        flush=True,
    )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/world.pt"
        data, world.data = world.data, None  # type: ignore[assignment]
        torch.save(world, path)
        world.data = data
        context = multiprocessing.get_context("spawn")
        for algorithm in args.algorithms.split(","):
            queue = context.Queue()
            process = context.Process(
                target=_work,
                args=(path, algorithm, args.runs, settings["steps"], args.batchnorm, queue),
            )
            process.start()
            results[algorithm] = _answer(process, queue)
            if "error" in results[algorithm]:
                print(f"{algorithm}: {results.pop(algorithm)['error']}", flush=True)
                continue
            steps = [r["steps"] for r in results[algorithm]["runs"] if r["steps"] is not None]
            print(
                (
                    f"{algorithm}: reached in {len(steps)} of {args.runs}, steps "
                    f"{np.round(steps, 1).tolist()}"
                ),
                flush=True,
            )
            write(args, world, share, fid, train_seconds, results)


def write(
    args: argparse.Namespace,
    world: World,
    share: float,
    fid: float,
    seconds: float,
    results: dict[str, Any],
) -> None:
    settings = DATA[args.data]
    name = args.data + ("" if args.batchnorm == "train" else "_frozen")
    Results(STUDY)[name] = {
        "data": args.data,
        "seeds": list(range(args.runs)),
        "settings": {
            **settings,
            "batchnorm": args.batchnorm,
            "class": world.forgotten_class,
            "below": BELOW,
            "samples": SAMPLES,
            "fid_samples": FID_SAMPLES,
        },
        "original": {
            "share": share,
            "fid": fid,
            "judge_accuracy": world.accuracy,
            "seconds": seconds,
        },
        "algorithms": results,
        "environment": provenance.describe(),
    }


if __name__ == "__main__":
    main()
