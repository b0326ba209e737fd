"""Every lower bound of pyproject.toml as an exact version: the constraints of `make test-lowest`.

    python -m tools.lowest > constraints.txt
    pip install -c constraints.txt -e ".[dev]"

The bounds of the extras are among them. torch and torchvision are left out. The Makefile's TORCH
sets their versions, since not every package index has older builds of torch for a machine without a
GPU. The script needs the standard library only.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
HELD = ("torch", "torchvision")  # by the Makefile's TORCH
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?(?:>=(?P<lowest>[^,;\s]+))?(?P<rest>.*)"
)


def constraints(pyproject: Path = ROOT / "pyproject.toml") -> list[str]:
    """Return the lines of a constraints file: `name==lowest` of requirements with a lower bound.

    Each name occurs once. Raises ValueError if one package has two different bounds, or a
    requirement has more than a lower bound.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    lowest: dict[str, str] = {}
    for one in [
        *project["dependencies"],
        *(r for rows in project["optional-dependencies"].values() for r in rows),
    ]:
        match = _REQUIREMENT.fullmatch(one.strip())
        if match is None or match["rest"]:
            raise ValueError(f"the requirement {one!r} is more than a name and a lower bound")
        name, version = match["name"].lower(), match["lowest"]
        if version is None or name in HELD:
            continue
        if lowest.setdefault(name, version) != version:
            raise ValueError(
                f"{name} has two lower bounds, {lowest[name]} and {version}; give it one"
            )
    return [f"{name}=={version}" for name, version in sorted(lowest.items())]


if __name__ == "__main__":
    print("\n".join(constraints()))
