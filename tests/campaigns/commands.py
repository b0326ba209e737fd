"""Random command lines of `concept-eraser` in a folder of hostile files.

    python -m tests.campaigns.commands --n 1000 --seed 0

The command lines mix valid and invalid verbs, options and values. Libraries are imported once. Each
command line runs in a fork of that process and in a scratch folder: `sys.argv` is set and
`concept_eraser.cli.main.main` is called. Every twenty-fifth also runs as a separate process and
must give the same exit code.

A defect is a traceback, an exit code other than 0, 2 and 130, or a duration of more than LIMIT
seconds. A change outside of the scratch folder and the cache is a defect. So are a started program,
a contacted host, and a changed or removed file of the user.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns import world as worlds
from tests.campaigns.isolation import Watch
from tests.campaigns.world import CANARIES, World

LIMIT = 20.0  # seconds
CODES = (0, 2, 130)
MEMORY = 12 * 2**30
LIBRARIES = (".ses", "torchinductor_")  # files of onnxruntime and torch in the temporary folder
WANDB = "wandb-"  # in the names of folders that wandb makes, and removes at a normal exit
RESULTS = Path(__file__).parent / "results" / "commands.json"

# Unusual values, without a null byte: no operating system passes one on a command line.
HOSTILE_TEXTS = (
    "",
    " ",
    "-",
    "--",
    "=",
    "==",
    "a=b=c",
    "../..",
    "..",
    ".",
    "/",
    "~",
    "nan",
    "inf",
    "-inf",
    "1e309",
    "-1",
    "0",
    "99999999999999999999",
    "0x10",
    "1_000",
    "1e3",
    "é",
    "日本語",
    "🌟" * 40,
    "\x1b[2J",
    "a\nb",
    "\t",
    "\x7f",
    "\udcff",
    "{shape}",
    "{0.__class__}",
    "{",
    "%s",
    "$(touch EXECUTED)",
    "`touch EXECUTED`",
    "'; touch EXECUTED",
    "x" * 300,
    "y" * 5000,
    "hf://a/b/c.csv",
    "owner/name",
    "owner/name@main",
    "a/b/c",
    "re:(a+)+$",
    "re:[",
    "null",
    "true",
    "[]",
    "{}",
    "[1,",
    "&a [*a]",
    "!!python/object/apply:os.system ['touch EXECUTED']",
    "payload:go",
    "con",
    "NUL",
    "*",
    "?",
)
HOSTILE_PATHS = (
    "missing",
    "missing/deep/er.yaml",
    "notes.txt",
    "notes.txt/below",
    "pipe",
    "loop",
    "loop/x",
    "dangling",
    "zero",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/proc/self/mem",
    "empty",
    "empty.yaml",
    "binary.yaml",
    "list.yaml",
    "deep.yaml",
    "bomb.yaml",
    "code.yaml",
    "list.json",
    "nan.json",
    "empty.safetensors",
    "huge.safetensors",
    "pickle.bin",
    "pickle.pt",
    "to_outside",
    "to_outside/secret.txt",
    "to_outside/new",
    "mine",
    "pipeline",
    "README.md",
    "report.html",
    "images",
    "images/broken.png",
    "runs",
    "runs/half",
    "x" * 300,
    "a/" * 2000 + "b",
    "sp ace",
    "\udcff\udcfe",
    ".",
    "..",
    "runs/star/my notes.txt",
    "model/unet",
    "runs/star/attacks",
    *(f"damaged/{name}" for name in worlds.DAMAGES),
)
OVERRIDES = (
    "training.lr=1e-4",
    "training.lr=nan",
    "training.lr=.inf",
    "training.lr=-1",
    "training.lr=",
    "training.lr=1e400",
    "training.batch_size=0",
    "training.batch_size=-1",
    "training.batch_size=1e99",
    "training.optimizer=sgd",
    "training.optimizer=\x1b",
    "training.seed=99999999999999999999",
    "training.weight_decay=.inf",
    "trainable=cross_attention",
    "trainable=re:(",
    "trainable=re:(a+)+b",
    "trainable.lora.rank=0",
    "trainable.lora.rank=2",
    "trainable.lora.alpha=.inf",
    "method.name=ga",
    "method.name=nothing",
    "method=[]",
    "method.options.x=1",
    "method=payload:go",
    "forget.loss=ascent",
    "forget.anchor={shape: circle}",
    "forget.anchor='{0.__class__}'",
    "forget.prompts=prompts.txt",
    "forget.prompts=pipe",
    "forget.prompts=zero",
    "forget.prompts=table.csv",
    "forget.prompts=binary.yaml",
    "forget.prompts=[a, b]",
    "forget.prompts={}",
    "forget.n=0",
    "forget.n=-5",
    "retain.prompts=to_outside/secret.txt",
    "model=payload:go",
    "model=missing",
    "model=model",
    "model=/dev/zero",
    "model=[1]",
    "model=damaged/index_list",
    "target=classifier",
    "target=é",
    "memory=8gb",
    "memory=lots",
    "a.b.c.d=1",
    "=1",
    "x=",
    "training=1",
    "training=[",
    "training={",
    "training.steps=1",
    "generation.guidance=nan",
    "generation.guidance=.inf",
    "generation.batch_size=3",
    "training.precision=bf16",
    "training.precision=fp8",
    "finish.name=uce",
    "finish=1",
    "watch={}",
    "watch.every=0",
    "training.warmup=.nan",
    "training.save_every=0",
    "training.micro_batches=0",
    "training.decay=cosine",
    "training.device=cuda",
    "training.device=\udcff",
)

Make = Callable[[random.Random], list[str]]


def _one(*values: str) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(values)


_RUN = _one("runs/star", "runs/star", "runs/lora", "runs/half", "model", "tiny-sd")
_OUT = _one(
    "out", "out/deep/er", "new.safetensors", "out.md", "empty", "runs/new", "runs/star/more"
)


def _any_damaged_run(rng: random.Random) -> str:
    return f"damaged/{rng.choice(worlds.DAMAGES)}"


def _any_run(rng: random.Random) -> str:
    return _any_damaged_run(rng) if rng.random() < 0.35 else _RUN(rng)


def _erase(rng: random.Random) -> list[str]:
    source = rng.choice(["short.yaml", "short.yaml", "lora.yaml", "other.yaml", "tiny_star_munba"])
    if rng.random() < 0.2:
        source = rng.choice(["star", "blue", "giraffe", "Van Gogh", "tiny_star_mumba"])
    words = [source, *rng.sample(OVERRIDES, rng.choice([0, 0, 1, 1, 2, 4]))]
    if rng.random() < 0.5:
        words += [
            "-o",
            rng.choice(
                ["out", "runs/half", "runs/star", _any_damaged_run(rng), ".", "mine", "empty"]
            ),
        ]
    words += [
        flag
        for flag in ("--resume", "--overwrite", "--quiet", "--allow-pickle", "--no-evaluate")
        if rng.random() < 0.25
    ]
    if rng.random() < 0.4:
        words += ["--dry-run"]
    return words


# Beginnings of command lines that are valid, or nearly so. `_cheap` appends the limits.
VERBS: dict[str, Make] = {
    "erase": _erase,
    "generate": lambda rng: [_any_run(rng), "-p", "a red star", "-o", _OUT(rng)],
    "evaluate": lambda rng: [
        _any_run(rng),
        "--suite",
        "tiny_star",
        *(["-o", _OUT(rng)] if rng.random() < 0.5 else []),
    ],
    "attack": lambda rng: [
        _any_run(rng),
        "-a",
        rng.choice(["random_tokens", "random_tokens", "nothing"]),
        *(["-o", _OUT(rng)] if rng.random() < 0.5 else []),
    ],
    "detect": lambda rng: [rng.choice(["images", "empty"]), "-o", _OUT(rng)],
    "demo": lambda rng: rng.choice(
        [
            ["missing"],
            ["--auth", "x"],
            ["--port", "0"],
            ["--runs", "notes.txt"],
            ["--host", "0.0.0.0"],
            [_any_damaged_run(rng), "--port", "70000"],
            ["--before", "missing", "missing"],
        ]
    ),
    "distance": lambda rng: ["images", "more images", "--features", "judge", "-o", _OUT(rng)],
    "compare": lambda rng: [_any_run(rng), _any_run(rng)],
    "report": lambda rng: (
        [_any_run(rng) for _ in range(rng.choice([1, 1, 2]))]
        + (
            ["-o", rng.choice(["page.html", "report.html", "out/x.html"])]
            if rng.random() < 0.6
            else []
        )
    ),
    "export": lambda rng: [
        _any_run(rng),
        "--to",
        rng.choice(["diffusers", "tensors", "lora", "kohya", "musubi", "comfyui", "single-file"]),
        *(["-o", _OUT(rng)] if rng.random() < 0.6 else []),
    ],
    "merge": lambda rng: [_any_run(rng), _any_run(rng), "-o", _OUT(rng)],
    "card": lambda rng: [
        _any_run(rng),
        *(
            ["-o", rng.choice(["card.md", "README.md", "runs", "runs/star/README.md"])]
            if rng.random() < 0.6
            else []
        ),
        *(
            ["--benchmark", rng.choice(["me/erasure", "me"]), "--results", _OUT(rng)]
            if rng.random() < 0.3
            else []
        ),
    ],
    "push": lambda rng: [
        _any_run(rng),
        "me/mine",
        *(["--dry-run"] if rng.random() < 0.8 else []),
        *(["--benchmark", "me/erasure"] if rng.random() < 0.3 else []),
    ],
    "verify": lambda rng: [_any_run(rng), *(["--accept"] if rng.random() < 0.3 else [])],
    "list": lambda rng: [rng.choice(["methods", "models", "recipes", "suites", "all", "nothing"])],
    "show": lambda rng: [rng.choice(["munba", "tiny_star", "tiny_star_munba", "p4d", "nothing"])],
    "check": lambda rng: rng.sample(
        [
            "short.yaml",
            "lora.yaml",
            "binary.yaml",
            "bomb.yaml",
            "deep.yaml",
            "list.yaml",
            "code.yaml",
        ],
        2,
    ),
    "copy": lambda rng: [
        rng.choice(["tiny_star_munba", "tiny_star", "nothing"]),
        rng.choice(["copied.yaml", "notes.txt", "empty", "out/x.yaml"]),
    ],
    "doctor": lambda rng: [] if rng.random() < 0.5 else ["-o", _OUT(rng)],
    "quickstart": lambda rng: rng.choice(
        [["-n", "0"], ["-n", "x"], ["-o", "notes.txt"], ["-o", "mine"], ["--what"], ["-o", "loop"]]
    ),
}
WEIGHTS = {"erase": 6, "quickstart": 1, "doctor": 1, "demo": 1, "list": 1, "show": 1, "check": 2}


@dataclass
class Outcome:
    """The result of one command line. defects: empty if there are none."""

    number: int
    words: list[str]
    code: int | None
    seconds: float
    defects: list[str] = field(default_factory=list)
    output: str = ""
    real_code: int | None = None


def command_line(seed: int, number: int) -> list[str]:
    """The command line with this number; it is the same in every run of the campaign."""
    rng = random.Random(seed * 1_000_003 + number)
    if rng.random() < 0.03:
        return [_hostile(rng) for _ in range(rng.choice([0, 1, 2, 3]))]
    verb = rng.choices(list(VERBS), [WEIGHTS.get(name, 3) for name in VERBS])[0]
    words = VERBS[verb](rng)
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3])):
        words = _mutate(rng, verb, words)
    words = [*words, *_cheap(rng, verb, words)]
    if rng.random() < 0.02:
        verb = rng.choice([verb.upper(), verb[:-1], f"{verb} ", "--" + verb, _hostile(rng)])
    return [verb, *words]


def _hostile(rng: random.Random) -> str:
    return rng.choice(HOSTILE_PATHS if rng.random() < 0.5 else HOSTILE_TEXTS)


def _mutate(rng: random.Random, verb: str, words: list[str]) -> list[str]:
    """Insert one mistake, or add one option."""
    kind = rng.choice(
        ["option", "option", "option", "value", "value", "drop", "twice", "insert", "swap"]
    )
    place = rng.randrange(len(words)) if words else 0
    if kind == "option":
        return words + _option(rng, verb)
    if kind == "value" and words:
        return [*words[:place], _hostile(rng), *words[place + 1 :]]
    if kind == "drop" and words:
        return words[:place] + words[place + 1 :]
    if kind == "twice" and words:
        return words[: place + 1] + words[place:]
    if kind == "swap" and len(words) > 1:
        return words[place:] + words[:place]
    return [*words[:place], _hostile(rng), *words[place:]]


def _option(rng: random.Random, verb: str) -> list[str]:
    """An option that the verb declares, with a value that is likely wrong.

    One in ten is an option that the verb does not have.
    """
    if rng.random() < 0.1:
        return [
            rng.choice(
                [
                    "--what",
                    "-z",
                    "--no-quiet",
                    "--output",
                    "--help",
                    "--=1",
                    "-n",
                    "--seed=",
                    "--version",
                ]
            )
        ]
    choices = [
        p
        for p in _commands()[verb].params
        if p.param_type_name == "option" and p.name not in ("n", "steps", "n_", "settings")
    ]
    if not choices:
        return []
    parameter = rng.choice(choices)
    name = rng.choice([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag:
        return [name]
    value = {
        "seed": _one("0", "1", "-1", "1.5", "99999999999999999999"),
        "guard": _one(
            "negative:a star",
            "sld-max:a star",
            "spm-gate:star@runs/lora",
            "spm-gate-tokens:star",
            "sld-max:",
            ":",
            "x:y",
            "negative:" + "a " * 3000,
        ),
        "before": _RUN,
        "base": _RUN,
        "output": _OUT,
        "weights": _one("1,0.5", "nan,1", "1e308,1e308", ",", "1", "inf,1"),
        "strength": _one("0", "0.5", "nan", "inf", "1e308", "-1"),
        "rank": _one("1", "4", "0", "-1", "1000000"),
        "suite": _one(
            "tiny_star", "tiny_moon", "tiny_sta", "list.yaml", "bomb.yaml", "binary.yaml"
        ),
        "kind": _one("pipeline", "lora", "both", "x"),
        "repository": _one("a/b", "a", "", "a/b@c", "../x"),
    }.get(parameter.name or "")
    return [name, value(rng) if value is not None and rng.random() < 0.6 else _hostile(rng)]


_COMMANDS: dict[str, Any] = {}


def _commands() -> dict[str, Any]:
    if not _COMMANDS:
        import typer

        from concept_eraser.cli.application import app

        _COMMANDS.update(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    return _COMMANDS


def _cheap(rng: random.Random, verb: str, words: Sequence[str]) -> list[str]:
    """Options that limit a valid command line to seconds: the last value of an option counts."""
    if verb == "erase":
        small = ["training.steps=2", "generation.steps=1", "forget.n=4", "retain.n=4"]
        own = any(word in ("short.yaml", "lora.yaml", "other.yaml") for word in words)
        return [
            *([] if own else small),
            *([] if own or "--dry-run" in words else ["--dry-run"]),
            *(["--no-two-steps"] if "--dry-run" in words or not own else []),
        ]
    if verb == "quickstart":
        return ["-n", "0"]
    return {
        "generate": [
            "-n",
            rng.choice(["1", "2", "0", "x"]),
            "--steps",
            rng.choice(["1", "2", "0", "1.5"]),
        ],
        "evaluate": ["-n", rng.choice(["2", "2", "1"])],
        "attack": [
            "-n",
            "2",
            "--set",
            rng.choice(
                [
                    "tries=1",
                    "tries=1",
                    "tries=x",
                    "what=1",
                    "x",
                    "tries=nan",
                    "tries=1e400",
                    "k=-1",
                    "where=\x1b",
                ]
            ),
        ],
    }.get(verb, [])


class Server:
    """Imports the libraries once, forks for each command line, and reports changes."""

    def __init__(self, world: World) -> None:
        self.world = world
        os.environ.update(world.variables())
        import matplotlib.figure  # noqa: F401
        import scipy.stats  # noqa: F401
        import torch
        import transformers  # noqa: F401
        from diffusers import DiffusionPipeline  # noqa: F401

        import concept_eraser.api
        import concept_eraser.cli.application  # noqa: F401

        torch.set_num_threads(1)
        self.before = worlds.snapshot(world.scratch)
        self.outside = worlds.snapshot(world.root / "outside")

    def run(self, number: int, words: list[str]) -> Outcome:
        start = time.monotonic()
        output = self.world.root / "output.txt"
        witness = self.world.root / "witness.txt"
        for path in (output, witness):
            path.write_bytes(b"")
        pid = os.fork()
        if pid == 0:
            _child(self.world, words, output, witness)
        code, timed_out = _wait(pid, LIMIT)
        outcome = Outcome(number, words, code, round(time.monotonic() - start, 2))
        text = output.read_text(errors="replace")
        outcome.output = text[-3000:]
        if "Traceback (most recent call last)" in text or "Exception ignored" in text:
            outcome.defects.append("a traceback")
        if timed_out:
            outcome.defects.append(f"more than {LIMIT:g} s")
        elif code not in CODES:
            outcome.defects.append(f"exit code {code}")
        if code == 2 and len(text) > 20_000:
            outcome.defects.append(f"an error of {len(text):,} characters")
        outcome.defects += sorted(set(witness.read_text(errors="replace").splitlines()))
        outcome.defects += self._find_damage(words)
        return outcome

    def _find_damage(self, words: list[str]) -> list[str]:
        """Name the paths that changed against the rules, and restore the scratch folder."""
        after = worlds.snapshot(self.world.scratch)
        changed_paths = worlds.changes(self.before, after)
        defects = [
            f"the user's file {path} changed"
            for path in changed_paths
            if path in CANARIES and not _is_requested(words, path)
        ]
        defects += [
            f"{path} changed"
            for path in changed_paths
            if path not in CANARIES and not _may_change(words, path)
        ]
        defects += (
            ["something was executed"] if any(path.endswith("EXECUTED") for path in after) else []
        )
        if worlds.snapshot(self.world.root / "outside") != self.outside:
            defects.append("what links lead to changed")
            self.outside = worlds.snapshot(self.world.root / "outside")
        new_paths = [path for path in after if path not in self.before]
        self._restore(changed_paths, new_paths)
        leftovers = [
            path
            for path in (self.world.root / "tmp").iterdir()
            if not path.name.startswith(LIBRARIES) and WANDB not in path.name
        ]
        defects += [f"left in the temporary folder: {leftovers[0].name}"] if leftovers else []
        for path in leftovers:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        return defects

    def _restore(self, changed_paths: list[str], new_paths: list[str]) -> None:
        for path in sorted(new_paths, key=len, reverse=True):
            place = self.world.scratch / path
            place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink(
                missing_ok=True
            )
        if not changed_paths:
            return
        for path in sorted(changed_paths):
            place, source = self.world.scratch / path, self.world.template / path
            if source.is_dir() and not source.is_symlink():
                place.mkdir(exist_ok=True)
                continue
            place.unlink(missing_ok=True)
            shutil.copy2(source, place, follow_symlinks=False)
        self.before = worlds.snapshot(self.world.scratch)


def _is_requested(words: list[str], path: str) -> bool:
    """Whether the command line replaces this file: `card --overwrite -o FILE` does."""
    return (
        words[:1] == ["card"]
        and "--overwrite" in words
        and any(os.path.normpath(word) == path for word in words)
    )


def _may_change(words: list[str], path: str) -> bool:
    """Whether a verb may change an existing path of a run. Other folders belong to the user."""
    verb, name = words[0] if words else "", path.rsplit("/", 1)[-1]
    if not path.startswith(("runs/", "damaged/")):
        return path == "empty"
    if name in (".concept_eraser.json", ".concept_eraser.lock"):
        return True
    if verb == "erase":
        return "--overwrite" in words or "--resume" in words
    result = {
        "evaluate": ("evaluation.json", "evaluation.csv.xz", "report.html"),
        "report": ("report.html",),
        "attack": ("attack.json", "attack.csv.xz", "attempts.jsonl"),
    }
    return name in result.get(verb, ())


def _child(world: World, words: list[str], output: Path, witness: Path) -> None:
    """Run one command line; never returns."""
    code = 70
    try:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        report = os.open(witness, os.O_WRONLY | os.O_APPEND)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(world.scratch)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["concept-eraser", *words]
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        replace = "backslashreplace"
        sys.stderr = open(2, "w", 1, "utf-8", replace, closefd=False)  # noqa: SIM115
        Watch(
            [world.scratch, world.cache, world.root / "tmp"],
            lambda text: os.write(report, (text + "\n").encode(errors="replace")),
            network=True,
        )
        from concept_eraser.cli.main import main

        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(pid: int, limit: float) -> tuple[int | None, bool]:
    """The exit code of a child, and whether it had to be killed."""
    descriptor = os.pidfd_open(pid)
    has_ended = bool(select.select([descriptor], [], [], limit)[0])
    os.close(descriptor)
    if not has_ended:
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status), not has_ended


def run_really(world: World, words: list[str]) -> int:
    """The exit code of the same command line as a separate process."""
    command = [sys.executable, "-m", "concept_eraser", *words]
    environment = {**os.environ, **world.variables(), "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [os.fsencode(word) for word in command],
        cwd=world.scratch,
        env=environment,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    ).returncode


def campaign(
    world: World,
    n: int,
    seed: int,
    *,
    first: int = 0,
    real_every: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Outcome]:
    """Run command lines `first` to `first + n`."""
    server, outcomes = Server(world), []
    start = time.monotonic()
    for number in range(first, first + n):
        words = command_line(seed, number)
        outcome = server.run(number, words)
        if real_every and number % real_every == 0:
            outcome.real_code = run_really(world, words)
            server._find_damage(words)
            if outcome.real_code != outcome.code:
                outcome.defects.append(f"exit code {outcome.real_code} as a process of its own")
        outcomes.append(outcome)
        if outcome.defects:
            say(f"{number}: {words!r}: {'; '.join(outcome.defects)}\n{outcome.output[-1500:]}\n")
        if (number + 1) % 50 == 0:
            rate = len(outcomes) / (time.monotonic() - start)
            say(
                f"{number + 1}: {rate:.1f} command lines/s, "
                f"{sum(bool(o.defects) for o in outcomes)} with defects"
            )
    return outcomes


def summary(outcomes: Sequence[Outcome], seed: int, seconds: float) -> dict[str, Any]:
    """The committed result: counts, and each defect with its command line."""
    from concept_eraser.utils import provenance as environment

    about = environment.describe()
    verbs: dict[str, Counter[str]] = {}
    for one in outcomes:
        verb = one.words[0] if one.words and one.words[0] in VERBS else "(none)"
        verbs.setdefault(verb, Counter())[str(one.code)] += 1
    return {
        "command_lines": len(outcomes),
        "seed": seed,
        "seconds": round(seconds, 1),
        "longest": max((one.seconds for one in outcomes), default=0.0),
        "exit_codes": dict(sorted(Counter(str(one.code) for one in outcomes).items())),
        "as_real_processes": sum(one.real_code is not None for one in outcomes),
        "verbs": {verb: dict(sorted(counts.items())) for verb, counts in sorted(verbs.items())},
        "defects": [
            {**asdict(one), "output": one.output[-600:]} for one in outcomes if one.defects
        ],
        "versions": {
            key: about[key]
            for key in ("python", "torch", "concept_eraser", "commit")
            if key in about
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="number of the first command line, to go on with a campaign",
    )
    parser.add_argument(
        "--real-every", type=int, default=25, help="also as a process of its own; 0: never"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/tmp/concept_eraser_campaign"),
        help="place of the world; kept",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    world, start = worlds.build(arguments.folder), time.monotonic()
    outcomes = campaign(
        world,
        arguments.n,
        arguments.seed,
        first=arguments.first,
        real_every=arguments.real_every,
        say=lambda text: print(text.encode(errors="backslashreplace").decode(), flush=True),
    )
    arguments.results.write_text(
        json.dumps(summary(outcomes, arguments.seed, time.monotonic() - start), indent=1) + "\n"
    )
    bad = sum(bool(one.defects) for one in outcomes)
    print(f"{len(outcomes)} command lines, {bad} with defects: {arguments.results}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
