"""Who may import whom. Two rules carry the design: methods never see a model, evaluation never sees training."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "concept_eraser"
BASE = {"errors", "limits", "progress", "vectors", "registry", "resources", "environment", "ranks", "storage"}
ALLOWED = {
    "errors": set(),
    "limits": {"errors"},
    "progress": set(),
    "vectors": set(),
    "registry": {"errors", "limits"},
    "resources": {"errors"},
    "environment": set(),
    "ranks": {"errors"},
    "__main__": {"cli"},
    "storage": {"errors", "storage"},
    "methods": {"vectors", "methods"},
    "models": {"errors", "registry", "resources", "places", "storage", "models", "tiny.clip"},
    "architectures": set(),
    "datasets": {"errors", "resources", "environment", "storage", "data", "tiny.painter", "datasets.base"},
    "data": {
        "errors",
        "limits",
        "progress",
        "resources",
        "environment",
        "ranks",
        "models.base",
        "models.hub",
        "storage",
        "data",
    },
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
        "storage",
        "progress",
        "methods.base",
        "losses",
        "vectors",
        "environment",
        "training",
    },
    "tiny": {"environment", "resources", "places", "models", "tiny"},
    "evaluation": {*BASE - {"vectors"}, "models", "data", "tiny", "evaluation"},
    "sections": {"errors", "limits", "resources", "training.parameters", "data.templates"},
    "changes": {"errors", "resources", "storage"},
    "mistakes": {"errors", "sections"},
    "consistency": {"errors", "sections", "recipe"},  # recipe: its type only
    "recipe": {
        "training.presets",
        "errors",
        "limits",
        "storage",
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
    "exporting": {"errors", "limits", "recipe", "models", "storage"},
    "merging": {"errors", "recipe", "models", "storage", "exporting"},
    "measuring": {*BASE, "recipe", "targets", "data", "models", "evaluation"},
    "matching": {*BASE, "recipe", "data", "evaluation"},
    "reporting": {*BASE, "recipe", "training", "evaluation"},
    "places": set(),
    "findings": {*BASE, "places", "recipe", "evaluation.entries", "evaluation.shapes"},
    "card_use": {*BASE, "places", "recipe", "models.hub"},
    "cards": {
        *BASE,
        "places",
        "findings",
        "card_use",
        "recipe",
        "evaluation.entries",
        "evaluation.shapes",
        "models.hub",
    },
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
    "defaults": {"changes", "places", "recipe", "registry", "storage", "models", "tiny.published"},
    "cli": {
        *BASE,
        "defaults",
        "matching",
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
ALLOWED_ONE = {"methods.history": {"storage.writers"}}  # what a training records may lie in a folder
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
    allowed = ALLOWED[name.split(".")[0]] | ALLOWED_ONE.get(name, set())
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


# Who may write to a disk. All else goes through storage/, which never removes what it did not write.
WRITERS = {
    "storage": "the writers themselves",
    "tiny": "a developer's build of the bundled weights, into a folder named on its command line",
    "models": "a model's own format, into the empty folder that storage.writers hands out",
}
WRITING_CALLS = {"write_text", "write_bytes", "unlink", "rmdir", "rmtree", "mkdir", "makedirs", "rename", "symlink_to", "hardlink_to", "touch", "copytree", "copyfile", "copy2", "move", "removedirs", "savez", "savez_compressed", "tofile"}  # fmt: skip
EXCEPTIONS = {  # (module, call): why
    ("cli.demo", "rmtree"): "the server's own scratch folder among the system's temporary ones",
    ("demo.uploads", "unlink"): "old uploads in the server's own scratch folder",
    ("demo.uploads", "rmdir"): "old uploads in the server's own scratch folder",
    ("training.log", "write_text"): "/proc/self/clear_refs, which resets the peak of memory",
}


def _opens_to_write(node: ast.Call) -> bool:
    """Whether a call opens a file with a mode that writes, or one that cannot be read from the source."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in ("open", "fdopen"):
        return False
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if isinstance(owner, ast.Name) and owner.id in ("Image", "webbrowser", "History", "zipfile"):
        return False
    modes = [a for a in [*node.args, *(k.value for k in node.keywords if k.arg == "mode")] if isinstance(a, ast.Constant) and isinstance(a.value, str)]  # fmt: skip
    return any(set(mode.value) & set("wax+") and set(mode.value) <= set("rwaxbt+") for mode in modes)


@pytest.mark.parametrize("path", [p for p in FILES if p.relative_to(ROOT).parts[0] not in WRITERS], ids=module)
def test_nothing_else_writes(path: Path) -> None:
    writers = {alias.asname or alias.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("concept_eraser.storage") for alias in node.names}  # fmt: skip
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        direct = isinstance(node.func, ast.Name)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        ours = direct and name in writers
        if _opens_to_write(node) or (name in WRITING_CALLS and not ours and (module(path), name) not in EXCEPTIONS):
            found.append(f"{name} in line {node.lineno}")
    assert not found, f"{module(path)} writes by itself ({', '.join(found)}); use concept_eraser.storage.writers"


# Who may parse what a file holds. Each kind of file has one guarded reader.
PARSERS = {
    "json.load", "yaml.load", "yaml.safe_load", "yaml.full_load", "yaml.unsafe_load", "pickle.load", "pickle.loads",
    "torch.load", "np.load", "np.fromfile", "csv.reader", "csv.DictReader", "safetensors.torch.load_file", "load_file",
    "safe_open",
}  # fmt: skip
READERS = {  # (module, call): why
    ("data.labelled", "np.load"): "the guarded reader of .npz",
    ("data.tables", "csv.DictReader"): "the guarded reader of tables",
    ("evaluation.features.base", "np.fromfile"): "the cache's records, each with its check",
    ("evaluation.features.inception", "torch.load"): "weights that the user has put there, as plain tensors",
    ("methods.history", "torch.load"): "what the user's own training recorded, as plain tensors",
    ("models.loading", "safe_open"): "the check of a model folder's weights",
    ("models.overlay", "load_file"): "the reader of parts of a pipeline",
    ("models.overlay", "safe_open"): "the reader of parts of a pipeline",
    ("models.overlay", "torch.load"): "pickles, as plain tensors and only where the user allows them",
    ("training.checkpoint", "torch.load"): "the reader of states, as plain tensors",
}


def _dotted(node: ast.expr) -> str:
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "?")


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.relative_to(ROOT).parts[0] not in ("storage", "tiny")], ids=module
)
def test_nothing_else_parses_files(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        reads = name == "json.loads" and any(isinstance(n, ast.Attribute) and n.attr in ("read_text", "read_bytes", "read") and _dotted(n) != "sys.stdin.read" for a in node.args for n in ast.walk(a))  # fmt: skip
        if reads or (name in PARSERS and (module(path), name) not in READERS):
            found.append(f"{name} in line {node.lineno}")
        weights_only = [k for k in node.keywords if k.arg == "weights_only" and getattr(k.value, "value", None) is True]
        assert name != "torch.load" or weights_only, f"{module(path)} reads a pickle with code in it"
    assert not found, f"{module(path)} parses files by itself ({', '.join(found)}); use concept_eraser.storage.readers"
