"""What a browser may ask for: limits of every number and text, and names that stay inside the runs folder.

A path is never read from the page. Runs are looked up in a listing; the only names that become paths are those of new
runs, and `new_folder` keeps them where they belong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from concept_eraser.errors import UserError, unknown_message

PROMPT = 300  # characters
LINES = 200  # prompts of one's own, one a line
COLUMNS = 4  # runs that are compared at once
WAITING = 40  # long jobs that may stand in the queue
RUNS = 200  # folders that the page may fill the runs folder up to
SIDE = 1024  # pixels of an uploaded picture's longer side; larger ones are scaled down
UPLOADS = 8
LIMITS: dict[str, tuple[float, float]] = {
    "sampler steps": (1, 50),
    "guidance": (0, 20),
    "number of seeds": (1, 8),
    "first seed": (0, 2**31 - 9),
    "strength": (0, 1),
    "training steps": (1, 2000),
    "pictures a side": (4, 800),
    "learning rate": (0, 1),
    "training seed": (0, 2**31 - 1),
    "prompts": (2, 16),
    "rounds": (1, 500),
    "seconds": (5, 3600),
    "pictures a group": (2, 500),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def number(what: str, value: Any) -> float:
    """A number within the limits of its name. Raises UserError for anything else."""
    low, high = LIMITS[what]
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{what}: expected a number, found {str(value)[:40]!r}") from None
    if not math.isfinite(found) or not low <= found <= high:
        raise UserError(f"{what}: expected {low:g} to {high:g}, found {found:g}")
    return found


def whole(what: str, value: Any) -> int:
    """A whole number within the limits of its name. Raises UserError for anything else."""
    found = number(what, value)
    if found != int(found):
        raise UserError(f"{what}: expected a whole number, found {found:g}")
    return int(found)


def prompt(text: Any) -> str:
    """A prompt on one line. Raises UserError where it is empty, too long, or no text."""
    if not isinstance(text, str) or not (short := " ".join(text.split())):
        raise UserError("the prompt is empty; write what to draw, e.g. a red star, or press one of the presets")
    if len(short) > PROMPT:
        raise UserError(f"the prompt has {len(short)} characters; at most {PROMPT} are taken. The model itself reads about 77 words")  # fmt: skip
    return short


def prompts(what: str, text: Any) -> list[str]:
    """Prompts of one's own, one a line; empty lines do not count."""
    lines = [line for line in str(text or "").splitlines() if line.strip()]
    if len(lines) > LINES:
        raise UserError(f"{what}: {len(lines)} prompts; at most {LINES} are taken")
    return [prompt(line) for line in lines]


def one_of(what: str, value: Any, allowed: Sequence[str]) -> str:
    """A choice that was offered. Raises UserError for others, whatever the browser sent."""
    if value not in allowed:
        raise UserError(unknown_message(what, str(value)[:80], allowed))
    return str(value)


def new_folder(runs: Path, name: Any) -> Path:
    """The folder of a new run. Raises UserError for a name that is no plain word, is taken, or leaves the runs folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"{str(name)[:80]!r} cannot be the name of a run; use letters, digits, dots, dashes and underscores, at most 64, e.g. heart-to-circle")  # fmt: skip
    folder = runs / name
    if folder.resolve().parent != runs.resolve():
        raise UserError(f"{name!r} leads out of the runs folder; give another name")
    if folder.exists():
        raise UserError(f"there is a run {name!r} already; give another name, or choose it under Resume")
    if runs.is_dir() and sum(1 for _ in runs.iterdir()) >= RUNS:
        raise UserError(f"the runs folder holds {RUNS} entries; take some away before new ones are made")
    return folder


def claim(runs: Path, name: str, wanted: str) -> Path:
    """Make the folder of a new run: by the name given, or by one like the wanted one that is not taken. Two who ask at the
    same time get two folders. Raises UserError as `new_folder`."""
    plain = (re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-._") or "run")[:56]
    numbered = (plain if i == 1 else f"{plain}-{i}" for i in range(1, RUNS + 2))
    for tried in [name] if name else numbered:
        if not name and (runs / tried).exists():
            continue
        folder = new_folder(runs, tried)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise UserError(f"there is a run {name or plain!r} already; give another name")
