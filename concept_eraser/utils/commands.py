"""Commands as a user can paste them into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path


def shell_command(verb: str, *words: object) -> str:
    """Return a command of concept-eraser, with quotes where a shell needs them.

    Example:
        >>> shell_command("evaluate", "my runs/star")
        "concept-eraser evaluate 'my runs/star'"
    """
    return shlex.join(["concept-eraser", verb, *map(str, words)])


def erase_command(folder: Path, *options: str) -> str:
    """Return the command that repeats the run of a folder there, by the recipe in the folder."""
    return shell_command("erase", folder / "recipe.yaml", "--output", folder, *options)
