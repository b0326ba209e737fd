"""Fuzzed inputs for all readers.

    python -m tests.campaigns.fuzz --n 100000 --seed 0 [--only manifest,state]

A reader returns, or raises UserError of at most 4,000 characters, within LIMIT seconds. The
examples of a target run in a forked process, in a folder of their own. It is a defect if a reader
writes outside of that folder, starts a program, contacts a host, or ends the process.

A target is a hypothesis strategy, or `make(seed)`, with `run(example, folder)`. `run` raises an
error for a defect only.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import mmap
import os
import re
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.campaigns.isolation import Watch

LIMIT = 5.0  # seconds an input may take
BATCH = 500  # inputs of one process
MEMORY = 12 * 2**30
RESULTS = Path(__file__).parent / "results" / "fuzz.json"


class SlowError(Exception):
    """An input that takes longer than LIMIT."""


def targets() -> dict[str, Any]:
    """All targets by name: those of data and models (targets.py), and those of runs
    (targets_runs.py).
    """
    from tests.campaigns import targets_runs

    run_targets: dict[str, Any] = dict(targets_runs.TARGETS)
    try:
        from tests.campaigns import targets
    except ImportError:
        return run_targets
    return {**targets.TARGETS, **run_targets}


def fuzz(target: Any, n: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run n examples of a target. Returns the count, the seconds and the defects."""
    if hasattr(target, "make"):
        target.make(seed)  # builds its corpus once
    start, total = time.monotonic(), 0
    defects: dict[str, dict[str, Any]] = {}  # one defect of each kind, by the end of its traceback
    while total < n:
        count = min(BATCH, n - total)
        reach, new_defects = _batch(target, seed + total, count, folder)
        for one in new_defects:
            defect = defects.setdefault(_sort_of(one["error"]), {**one, "times": 0})
            defect["times"] += 1
        total += reach
    return {
        "inputs": total,
        "seconds": round(time.monotonic() - start, 1),
        "defects": list(defects.values()),
    }


def _sort_of(error: str) -> str:
    """The common part of similar errors: the last place in our own code, and the kind of error."""
    places = re.findall(r'File "[^"]*(concept_eraser/[^"]+|tests/[^"]+)", line (\d+)', error)
    return f"{places[-1] if places else ''} {error.strip().splitlines()[-1][:40]}"


def warm() -> None:
    """Import the modules that readers import at their first use; no input pays for that time."""
    import jinja2  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import torch
    from diffusers import StableDiffusionPipeline  # noqa: F401
    from transformers import AutoImageProcessor, CLIPImageProcessor  # noqa: F401

    import concept_eraser.api  # noqa: F401
    from concept_eraser.models import loading
    from concept_eraser.reporting import plots

    torch.set_num_threads(1)
    loading.load("tiny-sd")
    plots.curves([{"step": 1, "losses": {"forget": 0.5}, "cosine": 0.1}])


def _batch(target: Any, seed: int, count: int, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Run examples in a forked process. Returns how many ran, and the defects."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    progress = mmap.mmap(-1, 8)  # shared with the child
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(target, seed, count, folder, progress, writing)
    os.close(writing)
    output, last, at = b"", time.monotonic(), 0
    while True:
        if select.select([reading], [], [], 1.0)[0]:
            piece = os.read(reading, 65536)
            if not piece:
                break
            output += piece
        now = struct.unpack("q", progress[:8])[0]
        if now != at:
            last, at = time.monotonic(), now
        if time.monotonic() - last > 4 * LIMIT + 60 * (
            at == 0
        ):  # in C code, which handles no signal
            os.kill(pid, signal.SIGKILL)
            break
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    defects = [json.loads(line) for line in output.decode(errors="replace").splitlines() if line]
    reach = struct.unpack("q", progress[:8])[0]
    if status != 0:
        defects.append({"seed": seed, "at": reach, "error": f"the process ended with {status}"})
        reach += 1
    return max(reach, 1), defects


def _child(
    target: Any, seed: int, count: int, folder: Path, progress: mmap.mmap, writing: int
) -> None:
    """Run examples in this process; never returns."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, _too_slow)
        silent = os.open(os.devnull, os.O_RDWR)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        faulthandler.disable()  # a crash is counted, not shown
        violations: list[str] = []
        watch = Watch([folder], violations.append, network=True)
        home = folder / "home"
        home.mkdir()
        os.chdir(home)

        def one(example: Any) -> None:
            number = struct.unpack("q", progress[:8])[0]
            place = folder / str(number)
            place.mkdir()
            try:
                signal.setitimer(signal.ITIMER_REAL, LIMIT)
                try:
                    target.run(example, place)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                problem = None
            except Exception as error:
                problem = "".join(traceback.format_exception(error)[-4:])[-1500:]
            if violations:
                problem = f"{problem or ''} touched: {sorted(set(violations))[:3]}"
                violations.clear()
            if problem:
                line = json.dumps(
                    {"seed": seed, "at": number, "error": problem, "input": repr(example)[:600]}
                )
                os.write(writing, line.encode() + b"\n")
            shutil.rmtree(place, ignore_errors=True)
            progress[:8] = struct.pack("q", number + 1)

        make: Callable[[int], Any] | None = getattr(target, "make", None)
        if make is not None:
            for number in range(seed, seed + count):
                one(make(number))
        else:
            watch.on = False
            _with_hypothesis(target.strategy, one, seed, count, watch)
            progress[:8] = struct.pack("q", max(count, struct.unpack("q", progress[:8])[0]))
        code = 0
    finally:
        os._exit(code)


def _with_hypothesis(
    strategy: Any, one: Callable[[Any], None], seed: int, count: int, watch: Watch
) -> None:
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from hypothesis import seed as use_seed

    def run_watched(example: Any) -> None:  # hypothesis' own files are no defect
        watch.on = True
        try:
            one(example)
        finally:
            watch.on = False

    run_settings = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    use_seed(seed)(run_settings(given(strategy)(run_watched)))()


def _too_slow(number: int, frame: Any) -> None:
    raise SlowError(f"more than {LIMIT:g} s")


def campaign(
    selection: Mapping[str, Any],
    n: int,
    seed: int,
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """n examples over all targets, divided by their weights."""
    warm()
    results: dict[str, Any] = {}
    weights = {name: getattr(target, "weight", 1.0) for name, target in selection.items()}
    for name, target in selection.items():
        share = math.ceil(n * weights[name] / sum(weights.values()))
        if share:
            results[name] = fuzz(target, share, seed, folder / "work")
            rate = results[name]["inputs"] / max(results[name]["seconds"], 0.1)
            say(
                f"{name}: {results[name]['inputs']} inputs, {rate:.0f}/s, "
                f"{len(results[name]['defects'])} defects"
            )
            for defect in results[name]["defects"][:3]:
                say(f"    {defect['error'][-700:]}\n    {defect.get('input', '')[:300]}")
    shutil.rmtree(folder / "work", ignore_errors=True)
    return results


def summary(results: Mapping[str, Any], seed: int) -> dict[str, Any]:
    from concept_eraser.utils import provenance

    about = provenance.describe()
    return {
        "inputs": sum(one["inputs"] for one in results.values()),
        "seed": seed,
        "seconds": round(sum(one["seconds"] for one in results.values()), 1),
        "targets": dict(results),
        "versions": {
            key: about[key] for key in ("python", "concept_eraser", "commit") if key in about
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of targets, with commas between them")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    every = targets()
    selection = (
        {name: every[name] for name in arguments.only.split(",")} if arguments.only else every
    )
    with tempfile.TemporaryDirectory() as folder:
        results = campaign(
            selection,
            arguments.n,
            arguments.seed,
            Path(folder),
            lambda text: print(text, flush=True),
        )
    all_results = results
    if arguments.only and arguments.results.is_file():  # a campaign in parts
        all_results = {**json.loads(arguments.results.read_text())["targets"], **results}
    arguments.results.write_text(json.dumps(summary(all_results, arguments.seed), indent=1) + "\n")
    bad = sum(len(one["defects"]) for one in results.values())
    inputs = sum(one["inputs"] for one in results.values())
    print(f"{inputs} inputs, {bad} defects: {arguments.results}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
