"""Fuzzed inputs over all readers. Each answers, or raises UserError of at most 4,000 characters,
within LIMIT seconds.

    python -m tests.campaigns.fuzz --n 100000 --seed 0 [--only manifest,state]

The examples of a target run in a forked process, in a folder of their own. What a reader writes
outside of that folder, which programs it starts and which hosts it asks is a defect; so is the end
of the process. A target is a hypothesis strategy, or `make(seed)`, and `run(example, folder)`,
which raises only what is a defect.
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

    found: dict[str, Any] = dict(targets_runs.TARGETS)
    try:
        from tests.campaigns import targets
    except ImportError:
        return found
    return {**targets.TARGETS, **found}


def fuzz(target: Any, n: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run n examples of a target. Returns the count, the seconds and the defects."""
    if hasattr(target, "make"):
        target.make(seed)  # its corpus is made here, once
    began, done = time.monotonic(), 0
    defects: dict[str, dict[str, Any]] = {}  # one of each sort, by the end of its traceback
    while done < n:
        count = min(BATCH, n - done)
        reached, found = _batch(target, seed + done, count, folder)
        for one in found:
            kept = defects.setdefault(_sort_of(one["error"]), {**one, "times": 0})
            kept["times"] += 1
        done += reached
    return {
        "inputs": done,
        "seconds": round(time.monotonic() - began, 1),
        "defects": list(defects.values()),
    }


def _sort_of(error: str) -> str:
    """What alike errors have in common: the last place in our own code, and the kind of error."""
    places = re.findall(r'File "[^"]*(concept_eraser/[^"]+|tests/[^"]+)", line (\d+)', error)
    return f"{places[-1] if places else ''} {error.strip().splitlines()[-1][:40]}"


def warm() -> None:
    """Import what readers import when they are first used: that is no part of an input's time."""
    import jinja2  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import torch
    from diffusers import StableDiffusionPipeline  # noqa: F401

    import concept_eraser.api  # noqa: F401
    from concept_eraser.models import loading
    from concept_eraser.reporting import plots

    torch.set_num_threads(1)
    loading.load("tiny-sd")
    plots.curves([{"step": 1, "losses": {"forget": 0.5}, "cosine": 0.1}])


def _batch(target: Any, seed: int, count: int, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """How many examples a forked process ran, and the defects that it met."""
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
    said, last, at = b"", time.monotonic(), 0
    while True:
        if select.select([reading], [], [], 1.0)[0]:
            piece = os.read(reading, 65536)
            if not piece:
                break
            said += piece
        now = struct.unpack("q", progress[:8])[0]
        if now != at:
            last, at = time.monotonic(), now
        if time.monotonic() - last > 4 * LIMIT + 60 * (at == 0):  # in C, where no signal is heard
            os.kill(pid, signal.SIGKILL)
            break
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found = [json.loads(line) for line in said.decode(errors="replace").splitlines() if line]
    reached = struct.unpack("q", progress[:8])[0]
    if status != 0:
        found.append({"seed": seed, "at": reached, "error": f"the process ended with {status}"})
        reached += 1
    return max(reached, 1), found


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
        touched: list[str] = []
        watch = Watch([folder], touched.append, network=True)
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
            if touched:
                problem = f"{problem or ''} touched: {sorted(set(touched))[:3]}"
                touched.clear()
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
    from hypothesis import seed as seeded

    def watched(example: Any) -> None:  # hypothesis' own files are no defect
        watch.on = True
        try:
            one(example)
        finally:
            watch.on = False

    chosen = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    seeded(seed)(chosen(given(strategy)(watched)))()


def _too_slow(number: int, frame: Any) -> None:
    raise SlowError(f"more than {LIMIT:g} s")


def campaign(
    chosen: Mapping[str, Any],
    n: int,
    seed: int,
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """n examples over all targets, in parts by their weights."""
    warm()
    found: dict[str, Any] = {}
    weights = {name: getattr(target, "weight", 1.0) for name, target in chosen.items()}
    for name, target in chosen.items():
        share = math.ceil(n * weights[name] / sum(weights.values()))
        if share:
            found[name] = fuzz(target, share, seed, folder / "work")
            rate = found[name]["inputs"] / max(found[name]["seconds"], 0.1)
            say(
                f"{name}: {found[name]['inputs']} inputs, {rate:.0f}/s, "
                f"{len(found[name]['defects'])} defects"
            )
            for defect in found[name]["defects"][:3]:
                say(f"    {defect['error'][-700:]}\n    {defect.get('input', '')[:300]}")
    shutil.rmtree(folder / "work", ignore_errors=True)
    return found


def summary(found: Mapping[str, Any], seed: int) -> dict[str, Any]:
    from concept_eraser.utils import provenance

    about = provenance.describe()
    return {
        "inputs": sum(one["inputs"] for one in found.values()),
        "seed": seed,
        "seconds": round(sum(one["seconds"] for one in found.values()), 1),
        "targets": dict(found),
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
    asked = parser.parse_args()
    every = targets()
    chosen = {name: every[name] for name in asked.only.split(",")} if asked.only else every
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(
            chosen, asked.n, asked.seed, Path(folder), lambda text: print(text, flush=True)
        )
    merged = found
    if asked.only and asked.results.is_file():  # a campaign in pieces
        merged = {**json.loads(asked.results.read_text())["targets"], **found}
    asked.results.write_text(json.dumps(summary(merged, asked.seed), indent=1) + "\n")
    bad = sum(len(one["defects"]) for one in found.values())
    print(f"{sum(one['inputs'] for one in found.values())} inputs, {bad} defects: {asked.results}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
