"""The README is true: its commands exist, its Python runs, its recipe is valid, its images are
there.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from concept_eraser.cli import quickstart
from concept_eraser.recipes import recipe
from tests.conftest import ROOT

TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.S)


def test_images_and_links_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(targets) >= 5
    for target in targets:
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"make (\w+)", "\n".join(blocks("sh"))))
    assert {"quickstart", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_commands_parse(cli) -> None:
    """Every `concept-eraser` line of the README is accepted by the real parser (erase: as a dry run
    where it can be).
    """
    commands = [
        line
        for block in blocks("sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip().startswith("concept-eraser")
    ]
    assert len(commands) >= 5
    for line in commands:
        words = shlex.split(line.split("#")[0])[1:]
        found = cli(words[0], "--help")
        assert found.returncode == 0, line
        flags = {w.split("=")[0] for w in words if w.startswith("--")}
        assert all(flag in found.stdout for flag in flags), line


def test_python_examples_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = blocks("python")[0]
    assert "concept_eraser.erase(" in first
    short = first.replace('"steps": 100', '"steps": 1').replace('"n": 400', '"n": 4')
    assert short != first
    exec(compile(short.replace("n=100", "n=2"), "README.md", "exec"), {})


def test_yaml_example_is_valid() -> None:
    for block in blocks("yaml"):
        assert recipe.load(yaml.safe_load(block))


def test_a_second_make_does_not_install_again() -> None:
    if not (ROOT / ".venv" / ".installed").exists():
        pytest.skip("this environment was not made by make")
    planned = subprocess.run(["make", "-n", "quickstart"], capture_output=True, text=True, cwd=ROOT)
    assert planned.returncode == 0
    assert "pip" not in planned.stdout
    assert "concept-eraser quickstart" in planned.stdout


def test_what_the_readme_printed_is_of_the_recipe_that_quickstart_runs() -> None:
    facts = json.loads((ROOT / "eval" / "results" / "quickstart.json").read_text())
    assert facts["recipe"] == quickstart.RECIPE
