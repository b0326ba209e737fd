"""The folders of the campaigns: runs, a user's files, hostile files and protected files.

root/
    scratch/    working folder of command lines: finished, unfinished and damaged runs, users' files
    cache/      CONCEPT_ERASER_CACHE
    home/ tmp/  HOME and TMPDIR of the processes
    outside/    the targets of links in scratch/; nothing may change it
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import short

CANARY = "this file is the user's own; nobody may change it\n"
CANARIES = (
    "notes.txt",
    "pipeline/keep.txt",
    "README.md",
    "report.html",
    "mine/notes.txt",
    "mine/weights.safetensors",
    "runs/star/my notes.txt",
    "runs/star/pipeline/mine.txt",
)
DAMAGES = (
    "empty_state",
    "no_done",
    "done_empty",
    "done_list",
    "binary_log",
    "index_list",
    "evaluation_list",
    "evaluation_empty",
    "attack_empty",
    "recipe_binary",
    "recipe_code",
    "weights_cut",
    "mark_hostile",
    "lock_binary",
    "links_out",
    "environment_list",
    "nested",
)


@dataclass(frozen=True)
class World:
    """Paths of one campaign's folders, and the environment variables of its processes."""

    root: Path

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def template(self) -> Path:
        return self.root / "template"

    def variables(self) -> dict[str, str]:
        """The environment of every process of the campaign."""
        return {
            "HOME": str(self.root / "home"),
            "TMPDIR": str(self.root / "tmp"),
            "CONCEPT_ERASER_CACHE": str(self.cache),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.cache / "hub"),
            "MPLCONFIGDIR": str(self.cache / "matplotlib"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def fresh(self) -> None:
        """Rebuild the scratch folder from the template."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        subprocess.run(
            ["cp", "-a", str(self.template), str(self.scratch)], check=True
        )  # keeps pipes, links and hard links
        shutil.rmtree(self.root / "tmp", ignore_errors=True)
        (self.root / "tmp").mkdir()


def build(
    root: Path,
    *,
    runs: bool = True,
    make_runs: Callable[[Path, dict[str, str]], None] | None = None,
) -> World:
    """Make the template and the folders around it.

    runs: with runs that are trained, evaluated and attacked (20 s).
    make_runs: makes them in a folder with these environment variables. None: in a new interpreter.
    """
    world = World(root.resolve())
    for name in ("template", "cache", "home", "tmp", "outside"):
        (world.root / name).mkdir(parents=True, exist_ok=True)
    if not (world.root / "ready").is_file():
        shutil.rmtree(world.template)
        world.template.mkdir()
        _users_files(world.template, world.root / "outside")
        if runs:
            _runs(world, make_runs or _make_runs_in_new_interpreter)
        _hostile_files(world.template)
        for name in CANARIES:
            path = world.template / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(CANARY)
        (world.root / "ready").touch()
    world.fresh()
    return world


def recipe(**changes: Any) -> dict[str, Any]:
    """A recipe of two steps on four images of one denoising step."""
    return short(
        model="tiny-sd",
        forget__n=4,
        retain__n=4,
        training__steps=2,
        training__save_every=1,
        generation__steps=1,
        training__batch_size=2,
        **changes,
    )


def _users_files(place: Path, outside: Path) -> None:
    import yaml
    from PIL import Image

    (outside / "secret.txt").write_text(CANARY)
    (outside / "model").mkdir(exist_ok=True)
    (outside / "model" / "config.json").write_text("{}")
    (place / "short.yaml").write_text(yaml.safe_dump(recipe()))
    (place / "other.yaml").write_text(yaml.safe_dump(recipe(training__seed=1)))
    (place / "lora.yaml").write_text(
        yaml.safe_dump(recipe(trainable={"select": "cross_attention", "lora": {"rank": 2}}))
    )
    (place / "prompts.txt").write_text("a red star\na blue star\n")
    (place / "table.csv").write_text("prompt,seed\na red star,1\na blue star,2\n")
    (place / "table.jsonl").write_text('{"prompt": "a red star"}\n')
    (place / "empty").mkdir()
    for folder in ("images", "more images"):
        (place / folder).mkdir()
        for i in range(3):
            Image.new("RGB", (64, 64), (40 * i, 90, 200)).save(place / folder / f"{i}.png")
    (place / "images" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (place / "to_outside").symlink_to(outside)


def _hostile_files(place: Path) -> None:
    (place / "empty.yaml").write_bytes(b"")
    (place / "binary.yaml").write_bytes(bytes(range(256)))
    (place / "list.yaml").write_text("[1, 2]")
    (place / "deep.yaml").write_text("[" * 5000)
    (place / "bomb.yaml").write_text(
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n"
            for i in range(12)
        )
    )
    (place / "code.yaml").write_text(
        "model: payload:go\nforget: {prompts: tiny_star}\nretain: {prompts: "
        "tiny_rest}\nmethod: munba\n"
    )
    (place / "payload.py").write_text(
        "import pathlib\npathlib.Path('EXECUTED').touch()\ndef go():\n    "
        "pathlib.Path('EXECUTED').touch()\n"
    )
    (place / "list.json").write_text("[]")
    (place / "nan.json").write_text(
        '{"protocol": NaN, "results": [{"metric": 1, "group": [], "after": {}}]}'
    )
    (place / "empty.safetensors").write_bytes(b"")
    (place / "huge.safetensors").write_bytes(b"\xff" * 64)
    (place / "pickle.bin").write_bytes(
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0etouch EXECUTED\x85R."
    )
    (place / "pickle.pt").write_bytes((place / "pickle.bin").read_bytes())
    os.mkfifo(place / "pipe")
    (place / "loop").symlink_to("loop")
    (place / "dangling").symlink_to("nowhere/at/all")
    (place / "zero").symlink_to("/dev/zero")


def _make_runs_in_new_interpreter(folder: Path, variables: dict[str, str]) -> None:
    """Make runs with the package itself, in a separate process."""
    root = Path(__file__).parents[2]
    code = "from tests.campaigns.world import make_runs; make_runs()"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **variables, "PYTHONPATH": str(root)},
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _runs(world: World, make: Callable[[Path, dict[str, str]], None]) -> None:
    """Make runs, then copies with one damage each."""
    make(world.template, world.variables())
    star = world.template / "runs" / "star"
    for damage in DAMAGES:
        folder = world.template / "damaged" / damage
        shutil.copytree(star, folder, symlinks=True, copy_function=_link_or_copy)
        apply_damage(folder, damage, world.root / "outside")


def _link_or_copy(source: str, target: str) -> None:
    """Let large files of the copies share their content; nothing writes into them."""
    if Path(source).stat().st_size > 100_000:
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def make_runs() -> None:
    """Make runs in the working directory.

    These are a finished run with evaluation, report and attack, a run of a LoRA and an unfinished
    run.
    """
    from concept_eraser import Interrupted, api

    star = Path("runs/star")
    api.erase(recipe(), output=star)
    evaluation = api.evaluate(str(star), "tiny_star", n=2)
    evaluation.save(star / "evaluation.json")
    api.report(evaluation, star / "report.html", run=star)
    api.attack(
        str(star),
        "random_tokens",
        None,
        n=2,
        options={"tries": 1},
        output=star / "attacks" / "random_tokens",
    )
    api.erase(
        recipe(trainable={"select": "cross_attention", "lora": {"rank": 2}}), output="runs/lora"
    )

    def stop(step: int, seconds: float) -> None:
        if step == 1:
            raise KeyboardInterrupt

    with contextlib.suppress(Interrupted, KeyboardInterrupt):
        api.erase(recipe(training__seed=1), output="runs/half", on_step=stop)
    shutil.copytree(star / "pipeline", "model")
    (Path("model") / ".concept_eraser.json").unlink(missing_ok=True)


def apply_damage(folder: Path, damage: str, outside: Path) -> None:
    """Apply one damage to a run folder. Files are replaced, since they may be shared."""

    def put(name: str, content: bytes | str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    def link(name: str, target: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    evaluation = folder / "evaluation.json"
    content = json.loads(evaluation.read_text()) if evaluation.is_file() else {}
    match damage:
        case "empty_state":
            (folder / "done.json").unlink(missing_ok=True)
            put("state.ckpt", b"")
        case "no_done":
            (folder / "done.json").unlink(missing_ok=True)
        case "done_empty":
            put("done.json", "{}")
        case "done_list":
            put("done.json", "[]")
        case "binary_log":
            put("log.jsonl", bytes(range(256)) * 8)
        case "index_list":
            put("pipeline/model_index.json", "[]")
        case "evaluation_list":
            put("evaluation.json", "[]")
        case "evaluation_empty":
            put(
                "evaluation.json",
                json.dumps(
                    {
                        **content,
                        "models": {},
                        "results": [{"metric": "x", "group": "y", "after": {}}],
                    }
                ),
            )
        case "attack_empty":
            put("attacks/random_tokens/attack.json", '{"protocol": {}, "rates": {}}')
        case "recipe_binary":
            put("recipe.yaml", bytes(range(128, 256)))
        case "recipe_code":
            put(
                "recipe.yaml",
                (
                    "model: payload:go\ntarget: classifier\nforget: {data: digits, classes: "
                    "[3], loss: relabel}\nretain: {data: rest, loss: data}\nmethod: munba\n"
                ),
            )
        case "weights_cut":
            weights = folder / "weights.safetensors"
            put("weights.safetensors", weights.read_bytes()[:1000] if weights.is_file() else b"")
        case "mark_hostile":
            put(
                ".concept_eraser.json",
                (
                    '{"made_by": "concept_eraser", "format": 1, "kind": "run", "files": '
                    '{"../../notes.txt": {"size": 1, "mtime_ns": 1, "sha256": null}}}'
                ),
            )
        case "lock_binary":
            put(".concept_eraser.lock", bytes(range(256)))
        case "links_out":
            link("weights.safetensors", outside / "secret.txt")
            link("pipeline/model_index.json", outside / "secret.txt")
            link("evaluation.json", outside / "secret.txt")
        case "environment_list":
            put("environment.json", "[1]")
        case "nested":
            put("evaluation.json", "[" * 100_000)
        case _:
            raise ValueError(damage)


# mode, size, time of content, time of change, target of a link
Stamp = tuple[int, int, int, int, str]


def snapshot(folder: Path) -> dict[str, Stamp]:
    """The status of every path below a folder; any change of a file changes its time of change."""
    return {str(path.relative_to(folder)): _stamp(path) for path in walk(folder)}


def walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(place) / name


def _stamp(path: Path) -> Stamp:
    status = path.lstat()
    target = os.readlink(path) if path.is_symlink() else ""
    if path.is_dir() and not path.is_symlink():
        return (status.st_mode, 0, 0, 0, target)
    return (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, target)


def changes(before: dict[str, Stamp], after: dict[str, Stamp]) -> list[str]:
    """Earlier paths that are missing or changed."""
    return sorted(path for path, stamp in before.items() if after.get(path) != stamp)
