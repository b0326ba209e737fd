"""Compare the steps of MUNBa, the plain sum and UNO, and take MUNBa's apart.

    python -m benchmarks.step_parts --state "one of two cores, the other one busy"

All three train the same parameters of the bundled model on the same random examples, through the
package's engine, as in benchmarks/floor.py. The time is CPU time of the process. Each repetition
runs all steps, in rotating order. Ratios are medians of the ratios within a repetition.

The parts of MUNBa's step are: drawing the batches; the forward and backward passes, teachers
included; the optimizer; and the rest, which is the Gram matrix, the combination, all checks and the
log. It takes a few minutes on one core. It writes step_parts.json and its table in README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator

from benchmarks.arguments import positive
from benchmarks.floor import LEFT_OUT, LR, TRAINED, build, eraser_of
from concept_eraser.methods.munba import Munba
from concept_eraser.methods.uno import Uno
from concept_eraser.methods.weighted import Weighted
from concept_eraser.storage.writers import write_text
from concept_eraser.training.closure import LossClosure
from concept_eraser.training.engine import Engine, Schedule
from concept_eraser.training.log import Log
from concept_eraser.utils import provenance
from studies.rendering.common import fill_blocks, machine_note, table

HERE = Path(__file__).parent
FILE, PAGE = HERE / "step_parts.json", HERE / "README.md"
FIRST = 17  # the first step's number: UNO checks its products at powers of two
METHODS: dict[str, Callable[[], Any]] = {
    "MUNBa": Munba,
    "plain sum": Weighted,
    "UNO": lambda: Uno(strength=1.0),
}
REST = "Gram matrix, combination, checks, log"
PARTS = ("drawing", "passes", "optimizer", REST)


@contextmanager
def timed(engine: Engine) -> Iterator[dict[str, float]]:
    """Count the CPU seconds of an engine's drawing, passes and optimizer inside the context."""
    seconds = dict.fromkeys(PARTS[:-1], 0.0)

    def counted(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.process_time() - began

        return call

    with ExitStack() as stack:
        for part, owner, name in (
            ("drawing", engine, "_draws"),
            ("passes", LossClosure, "_gradient"),
            ("optimizer", engine.optimizer, "step"),
        ):
            function = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, counted(part, function)))
        yield seconds


def measure(trained: str, batch: int, repetitions: int) -> dict[str, Any]:
    """Return the CPU seconds of the steps, their ratios, and the shares of MUNBa's parts."""
    model = build("tiny", torch.device("cpu"))
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    shares: dict[str, list[float]] = {part: [] for part in PARTS}
    eraser = eraser_of(model, trained, batch)
    with tempfile.TemporaryDirectory() as folder:
        engines: dict[str, tuple[Engine, Log]] = {}
        for number, (name, make) in enumerate(METHODS.items()):
            place = Path(folder) / str(number)
            place.mkdir()
            # UNO's products need gradients in fp32
            precision = "fp32" if name == "UNO" else TRAINED[trained][2]
            schedule = Schedule(steps=1, batch_size=batch, lr=LR, precision=precision)
            engine = Engine(eraser, make(), schedule, place, Accelerator(cpu=True))
            engines[name] = engine, Log(place / "log.jsonl", keep=0)
        order = list(METHODS)
        for repetition in range(LEFT_OUT + repetitions):
            turn = repetition % len(order)
            for name in (*order[turn:], *order[:turn]):
                engine, log = engines[name]
                began = time.process_time()
                with timed(engine) as parts:
                    engine.do_step(FIRST + repetition * 2, log)
                taken = time.process_time() - began
                if repetition < LEFT_OUT:
                    continue
                seconds[name].append(taken)
                if name == "MUNBa":
                    parts[REST] = taken - sum(parts.values())
                    for part in PARTS:
                        shares[part].append(parts[part] / taken)
    return {
        "trained": trained,
        "batch": batch,
        "n": repetitions,
        "commit": provenance.commit(),
        "cpu_seconds": {name: round(statistics.median(some), 4) for name, some in seconds.items()},
        "ratio": {
            "MUNBa / plain sum": _ratio(seconds["MUNBa"], seconds["plain sum"]),
            "UNO / MUNBa": _ratio(seconds["UNO"], seconds["MUNBa"]),
        },
        "share": {part: round(statistics.median(some), 4) for part, some in shares.items()},
    }


def _ratio(some: list[float], others: list[float]) -> list[float]:
    """Return the median, the smallest and the largest ratio within a repetition."""
    ratios = [a / b for a, b in zip(some, others, strict=True)]
    return [round(x, 3) for x in (statistics.median(ratios), min(ratios), max(ratios))]


def block(content: dict[str, Any]) -> str:
    """Return the table of README.md."""
    ratios = ("MUNBa / plain sum", "UNO / MUNBa")
    rows = [["Trained", "Batch", "MUNBa, CPU s", *ratios, *(f"{part}, %" for part in PARTS), "n"]]
    for row in content["rows"]:
        # UNO runs in fp32, so its ratio to a step in bf16 says nothing
        shown = ratios[:1] if TRAINED[row["trained"]][2] == "bf16" else ratios
        rows.append(
            [
                row["trained"],
                str(row["batch"]),
                f"{row['cpu_seconds']['MUNBa']:.3f}",
                *(
                    "{:.2f} [{:.2f}, {:.2f}]".format(*row["ratio"][name]) if name in shown else "-"
                    for name in ratios
                ),
                *(f"{100 * row['share'][part]:.1f}" for part in PARTS),
                str(row["n"]),
            ]
        )
    return f"{table(rows)}\n\ntiny-sd, {machine_note(content)}"


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
    rows = []
    for trained in args.trained:
        for batch in args.batches:
            rows.append(measure(trained, batch, args.repetitions))
            print(rows[-1], flush=True)
    content = {"environment": provenance.describe(), "state": args.state, "rows": rows}
    write_text(args.output, json.dumps(content, indent=1) + "\n", overwrite=True)
    if args.output == FILE:
        PAGE.write_text(fill_blocks(PAGE.read_text(), {"parts": lambda: block(content)}))


if __name__ == "__main__":
    main()
