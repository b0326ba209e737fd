"""Compare one erasing job with two at once on the same machine.

    python -m benchmarks.two_jobs --state "two idle cores, nothing else runs"

Each job is the command `erase` on the bundled model, in a process of its own, without
OMP_NUM_THREADS. A repetition has one job alone, two that start together, and two of which the
second starts when the first one trains. Every row of the table is one setting of the environment:

* as shipped: what the commands set themselves. A waiting thread spins briefly, and a command uses
  no more threads than cores are idle when it starts.
* the system's own: GNU OpenMP's own number of spins, and as many threads as cores.

The seconds are those of a training step, from its start to the start of the next one. With two
jobs only steps count during which both train. Two jobs that share the machine without a loss take
twice the seconds of one that has it alone. The command also writes the table of README.md.
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
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import positive
from benchmarks.scale import ALL, EXAMPLES, LEFT_OUT, TRAINING
from concept_eraser.storage.writers import write_text
from concept_eraser.utils import provenance
from studies.rendering.common import fill_blocks, machine_note, table

HERE = Path(__file__).parent
FILE, PAGE = HERE / "two_jobs.json", HERE / "README.md"
WORKER = "benchmarks.two_jobs_worker"
SPINS = "300000"  # GNU OpenMP's own, unless a machine has more threads than cores
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "as shipped": {},
    "the system's own": {
        "GOMP_SPINCOUNT": SPINS,
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    },
}
CASES = ("alone", "started together", "second started later")
PATIENCE = 600  # seconds until the first step of a job


def start(folder: Path, words: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a job that appends the start of each step, in seconds, to FOLDER/steps.txt."""
    folder.mkdir()
    inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", WORKER, str(folder / "steps.txt"), *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=HERE.parent,
            env={**inherited, "CUDA_VISIBLE_DEVICES": "", **environment},
        )


def step_starts(folder: Path) -> list[float]:
    """Return when the steps of a job began so far."""
    file = folder / "steps.txt"
    return [float(line) for line in file.read_text().split()] if file.exists() else []


def wait_for_steps(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a job has begun the first step that counts.

    Raises:
        SystemExit: It ended, or it did not begin in time.
    """
    limit = time.monotonic() + PATIENCE
    while len(step_starts(folder)) <= LEFT_OUT:
        if process.poll() is not None or time.monotonic() > limit:
            raise SystemExit(f"no step: {(folder / 'log.txt').read_text()[-2000:]}")
        time.sleep(0.05)


def common_seconds(jobs: list[list[float]]) -> list[float]:
    """Return the median seconds of a step of each job, of the steps while all jobs train."""
    begin = max(job[LEFT_OUT] for job in jobs)
    end = min(job[-1] for job in jobs)
    steps = [
        [after - before for before, after in pairwise(job) if before >= begin and after <= end]
        for job in jobs
    ]
    if not all(steps):
        raise SystemExit("the jobs did not train at the same time; give more --steps")
    return [statistics.median(one) for one in steps]


def run(case: str, words: list[str], environment: Mapping[str, str]) -> float:
    """Return the seconds of a step: of the one job, or the mean of the two jobs' medians.

    Raises:
        SystemExit: A job failed, with the end of its output.
    """
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folders = [Path(place, str(i)) for i in range(1 if case == "alone" else 2)]
        processes = []
        for folder in folders:
            if processes and case == "second started later":
                wait_for_steps(folders[0], processes[0])
            process = start(folder, [*words, "-o", str(folder / "run")], environment)
            stack.callback(process.kill)
            processes.append(process)
        for folder, process in zip(folders, processes, strict=True):
            if process.wait() != 0:
                raise SystemExit((folder / "log.txt").read_text()[-2000:])
        return statistics.mean(common_seconds([step_starts(folder) for folder in folders]))


def measure(name: str, steps: int, repetitions: int) -> dict[str, Any]:
    """Return the seconds of a step of each case. The ratios are within a repetition."""
    words = [*TRAINING, *ALL, "training.precision=fp32", f"training.steps={steps}", *EXAMPLES]
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for repetition in range(repetitions):
        for case in CASES[:: 1 if repetition % 2 == 0 else -1]:
            seconds[case].append(run(case, [*words, "-q"], ENVIRONMENTS[name]))
            print(f"{name}, {case}: {seconds[case][-1]:.3f} s", flush=True)
    ratios = {
        case: [both / one for one, both in zip(seconds["alone"], seconds[case], strict=True)]
        for case in CASES[1:]
    }
    return {
        "environment": name,
        "variables": ENVIRONMENTS[name],
        "steps": steps,
        "n": repetitions,
        "commit": provenance.commit(),
        "seconds": {case: round(statistics.median(some), 4) for case, some in seconds.items()},
        "ratios": {
            case: [round(x, 3) for x in (statistics.median(some), min(some), max(some))]
            for case, some in ratios.items()
        },
    }


def block(content: Mapping[str, Any]) -> str:
    """Return the table of README.md."""
    titles = [f"{case}, {unit}" for case in CASES[1:] for unit in ("s", "ratio to one alone")]
    lines = [["Environment", "One job alone, s", *(title.capitalize() for title in titles), "n"]]
    for row in content["rows"]:
        cells = [row["environment"], f"{row['seconds']['alone']:.2f}"]
        for case in CASES[1:]:
            ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*row["ratios"][case])
            cells += [f"{row['seconds'][case]:.2f}", ratio]
        lines.append([*cells, str(row["n"])])
    return f"{table(lines)}\n\nMUNBa on all weights of tiny-sd, {machine_note(content)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(ENVIRONMENTS)
    parser.add_argument("--environments", nargs="+", default=names, choices=names)
    parser.add_argument("--steps", type=positive, default=30, help="steps of each training")
    parser.add_argument("--repetitions", type=positive, default=3)
    parser.add_argument("--state", default="not stated", help="what else runs on the machine")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    stored = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    rows = {row["environment"]: row for row in stored}
    for name in args.environments:
        rows[name] = measure(name, args.steps, args.repetitions)
        content = {
            "environment": {
                **provenance.describe(),
                "device": "cpu",
                "threads": torch.get_num_threads(),
            },
            "state": args.state,
            "rows": [rows[one] for one in names if one in rows],
        }
        write_text(args.output, json.dumps(content, indent=1) + "\n", overwrite=True)
    if args.output == FILE:
        PAGE.write_text(fill_blocks(PAGE.read_text(), {"two-jobs": lambda: block(content)}))


if __name__ == "__main__":
    main()
