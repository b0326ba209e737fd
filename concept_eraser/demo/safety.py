"""What a browser may ask for: limits of every number and text, and names that stay inside the runs
folder.

A path is never read from the page. Runs are looked up in a listing; the only names that become
paths are those of new runs, and `new_folder` keeps them where they belong. A run folder may be a
stranger's: `lies_inside` and `require_inside` look at its symbolic links, and `require_no_code` at
its recipe. guard.py checks the requests themselves.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from concept_eraser.storage import output_folder
from concept_eraser.utils.errors import UserError, quote, unknown_message

PROMPT = 300  # characters
LINES = 200  # prompts of one's own, one a line
COLUMNS = 4  # runs that are compared at once
WAITING = 40  # long jobs that may stand in the queue
RUNS = 200  # folders that the page may fill the runs folder up to
UPLOADS = 8  # images that are shown at once
PIXELS = 20_000_000  # of an uploaded image
# that are opened; some others start a program (EPS)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
FREE = 2**30  # bytes of the disk that the page leaves free
PASSWORD = 8  # characters, where others in the network can reach the page
LISTED = 500  # runs that the page shows, the newest
RECIPE = 2**20  # bytes of a recipe that the page reads
ENTRIES = 20_000  # files of a run folder that are looked at for symbolic links
LIMITS: dict[str, tuple[float, float]] = {
    "sampler steps": (1, 50),
    "guidance": (0, 20),
    "number of seeds": (1, 8),
    "first seed": (0, 2**31 - 9),
    "strength": (0, 1),
    "training steps": (1, 2000),
    "images per prompt set": (4, 800),
    "learning rate": (0, 1),
    "training seed": (0, 2**31 - 1),
    "prompts": (2, 16),
    "rounds": (1, 500),
    "seconds": (5, 3600),
    "images a group": (2, 500),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def number(what: str, value: Any) -> float:
    """A number within the limits of its name. Raises UserError for anything else."""
    low, high = LIMITS[what]
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{what}: expected a number, found {str(value)[:40]!r}") from None
    if not math.isfinite(result) or not low <= result <= high:
        raise UserError(f"{what}: expected {low:g} to {high:g}, found {result:g}")
    return result


def whole(what: str, value: Any) -> int:
    """A whole number within the limits of its name. Raises UserError for anything else."""
    result = number(what, value)
    if result != int(result):
        raise UserError(f"{what}: expected a whole number, found {result:g}")
    return int(result)


def prompt(text: Any) -> str:
    """A prompt on one line. Raises UserError where it is empty, too long, or no text."""
    if not isinstance(text, str) or not (short := " ".join(text.split())):
        raise UserError(
            "the prompt is empty; write what to draw, e.g. a red star, or press one of the presets"
        )
    if len(short) > PROMPT:
        raise UserError(
            f"the prompt has {len(short)} characters; at most {PROMPT} are taken. The "
            "model itself reads about 77 words"
        )
    return short


def prompts(what: str, text: Any) -> list[str]:
    """Prompts of one's own, one a line; empty lines do not count."""
    lines = [line for line in str(text or "").splitlines() if line.strip()]
    if len(lines) > LINES:
        raise UserError(f"{what}: {len(lines)} prompts; at most {LINES} are taken")
    return [prompt(line) for line in lines]


def one_of(what: str, value: Any, choices: Sequence[str]) -> str:
    """A choice that was offered. Raises UserError for others, whatever the browser sent."""
    if value not in choices:
        raise UserError(unknown_message(what, str(value)[:80], choices))
    return str(value)


def new_folder(runs: Path, name: Any) -> Path:
    """The folder of a new run. Raises UserError for a name that is no plain word, is taken, or
    leaves the runs folder.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"{str(name)[:80]!r} cannot be the name of a run; use letters, digits, dots, "
            "dashes and underscores, at most 64, e.g. heart-to-circle"
        )
    folder = runs / name
    if folder.resolve().parent != runs.resolve():
        raise UserError(f"{name!r} leads out of the runs folder; give another name")
    if folder.exists():
        raise UserError(
            f"there is a run {name!r} already; give another name, or choose it under Resume"
        )
    if runs.is_dir() and sum(1 for _ in runs.iterdir()) >= RUNS:
        raise UserError(
            f"the runs folder holds {RUNS} entries; take some away before new ones are made"
        )
    require_space(runs)
    return folder


def require_space(folder: Path) -> None:
    """Raise UserError where the disk of a folder, which may not be there yet, is nearly full."""
    existing = next(
        (path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/")
    )
    free = shutil.disk_usage(existing).free
    if free < FREE:
        raise UserError(
            f"the disk of the runs folder has {free / 2**20:.0f} MB left; the page "
            f"begins nothing new below {FREE / 2**20:.0f} MB, so make room first"
        )


def lies_inside(path: Path, folder: Path) -> bool:
    """Whether a path, its symbolic links followed, stays in a folder."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # links in a circle
        return False


def can_be_listed(name: str) -> bool:
    """Whether a folder's name can stand in the page: text that can be sent, without control
    characters.
    """
    return len(name) <= 200 and name.isprintable()


def require_inside(folder: Path) -> None:
    """Raise UserError where a symbolic link in a run folder leads out of it: a job would write
    through the link.
    """
    count = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            count += 1
            path = Path(place) / name
            if path.is_symlink() and not lies_inside(path, folder):
                raise UserError(
                    f"{folder.name} holds a symbolic link that leads out of it "
                    f"({path.relative_to(folder)}); the page starts no job there, "
                    "replace the link by what it stands for"
                )
            if count > ENTRIES:
                raise UserError(
                    f"{folder.name} holds more than {ENTRIES} files; the page starts no "
                    "job there, use the command line"
                )


def names_code(model: str) -> bool:
    """Whether a model's name is a function that would be imported and called
    (package.module:function).
    """
    try:
        return ":" in model and not Path(model).exists()
    except (OSError, ValueError):  # a name that no file can have
        return True


def require_no_code(recipe: Any) -> None:
    """Raise UserError where a recipe names code: in the page no recipe, and no run folder, may run
    any.
    """
    if names_code(recipe.model):
        raise UserError(
            f"the recipe names code as its model ({quote(recipe.model, 80)}); the page "
            "runs no code that a recipe names. Save the module and give its folder, or "
            "use Python"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    plain = host.strip("[]")
    try:
        return ipaddress.ip_address(plain).is_loopback
    except ValueError:
        return plain.lower() == "localhost"


def require_account(host: str, auth: tuple[str, str] | None) -> None:
    """Raise UserError where others in the network reach the page and it has no password, or a short
    one.
    """
    if is_loopback(host):
        return
    if auth is None:
        raise UserError(
            f"on {host or 'every address'} everybody in the network can use this page, "
            "and this machine with it, so it needs --auth user:password (or the "
            "variable CONCEPT_ERASER_DEMO_AUTH); without one use --host 127.0.0.1"
        )
    if len(auth[1]) < PASSWORD:
        raise UserError(
            f"the password has {len(auth[1])} characters; on {host}, where others can "
            f"reach the page, it needs at least {PASSWORD}"
        )


def claim(runs: Path, name: str, proposal: str, kind: str = "run") -> Path:
    """Make the folder of a new run: by the name given, or by one like the wanted one that is not
    taken. Two who ask at the same time get two folders. Raises UserError as `new_folder`."""
    plain = (re.sub(r"[^A-Za-z0-9._-]+", "-", proposal).strip("-._") or "run")[:56]
    candidates = (plain if i == 1 else f"{plain}-{i}" for i in range(1, RUNS + 2))
    for candidate in [name] if name else candidates:
        if not name and (runs / candidate).exists():
            continue
        folder = new_folder(runs, candidate)
        if output_folder.make(folder, kind):
            return folder
    raise UserError(f"there is a run {name or plain!r} already; give another name")
