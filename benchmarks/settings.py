"""Compare the training step with settings that the package does not use.

    python -m benchmarks.settings --state "one of two cores, the other one busy"

All steps train the same parameters of the bundled model on the same random examples, as in
benchmarks/floor.py. The step of the package is compared with:

* channels last: the weights of the denoiser have the memory format `torch.channels_last`
* fused Adam: `torch.optim.Adam(..., fused=True)`
* compiled: `torch.compile` of the denoiser. Its first step compiles, and is stated apart. Its CPU
  time has that of the compilers of C++ that it starts.
* one pass: `training.one_pass: on`
* sum, one pass: a hand-written loop that trains on the sum of the losses. It has one forward and
  one backward pass of both batches at once, and one prediction of the teacher. Its batches are
  drawn outside of the measured time.

The prefix is the part of a prediction before the first trained layer. Teacher and student of the
retain objective compute it for the same input. A step could save one of these.

The time is CPU time of the process. Each repetition runs all steps, in rotating order. Ratios are
medians of the ratios within a repetition. It takes about ten minutes on one core. It writes
settings.json and its table in README.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from benchmarks.arguments import positive
from benchmarks.floor import LEFT_OUT, LR, OBJECTIVES, TRAINED, build, eraser_of
from concept_eraser.erasers.denoiser import Denoiser
from concept_eraser.losses.denoiser import DenoiserDraw
from concept_eraser.methods.munba import Munba
from concept_eraser.models.base import Model
from concept_eraser.storage.writers import write_text
from concept_eraser.training.engine import Engine, Schedule
from concept_eraser.training.log import Log
from concept_eraser.utils import provenance
from concept_eraser.utils.provenance import derive_seed
from studies.rendering.common import fill_blocks, machine_note
from studies.rendering.common import table as table_of

HERE = Path(__file__).parent
FILE, PAGE = HERE / "settings.json", HERE / "README.md"
OWN = "engine"
SETTINGS = ("channels last", "fused Adam", "compiled", "one pass", "sum, one pass")
# a setting and what its ratio is to
RATIOS = {
    "channels last": OWN,
    "fused Adam": OWN,
    "compiled": OWN,
    "MUNBa / sum, one pass each": "sum, one pass",
    "MUNBa in two passes / sum in one": "sum, one pass",
}
NUMERATORS = {"MUNBa / sum, one pass each": "one pass", "MUNBa in two passes / sum in one": OWN}


@dataclass
class SumLoop:
    """A loop on the sum of both losses: one forward and one backward pass of both batches."""

    eraser: Denoiser
    teacher: nn.Module
    precision: str

    def __post_init__(self) -> None:
        self.params = list(self.eraser.trainable().values())
        self.optimizer = torch.optim.Adam(self.params, lr=LR)
        self.draws: dict[str, DenoiserDraw] = {}

    def draw(self, step: int, batch: int) -> None:
        """Draw the batches that the engine has in this step."""
        self.draws = {
            name: self.eraser.draw(name, [derive_seed(0, step, name, e) for e in range(batch)])
            for name in OBJECTIVES
        }

    def step(self) -> None:
        """Take one step of Adam along the gradient of the sum."""
        forget, retain = self.draws["forget"], self.draws["retain"]
        assert forget.anchor is not None
        noisy, t = torch.cat([retain.noisy, forget.noisy]), torch.cat([retain.t, forget.t])
        targets = [retain.condition.tensors["states"], forget.anchor.tensors["states"]]
        prompts = [draw.condition.tensors["states"] for draw in (retain, forget)]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            with torch.no_grad():
                target = self.teacher(noisy, t, encoder_hidden_states=torch.cat(targets)).sample
            prediction = self.eraser.module(
                noisy, t, encoder_hidden_states=torch.cat(prompts)
            ).sample
        squares = (prediction.float() - target.float()).square().flatten(1).mean(1)
        (2 * squares.mean()).backward()  # the sum of the means of two batches of one size
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def engine_step(
    model: Model, trained: str, batch: int, *, setting: str, folder: Path
) -> tuple[Denoiser, Callable[[int], None]]:
    """Return an eraser, and the package's step under a setting."""
    if setting == "channels last":
        model.denoiser.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if setting == "compiled":
        model.denoiser.compile()
    eraser = eraser_of(model, trained, batch)
    mode: Literal["on", "off"] = "on" if setting == "one pass" else "off"
    schedule = Schedule(
        steps=1, batch_size=batch, lr=LR, precision=TRAINED[trained][2], one_pass=mode
    )
    folder.mkdir()
    engine = Engine(eraser, Munba(), schedule, folder, Accelerator(cpu=True))
    if setting == "fused Adam":
        engine.optimizer = torch.optim.Adam(list(eraser.trainable().values()), lr=LR, fused=True)
    log = Log(folder / "log.jsonl", keep=0)
    return eraser, lambda step: engine.do_step(step, log)


def with_children() -> float:
    """Return the CPU time of this process, and of those that it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@contextmanager
def prefix_clock(module: nn.Module, trained: list[Tensor]) -> Iterator[list[float]]:
    """Collect the CPU seconds of each prediction before its first trained layer."""
    known = {id(tensor) for tensor in trained}
    seconds: list[float] = []
    began: list[float] = []

    def begin(*_: Any) -> None:
        began[:] = [time.process_time()]

    def end(*_: Any) -> None:
        if began:
            seconds.append(time.process_time() - began.pop())

    handles = [module.register_forward_pre_hook(begin)]
    handles += [
        layer.register_forward_pre_hook(end)
        for layer in module.modules()
        if any(id(parameter) in known for parameter in layer.parameters(recurse=False))
    ]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


def measure(
    trained: str, batch: int, repetitions: int, settings: tuple[str, ...] = SETTINGS
) -> dict[str, Any]:
    """Return the CPU seconds of the steps, their ratios, and the prefix's share of a step.

    Args:
        trained: One of the keys of `TRAINED`.
        batch: Examples of each objective.
        repetitions: How often each step is measured.
        settings: Those of `SETTINGS` that are measured, the last one included.
    """
    torch.compiler.reset()  # it compiles a function for a few models only, and then no more
    names = (OWN, *settings)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    precision = TRAINED[trained][2]
    with tempfile.TemporaryDirectory() as folder:
        steps: dict[str, Callable[[int], None]] = {}
        erasers: dict[str, Denoiser] = {}
        for name in names[:-1]:
            erasers[name], steps[name] = engine_step(
                build("tiny", torch.device("cpu")),
                trained,
                batch,
                setting=name,
                folder=Path(folder) / name,
            )
        model = build("tiny", torch.device("cpu"))
        teacher = copy.deepcopy(model.denoiser)
        loop = SumLoop(eraser_of(model, trained, batch), teacher, precision)
        steps[names[-1]] = lambda _: loop.step()
        began = with_children()
        if "compiled" in steps:
            steps["compiled"](0)
        compiling = with_children() - began
        for repetition in range(LEFT_OUT + repetitions):
            turn = repetition % len(names)
            loop.draw(repetition, batch)
            for name in (*names[turn:], *names[:turn]):
                began = time.process_time()
                steps[name](repetition)
                if repetition >= LEFT_OUT:
                    seconds[name].append(time.process_time() - began)
        own = erasers[OWN]
        with prefix_clock(own.module, list(own.trainable().values())) as prefixes:
            for repetition in range(repetitions):
                steps[OWN](repetition)
    ratios = {
        name: [
            a / b for a, b in zip(seconds[NUMERATORS.get(name, name)], seconds[other], strict=True)
        ]
        for name, other in RATIOS.items()
        if NUMERATORS.get(name, name) in names
    }
    median = {name: statistics.median(some) for name, some in seconds.items()}
    return {
        "trained": trained,
        "batch": batch,
        "n": repetitions,
        "commit": provenance.commit(),
        "cpu_seconds": {name: round(value, 4) for name, value in median.items()},
        "compiling_cpu_seconds": round(compiling, 1),
        "ratio": {
            name: [round(x, 3) for x in (statistics.median(some), min(some), max(some))]
            for name, some in ratios.items()
        },
        "prefix_share": round(statistics.median(prefixes) / median[OWN], 4),
    }


def table(content: dict[str, Any]) -> str:
    """Return the table of README.md."""
    rows = [
        [
            "Trained",
            "Batch",
            "Engine, CPU s",
            *RATIOS,
            "Compiling, CPU s",
            "Prefix, % of a step",
            "n",
        ]
    ]
    for row in content["rows"]:
        rows.append(
            [
                row["trained"],
                str(row["batch"]),
                f"{row['cpu_seconds'][OWN]:.3f}",
                *("{:.2f} [{:.2f}, {:.2f}]".format(*row["ratio"][name]) for name in RATIOS),
                f"{row['compiling_cpu_seconds']:.0f}",
                f"{100 * row['prefix_share']:.1f}",
                str(row["n"]),
            ]
        )
    return f"{table_of(rows)}\n\ntiny-sd, {machine_note(content)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trained", nargs="*", default=list(TRAINED), choices=list(TRAINED))
    parser.add_argument("--batches", nargs="*", type=positive, default=[16, 4])
    parser.add_argument("--repetitions", type=positive, default=9)
    parser.add_argument("--state", default="not stated", help="what else runs on the machine")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    rows = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    for trained in args.trained:
        for batch in args.batches:
            row = measure(trained, batch, args.repetitions)
            print(row, flush=True)
            key = (trained, batch)
            rows = [r for r in rows if (r["trained"], r["batch"]) != key] + [row]
            content = {"environment": provenance.describe(), "state": args.state, "rows": rows}
            write_text(args.output, json.dumps(content, indent=1) + "\n", overwrite=True)
    if args.output == FILE and FILE.exists():
        content = json.loads(FILE.read_text())
        PAGE.write_text(fill_blocks(PAGE.read_text(), {"settings": lambda: table(content)}))


if __name__ == "__main__":
    main()
