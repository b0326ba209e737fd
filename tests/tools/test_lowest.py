"""The lower bounds of `tools/lowest.py`, as a second environment installs them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tools import lowest

PYPROJECT = lowest.ROOT / "pyproject.toml"


def project(folder: Path, *dependencies: str, **extras: list[str]) -> Path:
    file = folder / "pyproject.toml"
    lines = [f"{name} = {rows!r}" for name, rows in extras.items()]
    text = [
        "[project]",
        f"dependencies = {list(dependencies)!r}",
        "[project.optional-dependencies]",
        *lines,
    ]
    file.write_text("\n".join(text))
    return file


def test_every_bound_is_a_constraint_and_torch_is_held() -> None:
    constraints = dict(line.split("==") for line in lowest.constraints())
    content = tomllib.loads(PYPROJECT.read_text())["project"]
    requirements = [
        *content["dependencies"],
        *(r for rows in content["optional-dependencies"].values() for r in rows),
    ]
    bounds = {
        one.partition(">=")[0].partition("[")[0].lower(): one.partition(">=")[2]
        for one in requirements
        if ">=" in one
    }
    assert {name: bounds[name] for name in bounds if name not in lowest.HELD} == constraints
    assert not set(lowest.HELD) & set(constraints)


def test_extras_and_names_without_a_bound(tmp_path: Path) -> None:
    file = project(tmp_path, "A-b[x,y]>=1.2", "torch>=2", "plain", dev=["c>=3", "a-b>=1.2"])
    assert lowest.constraints(file) == ["a-b==1.2", "c==3"]


@pytest.mark.parametrize(
    "wrong", [["a>=1", "a>=2"], ["a>=1,<2"], ["a==1"], ["a>=1; python_version < '4'"]]
)
def test_what_is_no_single_lower_bound_is_refused(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"two lower bounds|more than a name and a lower bound"):
        lowest.constraints(project(tmp_path, *wrong))


def test_every_direct_dependency_says_why_its_bound() -> None:
    """Each bound has a comment on its line or above it."""
    lines = PYPROJECT.read_text().split("dependencies = [\n", 1)[1].split("\n]", 1)[0].splitlines()
    has_reason = False
    for line in lines:
        has_reason = has_reason or "#" in line
        if line.strip().startswith('"'):
            assert has_reason, f"no reason for {line.strip()}"
            has_reason = "torch>" in line  # the comment above torch also covers torchvision
