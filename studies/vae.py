"""UNO's benchmark (arXiv 2506.04712, Tables 1 and 2): the time until a VAE generates no more of a
class, for ten algorithms of the paper, one more of its authors' code, and a control that trains on
the retain set only.

    python -m studies.vae [--data fonts|digits|mnist|celeba] [--root FOLDER] [--runs 10]
    [--algorithms UNO,S] [--batchnorm frozen] [--fid-samples 25000]

A VAE and a classifier are trained on all classes. Each algorithm then unlearns the most frequent
class of the VAE's samples `runs` times through `concept_eraser.erase`, each run with another seed.
On `celeba` it is the class Male, as in the paper's Table 2. `--root` is the folder of MNIST or of
CelebA, which are not shipped. Their numbers of epochs and CelebA's classifiers are ours.
The settings are the paper's: Adam 1e-3, batch 128, sum-reduced losses, beta_o = beta_h = 1e3,
alpha = 1e-8. "A-D of the code" is that of the authors' modules/mnist/vae_ad.py, where surgery takes
turns with ascent. SA is surgery with ascent along the forget gradient (Bae et al., arXiv
2311.15040), as in the authors' modules/mnist/vae_sa.py. It and S also run at 1e-5, the other
learning rate of the authors' figures plots/sa_lr.pdf and plots/s_lr.pdf.

A run also stores the rate of each class among prior samples at its end. The authors' figure
plots/mnist_dist.pdf shows these for the original and for one erased VAE. The first run stores
16 samples too.

Time to unlearn: the training time until the rate of the class among prior samples is first below
2 %. It is interpolated and excludes the evaluations. A second classifier counts, which no algorithm
trains against. With `--batchnorm frozen` the running statistics are constant (in the paper they
move), and the result is <data>_frozen. FID is on 5,000 samples. The paper has 25,000
(`--fid-samples`), whose result is <data>_fid25000.

Each algorithm runs in a process of its own. Its peak memory is measured above the memory at its
start, with data and models loaded, and includes the evaluations. The result <data> of the study
`vae` (studies/result_tables.py) is written after each algorithm. With `--algorithms` the rows of
other algorithms stay, if they were measured on the same VAE.
"""

from __future__ import annotations

import argparse
import base64
import copy
import io
import math
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
from PIL import Image
from torch import Tensor, nn

from concept_eraser import api, registry
from concept_eraser.data.labelled import Labelled
from concept_eraser.data.stand_in import NotHere
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
EVALUATION_STEPS = (
    *range(21),
    *range(25, 101, 5),
    *range(120, 1001, 20),
)  # steps with an evaluation of the rate
SHEET_SAMPLES = 16  # images of a model on the page
EARLY_STEP = 5  # the authors' table has the rate after it
FID_STEPS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 300, 400, 530)  # ... and of the FID
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
    "mnist": {
        "options": {},
        "inputs": 784,
        "hidden": 400,
        "latent": 2,
        "vae_epochs": 60,
        "judge_epochs": 3,
        "steps": 530,
    },
    "celeba": {
        "options": {"size": 64},
        "forget": "Male",
        "vae": ("vae_conv", {"width": 32, "latent": 512}),
        "judge": ("resnet18", {"width": 16, "classes": 2}),
        "batch": 256,  # images that a network evaluates at once; without it all
        "vae_epochs": 20,
        "judge_epochs": 3,
        "steps": 530,
    },
}
LEARNING_RATE = 1e-3  # of the algorithms that have none of their own
UNO = {"strength": 1000.0, "reduction": "sum"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "retain only": {"forget": "data", "retain": "data", "method": {"name": "finetune"}},  # control
    "A": {"forget": "ascent", "method": {"name": "a"}},
    "A-D": {"forget": "ascent", "retain": "data", "method": {"name": "a-d"}},
    "A-D of the code": {"forget": "ascent", "retain": "data", "method": {"name": "a-s"}},
    "SA": {"forget": "ascent", "retain": "data", "method": {"name": "sa"}},
    "SA at 1e-5": {"forget": "ascent", "retain": "data", "method": {"name": "sa"}, "lr": 1e-5},
    "S": {"forget": "ascent", "retain": "data", "method": {"name": "s"}},
    "S at 1e-5": {"forget": "ascent", "retain": "data", "method": {"name": "s"}, "lr": 1e-5},
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
    """The data, the trained VAE and the classifiers.

    Args:
        name: The name of the data.
        forgotten_class: The class to forget, the most frequent one of the VAE's samples.
        data: The training data.
        vae: The VAE.
        judge: The classifier that the algorithms with a hat train against.
        witness: The classifier that counts the samples, and computes features for FID.
        reference: Features of real images of the other classes.
        accuracy: The accuracy of the witness on test images.
        fid_samples: The number of prior samples, and at most of real images, of an FID.
        root: The folder of the data set; None for the default.
    """

    name: str
    forgotten_class: int
    data: Labelled
    vae: nn.Module
    judge: nn.Module
    witness: nn.Module
    reference: np.ndarray
    accuracy: float
    fid_samples: int = FID_SAMPLES
    root: str | None = None

    @torch.no_grad()
    def of_samples(self, module: nn.Module, n: int, seed: int, function: Any) -> Tensor:
        """Return a function of n prior samples of a VAE, [n, ...]."""
        z = torch.randn(n, *module.latent_shape, generator=torch.Generator().manual_seed(seed))  # type: ignore[misc]
        module.eval()
        return torch.cat([function(module.decode(part)) for part in in_batches(self.name, z)])  # type: ignore[operator]

    @torch.no_grad()
    def rates(self, module: nn.Module) -> Tensor:
        """Return the rate of each class among prior samples, [classes]."""
        classes = self.of_samples(module, SAMPLES, 1, self.witness).argmax(1)
        return torch.bincount(classes, minlength=len(self.data.names)) / SAMPLES

    def rate(self, module: nn.Module) -> float:
        """Return the rate of the class to forget among prior samples."""
        return float(self.rates(module)[self.forgotten_class])

    @torch.no_grad()
    def fid(self, module: nn.Module) -> float:
        """Return the FID of prior samples to real images of the other classes."""
        witness: Any = self.witness
        features = self.of_samples(module, self.fid_samples, 2, witness.features)
        return frechet_of_features(features.double().numpy(), self.reference)


def in_batches(name: str, values: Tensor) -> tuple[Tensor, ...]:
    """Return parts of a tensor [n, ...] that a network of a data set evaluates at once."""
    return values.split(DATA[name].get("batch", len(values)))


def load_data(name: str, root: str | None, split: str) -> Labelled:
    """Return a data set.

    Args:
        name: Its name in DATA.
        root: Its folder; None for the default.
        split: "train" or "test".
    """
    options = {**DATA[name]["options"], **({} if root is None else {"root": root})}
    data: Labelled = registry.build("dataset", name, options).load(split)
    return data


def make_judge(data: Labelled, settings: dict[str, Any], seed: int) -> nn.Module:
    """Return UNO's classifier, trained on all classes."""
    torch.manual_seed(seed)
    architecture, options = settings.get("judge") or ("mlp", {"inputs": settings["inputs"]})
    net = build(architecture, "classifier", **options).module
    fit(
        net,
        lambda rows: F.cross_entropy(net(data.inputs(rows)), data.labels[list(rows)]),
        torch.arange(len(data)),
        Plan(settings["judge_epochs"], 128, 1e-3, "adam", seed=seed),
    )
    return net


def make_world(
    name: str, seed: int = 0, *, root: str | None = None, fid_samples: int = FID_SAMPLES
) -> World:
    """Train the VAE and the classifiers on a data set."""
    settings = DATA[name]
    data, test = (load_data(name, root, split) for split in ("train", "test"))
    everything = torch.arange(len(data))
    judge, witness = (make_judge(data, settings, seed + i) for i in range(2))

    @torch.no_grad()
    def of_images(images: Labelled, rows: Tensor, function: Any) -> Tensor:
        return torch.cat([function(images.inputs(p.tolist())) for p in in_batches(name, rows)])

    classes = of_images(test, torch.arange(len(test)), witness).argmax(1)
    accuracy = float((classes == test.labels).float().mean())
    torch.manual_seed(seed)
    architecture, options = settings.get("vae") or (
        "vae_mlp",
        {k: settings[k] for k in ("inputs", "hidden", "latent")},
    )
    vae = build(architecture, "vae", **options).module
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
    world = World(
        name,
        forgotten_class=-1,
        data=data,
        vae=vae,
        judge=judge,
        witness=witness,
        reference=np.zeros(0),
        accuracy=accuracy,
        fid_samples=fid_samples,
        root=root,
    )
    world.forgotten_class = (
        data.class_index(settings["forget"])
        if "forget" in settings
        else int(world.rates(vae).argmax())
    )
    others = (data.labels != world.forgotten_class).nonzero()[:, 0][:fid_samples]
    world.reference = of_images(data, others, witness.features).double().numpy()
    return world


def class_rates(world: World, module: nn.Module) -> list[float]:
    """Return the rate of each class among prior samples, as the numbers of samples give it."""
    return [round(float(rate), 4) for rate in world.rates(module)]


@torch.no_grad()
def sample_sheet(world: World, module: nn.Module) -> str:
    """Return prior samples side by side, as a PNG in base64. All models decode the same codes."""
    samples = world.of_samples(module, SHEET_SAMPLES, 3, lambda images: images)
    if samples.dim() == 2:  # of a network without channels
        side = math.isqrt(samples.shape[1])
        samples = samples.reshape(-1, 1, side, side)
    pixels = samples.clamp(0, 1).mul(255).round().byte()  # [n, c, h, w]
    row = torch.cat(list(pixels), 2).permute(1, 2, 0).squeeze(-1)
    file = io.BytesIO()
    Image.fromarray(row.numpy()).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def unlearn(
    world: World, algorithm: str, seed: int, steps: int, with_fid: bool, batchnorm: str = "train"
) -> dict[str, Any]:
    """Return one run: its evaluations, the time until the bound, and the FIDs."""
    spec, module = ALGORITHMS[algorithm], copy.deepcopy(world.vae)
    rows: list[dict[str, Any]] = []

    def on_step(step: int, seconds: float) -> None:
        if step in EVALUATION_STEPS or step == steps:
            row = {"step": step, "seconds": seconds, "concept_rate": world.rate(module)}
            is_below = row["concept_rate"] < BELOW and all(r["concept_rate"] >= BELOW for r in rows)
            if is_below or step == steps or (with_fid and step in FID_STEPS):
                row["fid"] = world.fid(module)
            rows.append(row)

    settings: dict[str, Any] = {
        "forget": {
            "data": world.data,
            "classes": [world.forgotten_class],
            "loss": spec["forget"],
        },
        "retain": {"data": "rest", "loss": spec["retain"]} if "retain" in spec else None,
        "method": spec["method"],
        "trainable": {"batchnorm": batchnorm},
        "training": {
            "steps": steps,
            "batch_size": 128,
            "lr": spec.get("lr", LEARNING_RATE),
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
            model=module, target="vae", output=Path(folder) / "run", on_step=on_step, **settings
        )
    end = crossing(rows, BELOW)
    at = next((row["fid"] for row in rows if row["concept_rate"] < BELOW), None)
    return {
        "seed": seed,
        "steps": end["steps"],
        "seconds": end["seconds"],
        "fid_at_bound": at,
        "fid": rows[-1]["fid"],
        "concept_rate": rows[-1]["concept_rate"],
        "early_rate": next((r["concept_rate"] for r in rows if r["step"] == EARLY_STEP), None),
        "class_rates": class_rates(world, module),
        "per_step": run.seconds / steps,
        "measurements": rows if with_fid else [],
        "samples": sample_sheet(world, module) if with_fid else "",
    }


def _work(path: str, algorithm: str, runs: int, steps: int, batchnorm: str, queue: Any) -> None:
    """Put all runs of one algorithm and the peak memory into the queue, in a process of its own."""
    try:
        world = torch.load(path, weights_only=False)  # a file of this program
        world.data = load_data(world.name, world.root, "train")
        before = reset_peak_memory()
        results = [
            unlearn(
                world, algorithm, seed=seed, steps=steps, with_fid=seed == 0, batchnorm=batchnorm
            )
            for seed in range(runs)
        ]
        queue.put({"runs": results, "memory_mb": peak_memory(), "memory_before_mb": before})
    except Exception as error:  # without a message the parent would wait
        queue.put({"error": f"{type(error).__name__}: {error}"})


def _answer(process: Any, queue: Any) -> dict[str, Any]:
    """Return the message of a process, or an error if the process ends without one."""
    while True:
        alive = process.is_alive()
        try:
            message = queue.get(timeout=1)
        except Empty:
            if alive:
                continue
            return {"error": f"its process ended with {process.exitcode} without a message"}
        process.join()
        return message


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=sorted(DATA), default="fonts")
    parser.add_argument("--root", help="the folder of MNIST or CelebA")
    parser.add_argument(
        "--fid-samples", type=int, default=FID_SAMPLES, help="prior samples of an FID"
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--algorithms", type=lambda text: text.split(","), default=list(ALGORITHMS))
    parser.add_argument("--batchnorm", choices=("train", "frozen"), default="train")
    args = parser.parse_args()
    unknown_names = set(args.algorithms) - set(ALGORITHMS)
    if unknown_names:
        parser.error(
            f"unknown algorithm {unknown_names.pop()!r}; available: {', '.join(ALGORITHMS)}"
        )
    if args.fid_samples < 2:
        parser.error(f"--fid-samples must be at least 2, found {args.fid_samples}")
    if args.root is not None and args.data not in ("mnist", "celeba"):
        parser.error(f"--root is for the data sets mnist and celeba, found {args.data}")
    settings, start = DATA[args.data], time.monotonic()
    try:
        world = make_world(args.data, root=args.root, fid_samples=args.fid_samples)
    except NotHere as error:
        parser.error(str(error))
    rate, fid, train_seconds = (
        world.rate(world.vae),
        world.fid(world.vae),
        time.monotonic() - start,
    )
    print(
        f"world in {train_seconds:.0f} s: judge {world.accuracy:.3f}, rate {rate:.3f}, "
        f"FID {fid:.1f}",
        flush=True,
    )
    earlier = earlier_algorithms(args, world, rate, fid)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/world.pt"
        data, world.data = world.data, None  # type: ignore[assignment]
        torch.save(world, path)
        world.data = data
        context = multiprocessing.get_context("spawn")
        for algorithm in args.algorithms:
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
            results[algorithm]["environment"] = provenance.describe()
            write(
                args,
                world,
                rate=rate,
                fid=fid,
                seconds=train_seconds,
                results=ordered(earlier | results),
            )


def ordered(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results of the algorithms in the order of the benchmark."""
    return {name: results[name] for name in ALGORITHMS if name in results}


def result_name(args: argparse.Namespace) -> str:
    """Return the key of the result."""
    frozen = "" if args.batchnorm == "train" else "_frozen"
    fid = "" if args.fid_samples == FID_SAMPLES else f"_fid{args.fid_samples}"
    return f"{args.data}{frozen}{fid}"


def settings_of(args: argparse.Namespace, world: World) -> dict[str, Any]:
    """Return the settings that all rows of a result share."""
    return {
        **DATA[args.data],
        "batchnorm": args.batchnorm,
        "class": world.forgotten_class,
        "below": BELOW,
        "samples": SAMPLES,
        "fid_samples": world.fid_samples,
    }


def earlier_algorithms(
    args: argparse.Namespace, world: World, rate: float, fid: float
) -> dict[str, Any]:
    """Return the stored rows of the algorithms that are not measured now.

    The same training on another machine gives a VAE that differs by rounding. So the rate and the
    accuracy may differ by 0.002, and the FID by a thousandth of itself.

    Raises:
        SystemExit: They belong to another VAE, to other settings or to other seeds.
    """
    content = Results(STUDY).get(result_name(args))
    if content is None:
        return {}
    rows = {
        name: {"environment": content["environment"], **result}
        for name, result in content["algorithms"].items()
        if name not in args.algorithms
    }
    original = content["original"]
    numbers = (rate, fid, world.accuracy)
    is_same = (
        content["settings"] == settings_of(args, world)
        and content["seeds"] == list(range(args.runs))
        and all(
            abs(original[key] - number) <= within
            for key, number, within in zip(
                ("concept_rate", "fid", "judge_accuracy"),
                numbers,
                (0.002, 1e-3 * original["fid"], 0.002),
                strict=True,
            )
        )
    )
    if rows and not is_same:
        raise SystemExit(
            f"the stored result {result_name(args)} is of another VAE, other settings or other "
            f"seeds: {original} and {content['seeds']}, now {numbers} and {args.runs} runs. Run "
            "all algorithms, or remove it with python -m studies.result_tables"
        )
    return rows


def write(
    args: argparse.Namespace,
    world: World,
    rate: float,
    fid: float,
    seconds: float,
    results: dict[str, Any],
) -> None:
    """Write the result of the algorithms so far."""
    Results(STUDY)[result_name(args)] = {
        "data": args.data,
        "seeds": list(range(args.runs)),
        "settings": settings_of(args, world),
        "original": {
            "concept_rate": rate,
            "class_rates": class_rates(world, world.vae),
            "samples": sample_sheet(world, world.vae),
            "fid": fid,
            "judge_accuracy": world.accuracy,
            "seconds": seconds,
        },
        "algorithms": results,
        "environment": provenance.describe(),
    }


if __name__ == "__main__":
    main()
