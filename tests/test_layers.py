"""Which part may import which. Two rules carry the design: methods never see a model, evaluation
never sees training.
"""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "concept_eraser"
BASE = {"utils", "storage", "registry"}
IMPORT_RULES = {
    "__main__": {"cli"},
    "utils": {"utils"},
    "storage": {"utils", "storage"},
    "registry": {"utils"},
    "methods": {"methods"},
    "models": {*BASE, "models"},
    "losses": {"models.base", "registry", "losses"},
    "data": {"utils", "storage", "models.base", "models.hub", "data"},
    "concepts": {*BASE, "models.base", "data", "tiny.painter", "concepts"},
    "erasers": {"utils", "registry", "losses", "data", "models.base", "models.lora", "erasers"},
    "training": {"utils", "storage", "methods", "erasers.base", "training"},
    "tiny": {"utils", "models", "tiny"},
    "recipes": {*BASE, "data.templates", "recipes"},
    "targets": {
        *BASE,
        "recipes",
        "data",
        "losses",
        "erasers",
        "models",
        "training.placement",
        "methods.base",
        "targets",
    },
    "evaluation": {*BASE, "models", "data", "tiny", "evaluation"},
    "runs": {
        *BASE,
        "concepts.plan",
        "recipes",
        "targets",
        "erasers",
        "losses",
        "data",
        "models",
        "training",
        "methods.base",
        "evaluation",
        "tiny",
        "runs",
    },
    "reporting": {*BASE, "recipes", "data", "models", "evaluation", "training.log", "reporting"},
    "exporting": {
        *BASE,
        "recipes",
        "models",
        "evaluation.result_schema",
        "reporting.run_results",
        "exporting",
    },
    "api": {
        *BASE,
        "concepts",
        "recipes",
        "runs",
        "models",
        "training.log",
        "evaluation",
        "reporting",
        "exporting",
    },
    "cli": {
        *BASE,
        "api",
        "concepts.plan",
        "recipes",
        "runs",
        "targets",
        "losses",
        "data",
        "models.loading",
        "tiny.published",
        "evaluation",
        "reporting",
        "demo",
        "cli",
    },
    "demo": {
        *BASE,
        "api",
        "recipes",
        "targets",
        "data",
        "models",
        "evaluation",
        "reporting",
        "tiny.painter",
        "demo",
    },
}
SINGLE_RULES = {
    "methods.history": {"storage.writers"},  # a recorded history may be in a folder
    "utils.plugin_fields": {"registry"},  # fields of recipes and suites that name a plug-in
    "methods.fisher": {"utils.extras"},
    "methods.torchjd": {"utils.extras"},
    "data.datasets.painted": {"tiny.painter"},  # the painter of the bundled data set
    "cli.concept_result": {"models.single_file"},  # whether a model has that format
    "cli.dry_run": {"models.hub"},  # a dry run asks it for nothing
    "cli.doctor": {"models.base"},  # whether this CPU emulates bfloat16
    "recipes.defaults": {"models", "tiny.published"},  # the default depends on the model
    "demo.presets": {"runs.suite_matching"},  # the suite in a run folder
    "reporting.run_results": {"runs.suite_matching"},  # whether a command needs --suite
    # only for their types
    "recipes.keywords": {"data.labelled", "evaluation", "losses", "methods.base", "models.base"},
}
FOREIGN = {  # only these may import the heavy libraries
    "diffusers": {"models", "tiny"},
    "transformers": {"models", "tiny", "evaluation.judges"},
    "peft": {"models"},
    "accelerate": {"training", "runs.job", "utils.distributed"},
    "typer": {"cli"},
    "gradio": {"demo.page"},  # the tabs get it as an argument, so that tests run without it
    "matplotlib": {"reporting", "data.datasets"},
    "pydantic": {"utils.plugin_fields", "recipes", "evaluation"},
}
FILES = sorted(ROOT.rglob("*.py"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return the nodes of a file's syntax tree. A file is parsed once in a process."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it, as dotted names (also `from x import y` as
    x.y).
    """
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def is_covered(name: str, rules: set[str]) -> bool:
    return any(name == rule or name.startswith(rule + ".") for rule in rules)


def test_imports_within_the_package() -> None:
    faults = []
    for path in FILES:
        name = module(path)
        if name == "__init__":
            continue
        rules = IMPORT_RULES[name.split(".")[0]] | SINGLE_RULES.get(name, set())
        own = {
            i.removeprefix("concept_eraser.")
            for i in imports(path)
            if i.startswith("concept_eraser.")
        }
        if wrong := {i for i in own if not is_covered(i, rules)}:
            faults.append(f"{name} imports {wrong}; allowed: {rules}")
    assert not faults, "\n".join(faults)


def imported_files(path: Path) -> set[Path]:
    """The files of the package that a file imports, also where only a type checker reads the
    import.
    """
    files = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "concept_eraser":
            continue
        for length in range(len(parts), 1, -1):  # a name in a module counts for the module
            stem = ROOT.joinpath(*parts[1:length])
            candidates = (stem.with_suffix(".py"), stem / "__init__.py")
            if file := next((one for one in candidates if one.is_file()), None):
                files.add(file)
                break
    return files - {path}


def test_no_import_circles() -> None:
    """Files can be sorted so that each imports only files before it, also for type checkers."""
    graph = {path: imported_files(path) for path in FILES}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail("these files import each other: " + " <- ".join(map(module, error.args[1])))


def test_class_names_occur_once() -> None:
    """One concept, one class name: no two classes of the package are called the same."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module(path))
    duplicates = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert not duplicates, f"give each of these classes a name of its own: {duplicates}"


def test_heavy_libraries_stay_where_they_belong() -> None:
    faults = [
        f"{module(path)} imports {library}"
        for path in FILES
        for library in {name.split(".")[0] for name in imports(path)} & FOREIGN.keys()
        if not is_covered(module(path), FOREIGN[library])
    ]
    assert not faults, "\n".join(faults)


def test_methods_know_torch_and_vectors_only() -> None:
    for path in (ROOT / "methods").glob("*.py"):
        outside = {i.split(".")[0] for i in imports(path)} - {
            "concept_eraser",
            "torch",
            "__future__",
        }
        extra = {
            "torchjd": {"torchjd"},
            "fisher": {"curvlinops", "scipy", "numpy"},
            "gaussian_mechanism": {"scipy"},
        }.get(path.stem, set())
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
        assert outside <= plain | extra, f"{path.name}: {outside}"


def test_the_package_itself_is_light() -> None:
    """`import concept_eraser` and the command line's start load no torch."""
    import subprocess
    import sys

    code = (
        "import sys, concept_eraser, concept_eraser.cli.main; print([m for m in ('torch', "
        "'diffusers', 'pydantic', 'numpy') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "[]"
    )


def test_no_print_and_no_notebook_of_asserts_in_the_library() -> None:
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in ("cli", "tiny"):
            continue
        for node in nodes_of(path):
            assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"), (
                f"{path} prints"
            )


# Calls that may have more than four positional arguments. All others name their arguments.
POSITIONAL_CALLS = {
    "nn.Sequential": "takes any number of modules",
    "log.warning": "takes the values of the message's format",
    "field_validator": "pydantic's; takes any number of names of fields",
    "_results": "of the api; takes any number of names of files",
}
STUDIES = ROOT.parent / "studies"


@pytest.mark.parametrize("folder", [ROOT, STUDIES], ids=lambda folder: folder.name)
def test_long_calls_name_their_arguments(folder: Path) -> None:
    """A call with more than four arguments passes them by keyword."""
    calls = [
        f"{path.relative_to(ROOT.parent)}:{node.lineno}: {_dotted_name(node.func)}"
        for path in sorted(folder.rglob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and sum(not isinstance(argument, ast.Starred) for argument in node.args) > 4
        and _dotted_name(node.func) not in POSITIONAL_CALLS
    ]
    assert not calls, "pass these arguments by keyword:\n" + "\n".join(calls)


# Which parts may write to a disk. All others use storage/, which never removes the files of others.
WRITERS = {
    "storage": "the writers themselves",
    "tiny": "a developer's build of the bundled weights, into a folder named on its command line",
    "models": "a model's own format, into the empty folder that storage.writers hands out",
}
WRITING_CALLS = {
    "write_text",
    "write_bytes",
    "unlink",
    "rmdir",
    "rmtree",
    "mkdir",
    "makedirs",
    "rename",
    "symlink_to",
    "hardlink_to",
    "touch",
    "copytree",
    "copyfile",
    "copy2",
    "move",
    "removedirs",
    "savez",
    "savez_compressed",
    "tofile",
}
EXCEPTIONS = {  # (module, call): why
    ("cli.demo", "rmtree"): "the server's own scratch folder among the system's temporary ones",
    ("demo.uploads", "unlink"): "old uploads in the server's own scratch folder",
    ("demo.uploads", "rmdir"): "old uploads in the server's own scratch folder",
    ("training.log", "write_text"): "/proc/self/clear_refs, which resets the peak of memory",
}


def _opens_to_write(node: ast.Call) -> bool:
    """Whether a call opens a file with a mode that writes."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in ("open", "fdopen"):
        return False
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if isinstance(owner, ast.Name) and owner.id in ("Image", "webbrowser", "History", "zipfile"):
        return False
    modes = [
        a
        for a in [*node.args, *(k.value for k in node.keywords if k.arg == "mode")]
        if isinstance(a, ast.Constant) and isinstance(a.value, str)
    ]
    return any(
        set(mode.value) & set("wax+") and set(mode.value) <= set("rwaxbt+") for mode in modes
    )


def test_nothing_else_writes() -> None:
    others = [path for path in FILES if path.relative_to(ROOT).parts[0] not in WRITERS]
    faults = [fault for path in others for fault in writing_calls(path)]
    assert not faults, "use concept_eraser.storage.writers:\n" + "\n".join(faults)


def writing_calls(path: Path) -> list[str]:
    """Return the calls of a file that write, each with its line."""
    writers = {
        alias.asname or alias.name
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("concept_eraser.storage")
        for alias in node.names
    }
    calls = []
    for node in nodes_of(path):
        if not isinstance(node, ast.Call):
            continue
        direct = isinstance(node.func, ast.Name)
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        is_writer = direct and name in writers
        if _opens_to_write(node) or (
            name in WRITING_CALLS and not is_writer and (module(path), name) not in EXCEPTIONS
        ):
            calls.append(f"{module(path)}: {name} in line {node.lineno}")
    return calls


# Which parts may parse files. Each kind of file has one guarded reader.
PARSERS = {
    "json.load",
    "yaml.load",
    "yaml.safe_load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "np.load",
    "np.fromfile",
    "csv.reader",
    "csv.DictReader",
    "safetensors.torch.load_file",
    "load_file",
    "safe_open",
}
READERS = {  # (module, call): why
    ("data.labelled", "np.load"): "the guarded reader of .npz",
    ("data.tables", "csv.DictReader"): "the guarded reader of tables",
    ("runs.job_table", "csv.DictReader"): "tables of erasures, after the guarded reader of texts",
    ("evaluation.features.base", "np.fromfile"): "the cache's records, each with its check",
    (
        "evaluation.features.inception",
        "torch.load",
    ): "weights that the user has put there, as plain tensors",
    (
        "evaluation.judges.base",
        "torch.load",
    ): "weights as plain tensors, published by torchvision or allowed by the user",
    ("methods.history", "torch.load"): "what the user's own training recorded, as plain tensors",
    ("models.loading", "safe_open"): "the check of a model folder's weights",
    ("models.overlay", "load_file"): "the reader of parts of a pipeline",
    ("models.overlay", "safe_open"): "the reader of parts of a pipeline",
    (
        "models.overlay",
        "torch.load",
    ): "pickles, as plain tensors and only where the user allows them",
    ("training.checkpoint", "torch.load"): "the reader of states, as plain tensors",
}


def _dotted_name(node: ast.expr) -> str:
    return (
        f"{_dotted_name(node.value)}.{node.attr}"
        if isinstance(node, ast.Attribute)
        else getattr(node, "id", "?")
    )


def test_nothing_else_parses_files() -> None:
    others = [path for path in FILES if path.relative_to(ROOT).parts[0] not in ("storage", "tiny")]
    faults = [fault for path in others for fault in parsing_calls(path)]
    assert not faults, "use concept_eraser.storage.readers:\n" + "\n".join(faults)


def parsing_calls(path: Path) -> list[str]:
    """Return the calls of a file that parse files, each with its line."""
    calls = []
    for node in nodes_of(path):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted_name(node.func)
        reads = name == "json.loads" and any(
            isinstance(n, ast.Attribute)
            and n.attr in ("read_text", "read_bytes", "read")
            and _dotted_name(n) != "sys.stdin.read"
            for a in node.args
            for n in ast.walk(a)
        )
        if reads or (name in PARSERS and (module(path), name) not in READERS):
            calls.append(f"{module(path)}: {name} in line {node.lineno}")
        has_weights_only = any(
            k.arg == "weights_only" and getattr(k.value, "value", None) is True
            for k in node.keywords
        )
        if name == "torch.load" and not has_weights_only:
            calls.append(f"{module(path)}: a pickle with code in it in line {node.lineno}")
    return calls
