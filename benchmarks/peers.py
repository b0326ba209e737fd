"""Compare MUNBa and UNO with their authors' algorithms and with another package.

    python -m benchmarks.peers --state "one of two cores, the other one busy"

All train the same parameters of the bundled pipeline on the same images and prompts, from the same
start. The steps are:

* fine-tuning: the retain loss alone, by the package's engine.
* MUNBa, this package; UNO, this package: the engine's step, with drawing, checks and the log.
* MUNBa, authors' algorithm (JingWu321/MUNBa, SD/MUNBa_nsfw.py): both losses with their graphs, one
  backward pass of each for flat copies of the gradients, a convex solver for the weights, a third
  backward pass of the weighted sum, clipping, Adam.
* UNO, authors' algorithm (pinakm9/forget, modules/mnist/vae_ortho.py and imagenet/ortho.py):
  both gradients with their graphs, and one backward pass through all of it, with the attention
  kernel that has a second derivative.
* MUNBa, vision-unlearning: the step of the package of this name, in an environment of its own:

      python -m venv peers && peers/bin/pip install vision-unlearning==1.0.0 pyarrow==21.0.0
      python -m benchmarks.peers --other-python peers/bin/python

The losses of MUNBa are those of the authors' script: `data` (retain) and `anchor` with `teacher:
current` (forget). UNO has `data` for both. The package vision-unlearning has losses of its own.

The time is CPU time of the process with one thread. Each repetition takes all steps, in rotating
order, on the same batches. The memory is that of a process of its own for each step. The concept
rate is measured after the same number of steps, by the bundled judge. It takes half an hour on one
core, and writes peers.json and the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.arguments import positive
from concept_eraser.data import prompts
from concept_eraser.erasers.denoiser import Denoiser
from concept_eraser.evaluation import suite as suites
from concept_eraser.losses.denoiser import DenoiserDraw
from concept_eraser.methods.base import Method
from concept_eraser.methods.munba import Munba
from concept_eraser.methods.uno import Uno
from concept_eraser.methods.weighted import Weighted
from concept_eraser.models.loading import load
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs.job import Job
from concept_eraser.storage.writers import write_text
from concept_eraser.training.engine import Engine, Schedule
from concept_eraser.training.log import Log, peak_memory, reset_peak_memory
from concept_eraser.training.memory import Peak
from concept_eraser.utils import provenance
from concept_eraser.utils.progress import silent
from concept_eraser.utils.provenance import derive_seed
from studies.rendering.common import fill_blocks, machine_note

HERE = Path(__file__).parent
FILE, PAGE = HERE / "peers.json", HERE / "README.md"
OTHER = HERE / "vision_unlearning_worker.py"
TRAINED: dict[str, dict[str, Any]] = {
    "cross-attention": {"select": "cross_attention"},
    # the layers and the rank that are the defaults of vision-unlearning
    "LoRA, rank 32": {
        "select": r"re:\.attn[12]\.to_(q|k|v|out\.0)\.weight$",
        "lora": {"rank": 32, "alpha": 64},
    },
}
BASELINE, OURS, PEER = "fine-tuning", "MUNBa, this package", "MUNBa, authors' algorithm"
OUR_UNO, UNO_PEER = "UNO, this package", "UNO, authors' algorithm"
PACKAGE = "MUNBa, vision-unlearning"
INVERTED = "MUNBa, vision-unlearning, LoRA inverted"  # the same training, used as its page says
# -> the step to which its time is compared
NAMES = {BASELINE: OURS, OURS: OURS, PEER: OURS, PACKAGE: OURS, OUR_UNO: OUR_UNO, UNO_PEER: OUR_UNO}
PARTS = ("time", "memory", "concept")
LEFT_OUT = 2  # first repetitions, which allocate memory and choose kernels
FIRST = 17  # the first step's number: UNO checks its products at powers of two
MEMORY_STEPS = 3
FALLBACK = 0.1  # the authors' weight of the forget loss where their solver fails
STRENGTH = 1000.0  # UNO's beta of the authors' code for MNIST, for losses that are sums
LR = 5e-4
SUITE = {
    "concept": {"shape": "star"},
    "judge": "tiny",
    "seed": 4242,
    "sampling": {"steps": 8, "guidance": 5.0, "batch_size": 64, "precision": "fp32"},
    "groups": {
        "direct": {"prompts": "tiny_star", "role": "forget", "n": 500},
        "retained": {"prompts": "tiny_rest", "role": "retain", "n": 500},
    },
    "metrics": ["concept_rate", "accuracy"],
}


def recipe(trained: str, batch: int, images: int, model: str = "tiny-sd") -> recipes.Recipe:
    """Return the recipe whose eraser all steps train, with the losses of MUNBa's script."""
    return recipes.load(
        {
            "model": model,
            "target": "denoiser",
            "forget": {
                "prompts": "tiny_star",
                "loss": "anchor",
                "anchor": {"shape": "circle"},
                "teacher": "current",
                "n": images,
            },
            "retain": {"prompts": "tiny_rest", "loss": "data", "n": images},
            "method": "munba",
            "trainable": TRAINED[trained],
            "training": {"steps": 1, "batch_size": batch, "lr": LR, "device": "cpu"},
            "generation": {
                "steps": 12,
                "guidance": 5.0,
                "batch_size": 64,
                "precision": "fp32",
            },
        }
    )


@dataclass
class Bench:
    """The model and two erasers of the same parameters, by the method whose losses they have."""

    trained: str
    batch: int
    images: int
    folder: Path  # for logs, and for the cache of generated images
    source: str = "tiny-sd"

    def __post_init__(self) -> None:
        self.recipe = recipe(self.trained, self.batch, self.images, self.source)
        self.model: Any = load(self.source)
        job = Job(self.recipe, self.model, self.folder, silent, cache=self.folder / "cache")
        first: Any = job.eraser()
        objectives = {
            name: replace(one, loss="data") for name, one in first.objective_by_name.items()
        }
        self.adapter = first.adapter
        second = Denoiser(self.model, objectives, first.selected_names, adapter=self.adapter)
        self.erasers: dict[str, Denoiser] = {"munba": first, "uno": second}
        self.params = list(first.trainable().values())

    def draws(self, losses: str, step: int) -> dict[str, DenoiserDraw]:
        """Return the batches that the engine draws at a step."""
        eraser = self.erasers[losses]
        return {
            name: eraser.draw(name, [derive_seed(0, step, name, e) for e in range(self.batch)])
            for name in eraser.objectives
        }

    @torch.no_grad()
    def reset(self) -> None:
        """Give the parameters the values before the training."""
        eraser = self.erasers["munba"]
        for name, parameter in eraser.trainable().items():
            parameter.copy_(eraser.originals[name])

    def texts(self) -> dict[str, list[str]]:
        """Return the prompts of the examples of each objective."""
        seed, specs = self.recipe.generation.seed, self.recipe.objective_specs
        return {
            name: [row.text for row in prompts.load(str(spec.prompts)).take(spec.n, seed).prompts]
            for name, spec in specs.items()
        }


class Step(Protocol):
    """One way to train. The batches are drawn in `draw`, which is not part of the step's time."""

    def draw(self, step: int) -> None: ...
    def step(self, step: int) -> float:
        """Take a step. Returns its CPU seconds."""
        ...


@dataclass
class EngineStep:
    """The package's step. It draws its batches itself, within its time."""

    bench: Bench
    method: Method
    losses: str

    def __post_init__(self) -> None:
        folder = Path(tempfile.mkdtemp(dir=self.bench.folder))
        self.engine = Engine(
            self.bench.erasers[self.losses],
            self.method,
            Schedule(steps=1, batch_size=self.bench.batch, lr=LR),
            folder,
            Accelerator(cpu=True),
        )
        self.log = Log(folder / "log.jsonl", keep=0)

    def draw(self, step: int) -> None:
        return

    def step(self, step: int) -> float:
        began = time.process_time()
        self.engine.do_step(step, self.log)
        return time.process_time() - began


@dataclass
class HandWritten:
    """A step written by hand, with Adam."""

    bench: Bench
    losses: ClassVar[str]
    drawn: dict[str, DenoiserDraw] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.params = self.bench.params
        self.optimizer = torch.optim.Adam(self.params, lr=LR)

    def draw(self, step: int) -> None:
        self.drawn = self.bench.draws(self.losses, step)

    def loss(self, name: str) -> Tensor:
        return self.bench.erasers[self.losses].loss(name, self.drawn[name])

    def step(self, step: int) -> float:
        began = time.process_time()
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()
        return time.process_time() - began

    def backward(self) -> None:
        """Give the parameters their gradients."""
        raise NotImplementedError

    def flat(self, loss: Tensor, *, create_graph: bool) -> Tensor:
        """Return the gradient of a loss as one vector. The graph of the loss stays."""
        parts = torch.autograd.grad(loss, self.params, retain_graph=True, create_graph=create_graph)
        return torch.cat([part.flatten() for part in parts])


class MunbaStep(HandWritten):
    """Three backward passes, flat copies of the gradients, and weights of a convex solver.

    The solver is TorchJD's of Nash-MTL (arXiv 2202.01017), whose public code is also the origin of
    the authors' solver. It stops at a change of 1e-6, theirs at 1e-3. The Gram matrix has all
    tensors, as in the authors' script for classes; their script for nudity has the first tensor.
    """

    losses = "munba"

    def __post_init__(self) -> None:
        super().__post_init__()
        from torchjd.aggregation import NashMTL  # a development dependency

        rule = NashMTL(n_tasks=2, max_norm=0.0, update_weights_every=1, optim_niter=100)
        self.solve: Any = rule.weighting
        self.solver_seconds, self.fallbacks = 0.0, 0

    def backward(self) -> None:
        losses = [self.loss("retain"), self.loss("forget")]
        gradients = torch.stack([self.flat(loss, create_graph=False) for loss in losses])
        began = time.process_time()
        weights = self.solve(gradients)
        self.solver_seconds += time.process_time() - began
        if not bool(torch.isfinite(weights).all()) or bool((weights == 1).all()):
            weights = torch.tensor([1.0, FALLBACK])
            self.fallbacks += 1
        (weights[0] * losses[0] + weights[1] * losses[1]).backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)


class UnoStep(HandWritten):
    """L_r + beta cos^2(g_r, g_f), and its gradient by one backward pass through both gradients."""

    losses = "uno"

    def backward(self) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            retain, forget = self.loss("retain"), self.loss("forget")
            a, b = (self.flat(loss, create_graph=True) for loss in (retain, forget))
            cosine2 = (a @ b) ** 2 / ((a @ a) * (b @ b))
            (self.drawn["retain"].terms * retain + STRENGTH * cosine2).backward()


@dataclass
class OtherPackage:
    """The step of vision-unlearning, in a process of its environment (see its worker)."""

    bench: Bench
    python: str

    def __post_init__(self) -> None:
        folder = Path(tempfile.mkdtemp(dir=self.bench.folder))
        expected = export(self.bench, folder)
        self.process = subprocess.Popen(
            [self.python, str(OTHER), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.about = self._answer()
        actual = load_file(folder / "prediction.safetensors")["prediction"]
        error = float((actual - expected).norm() / expected.norm())
        if not error < 1e-3:
            raise RuntimeError(f"the pipeline of {self.python} differs: relative error {error:g}")

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # the package writes its log there too
            if line.startswith("RESULT "):
                answer: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return answer
        raise RuntimeError(f"the worker of {self.python} ended")

    def ask(self, *words: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def draw(self, step: int) -> None:
        generator = torch.Generator().manual_seed(derive_seed(0, step, "other package"))
        rows = torch.randint(self.bench.images, (self.bench.batch,), generator=generator)
        self.rows = ",".join(map(str, rows.tolist()))

    def step(self, step: int) -> float:
        return float(self.ask("step", self.rows)["cpu_seconds"])

    def close(self) -> None:
        self.process.communicate(timeout=60)


@torch.no_grad()
def export(bench: Bench, folder: Path) -> Tensor:
    """Write the pipeline and the examples for the worker. Returns a prediction for comparison.

    The libraries of its environment name the text encoder's tensors with a prefix.
    """
    pipeline = bench.model.pipeline
    plain: Any = load(bench.source)  # without an adapter
    plain.denoiser.save_pretrained(folder / "unet")
    for name in ("vae", "scheduler"):
        getattr(pipeline, name).save_pretrained(folder / name)
    encoder = pipeline.text_encoder
    encoder.config.save_pretrained(folder / "text_encoder")
    tensors = {
        f"text_model.{key.removeprefix('text_model.')}": value.contiguous()
        for key, value in encoder.state_dict().items()
    }
    save_file(tensors, folder / "text_encoder" / "model.safetensors", {"format": "pt"})
    examples: dict[str, Tensor] = {}
    for name, texts in bench.texts().items():
        latents = bench.erasers["munba"].objective_by_name[name].examples.latents
        assert latents is not None
        examples[f"{name}.pixels"] = bench.model.decode(latents).clamp(-1, 1).contiguous()
        examples[f"{name}.tokens"] = pipeline.tokenizer(
            texts, padding="max_length", truncation=True, return_tensors="pt"
        ).input_ids
    save_file(examples, folder / "examples.safetensors")
    noisy = torch.randn(
        (2, *bench.model.latent_shape()), generator=torch.Generator().manual_seed(0)
    )
    save_file({"noisy": noisy, "t": torch.tensor([100, 800])}, folder / "inputs.safetensors")
    condition = plain.encode(bench.texts()["forget"][:2])
    prediction: Tensor = plain.denoise(noisy, torch.tensor([100, 800]), condition)
    return prediction


def make(name: str, bench: Bench, python: str | None = None) -> Step:
    if name == PEER:
        return MunbaStep(bench)
    if name == UNO_PEER:
        return UnoStep(bench)
    if name == PACKAGE:
        assert python is not None
        return OtherPackage(bench, python)
    methods: dict[str, tuple[Method, str]] = {
        BASELINE: (Weighted(forget=0.0), "munba"),
        OURS: (Munba(), "munba"),
        OUR_UNO: (Uno(strength=STRENGTH), "uno"),
    }
    return EngineStep(bench, *methods[name])


@contextmanager
def closing(step: Step) -> Iterator[Step]:
    try:
        yield step
    finally:
        if isinstance(step, OtherPackage):
            step.close()


def measure_time(
    bench: Bench, names: list[str], repetitions: int, python: str | None
) -> dict[str, dict[str, Any]]:
    """Return the CPU seconds of each step: median, and the ratio to this package's step.

    The ratio is the median of the ratios within a repetition, with its smallest and largest value.
    """
    steps = {name: make(name, bench, python) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(LEFT_OUT + repetitions):
        turn = repetition % len(names)
        for name in (*names[turn:], *names[:turn]):
            steps[name].draw(FIRST + repetition)
            seconds[name].append(steps[name].step(FIRST + repetition))
    rows: dict[str, dict[str, Any]] = {}
    for name, step in steps.items():
        own = seconds[name][LEFT_OUT:]
        rows[name] = {"n": repetitions, "cpu_seconds": round(statistics.median(own), 4)}
        if NAMES[name] in seconds and NAMES[name] != name:
            ratios = [a / b for a, b in zip(own, seconds[NAMES[name]][LEFT_OUT:], strict=True)]
            middle = statistics.median(ratios)
            rows[name]["ratio"] = [round(x, 3) for x in (middle, min(ratios), max(ratios))]
        if isinstance(step, MunbaStep):
            share = step.solver_seconds / (LEFT_OUT + repetitions)
            rows[name] |= {"solver_seconds": round(share, 4), "fallbacks": step.fallbacks}
        if isinstance(step, OtherPackage):
            rows[name]["versions"] = step.about["versions"]
            step.close()
    return rows


def memory_of(name: str, bench: Bench) -> dict[str, Any]:
    """Return the MB that the steps of this process add: of its resident set, and of its tensors.

    The resident set is measured first. It has all libraries and the examples already.
    """
    step = make(name, bench)
    before = reset_peak_memory()
    for number in range(MEMORY_STEPS):
        step.draw(number)
        step.step(number)
    resident = peak_memory() - before
    step.draw(MEMORY_STEPS)
    with Peak() as peak:
        step.step(MEMORY_STEPS)
    return {"resident_mb": round(resident, 1), "tensors_mb": round(peak.peak / 2**20, 2)}


def measure_memory(bench: Bench, name: str, python: str | None) -> dict[str, Any]:
    """Return the memory of a step in a process of its own."""
    if name == PACKAGE:
        with closing(make(name, bench, python)) as step:
            step.draw(0)
            assert isinstance(step, OtherPackage)
            return {"resident_mb": step.ask("memory", step.rows, MEMORY_STEPS)["resident_mb"]}
    words = ["--child", name, "--trained", bench.trained, "--batch", str(bench.batch)]
    words += ["--images", str(bench.images), "--folder", str(bench.folder)]
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=HERE.parent,
    )
    memory: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return memory


def measure_concept(bench: Bench, n: int, before: Any) -> dict[str, Any]:
    """Return the concept rate and the retain accuracy of the model, of n images each.

    Each is [value, low, high], with Wilson's interval of 95 %.
    """
    suite = suites.load(SUITE).with_at_most(n)
    evaluation = suites.evaluate(before, bench.model, suite, cache=bench.folder / "cache")
    numbers = {"rate": ("concept_rate", "direct"), "accuracy": ("accuracy_shape", "retained")}
    row: dict[str, Any] = {"n": n}
    for key, place in numbers.items():
        result = evaluation.find(*place)
        assert result is not None
        row[key] = [round(x, 4) for x in (result.after.value, result.after.low, result.after.high)]
    return row


def train(
    bench: Bench, name: str, steps: int, python: str | None
) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Train from the start.

    Returns notes, and the changes of weights that vision-unlearning made, if any.
    """
    bench.reset()
    with closing(make(name, bench, python)) as step:
        for number in range(steps):
            step.draw(number)
            step.step(number)
        about = {"steps": steps, "lr": LR}
        if isinstance(step, MunbaStep):
            about["fallbacks"] = step.fallbacks
        if not isinstance(step, OtherPackage):
            return about, {}
        path = bench.folder / "changes.safetensors"
        step.ask("save", path)
        return about, load_file(path)


@contextmanager
def shifted(bench: Bench, changes: Mapping[str, Tensor], factor: float) -> Iterator[None]:
    """Add changes of the UNet's weights inside the context."""
    assert bench.adapter is not None
    weights = bench.adapter.base()
    originals = {name: weights[name].detach().clone() for name in changes}
    with torch.no_grad():
        for name, change in changes.items():
            weights[name].add_(change, alpha=factor)
        yield
        for name, value in originals.items():
            weights[name].copy_(value)


def concept_rows(
    bench: Bench, name: str, *, steps: int, n: int, python: str | None
) -> dict[str, dict[str, Any]]:
    """Return what remains of the concept after training with a step, by the row's name."""
    before = load(bench.source)
    about, changes = train(bench, name, steps, python)
    if not changes:
        return {name: about | measure_concept(bench, n, before)}
    rows = {}
    for row, factor in {name: 1.0, INVERTED: -1.0}.items():
        with shifted(bench, changes, factor):
            rows[row] = about | measure_concept(bench, n, before)
    return rows


def table(content: dict[str, Any]) -> str:
    """Return the table: time, memory and what remains of the concept, one row for each step."""
    lines = [
        "| Trained | Step | CPU s | / this package | Tensors, MB | Resident set, MB | "
        "Concept rate, % | Retain accuracy, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = [BASELINE, OURS, PEER, PACKAGE, INVERTED, OUR_UNO, UNO_PEER]
    for trained in TRAINED:
        rows = {row["name"]: row for row in content["rows"] if row["trained"] == trained}
        for name in [name for name in order if name in rows]:
            times, memory, concept = (rows[name].get(part, {}) for part in PARTS)
            ratio = times.get("ratio")
            cells = [
                f"{times['cpu_seconds']:.3f}" if times else "",
                "{:.2f} [{:.2f}, {:.2f}]".format(*ratio) if ratio else "",
                f"{memory['tensors_mb']:.1f}" if "tensors_mb" in memory else "",
                f"{memory['resident_mb']:.0f}" if memory else "",
                *(_percent(concept.get(key)) for key in ("rate", "accuracy")),
            ]
            lines.append(f"| {trained} | {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", note(content)])


def note(content: dict[str, Any]) -> str:
    """Return the sentence below the table. All rows have the same settings."""
    times, concept = (
        [row[part] for row in content["rows"] if part in row] for part in ("time", "concept")
    )
    text = [
        f"tiny-sd, batch {_only(content['rows'], 'batch')}",
        f"n = {_only(times, 'n')} repetitions",
    ]
    if concept:
        untouched = content["untouched"]
        text += [
            f"{_only(concept, 'steps')} steps of training with one seed, "
            f"n = {_only(concept, 'n')} images for each share",
            f"before the training the concept rate is {_percent(untouched['rate'])} and the "
            f"retain accuracy {_percent(untouched['accuracy'])}",
        ]
    for versions in [row["versions"] for row in times if "versions" in row]:
        text.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    return f"{'; '.join(text)}. This package: {machine_note(content)}"


def _only(rows: list[dict[str, Any]], key: str) -> Any:
    (value,) = {row[key] for row in rows}
    return value


def _percent(share: list[float] | None) -> str:
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * x for x in share)) if share else ""


def render(page: str, content: dict[str, Any]) -> str:
    return fill_blocks(page, {"peers": lambda: table(content)})


class Results:
    """The rows of the JSON file. Each measurement is written at once."""

    def __init__(self, path: Path, state: str) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.content |= {"environment": provenance.describe(), "state": state}
        self.content.setdefault("rows", [])

    def add(self, bench: Bench, name: str, part: str, numbers: dict[str, Any]) -> None:
        rows = self.content["rows"]
        row = next((r for r in rows if (r["trained"], r["name"]) == (bench.trained, name)), None)
        if row is None:
            row = {"trained": bench.trained, "name": name}
            rows.append(row)
        row |= {
            "batch": bench.batch,
            "images": bench.images,
            "parameters": sum(parameter.numel() for parameter in bench.params),
            part: {**numbers, "commit": provenance.commit()},
        }
        print(bench.trained, name, part, numbers, flush=True)
        self.write()

    def write(self) -> None:
        write_text(self.path, json.dumps(self.content, indent=1) + "\n", overwrite=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="compare with the algorithms of others")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--trained", nargs="*", default=list(TRAINED), choices=list(TRAINED))
    parser.add_argument("--names", nargs="*", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument(
        "--images", type=positive, default=64, help="for training, of each objective"
    )
    parser.add_argument("--repetitions", type=positive, default=9)
    parser.add_argument("--steps", type=positive, default=50, help="of training before the judge")
    parser.add_argument("--judged", type=positive, default=100, help="images for each share")
    parser.add_argument("--other-python", help=f"Python of an environment for {PACKAGE}")
    parser.add_argument("--state", default="not stated", help="what else runs on the machine")
    parser.add_argument("--folder", type=Path, help="for logs and generated images")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--render", action="store_true", help="only the table, from peers.json")
    parser.add_argument("--child", choices=list(NAMES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = arguments.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        if arguments.child:
            (trained,) = arguments.trained
            bench = Bench(trained, arguments.batch, arguments.images, folder)
            print(json.dumps(memory_of(arguments.child, bench)))
            return
        if not arguments.render:
            measure(arguments, folder)
    if arguments.output == FILE and FILE.exists():
        PAGE.write_text(render(PAGE.read_text(), json.loads(FILE.read_text())))


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    results = Results(arguments.output, arguments.state)
    python: str | None = arguments.other_python
    for trained in arguments.trained:
        bench = Bench(trained, arguments.batch, arguments.images, folder)
        names = [
            name
            for name in arguments.names
            if name != PACKAGE or (python is not None and bench.adapter is not None)
        ]
        if "time" in arguments.parts:
            times = measure_time(bench, names, arguments.repetitions, python)
            for name, numbers in times.items():
                results.add(bench, name, "time", numbers)
        for name in names if "memory" in arguments.parts else ():
            bench.reset()
            results.add(bench, name, "memory", measure_memory(bench, name, python))
        if "concept" in arguments.parts:
            bench.reset()
            results.content["untouched"] = measure_concept(bench, arguments.judged, bench.model)
            for name in names:
                rows = concept_rows(
                    bench, name, steps=arguments.steps, n=arguments.judged, python=python
                )
                for row, numbers in rows.items():
                    results.add(bench, row, "concept", numbers)


if __name__ == "__main__":
    main()
