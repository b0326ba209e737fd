"""Find the largest costs of each phase of an erasing job.

    python -m benchmarks.profile_phases OUTPUT.json erase RECIPE [KEY=VALUE]... -o FOLDER

runs the command `concept-eraser` with these words. torch's profiler watches the functions in
PHASES. The operators are summed up by kind. The time of an operator is its own, without those that
it calls: on a GPU that of its kernels, else that of the CPU. The row of a phase is about its last
call, since the first one also prepares kernels. Its seconds have what the profiler adds to each
operator. They have neither the start nor the end of the profiler.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from concept_eraser.models.latent import Latent
from concept_eraser.targets import denoiser, latents
from concept_eraser.training.engine import Engine

# the name of a phase -> the owner and the name of its function
PHASES: Mapping[str, tuple[Any, str]] = {
    "encoding prompts": (denoiser, "encode_prompts"),
    "generating images": (Latent, "sample"),
    "encoding images": (latents.batches, "encode_pixels"),
    "training step": (Engine, "_step"),
}
# kinds of operators by parts of their names; the first that fits counts
KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "convolutions": ("convolution",),
    "norms": ("_norm", "moments"),
    "matrix products": ("addmm", "::mm", "bmm", "mkldnn_linear"),
    "activation functions": ("silu", "gelu", "sigmoid"),
    "copies and casts": ("copy", "::cat", "::clone", "fill_", "zero", "index", "::stack"),
    "random numbers": ("normal", "random"),
    "sums and products": (
        *("::add", "::sub", "::mul", "::div", "::sum", "::dot", "::mean", "::sqrt", "::pow"),
        *("::addc", "::lerp", "foreach", "::where", "::square", "::linalg_vector_norm"),
    ),
}
LARGEST = 3


def kind_of(operator: str) -> str:
    """Return the kind of an operator by its name, "others" for an unknown one."""
    for kind, words in KINDS.items():
        if any(word in operator for word in words):
            return kind
    return "others"


def costs(events: Any, *, gpu: bool) -> dict[str, float]:
    """Return the seconds of each kind of operators, the largest first.

    Args:
        events: `key_averages()` of torch's profiler.
        gpu: Whether the time of kernels counts.
    """
    seconds: Counter[str] = Counter()
    for event in events:
        if event.device_type != DeviceType.CPU:  # a kernel, whose time its operator has
            continue
        microseconds = event.self_device_time_total if gpu else event.self_cpu_time_total
        seconds[kind_of(event.key)] += microseconds / 1e6
    return {kind: value for kind, value in seconds.most_common() if value > 0}


@contextmanager
def watched() -> Iterator[dict[str, dict[str, Any]]]:
    """Profile the phases inside the context.

    Yields the last call of each phase: its seconds, its number, and the costs by kind.
    """
    rows: dict[str, dict[str, Any]] = {}
    originals = {phase: getattr(owner, name) for phase, (owner, name) in PHASES.items()}
    gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]

    def watch(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with profile(activities=activities) as profiler:
                start = time.monotonic()
                result = function(*args, **options)
                if gpu:
                    torch.cuda.synchronize()
                seconds = time.monotonic() - start
            rows[phase] = {
                "seconds": round(seconds, 3),
                "calls": rows.get(phase, {"calls": 0})["calls"] + 1,
                "costs": costs(profiler.key_averages(), gpu=gpu),
            }
            return result

        return call

    for phase, (owner, name) in PHASES.items():
        setattr(owner, name, watch(phase, originals[phase]))
    try:
        yield rows
    finally:
        for phase, (owner, name) in PHASES.items():
            setattr(owner, name, originals[phase])


def lines(phases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of the three largest costs of each phase, in percent of its operators."""
    rows = [
        "| phase | seconds | largest costs, % of the operators |",
        "| --- | --- | --- |",
    ]
    for phase, row in phases.items():
        total = sum(row["costs"].values())
        largest = list(row["costs"].items())[:LARGEST]
        shares = ", ".join(f"{kind} {100 * value / total:.0f}" for kind, value in largest)
        rows.append(f"| {phase} | {row['seconds']:.1f} | {shares} |")
    return rows


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT.json")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the words of concept-eraser")
    arguments = parser.parse_args(words)
    if not arguments.command:
        parser.error("give the words of concept-eraser, e.g. erase RECIPE -o FOLDER")
    from concept_eraser.cli.main import app

    try:
        with watched() as phases:
            app(arguments.command, standalone_mode=False)
    finally:
        arguments.output.write_text(json.dumps(phases, indent=1) + "\n")
    print("\n".join(lines(phases)))


if __name__ == "__main__":
    main(sys.argv[1:])
