"""Checks of the values from a browser: numbers, texts, names of runs, files and accounts.

A path is never read from the page. Runs are looked up in a listing. Only the names of new runs
become paths, and `new_folder` keeps them inside the runs folder. A run folder may come from a
stranger. `lies_inside` and `require_inside` therefore check its symbolic links, and
`require_no_code` checks its recipe. guard.py checks the requests themselves.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from concept_eraser.storage import output_folder
from concept_eraser.utils.errors import UserError, quote, unknown_message

PROMPT = 300  # characters
LINES = 200  # the user's own prompts, one a line
NAME = 200  # characters of the name of a run that is shown
COLUMNS = 4  # runs that are compared at once
WAITING = 40  # waiting jobs in the queue
RUNS = 200  # entries of the runs folder above which the page makes no new one
UPLOADS = 8  # images that are shown at once
PIXELS = 20_000_000  # of an uploaded image
# formats of uploaded images; some other formats start a program (EPS)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
FREE = 2**30  # bytes of the disk that the page leaves free
PASSWORD = 8  # least number of characters if others in the network can reach the page
LISTED = 500  # runs that the page shows, the newest
RECIPE = 2**20  # bytes of a recipe that the page reads
ENTRIES = 20_000  # files of a run folder that are checked for symbolic links
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


def number(field: str, value: Any) -> float:
    """Return a number within the limits of its name. Raises UserError for any other value."""
    low, high = LIMITS[field]
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{field}: expected a number, found {str(value)[:40]!r}") from None
    if not math.isfinite(result) or not low <= result <= high:
        raise UserError(f"{field}: expected {low:g} to {high:g}, found {result:g}")
    return result


def whole_number(field: str, value: Any) -> int:
    """Return a whole number within the limits of its name. Raises UserError for any other value."""
    result = number(field, value)
    if result != int(result):
        raise UserError(f"{field}: expected a whole number, found {result:g}")
    return int(result)


def prompt(text: Any) -> str:
    """Return a prompt on one line. Raises UserError if it is empty, too long, or not a text."""
    if not isinstance(text, str) or not (short := " ".join(text.split())):
        raise UserError(
            "the prompt is empty; write a prompt, e.g. a red star, or press one of the presets"
        )
    if len(short) > PROMPT:
        raise UserError(
            f"the prompt has {len(short)} characters; at most {PROMPT} are allowed. The "
            "model itself reads about 77 words"
        )
    return short


def prompts(field: str, text: Any) -> list[str]:
    """Split a text into prompts, one a line. Empty lines are ignored."""
    lines = [line for line in str(text or "").splitlines() if line.strip()]
    if len(lines) > LINES:
        raise UserError(f"{field}: {len(lines)} prompts; at most {LINES} are allowed")
    return [prompt(line) for line in lines]


def require_choice(field: str, value: Any, choices: Sequence[str]) -> str:
    """Return a value that is one of the choices. Raises UserError for any other value."""
    if value not in choices:
        raise UserError(unknown_message(field, str(value)[:80], choices))
    return str(value)


def new_folder(runs: Path, name: Any) -> Path:
    """Return the folder of a new run.

    Raises UserError if the name has other characters, exists already, or leads out of the runs
    folder, if the runs folder has too many entries, or if the disk is nearly full.
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
            f"the runs folder holds {RUNS} entries; remove some before you make new ones"
        )
    require_space(runs)
    return folder


def require_space(folder: Path) -> None:
    """Raise UserError if the disk of a folder is nearly full. The folder need not exist yet."""
    existing = next(
        (path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/")
    )
    free = shutil.disk_usage(existing).free
    if free < FREE:
        raise UserError(
            f"the disk of the runs folder has {free / 2**20:.0f} MB left; the page "
            f"starts nothing new below {FREE / 2**20:.0f} MB, so free some space first"
        )


def lies_inside(path: Path, folder: Path) -> bool:
    """Whether a path is inside a folder after its symbolic links are resolved."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # links in a circle
        return False


def can_be_listed(name: str) -> bool:
    """Whether the page can show a folder's name: not too long, and only printable characters."""
    return len(name) <= NAME and name.isprintable()


def require_inside(folder: Path) -> None:
    """Raise UserError if a symbolic link in a run folder leads out of it.

    A job would write through the link.
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
                    "replace the link by its target"
                )
            if count > ENTRIES:
                raise UserError(
                    f"{folder.name} holds more than {ENTRIES} files; the page starts no "
                    "job there, use the command line"
                )


def names_code(model: str) -> bool:
    """Whether a model's name is code to import and call, as package.module:function."""
    try:
        return ":" in model and not Path(model).exists()
    except (OSError, ValueError):  # a name that no file can have
        return True


def require_no_code(recipe: Any) -> None:
    """Raise UserError if a recipe names code. The page runs no code from recipes or run folders."""
    if names_code(recipe.model):
        raise UserError(
            f"the recipe names code as its model ({quote(recipe.model, 80)}); the page "
            "runs no code that a recipe names. Save the module and give its folder, or "
            "use Python"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    plain = host.strip("[]")
    try:
        return ipaddress.ip_address(plain).is_loopback
    except ValueError:
        return plain.lower() == "localhost"


def require_account(host: str, auth: tuple[str, str] | None) -> None:
    """Raise UserError if others can reach the page and it has no password, or a short one."""
    if is_loopback(host):
        return
    if auth is None:
        raise UserError(
            f"on {host or 'every address'} everybody in the network can use this page, "
            "and this machine with it, so it needs --auth user:password (or the "
            "variable CONCEPT_ERASER_DEMO_AUTH); without a password use --host 127.0.0.1"
        )
    if len(auth[1]) < PASSWORD:
        raise UserError(
            f"the password has {len(auth[1])} characters; on {host}, where others can "
            f"reach the page, it needs at least {PASSWORD}"
        )


@contextmanager
def claimed(runs: Path, name: str, proposal: str, kind: str = "run") -> Iterator[Path]:
    """Make the folder of a new run or attack, and remove it again if the context fails.

    It has the name, or without one a free name derived from the proposal. Two requests at the same
    time get two folders. Raises the UserErrors of `new_folder`.
    """
    folder = _claim(runs, name, proposal, kind)
    try:
        yield folder
    except BaseException:
        output_folder.discard(folder)
        raise


def _claim(runs: Path, name: str, proposal: str, kind: str) -> Path:
    plain = (re.sub(r"[^A-Za-z0-9._-]+", "-", proposal).strip("-._") or "run")[:56]
    candidates = (plain if i == 1 else f"{plain}-{i}" for i in range(1, RUNS + 2))
    for candidate in [name] if name else candidates:
        if not name and (runs / candidate).exists():
            continue
        folder = new_folder(runs, candidate)
        if output_folder.make(folder, kind):
            return folder
    raise UserError(f"there is a run {name or plain!r} already; give another name")
