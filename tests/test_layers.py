"""Who may import whom. Two rules carry the design: methods never see a model, evaluation never sees training."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "concept_eraser"
BASE = {"errors", "progress", "vectors", "registry", "resources", "environment", "ranks", "files"}
ALLOWED = {
    "errors": set(),
    "progress": set(),
    "vectors": set(),
    "registry": {"errors"},
    "resources": {"errors"},
    "environment": set(),
    "ranks": {"errors"},
    "__main__": {"cli"},
    "files": {"errors"},
    "methods": {"vectors", "methods"},
    "models": {"errors", "registry", "resources", "places", "models", "tiny.clip"},
    "architectures": set(),
    "datasets": {"errors", "resources", "environment", "data", "tiny.painter", "datasets.base"},
    "data": {"errors", "progress", "resources", "environment", "ranks", "models.base", "data"},
    "losses": {"models.base"},
    "erasers": {
        "errors",
        "losses",
        "data",
        "models.base",
        "models.lora",
        "erasers.base",
        "erasers.elastic",
        "erasers.expansion",
    },
    "training": {
        "errors",
        "ranks",
        "files",
        "progress",
        "methods.base",
        "losses",
        "vectors",
        "environment",
        "training",
    },
    "tiny": {"environment", "resources", "places", "models", "tiny"},
    "evaluation": {*BASE - {"vectors"}, "models", "data", "tiny", "evaluation"},
    "sections": {"errors", "resources", "training.parameters"},
    "changes": {"errors", "resources"},
    "mistakes": {"errors", "sections"},
    "consistency": {"errors", "sections", "recipe"},  # recipe: its type only
    "recipe": {
        "training.presets",
        "errors",
        "registry",
        "resources",
        "environment",
        "sections",
        "changes",
        "mistakes",
        "consistency",
    },
    "targets": {
        *BASE,
        "recipe",
        "sections",
        "data",
        "losses",
        "erasers",
        "models",
        "training.parameters",
        "training.placement",
        "methods.base",
        "targets",
    },
    "jobs": {*BASE, "recipe", "sections", "targets", "models", "training", "methods.base", "evaluation"},
    "forecast": {"data", "erasers", "losses", "models", "recipe", "sections", "targets", "training"},
    "trials": {*BASE, "data", "jobs", "recipe", "sections", "models", "targets", "tiny", "training.log"},
    "exporting": {"errors", "recipe", "models", "files"},
    "merging": {"errors", "recipe", "models", "files", "exporting"},
    "measuring": {*BASE, "recipe", "targets", "data", "models", "evaluation"},
    "matching": {*BASE, "recipe", "data", "evaluation"},
    "reporting": {*BASE, "recipe", "training", "evaluation"},
    "places": set(),
    "findings": {*BASE, "places", "recipe", "evaluation.entries"},
    "card_use": {*BASE, "places", "recipe", "models.hub"},
    "cards": {*BASE, "places", "findings", "card_use", "recipe", "evaluation.entries", "models.hub"},
    "publishing": {*BASE, "places", "cards", "evaluation.entries", "models.hub"},
    "api": {
        *BASE,
        "recipe",
        "jobs",
        "matching",
        "measuring",
        "exporting",
        "merging",
        "reporting",
        "cards",
        "publishing",
        "models",
        "training",
        "evaluation",
    },
    "demo": {
        *BASE - {"vectors"},
        "api",
        "recipe",
        "targets",
        "data",
        "models",
        "evaluation",
        "storage.readers",
        "tiny.painter",
        "demo",
    },
    "defaults": {"changes", "places", "recipe", "registry", "models", "tiny.published"},
    "cli": {
        *BASE,
        "defaults",
        "api",
        "measuring",
        "reporting",
        "recipe",
        "targets",
        "models.loading",
        "data",
        "losses",
        "training.parameters",
        "training.presets",
        "forecast",
        "trials",
        "tiny.published",
        "evaluation",
        "demo",
        "cli",
    },
}
FOREIGN = {  # only these may import the heavy libraries
    "diffusers": {"models", "tiny"},
    "transformers": {"models", "tiny", "evaluation.judges"},
    "peft": {"models"},
    "accelerate": {"training", "jobs", "ranks"},
    "typer": {"cli"},
    "gradio": {"demo.page"},  # the tabs are given it, so that what they show is tested without it
    "matplotlib": {"evaluation", "datasets"},
    "pydantic": {"recipe", "sections", "mistakes", "evaluation"},
}
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it, as dotted names (also `from x import y` as x.y)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def covered(name: str, allowed: set[str]) -> bool:
    return any(name == rule or name.startswith(rule + ".") for rule in allowed)


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_within_the_package(path: Path) -> None:
    name = module(path)
    if name == "__init__":
        return
    allowed = ALLOWED[name.split(".")[0]]
    ours = {i.removeprefix("concept_eraser.") for i in imports(path) if i.startswith("concept_eraser.")}
    wrong = {i for i in ours if not covered(i, allowed)}
    assert not wrong, f"{name} imports {wrong}; allowed: {allowed}"


@pytest.mark.parametrize("path", FILES, ids=module)
def test_heavy_libraries_stay_where_they_belong(path: Path) -> None:
    for name in imports(path):
        library = name.split(".")[0]
        if library in FOREIGN:
            assert covered(module(path), FOREIGN[library]), f"{module(path)} imports {library}"


def test_methods_know_torch_and_vectors_only() -> None:
    for path in (ROOT / "methods").glob("*.py"):
        outside = {i.split(".")[0] for i in imports(path)} - {"concept_eraser", "torch", "__future__"}
        adapted = {"torchjd": {"torchjd"}, "fisher": {"curvlinops", "scipy", "numpy"}, "gaussian_mechanism": {"scipy"}}.get(path.stem, set())  # fmt: skip
        plain = {
            "abc",
            "collections",
            "contextlib",
            "dataclasses",
            "functools",
            "itertools",
            "math",
            "pathlib",
            "typing",
        }
        assert outside <= plain | adapted, f"{path.name}: {outside}"


def test_the_package_itself_is_light() -> None:
    """`import concept_eraser` and the command line's start load no torch."""
    import subprocess
    import sys

    code = "import sys, concept_eraser, concept_eraser.cli.main; print([m for m in ('torch', 'diffusers', 'pydantic', 'numpy') if m in sys.modules])"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_no_print_and_no_notebook_of_asserts_in_the_library() -> None:
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in ("cli", "tiny"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"), f"{path} prints"
