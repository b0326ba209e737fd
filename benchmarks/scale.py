"""Compare one process with two: seconds a step, and the bytes that each process sends.

    python -m benchmarks.scale --state "two idle cores, nothing else runs"

Each job is a command of the package on the bundled model. One process runs it, and two processes
that torchrun starts (gloo on the CPU). Every process has one thread. The batch is the same in all:
two processes have half of it each. Of an attack one process has the two halves one after the other.
A repetition runs both, in turn.

A step of a training lasts from its start to the start of the next one, so it has all that a process
waits for. The first steps and the last one are left out. An attack is measured from its first
batch of prompts to the end of its last one, and divided by its iterations. Loading the libraries
and the model, and generating images, is not counted.

The floor of the bytes is one gradient of the trained parameters for each objective, in the
precision in which it is sent. Two processes average a tensor of n bytes if each sends n bytes.
Rows of other jobs stay in scale.json. The command also writes the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.arguments import positive
from concept_eraser.storage.writers import write_text
from concept_eraser.utils import provenance
from studies.rendering.common import fill_blocks, machine_note, table

HERE = Path(__file__).parent
FILE, PAGE = HERE / "scale.json", HERE / "README.md"
WORKER = "benchmarks.scale_worker"
PROCESSES = (1, 2)
BATCH = 16  # of all processes together
PROMPTS = 17  # the original shows the concept for 16 of them
LEFT_OUT = 2  # first steps of a training, which allocate memory and choose kernels
ITERATIONS = 4  # of an attack, for each step of a training
ENOUGH = 5  # repetitions; the table has no seconds of fewer
EXAMPLES = ["forget.n=32", "retain.n=32", "generation.steps=2"]  # what they show changes no time
TRAINING = ["erase", "--forget", "tiny_star", "--anchor", "shape=circle", "--retain", "tiny_rest"]
ALL = ["--select", "all", "finish=none", "--save", "changed"]
ATTACK = ["attack", "tiny-sd-without-star", "--before", "tiny-sd", "--suite", "tiny_star"]


@dataclass(frozen=True)
class Job:
    """A command to measure.

    Attributes:
        words: The command and its settings.
        is_training: Whether it is a training. Otherwise it is an attack.
    """

    words: Sequence[str]
    is_training: bool = True

    def command(self, processes: int, steps: int, folder: Path) -> list[str]:
        """Return the command of `steps` steps, whose results lie in a new folder in `folder`."""
        share = BATCH // processes
        settings = (
            [f"training.steps={steps}", f"training.batch_size={share}", *EXAMPLES]
            if self.is_training
            # one process attacks the two batches one after the other
            else ["-n", str(PROMPTS), "--batch", str(BATCH // 2), "--set", f"iterations={steps}"]
        )
        return [*self.words, *settings, "-q", "-o", str(folder / "result")]


JOBS = {
    "MUNBa, default LoRA, bf16": Job([*TRAINING, "training.precision=bf16"]),
    "MUNBa, all weights": Job([*TRAINING, *ALL, "training.precision=fp32"]),
    # one time step, so that the images come after all iterations
    "attack unlearn_diff": Job(
        [*ATTACK, "-a", "unlearn_diff", "--set", "times=1"], is_training=False
    ),
}


def launch(processes: int, words: Sequence[str], folder: Path) -> None:
    """Run a command in one process or in several, with one thread each.

    Raises:
        SystemExit: It failed, with the end of its output.
    """
    several = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
    start = [sys.executable, "-m", *(several if processes > 1 else []), WORKER, str(folder)]
    result = subprocess.run(
        [*start, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=HERE.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    if result.returncode != 0:
        raise SystemExit(
            f"{' '.join(words)} ended with {result.returncode}:\n{result.stdout[-2000:]}"
        )


@dataclass(frozen=True)
class Run:
    """What the processes of one command recorded, by rank. See `scale_worker.Meter`."""

    records: Sequence[Mapping[str, Any]]

    def seconds_of_training(self) -> float:
        """Return the median of the first process's steps.

        The processes wait for each other in every step, so each has the same number of seconds.
        """
        starts = [step["began"] for step in self.records[0]["steps"][LEFT_OUT:]]
        return statistics.median(after - before for before, after in pairwise(starts))

    def seconds_of_attack(self) -> float:
        """Return those of the process that took longest for its batches."""
        return max(one["steps"][-1]["ended"] - one["steps"][0]["began"] for one in self.records)

    def messages(self, is_training: bool) -> list[list[Any]]:
        """Return the messages of a step of a training, or of an attack and what follows it.

        Raises:
            SystemExit: Two processes, or two steps of a training, sent different messages.
        """
        each = [
            [step["messages"] for step in one["steps"][:-1]]
            if is_training
            else [[message for step in one["steps"] for message in step["messages"]]]
            for one in self.records
        ]
        first, *others = [step for steps in each for step in steps]
        if any(step != first for step in others):
            raise SystemExit(f"the messages are not the same in each step: {[first, *others]}")
        return first

    def socket_bytes(self, is_training: bool) -> int:
        """Return the most that a process sent in a step of a training, or in an attack."""
        each = [[step["sockets"] for step in one["steps"]] for one in self.records]
        if is_training:
            return max(value for values in each for value in values[:-1])
        return max(sum(values) for values in each)


def run(name: str, processes: int, steps: int) -> Run:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        launch(processes, JOBS[name].command(processes, steps, folder), folder)
        files = [folder / f"{rank}.json" for rank in range(processes)]
        return Run([json.loads(file.read_text()) for file in files])


def measure(name: str, steps: int, repetitions: int) -> dict[str, Any]:
    """Return the seconds of a step in one and in two processes, and what a process sends.

    The speed-up is the median of the ratios within a repetition, with the smallest and the largest.
    """
    job = JOBS[name]
    counted = steps if job.is_training else steps * ITERATIONS
    all_steps = counted + (LEFT_OUT + 1 if job.is_training else 0)
    seconds: dict[int, list[float]] = {processes: [] for processes in PROCESSES}
    for repetition in range(repetitions):
        for processes in PROCESSES[:: 1 if repetition % 2 == 0 else -1]:
            done = run(name, processes, all_steps)
            taken = (
                done.seconds_of_training()
                if job.is_training
                else done.seconds_of_attack() / counted
            )
            seconds[processes].append(taken)
            if processes > 1:
                two = done
    ratios = [one / both for one, both in zip(seconds[1], seconds[2], strict=True)]
    messages, facts = two.messages(job.is_training), two.records[0]
    return {
        "job": name,
        "batch": BATCH,
        "steps": counted,
        "n": repetitions,
        "commit": provenance.commit(),
        "seconds": {str(k): round(statistics.median(some), 4) for k, some in seconds.items()},
        "speed_up": [round(x, 3) for x in (statistics.median(ratios), min(ratios), max(ratios))],
        "floor_bytes": facts["gradient_bytes"] * facts["objectives"],
        "messages": messages,
        "sent_bytes": sum(size for _, size in messages),
        "socket_bytes": two.socket_bytes(job.is_training),
    }


def block(content: dict[str, Any]) -> str:
    """Return the table of README.md."""
    seconds = ("One process, s", "Two processes, s", "Speed-up")
    sizes = ("Floor, bytes", "Sent, bytes", "On the sockets, bytes")
    lines = [["Job", "Batch", *seconds, *sizes, "Messages", "n"]]
    for row in content["rows"]:
        lines.append(
            [
                row["job"],
                str(row["batch"]),
                *(_times(row) if row["n"] >= ENOUGH else ["-"] * 3),
                *(f"{row[key]:,}" for key in ("floor_bytes", "sent_bytes", "socket_bytes")),
                str(len(row["messages"])),
                str(row["n"]),
            ]
        )
    text = f"{table(lines)}\n\ntiny-sd, {machine_note(content)}"
    if any(row["n"] < ENOUGH for row in content["rows"]):
        text += " Seconds of fewer than five repetitions are left out."
    return text


def _times(row: Mapping[str, Any]) -> list[str]:
    seconds = [f"{row['seconds'][str(processes)]:.3f}" for processes in PROCESSES]
    return [*seconds, "{:.2f} [{:.2f}, {:.2f}]".format(*row["speed_up"])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--steps", type=positive, default=10, help="measured steps of a training")
    parser.add_argument("--repetitions", type=positive, default=7)
    parser.add_argument("--state", default="not stated", help="what else runs on the machine")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    stored = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    rows = {row["job"]: row for row in stored}
    for name in args.jobs:
        rows[name] = measure(name, args.steps, args.repetitions)
        print(rows[name], flush=True)
        content = {
            # one thread in each process; this one computes nothing
            "environment": {**provenance.describe(), "device": "cpu", "threads": 1},
            "state": args.state,
            "rows": [rows[job] for job in JOBS if job in rows],
        }
        write_text(args.output, json.dumps(content, indent=1) + "\n", overwrite=True)
    if args.output == FILE:
        PAGE.write_text(fill_blocks(PAGE.read_text(), {"scale": lambda: block(content)}))


if __name__ == "__main__":
    main()
