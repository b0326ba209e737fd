"""Files of one JSON object a line that a kill may cut anywhere: what is whole is read, what follows starts on a line of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of all whole lines; [] where there is no file."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # cut off
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


def add_line(path: Path, row: dict[str, Any]) -> None:
    """Append an object, behind a fragment if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.seek(0, 2):
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write((json.dumps(row) + "\n").encode())
