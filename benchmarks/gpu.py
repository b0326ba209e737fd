"""Measure seconds per training step and peak memory of the published architectures.

All benchmarks, on a GPU; an interrupted call continues where it stopped:

    python -m benchmarks.gpu

A part of them:

    python -m benchmarks.gpu --families sd14 --batches 1,4

A test of this script on the CPU:

    python -m benchmarks.gpu --families tiny --jobs munba --batches 2 --device cpu \\
        --output /tmp/tiny.json

What a step asks of a GPU, counted without one (benchmarks/rehearsal_device.py):

    python -m benchmarks.gpu --device rehearsal

The weights are random, and each job runs through `erase` itself, up to its last step; nothing is
written. The time of a step is the median over the run's log without the first two steps. The memory
is the maximum that torch allocated in the run, generation of its few training images included. On
CUDA a row also has what torch reserved, what CUDA itself took beside that, and how often the host
waited in the last step. A job that does not fit has a row that says so. Each family, job and batch
size adds one row to the JSON as soon as it is measured. `python -m studies.render_results` renders
the table.

    python -m benchmarks.gpu --estimates

adds what a dry run estimates to rows without it. That needs no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks import rehearsal, rehearsal_device
from benchmarks.device_counts import Counts
from concept_eraser import api
from concept_eraser.models.loading import load
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs import memory_estimate
from concept_eraser.storage.writers import write_text
from concept_eraser.tiny import published
from concept_eraser.training import log
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError

PIXELS = {"sd14": 512, "sdxl": 512, "tiny": 64}  # SDXL is made for 1024
OUTPUT = Path(__file__).parent / "gpu.json"
GENERATING = "generating"
LEFT_OUT = 2  # first steps, which allocate memory and choose kernels
_TWO_SIDES = {"forget.loss": "anchor", "forget.anchor": "a person"}
_NO_RETAIN = {"method": {"name": "weighted", "retain": 0.0}}
_SURGERY = {"method": {"name": "uno", "hvp": "difference"}, "training.precision": "fp32"}
JOBS: dict[str, dict[str, Any]] = {  # name -> differences from plain fine-tuning of all weights
    "fine-tuning": {"method": "finetune"},
    "munba": {**_TWO_SIDES},
    "munba, fp32": {**_TWO_SIDES, "training.precision": "fp32"},
    "munba, cross-attention": {**_TWO_SIDES, "trainable.select": "cross_attention"},
    "munba, LoRA 4": {**_TWO_SIDES, "trainable.select": "cross_attention", "trainable.lora": 4},
    "uno, difference": _SURGERY,
    "uno, exact": {**_SURGERY, "method": {"name": "uno", "hvp": "exact"}},
    "esd, cross-attention": {
        **_NO_RETAIN,
        "forget.loss": "esd",
        "trainable.select": "cross_attention",
    },
}


def build(family: str, device: str = "cpu") -> Any:
    """Return a pipeline with random weights, drawn on a device, which is quick on a GPU.

    The family tiny is the bundled pipeline.
    """
    torch.manual_seed(0)
    if family == "tiny":
        return load("tiny-sd").pipeline  # type: ignore[attr-defined]
    with torch.device(device):
        return published.MADE[family][1]()


def recipe(family: str, job: str, batch: int, steps: int, device: str) -> dict[str, Any]:
    """Return the settings of a run for `erase`."""
    content: dict[str, Any] = {
        "forget": {"prompts": ["a church"], "loss": "data", "n": batch},
        "retain": {"prompts": ["a golf ball"], "n": batch},
        "method": "munba",
        "trainable": {"select": "all"},
        "training": {
            "steps": steps,
            "batch_size": batch,
            "lr": 1e-6,
            "precision": "bf16",
            "device": device,
        },
        "generation": {
            "steps": 2,
            "guidance": 5.0,
            "batch_size": min(batch, 4),
            "precision": "bf16",
        },
    }
    if family == "sdxl":
        content["model_options"] = {"size": PIXELS[family]}
    for path, value in JOBS[job].items():
        *parents, last = path.split(".")
        place = content
        for name in parents:
            place = place[name]
        place[last] = value
    if content["method"] == _NO_RETAIN["method"]:
        del content["retain"]
    return content


def step(
    pipeline: Any, family: str, job: str, batch: int, steps: int, device: str
) -> dict[str, Any]:
    """Train for a few steps. Returns seconds per step and peak memory, or that it does not fit."""
    _tidy()
    log.reset_peak_memory()
    rehearses = device == "rehearsal"
    with tempfile.TemporaryDirectory() as scratch, _counts_of_steps(device) as counts:
        rows: list[dict[str, Any]] = []
        folder = Path(scratch) / "run"
        settings = recipe(family, job, batch, steps, "auto" if rehearses else device)
        try:
            api.erase(
                settings,
                model=pipeline,
                output=folder,
                cache=Path(scratch),
                on_step=_Reader(folder, rows, steps),
            )
        except _LastStep:
            taken = _taken_memory(device)
        except torch.cuda.OutOfMemoryError as error:
            return {"fits": False, "said": str(error).splitlines()[0][:120]}
        finally:
            _tidy()
    if rehearses:
        return {"n": len(counts), **rehearsal.summary(counts)}
    seconds = [row["seconds"] for row in rows][LEFT_OUT:]
    return {
        "fits": True,
        "seconds": statistics.median(seconds),
        "slowest": max(seconds),
        "quickest": min(seconds),
        "n": len(seconds),
        "memory_mb": max(row["memory_mb"] for row in rows),
        **taken,
        **({"syncs": counts[-1].syncs} if counts else {}),
    }


def _counts_of_steps(device: str) -> AbstractContextManager[list[Counts]]:
    """Return a context with the counts of each step: none on a CPU."""
    if device == "rehearsal":
        return rehearsal.on_the_device()
    return rehearsal_device.count_steps() if device == "cuda" else nullcontext([])


def _taken_memory(device: str) -> dict[str, float]:
    """Return in MB what torch reserved on the GPU, and what was taken on it besides."""
    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "reserved_mb": round(torch.cuda.max_memory_reserved() / 2**20, 1),
        "beside_mb": round((total - free - torch.cuda.memory_reserved()) / 2**20, 1),
    }


class _LastStep(Exception):
    """The last step is done. The run need not be written."""


class _Reader:
    """Called between steps. It reads the log's rows, and ends the run after its last step."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]], steps: int) -> None:
        self.folder, self.rows, self.steps = folder, rows, steps

    def __call__(self, steps_done: int, seconds: float) -> None:
        path = self.folder / "log.jsonl"
        if path.exists():
            self.rows[:] = [json.loads(line) for line in path.read_text().splitlines()]
        if steps_done == self.steps:
            raise _LastStep


def generation(pipeline: Any, family: str, batch: int, device: str) -> dict[str, Any]:
    """Return images per second: 50 steps with guidance, bf16, after one batch to warm up."""
    _tidy()
    log.reset_peak_memory()
    try:
        model = load(pipeline).to(torch.device(device))
        if family == "sdxl":
            model.configure({"size": PIXELS[family]})
        seconds = []
        for seed in range(2):
            start = time.monotonic()
            model.sample(
                ["a church"] * batch,
                seeds=[seed] * batch,
                steps=50,
                guidance=7.5,
                autocast=torch.bfloat16,
            )
            seconds.append(time.monotonic() - start)
    except torch.cuda.OutOfMemoryError as error:
        return {"fits": False, "said": str(error).splitlines()[0][:120]}
    return {
        "fits": True,
        "images_per_second": batch / seconds[1],
        "n": batch,
        "memory_mb": log.peak_memory(),
    }


def _tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def cells(
    families: list[str], jobs: list[str], batches: list[int]
) -> Iterator[tuple[str, str, int]]:
    for family in families:
        for batch in batches:
            yield from ((family, job, batch) for job in jobs)


def choose(text: str, allowed_names: Any, what: str) -> list[str]:
    names = text.split(",") if text else list(allowed_names)
    unknown_names = [name for name in names if name not in allowed_names]
    if unknown_names:
        raise UserError(
            f"unknown {what} {unknown_names[0]!r}; there are: {', '.join(allowed_names)}"
        )
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default="", help="of sd14, sdxl, tiny; sd14,sdxl on a GPU")
    parser.add_argument("--jobs", default="", help="only those whose name begins so, e.g. munba")
    parser.add_argument("--batches", default="", help="1,4,8 by default; 4 on the device rehearsal")
    parser.add_argument("--steps", type=int, default=10, help="a run; more than 3")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "rehearsal"])
    parser.add_argument("--output", type=Path, help="gpu.json, or rehearsal.json, by default")
    parser.add_argument("--estimates", action="store_true", help="only add the estimates")
    args = parser.parse_args()
    if args.estimates:
        add_estimates(args.output or OUTPUT)
        return
    rehearses = args.device == "rehearsal"
    output: Path = args.output or (rehearsal.FILE if rehearses else OUTPUT)
    try:
        families = choose(args.families or ("tiny" if rehearses else "sd14,sdxl"), PIXELS, "family")
        jobs = [name for name in JOBS if name.startswith(args.jobs)]
        if not jobs:
            raise UserError(f"unknown job {args.jobs!r}; there are: {', '.join(JOBS)}")
        if args.device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "there is no GPU here, and on a CPU these architectures take hours; try "
                "--families tiny --device cpu"
            )
        if args.steps <= LEFT_OUT + 1:
            raise UserError(f"--steps must be more than {LEFT_OUT + 1}, found {args.steps}")
        batches = [int(b) for b in (args.batches or ("4" if rehearses else "1,4,8")).split(",")]
    except (UserError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    if not rehearses:
        jobs.append(GENERATING)
    measure(families, jobs, batches, args.steps, args.device, output)
    if output == rehearsal.FILE:
        rehearsal.write_page()


def add_estimates(output: Path) -> None:
    """Add to each measured row what a dry run estimates for its job, in MB."""
    content = json.loads(output.read_text())
    models = {}
    for row in content["rows"]:
        if row["job"] == GENERATING or "estimate_mb" in row:
            continue
        family = row["family"]
        if family not in models:
            models[family] = load("tiny-sd") if family == "tiny" else published.hollow(family)
        settings = recipe(family, row["job"], row["batch"], 10, "cuda")
        job = recipes.load({"model": "tiny-sd", **settings})
        models[family].configure(job.model_options)
        estimate = memory_estimate.estimate(job, models[family])
        row["estimate_mb"] = round(max(estimate.training, estimate.examples) / 2**20, 1)
        print(f"{family}, {row['job']}, batch {row['batch']}: {row['estimate_mb']} MB", flush=True)
    write_text(output, json.dumps(content, indent=1) + "\n", overwrite=True)


def require_same_machine(output: Path, older: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse to put rows beside those of another device or another torch.

    Raises:
        SystemExit: One of them differs.
    """
    for what, other, own in (
        ("device", older["device"], here["device"]),
        ("torch", older["versions"]["torch"], here["versions"]["torch"]),
    ):
        if other != own:
            raise SystemExit(
                f"{output} has rows of another {what}, {other}; this is {own}; give another file "
                "with --output"
            )


def measure(
    families: list[str], jobs: list[str], batches: list[int], steps: int, device: str, output: Path
) -> None:
    content = json.loads(output.read_text()) if output.exists() else {"rows": []}
    rows, here = content["rows"], provenance.describe()
    if rows:
        require_same_machine(output, content["environment"], here)
    finished_keys = {(row["family"], row["job"], row["batch"]) for row in rows}
    pipelines: dict[str, Any] = {}
    for family, job, batch in cells(families, jobs, batches):
        if (family, job, batch) in finished_keys:
            continue
        if family not in pipelines:
            pipelines.clear()  # one at a time is enough for any card
            pipelines[family] = build(family, "cpu" if device == "rehearsal" else device)
        pipeline = pipelines[family]
        result = (
            generation(pipeline, family, batch, device)
            if job == GENERATING
            else step(pipeline, family, job, batch, steps, device)
        )
        rows.append(
            {"family": family, "job": job, "batch": batch, "pixels": PIXELS[family], **result}
        )
        write_text(
            output,
            json.dumps({"environment": here, "rows": rows}, indent=1) + "\n",
            overwrite=True,
        )
        print(f"{family}, {job}, batch {batch}: {result}", flush=True)


if __name__ == "__main__":
    main()
