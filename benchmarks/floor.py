"""Compare a training step with a hand-written loop in plain diffusers: python -m benchmarks.floor

The step is MUNBa's with the losses `anchor` (forget) and `distill` (retain) and Adam. There are
three steps, which train the same parameters in turn, on the same batches:

* floor: two predictions by a frozen copy of the UNet, forward and backward pass of each objective,
  MUNBa's combination with its Gram matrix in float64, Adam. Drawing the batches is not counted. A
  LoRA has the forward pass of peft's layers.
* engine: the package's step, with drawing, checks and the log.
* one pass: the same with `training.one_pass: on`.

The time is CPU time of the process, or on a GPU the time until the GPU is idle again. Each
repetition runs all steps, in rotating order. It takes a few minutes on one core. Latents and
conditions are random, so that nothing is generated; the time of a step does not depend on them. It
writes floor.json and the table of README.md:

    python -m benchmarks.floor --state "one of two cores, the other one busy"

Stable Diffusion 1.4's architecture has random weights and images of 64, 128 or 256 pixels:

    python -m benchmarks.floor --models sd14-64 --trained cross-attention --batches 1

All weights of it fit 24 GB with `--shared`, if nothing else runs. The three steps then have one
state of Adam, which all of them change, and the loop's teacher has the tensors of the engine's:

    python -m benchmarks.floor --models sd14-64 --trained "all weights" --batches 1 --shared

On a GPU it writes floor_gpu.json:

    python -m benchmarks.floor --device cuda --models tiny sd14-256 --batches 4 1
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor

from benchmarks.arguments import device as device_of
from benchmarks.arguments import positive
from concept_eraser.data.batches import Examples
from concept_eraser.erasers.denoiser import Denoiser, DenoiserObjective
from concept_eraser.losses.denoiser import DenoiserDraw
from concept_eraser.methods.munba import Munba
from concept_eraser.models.base import Condition, Model
from concept_eraser.models.families.sd import StableDiffusion
from concept_eraser.models.loading import load
from concept_eraser.models.lora import Adapter, layers_of
from concept_eraser.recipes.defaults import LORA_LAYERS
from concept_eraser.recipes.selections import select
from concept_eraser.storage.writers import write_text
from concept_eraser.tiny import published
from concept_eraser.training.engine import Engine, Schedule
from concept_eraser.training.log import Log
from concept_eraser.utils import provenance
from concept_eraser.utils.provenance import derive_seed
from studies.rendering.common import fill_blocks, machine_note

HERE = Path(__file__).parent
FILE, PAGE = HERE / "floor.json", HERE / "README.md"
GPU_FILE = HERE / "floor_gpu.json"
PIXELS = {"tiny": 64, "sd14-64": 64, "sd14-128": 128, "sd14-256": 256, "sd14-512": 512}
Precision = Literal["fp32", "bf16"]
# -> the selection, the rank of a LoRA, and the precision
TRAINED: dict[str, tuple[str, int | None, Precision]] = {
    "cross-attention": ("cross_attention", None, "fp32"),
    "all weights": ("all", None, "fp32"),
    "LoRA, rank 64": ("all", 64, "fp32"),
    "default LoRA, bf16": (LORA_LAYERS, 64, "bf16"),
}
STEPS = ("floor", "engine", "one pass")
LEFT_OUT = 2  # first repetitions, which allocate memory and choose kernels
OBJECTIVES = {"retain": "distill", "forget": "anchor"}
LR = 1e-5


def build(name: str, device: torch.device) -> Model:
    """Return the bundled model, or Stable Diffusion 1.4's architecture with random weights."""
    if name == "tiny":
        return load("tiny-sd").to(device)
    torch.manual_seed(0)
    with device:
        pipeline = published.MADE["sd14"][1]()
    pipeline.unet.register_to_config(sample_size=PIXELS[name] // pipeline.vae_scale_factor)
    return StableDiffusion(pipeline, name)


def examples(model: Model, n: int, seed: int) -> Examples:
    """Return n examples of random latents, conditions and anchors."""
    generator = torch.Generator().manual_seed(seed)
    null = model.null()

    def condition() -> Condition:
        return Condition(
            {
                name: torch.randn((n, *value.shape[1:]), generator=generator)
                for name, value in null.tensors.items()
            }
        )

    return Examples(
        torch.randn((n, *model.latent_shape()), generator=generator),
        condition(),
        rows=torch.arange(n),
        anchors=condition(),
        anchor_rows=torch.arange(n),
        null=null,
    )


@dataclass
class Floor:
    """The hand-written step. `student` and its parameters are those of the eraser."""

    student: Any
    teacher: Any
    params: list[Tensor]
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.params, lr=LR)

    def gradient(self, draw: DenoiserDraw, condition: Condition) -> tuple[Tensor, ...]:
        """Return the gradient of the squared distance to the teacher's prediction."""
        with torch.autocast(
            draw.noisy.device.type, torch.bfloat16, enabled=self.precision == "bf16"
        ):
            with torch.no_grad():
                target = self.teacher(
                    draw.noisy, draw.t, encoder_hidden_states=condition.tensors["states"]
                ).sample
            prediction = self.student(
                draw.noisy, draw.t, encoder_hidden_states=draw.condition.tensors["states"]
            ).sample
            loss = torch.nn.functional.mse_loss(prediction.float(), target.float())
        return torch.autograd.grad(loss, self.params)

    def step(self, draws: Mapping[str, DenoiserDraw]) -> None:
        """Take one step of MUNBa (arXiv 2411.15537, Eqs. 6-8) for two objectives."""
        forget, retain = draws["forget"], draws["retain"]
        assert forget.anchor is not None
        first = self.gradient(retain, retain.condition)
        second = self.gradient(forget, forget.anchor)
        squares = torch.zeros(3, dtype=torch.float64, device=first[0].device)
        for a, b in zip(first, second, strict=True):
            a, b = a.double().flatten(), b.double().flatten()
            squares += torch.stack([a @ a, b @ b, a @ b])
        lengths = squares[:2].sqrt()
        slack = (1 + squares[2] / lengths.prod()).clamp(min=1e-6).sqrt()
        scales = (1 / (lengths * slack)).tolist()
        # each part is freed when its sum is there, so that no third gradient is held
        remaining = deque(zip(first, second, strict=True))
        del first, second, a, b
        for parameter in self.params:
            a, b = remaining.popleft()
            parameter.grad = (a * scales[0]).add_(b, alpha=scales[1])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@contextmanager
def as_in_peft(adapter: Adapter | None) -> Iterator[None]:
    """Let the layers of a LoRA compute as peft has them inside the context."""
    layers = [] if adapter is None else [vars(layer) for layer in adapter.layers.values()]
    own = [attributes.pop("forward") for attributes in layers]
    try:
        yield
    finally:
        for attributes, forward in zip(layers, own, strict=True):
            attributes["forward"] = forward


def eraser_of(model: Model, trained: str, batch: int) -> Denoiser:
    """Return an eraser of random examples, four batches of each objective."""
    selection, rank, _ = TRAINED[trained]
    names = select([name for name, _ in model.denoiser.named_parameters()], selection)
    adapter = None
    if rank is not None:
        layers = layers_of(model.denoiser, names, conv=True)
        adapter = Adapter(model.denoiser, layers, rank=rank, alpha=rank, seed=0)
    objectives = {
        name: DenoiserObjective(examples(model, 4 * batch, seed), loss)
        for seed, (name, loss) in enumerate(OBJECTIVES.items())
    }
    return Denoiser(model, objectives, adapter.tensors if adapter else names, adapter=adapter)


def steps_of(
    model: Model, trained: str, batch: int, folder: Path, *, shared: bool = False
) -> tuple[Denoiser, dict[str, Callable[[int], None]]]:
    """Return an eraser, and the three steps that train its parameters.

    shared: Whether they have one state of Adam and one teacher.
    """
    precision = TRAINED[trained][2]
    teacher = copy.deepcopy(model.denoiser)
    eraser = eraser_of(model, trained, batch)
    adapter = eraser.adapter
    if shared and adapter is None:
        for parameter_name, original in eraser.originals.items():
            teacher.get_parameter(parameter_name).data = original
    floor = Floor(eraser.module, teacher, list(eraser.trainable().values()), precision)
    runs: dict[str, Callable[[int], None]] = {"floor": lambda step: None}
    modes: dict[str, Literal["on", "off"]] = {"engine": "off", "one pass": "on"}
    for name, mode in modes.items():
        run_folder = folder / mode
        run_folder.mkdir()
        engine = Engine(
            eraser,
            Munba(),
            Schedule(steps=1, batch_size=batch, lr=LR, precision=precision, one_pass=mode),
            run_folder,
            Accelerator(cpu=model.device.type == "cpu"),
        )
        if shared:
            engine.optimizer.state = floor.optimizer.state
        log = Log(run_folder / "log.jsonl", keep=0)
        runs[name] = lambda step, engine=engine, log=log: engine.do_step(step, log)  # type: ignore[misc]

    draws: dict[str, DenoiserDraw] = {}

    def draw(step: int) -> None:
        """Draw the engine's batches for the floor, which is not counted."""
        draws.update(
            {
                name: eraser.draw(name, [derive_seed(0, step, name, e) for e in range(batch)])
                for name in OBJECTIVES
            }
        )

    runs["drawing"] = draw

    def plain(step: int) -> None:
        with as_in_peft(adapter):
            floor.step(draws)

    runs["floor"] = plain
    return eraser, runs


def move_apart(params: Sequence[Tensor]) -> None:
    """Move the parameters away from the original's values, as earlier steps do.

    At the original's values the gradient of the retain objective is zero, so MUNBa's combination
    divides zero by zero.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in params:
            scale = 0.02 * float(parameter.std().nan_to_num().clamp(min=0.01))
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter), alpha=scale)


def clock(device: torch.device) -> float:
    """Return the CPU time of the process, or the time at which a GPU has become idle."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.monotonic()


def measure(
    name: str,
    trained: str,
    batch: int,
    repetitions: int,
    device: torch.device,
    *,
    shared: bool = False,
) -> dict[str, Any]:
    """Return the seconds of each step: median, and the ratio to the floor.

    The ratio is the median of the ratios within a repetition, with its smallest and largest value.

    Raises:
        SystemExit: A step left the weights as they were, or not finite.
    """
    model = build(name, device)
    seconds: dict[str, list[float]] = {step: [] for step in STEPS}
    with tempfile.TemporaryDirectory() as folder:
        eraser, runs = steps_of(model, trained, batch, Path(folder), shared=shared)
        params = list(eraser.trainable().values())
        move_apart(params)
        for repetition in range(LEFT_OUT + repetitions):
            turn = repetition % len(STEPS)
            runs["drawing"](repetition)
            for step in (*STEPS[turn:], *STEPS[:turn]):
                before = params[0].detach().clone()
                began = clock(device)
                runs[step](repetition)
                ended = clock(device)
                if torch.equal(before, params[0]) or not params[0].isfinite().all():
                    raise SystemExit(f"the step {step!r} of {name}, {trained}, took no step")
                if repetition >= LEFT_OUT:
                    seconds[step].append(ended - began)
    ratios = {
        step: [a / b for a, b in zip(seconds[step], seconds["floor"], strict=True)]
        for step in STEPS[1:]
    }
    return {
        "model": name,
        "trained": trained,
        "batch": batch,
        "parameters": sum(parameter.numel() for parameter in eraser.trainable().values()),
        "n": repetitions,
        **({"shared": True} if shared else {}),
        "commit": provenance.commit(),
        ("cpu_seconds" if device.type == "cpu" else "seconds"): {
            step: round(statistics.median(some), 4) for step, some in seconds.items()
        },
        "ratio": {
            step: [round(x, 3) for x in (statistics.median(some), min(some), max(some))]
            for step, some in ratios.items()
        },
    }


def table(content: dict[str, Any]) -> str:
    """Return the table: CPU seconds of the floor, and the ratios of the other steps to it."""
    key = "cpu_seconds" if "cpu_seconds" in content["rows"][0] else "seconds"
    unit = {"cpu_seconds": "CPU s", "seconds": "s"}[key]
    lines = [
        f"| Model | Trained | Batch | Floor, {unit} | Engine / floor | One pass / floor | n |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        ratios = " | ".join(
            "{:.2f} [{:.2f}, {:.2f}]".format(*row["ratio"][step]) for step in STEPS[1:]
        )
        model = "tiny-sd" if row["model"] == "tiny" else "Stable Diffusion 1.4"
        lines.append(
            f"| {model}, {PIXELS[row['model']]} px | {row['trained']} | {row['batch']} | "
            f"{row[key]['floor']:.3f} | {ratios} | {row['n']} |"
        )
    return "\n".join([*lines, "", machine_note(content)])


def render(page: str, content: dict[str, Any]) -> str:
    blocks = {"floor": lambda: table(content)}
    if GPU_FILE.exists():
        blocks["floor-gpu"] = lambda: table(json.loads(GPU_FILE.read_text()))
    return fill_blocks(page, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description="compare a training step with a plain loop")
    parser.add_argument("--models", nargs="*", default=["tiny"], choices=list(PIXELS))
    parser.add_argument("--trained", nargs="*", default=list(TRAINED), choices=list(TRAINED))
    parser.add_argument("--batches", nargs="*", type=positive, default=[16, 4])
    parser.add_argument("--repetitions", type=positive, default=9)
    parser.add_argument("--shared", action="store_true", help="one state of Adam and one teacher")
    parser.add_argument("--state", default="not stated", help="what else runs on the machine")
    parser.add_argument("--device", default="cpu", type=device_of, metavar="{cpu,cuda}")
    parser.add_argument("--output", type=Path, help="floor.json, or floor_gpu.json, by default")
    parser.add_argument("--render", action="store_true", help="only the table, from floor.json")
    arguments = parser.parse_args()
    device: torch.device = arguments.device
    output: Path = arguments.output or (FILE if device.type == "cpu" else GPU_FILE)
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    for name in arguments.models if not arguments.render else ():
        for trained in arguments.trained:
            for batch in arguments.batches:
                row = measure(
                    name, trained, batch, arguments.repetitions, device, shared=arguments.shared
                )
                print(row, flush=True)
                key = (name, trained, batch)
                rows = [r for r in rows if (r["model"], r["trained"], r["batch"]) != key] + [row]
                content = {
                    "environment": provenance.describe(),
                    "state": arguments.state,
                    "rows": rows,
                }
                write_text(output, json.dumps(content, indent=1) + "\n", overwrite=True)
    if output in (FILE, GPU_FILE) and FILE.exists():
        PAGE.write_text(render(PAGE.read_text(), json.loads(FILE.read_text())))


if __name__ == "__main__":
    main()
