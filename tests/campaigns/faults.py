"""Kills and other faults on real processes of every verb that writes files.

    python -m tests.campaigns.faults --kills 50 --seed 0 [--only erase,merge] [--folder PLACE]

Each case runs one command line as a separate process, injects a fault, and repeats the command. A
fault is a signal at a random moment, a full or read-only disk, a removed cache, a second process in
the same folder, or a clock that jumps.

After the fault, the user's files and all earlier results are unchanged byte for byte, or set aside
as a whole. There is no traceback, and the exit code is 0, 2, 130 or that of the signal. Nothing
outside changed. The repetition succeeds, and its weights are bit-identical to those of a run
without a fault.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns import world as worlds
from tests.campaigns.world import World

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "faults.json"
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
LONGEST = 300  # seconds; a process that takes longer hangs
_OWN = (".concept_eraser.json", ".concept_eraser.lock", "log.jsonl", "attempts.jsonl")
_OF_CAMPAIGN = ("home", "tmp", "cache", "output")


@dataclass(frozen=True)
class Verb:
    """A command line and the files that it writes.

    words: the command line; again: the one that repeats it after a fault; outputs: the paths that
    it may create or replace; weights: the file by which two results are compared, "" if no file is
    the same each time.
    """

    words: Sequence[str]
    outputs: Sequence[str]
    weights: str = ""
    again: Sequence[str] | None = None
    # of a run without a fault; `distance` ends with 2, since FID of four images is refused
    code: int = 0


VERBS: dict[str, Verb] = {
    "erase": Verb(
        ["erase", "other.yaml", "-o", "out"],
        ["out"],
        "out/weights.safetensors",
        ["erase", "other.yaml", "-o", "out", "--resume"],
    ),
    "resume": Verb(
        ["erase", "runs/half/recipe.yaml", "-o", "runs/half", "--resume"],
        ["runs/half"],
        "runs/half/weights.safetensors",
    ),
    "overwrite": Verb(
        ["erase", "other.yaml", "-o", "runs/star", "--overwrite"],
        ["runs/star"],
        "runs/star/weights.safetensors",
        ["erase", "other.yaml", "-o", "runs/star", "--resume"],
    ),
    "evaluate": Verb(
        ["evaluate", "runs/lora", "--suite", "tiny_star", "-n", "2"],
        ["runs/lora/evaluation.json", "runs/lora/report.html"],
    ),
    "attack": Verb(
        ["attack", "runs/lora", "-a", "random_tokens", "-n", "2", "--set", "tries=2"],
        ["runs/lora/attacks"],
    ),
    "generate": Verb(
        ["generate", "runs/star", "-p", "a red star", "-n", "3", "--steps", "2", "-o", "out"],
        ["out"],
        "out/00000.png",
        [
            "generate",
            "runs/star",
            "-p",
            "a red star",
            "-n",
            "3",
            "--steps",
            "2",
            "-o",
            "out",
            "--overwrite",
        ],
    ),
    "export diffusers": Verb(
        ["export", "runs/star", "--to", "diffusers", "-o", "out"],
        ["out"],
        "out/unet/diffusion_pytorch_model.safetensors",
    ),
    "export tensors": Verb(
        ["export", "runs/star", "--to", "tensors", "-o", "out.safetensors"],
        ["out.safetensors"],
        "out.safetensors",
    ),
    "export lora": Verb(
        ["export", "runs/lora", "--to", "lora", "-o", "out.safetensors"],
        ["out.safetensors"],
        "out.safetensors",
    ),
    "export kohya": Verb(
        ["export", "runs/lora", "--to", "kohya", "-o", "out.safetensors"],
        ["out.safetensors"],
        "out.safetensors",
    ),
    "export single-file": Verb(
        ["export", "runs/star", "--to", "single-file", "-o", "out.safetensors"],
        ["out.safetensors"],
        "out.safetensors",
    ),
    "merge": Verb(
        ["merge", "runs/star", "runs/lora", "-o", "out"],
        ["out"],
        "out/unet/diffusion_pytorch_model.safetensors",
    ),
    "card": Verb(["card", "runs/star", "-o", "out.md"], ["out.md"], "out.md"),
    "report": Verb(["report", "runs/star"], ["runs/star/report.html"]),
    "detect": Verb(["detect", "images", "-o", "out"], ["out"]),
    "distance": Verb(
        ["distance", "images", "more images", "--features", "judge", "-o", "out"], ["out"], code=2
    ),
    "copy": Verb(["copy", "tiny_star_munba", "out.yaml"], ["out.yaml"], "out.yaml"),
}


@dataclass
class Case:
    """One fault and its result. problems: empty if all conditions held."""

    verb: str
    fault: str
    after: float | None
    code: int | None
    problems: list[str] = field(default_factory=list)
    output: str = ""


class Bench:
    """Runs cases in the world's scratch folder, which is rebuilt for each case."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seconds: dict[str, float] = {}
        self.digests: dict[str, str] = {}

    def fresh(self) -> None:
        """Rebuild the scratch folder, without the user's file in runs/star.

        A folder with this file is refused by --overwrite.
        """
        self.world.fresh()
        (self.world.scratch / "runs/star/pipeline/mine.txt").unlink()

    def command(self, words: Sequence[str], **more: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **self.world.variables(), "PYTHONPATH": str(ROOT), **more}

        def handle_interrupt() -> None:  # a background process inherits an ignored signal
            signal.signal(signal.SIGINT, signal.default_int_handler)

        return subprocess.Popen(
            [sys.executable, "-m", "concept_eraser", *words],
            cwd=self.world.scratch,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            preexec_fn=handle_interrupt,
        )

    def measure_undisturbed(self, name: str) -> None:
        """Measure how long the verb takes, and the digest of its result."""
        if name in self.seconds:
            return
        self.fresh()
        start = time.monotonic()
        code, output = self._end(self.command(VERBS[name].words))
        if code != VERBS[name].code:
            raise RuntimeError(f"{name} fails without any fault: {output[-600:]}")
        self.seconds[name] = time.monotonic() - start
        self.digests[name] = self._digest(name)

    def _end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        try:
            output = process.communicate(timeout=LONGEST)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + "\n(it hung)"
        return process.returncode, output

    def _digest(self, name: str) -> str:
        path = self.world.scratch / VERBS[name].weights
        return (
            hashlib.sha256(path.read_bytes()).hexdigest()
            if VERBS[name].weights and path.is_file()
            else ""
        )

    def case(
        self,
        name: str,
        fault: str,
        inject: Callable[[subprocess.Popen[str]], float | None],
        *,
        exit_codes: Sequence[int] = (0, 2, 130),
        cold: bool = False,
        **more: str,
    ) -> Case:
        """Run a verb, inject a fault, check the files, and repeat the command.

        cold: without the content of the cache.
        """
        self.measure_undisturbed(name)
        self.fresh()
        if cold:
            self.clear_cache()
        before, outside = (
            _contents(self.world.scratch),
            worlds.snapshot(self.world.root / "outside"),
        )
        process = self.command(VERBS[name].words, **more)
        after = inject(process)
        code, output = self._end(process)
        case = Case(
            name, fault, None if after is None else round(after, 2), code, output=output[-600:]
        )
        self._check(case, before, output, exit_codes)
        if worlds.snapshot(self.world.root / "outside") != outside:
            case.problems.append("something outside changed")
        self._repeat(case, code)
        self._check_files(case, before, "after the repetition")
        return case

    def _check(
        self, case: Case, before: dict[str, str], output: str, exit_codes: Sequence[int]
    ) -> None:
        if "Traceback (most recent call last)" in output or "Exception ignored" in output:
            case.problems.append("a traceback")
        if case.code not in exit_codes:
            case.problems.append(f"exit code {case.code}")
        if (
            case.code == 130
            and case.fault.startswith("SIGINT at start")
            and len(output.strip().splitlines()) != 1
        ):
            case.problems.append("more than one line")
        self._check_files(case, before, "after the fault")

    def _check_files(self, case: Case, before: dict[str, str], when: str) -> None:
        """Check that every earlier file is unchanged, set aside, or replaced by a finished
        result.
        """
        now = _contents(self.world.scratch)
        aside = {digest for path, digest in now.items() if "/.replaced-" in path}
        outputs = VERBS[case.verb].outputs
        for path, digest in before.items():
            if now.get(path) == digest or Path(path).name in _OWN:
                continue
            ours = (
                any(path == output or path.startswith(f"{output}/") for output in outputs)
                and path not in worlds.CANARIES
            )
            has_new_result = ours and (
                case.verb not in ("overwrite",)
                or (self.world.scratch / "runs/star/done.json").is_file()
            )
            if digest not in aside and not has_new_result and not (case.verb == "resume" and ours):
                case.problems.append(f"{path} {'changed' if path in now else 'is gone'} {when}")
        strange = [
            path
            for path in now
            if path not in before
            and Path(path).name not in _OWN
            and not any(
                path == o
                or path.startswith((f"{o}/", f".{o}."))
                or Path(path).name.startswith(f".{Path(o).name}.")
                for o in outputs
            )
        ]
        if strange:
            case.problems.append(f"{strange[0]} was made {when}")

    def _repeat(self, case: Case, code: int) -> None:
        """Repeat the command; its result is that of a run without a fault."""
        verb = VERBS[case.verb]
        outputs = [self.world.scratch / output for output in verb.outputs]
        if code == 0 and case.verb not in ("evaluate", "attack", "report", "erase", "resume"):
            if self._digest(case.verb) != self.digests[case.verb]:
                case.problems.append("its result differs from an undisturbed one")
            return
        words = verb.words
        if verb.again is not None and any(path.exists() for path in outputs):
            can_resume = (
                self.world.scratch / "out" / worlds_mark()
            ).is_file() or case.verb == "overwrite"
            words = verb.again if can_resume else verb.words
        if case.verb == "overwrite" and not self._holds_new_run():
            words = verb.words
        whole = (
            bool(verb.weights) and self._digest(case.verb) == self.digests[case.verb]
        )  # the kill came after the result
        again, output = self._end(self.command(words))
        if again == 2 and whole and "exists already" in output:
            return
        if again != verb.code:
            case.problems.append(f"the repetition ends with {again}: {output.strip()[-300:]}")
        elif self._digest(case.verb) != self.digests[case.verb]:
            case.problems.append("the repetition's result differs from an undisturbed one")

    def _holds_new_run(self) -> bool:
        """Whether the overwritten folder already holds the new run.

        If so, the run continues with --resume, finished or not.
        """
        import yaml

        path = self.world.scratch / "runs/star/recipe.yaml"
        return path.is_file() and yaml.safe_load(path.read_text())["training"]["seed"] == 1

    def clear_cache(self) -> None:
        for path in self.world.cache.iterdir():
            if path.name not in ("matplotlib", "hub"):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def worlds_mark() -> str:
    from concept_eraser.storage.manifest import MARK

    return MARK


def _contents(folder: Path) -> dict[str, str]:
    """The SHA-256 of every regular file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in worlds.walk(folder)
        if path.is_file() and not path.is_symlink()
    }


def kills(
    bench: Bench,
    n: int,
    seed: int,
    only: Sequence[str],
    first: int = 0,
    say: Callable[[Case], None] = lambda case: None,
) -> list[Case]:
    """n kills: verbs and signals in turn, each at a moment that the seed and the number
    determine.
    """
    cases, names, kinds = [], list(only), list(SIGNALS)
    for number in range(first, first + n):
        rng = random.Random(seed * 1_000_003 + number)
        name, kind = names[number % len(names)], kinds[(number + number // len(names)) % len(kinds)]
        bench.measure_undisturbed(name)
        delay = rng.uniform(0.3, 1.0) * bench.seconds[name]

        def inject(process: subprocess.Popen[str], delay: float = delay, kind: str = kind) -> float:
            time.sleep(delay)
            process.send_signal(SIGNALS[kind])
            return delay

        signal_codes = () if kind == "SIGINT" else (-SIGNALS[kind],)
        cases.append(
            bench.case(
                name, kind, inject, exit_codes=(0, 2, 130, *signal_codes), cold=rng.random() < 0.3
            )
        )
        say(cases[-1])
    return cases


def _let_run(process: subprocess.Popen[str]) -> None:
    return None


def start_up(bench: Bench, delays: Sequence[float]) -> list[Case]:
    """Ctrl-C while libraries are imported: one line, exit code 130.

    The delays begin where `main` can be imported: until then Python itself answers Ctrl-C.
    """
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import concept_eraser.cli.main"], cwd=ROOT, check=True)
    python = time.monotonic() - start
    cases = []
    for delay in delays:

        def inject(process: subprocess.Popen[str], delay: float = delay) -> float:
            time.sleep(python + delay)
            process.send_signal(signal.SIGINT)
            return delay

        cases.append(bench.case("generate", "SIGINT at start", inject, exit_codes=(130,)))
    return cases


def other_faults(bench: Bench) -> list[Case]:
    """Full disk, read-only folder, vanished cache, two processes, jumping clock."""
    return [
        *_full_disks(bench),
        *_read_only(bench),
        *_vanished_cache(bench),
        *_two_processes(bench),
        *_clocks(bench),
    ]


def _with_site(bench: Bench, name: str, code: str) -> dict[str, str]:
    """The environment variables that let Python run a code at its start."""
    folder = bench.world.root / f"site_{name}"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def _full_disks(bench: Bench) -> list[Case]:
    """A limit on the size of a file gives the error of a full disk for every larger file."""
    cases = []
    for size in (100_000, 3_000_000):
        code = (
            "import resource, signal\nsignal.signal(signal.SIGXFSZ, "
            f"signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        )
        variables = _with_site(bench, f"full_{size}", code)
        for name in (
            "erase",
            "overwrite",
            "generate",
            "export diffusers",
            "export single-file",
            "merge",
            "evaluate",
        ):
            cases.append(
                bench.case(
                    name,
                    f"no file above {size} bytes",
                    _let_run,
                    cold=size < 1_000_000,
                    **variables,
                )
            )
    return cases + _small_disk(bench)


def _mount(place: Path, *options: str) -> bool:
    place.mkdir(parents=True, exist_ok=True)
    return subprocess.run(["mount", *options, str(place)], capture_output=True).returncode == 0


def _small_disk(bench: Bench) -> list[Case]:
    """The output on a file system of 2 MB, if this user may mount one."""
    place = bench.world.root / "small"
    if not _mount(place, "-t", "tmpfs", "-o", "size=2m", "none"):
        return []
    cases = []
    try:
        for words in (
            ["erase", "other.yaml"],
            ["export", "runs/star", "--to", "diffusers"],
            ["merge", "runs/star", "runs/lora"],
            ["generate", "runs/star", "-p", "a star", "-n", "2", "--steps", "1"],
        ):
            bench.fresh()
            shutil.rmtree(place / "out", ignore_errors=True)
            before = _contents(bench.world.scratch)
            code, output = bench._end(bench.command([*words, "-o", str(place / "out")]))
            case = Case(words[0], "disk of 2 MB", None, code, output=output[-600:])
            if code not in (0, 2) or "Traceback" in output:
                case.problems.append(f"exit code {code}")
            if code == 2 and "full" not in output and "space" not in output:
                case.problems.append("the message does not say that the disk is full")
            if _contents(bench.world.scratch) != before:
                case.problems.append("a file elsewhere changed")
            cases.append(case)
    finally:
        subprocess.run(["umount", str(place)], capture_output=True)
    return cases


def _read_only(bench: Bench) -> list[Case]:
    """The output in a folder that is mounted read-only, if this user may mount."""
    place = bench.world.root / "read_only"
    if not _mount(place, "-t", "tmpfs", "-o", "size=2m,ro", "none"):
        return []
    cases = []
    try:
        for words in (
            ["erase", "other.yaml"],
            ["generate", "runs/star", "-p", "a star"],
            ["export", "runs/star", "--to", "diffusers"],
            ["detect", "images"],
            ["card", "runs/star"],
            ["evaluate", "runs/star", "--suite", "tiny_star", "-n", "2"],
        ):
            bench.fresh()
            code, output = bench._end(bench.command([*words, "-o", str(place / "out")]))
            case = Case(words[0], "read-only folder", None, code, output=output[-600:])
            if code != 2 or "Traceback" in output or len(output.strip().splitlines()) > 4:
                case.problems.append(f"exit code {code}: {output[-300:]}")
            cases.append(case)
    finally:
        subprocess.run(["umount", str(place)], capture_output=True)
    return cases


def _vanished_cache(bench: Bench) -> list[Case]:
    cases = []
    for name in ("erase", "evaluate", "attack"):
        bench.measure_undisturbed(name)
        for part in (0.5, 0.8):

            def inject(
                process: subprocess.Popen[str], name: str = name, part: float = part
            ) -> float:
                time.sleep(part * bench.seconds[name])
                bench.clear_cache()
                return part * bench.seconds[name]

            cases.append(bench.case(name, "cache removed", inject, cold=True))
    return cases


def _two_processes(bench: Bench) -> list[Case]:
    """A second process runs the same command a moment later.

    One of them works, and the other is refused or finds a finished result.
    """
    cases = []
    for name in ("erase", "generate", "merge", "export diffusers", "evaluate", "attack"):
        second: list[tuple[int, str]] = []

        def inject(
            process: subprocess.Popen[str], name: str = name, second: list[tuple[int, str]] = second
        ) -> float:
            time.sleep(0.5)
            second.append(bench._end(bench.command(VERBS[name].words)))
            return 0.5

        case = bench.case(name, "two processes", inject)
        code, output = second[0]
        if code not in (0, 2) or "Traceback" in output:
            case.problems.append(f"the second process: exit code {code}: {output[-300:]}")
        if code == 2 and case.code == 2:
            case.problems.append("both processes were refused")
        cases.append(case)
    return cases


def _clocks(bench: Bench) -> list[Case]:
    """The clock jumps by a year, forwards and backwards, between calls."""
    code = (
        "import time, itertools\n_real, _count = time.time, itertools.count()\ntime.time = "
        "lambda: _real() + (31e6, -31e6, 0.0)[next(_count) % 3]\n"
    )
    variables = _with_site(bench, "clock", code)
    return [
        bench.case(name, "clock jumps", _let_run, **variables)
        for name in ("erase", "generate", "evaluate", "merge", "detect")
    ]


def table(cases: Sequence[Case], about: dict[str, Any]) -> str:
    """The counts as Markdown, with a row for each verb and a column for each fault.

    The failures of all cases follow.
    """
    faults = list(dict.fromkeys(case.fault for case in cases))
    lines = [
        "# Faults on real processes",
        "",
        (
            "Written by `python -m tests.campaigns.faults`. A cell counts cases in which all "
            "held, of all cases."
        ),
        "",
        (
            f"{len(cases)} cases, {sum(case.fault in SIGNALS for case in cases)} of them "
            f"kills; seed {about['seed']}, commit {about.get('commit')}."
        ),
        "",
        "| verb | " + " | ".join(faults) + " |",
        "|---|" + "---|" * len(faults),
    ]
    for verb in dict.fromkeys(case.verb for case in cases):
        cells = []
        for fault in faults:
            some = [case for case in cases if (case.verb, case.fault) == (verb, fault)]
            cells.append(
                f"{sum(not case.problems for case in some)} of {len(some)}" if some else ""
            )
        lines.append(f"| {verb} | " + " | ".join(cells) + " |")
    failures = [case for case in cases if case.problems]
    lines += [
        "",
        f"Failed: {len(failures)}.",
        *(
            f"* {case.verb}, {case.fault}, after {case.after} s: {'; '.join(case.problems)[:300]}"
            for case in failures
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first kill, to go on with a campaign"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default=",".join(VERBS), help="verbs to kill, with commas between them"
    )
    parser.add_argument(
        "--others",
        default="all",
        choices=["all", "none", "full", "read-only", "cache", "two", "clock", "start"],
        help="faults beside kills",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/tmp/concept_eraser_campaign"),
        help="place of the world; kept",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--add", action="store_true", help="add to the results that are there")
    arguments = parser.parse_args()
    from concept_eraser.utils import provenance as environment

    bench = Bench(worlds.build(arguments.folder))
    start = time.monotonic()
    earlier = (
        json.loads(arguments.results.read_text())
        if arguments.add and arguments.results.is_file()
        else {"cases": [], "seconds": 0.0}
    )
    cases = [Case(**one) for one in earlier["cases"]]

    def keep(case: Case) -> None:
        cases.append(case)
        print(
            (
                f"{case.verb}, {case.fault}, after {case.after} s: exit code {case.code}; "
                f"{'; '.join(case.problems) or 'all held'}"
            ),
            flush=True,
        )
        about = environment.describe()
        content = {
            "seed": arguments.seed,
            "commit": about["commit"],
            "python": about["python"],
            "seconds": round(earlier["seconds"] + time.monotonic() - start, 1),
            "kills": sum(one.fault in SIGNALS for one in cases),
            "defects": sum(bool(one.problems) for one in cases),
            "cases": [
                {**asdict(one), "output": one.output[-300:] if one.problems else ""}
                for one in cases
            ],
        }
        arguments.results.write_text(json.dumps(content, indent=1) + "\n")
        arguments.results.with_suffix(".md").write_text(table(cases, content))

    kinds: dict[str, Callable[[], list[Case]]] = {
        "start": lambda: start_up(bench, (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 2.2, 3.0)),
        "full": lambda: _full_disks(bench),
        "read-only": lambda: _read_only(bench),
        "cache": lambda: _vanished_cache(bench),
        "two": lambda: _two_processes(bench),
        "clock": lambda: _clocks(bench),
    }
    kills(bench, arguments.kills, arguments.seed, arguments.only.split(","), arguments.first, keep)
    for name, make in kinds.items():
        for case in make() if arguments.others in ("all", name) else ():
            keep(case)
    sys.exit(1 if any(case.problems for case in cases) else 0)


if __name__ == "__main__":
    main()
