"""The scripts of examples/ run as processes, and the cells of the notebooks run in order."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from concept_eraser import registry
from concept_eraser.concepts.known import KINDS
from concept_eraser.recipes import memory_presets
from tests.conftest import ROOT
from tests.processes import Command

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
LONGEST = 66  # lines of a script
# what each script writes with --quick
FILES = {
    "attack_model": [],
    "custom_method": ["runs/custom_method/weights.safetensors"],
    "erase_bundled": ["runs/star/report.html", "runs/star/before_after.png", "runs/star/lora"],
    "erase_checkpoint": ["runs/star/lora", "runs/star/exports/star-kohya.safetensors"],
    "unlearn_class": ["runs/unlearn_class/weights.safetensors"],
}
PRINTED = {
    "attack_model": r"(?s)soft_prompt: pre-ASR .*seed_search \(a control\): pre-ASR",
    "custom_method": r"concept rate: [\d.]+% before, [\d.]+% after",
    "erase_bundled": r"(?s)concept_rate +direct .*accuracy_shape +retained .*runs/star",
    "erase_checkpoint": r"(?s)load_lora_weights\('runs/star/lora'\).*of rank 64",
    "unlearn_class": r"forget +100\.0% before",
}


def _name(path: Path) -> str:
    return path.stem


def _docstring(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert text is not None
    return text


def _cells(path: Path, kind: str) -> list[str]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == kind]


def test_there_are_five_scripts_and_three_notebooks() -> None:
    assert {path.stem for path in SCRIPTS} == FILES.keys() == PRINTED.keys()
    assert [path.stem for path in NOTEBOOKS] == ["1_erase", "2_attack", "3_classifier"]


def test_the_readme_lists_every_example_in_one_table() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w.]+)\]\(([\w.]+)\) \|", text, flags=re.M)
    assert all(label == target for label, target in rows)
    assert [label for label, _ in rows] == [path.name for path in (*SCRIPTS, *NOTEBOOKS)]


@pytest.mark.parametrize("path", SCRIPTS, ids=_name)
def test_scripts_are_short_and_say_how_to_run_them(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST
    commands = re.findall(r"^    (python .*)$", _docstring(path), flags=re.M)
    assert commands
    assert all(shlex.split(command)[1] == f"examples/{path.name}" for command in commands)


@pytest.mark.parametrize("path", SCRIPTS, ids=_name)
def test_help_shows_the_docstring_and_knows_the_options_of_the_commands(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(str(path), run_name="__main__")
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    docstring = _docstring(path)
    assert docstring in shown
    options = re.findall(r" (--[a-z]+)", docstring.split("Without")[0])
    own_options = [option for option in options if f"examples/{path.name}" in docstring]
    assert all(option in shown.replace(docstring, "") for option in [*own_options, "--quick"])


def test_choices_are_those_of_the_package() -> None:
    values = runpy.run_path(str(EXAMPLES / "erase_checkpoint.py"))
    assert values["KINDS"] == list(KINDS)
    assert values["PRESETS"] == list(memory_presets.PRESETS)
    budgets = runpy.run_path(str(EXAMPLES / "attack_model.py"))["QUICK"]
    for name, options in budgets.items():
        assert options.keys() <= set(registry.options(registry.load("attack", name)))


@pytest.mark.parametrize("path", SCRIPTS, ids=_name)
def test_scripts_run(path: Path, tmp_path: Path) -> None:
    process = Command("--quick", folder=tmp_path, script=path)
    assert process.wait() == 0, process.stderr
    assert re.search(PRINTED[path.stem], process.stdout), process.stdout
    assert [name for name in FILES[path.stem] if not (tmp_path / name).exists()] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=_name)
def test_notebooks_are_plain_files_without_outputs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    content = json.loads(text)
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert text == json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    cells = content["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert cells[0]["cell_type"] == "markdown"
    assert "CONCEPT_ERASER_QUICK=1" in "".join(cells[0]["source"])
    for link in re.findall(r"\]\((\w[^)]*)\)", "\n".join(_cells(path, "markdown"))):
        assert (EXAMPLES / link).exists(), link


@pytest.mark.parametrize("path", NOTEBOOKS, ids=_name)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONCEPT_ERASER_QUICK", "1")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(_cells(path, "code"), start=1):
        code = compile(source, f"{path.name}, code cell {number}", "exec", dont_inherit=True)
        exec(code, namespace)
    assert (namespace["run"].folder / "done.json").exists()
