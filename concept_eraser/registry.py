"""Plug-ins: where they come from, their options, and how a recipe or a suite holds them.

A plug-in is a class whose fields are its options. It comes from one of three places.

* A module of this package. `methods/munba.py` is the method "munba". A module is a plug-in when it
  defines PLUGIN at its top level. It may also define NAMED: settings with a name of their own in a
  paper (`s` is `surgery` with rule: descent). The losses are the exception. The modules of
  `losses/` hold tables of them, because a loss has one formula for each target.
* An entry point of an installed package, in one of the groups of `GROUPS`. A built-in name wins
  over an entry point.
* An object that is passed in Python: `erase(method=MyMethod(), ...)`.

Names and summaries are read by `ast`, so that `list` and `--help` import neither torch nor another
package's code. A module is imported when its plug-in is loaded.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.metadata
import logging
import math
import os
import re
import sys
import threading
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError, first_line, quote, unknown, unknown_message

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parent
KINDS = {
    "method": "methods",
    "loss": "losses",
    "model": "models/families",
    "metric": "evaluation/metrics",
    "judge": "evaluation/judges",
    "feature": "evaluation/features",
    "attack": "evaluation/attacks",
    "dataset": "data/datasets",
    "architecture": "models/architectures",
}
GROUPS = {  # of entry points
    "method": "concept_eraser.methods",
    "loss": "concept_eraser.losses",
    "judge": "concept_eraser.judges",
    "metric": "concept_eraser.metrics",
    "attack": "concept_eraser.attacks",
}
_BASES = {  # the module and the classes that a plug-in from outside is derived from
    "method": ("methods.base", ("Method", "Edit")),
    "loss": ("losses.base", ("Loss",)),
    "judge": ("evaluation.base", ("Judge",)),
    "metric": ("evaluation.base", ("Metric",)),
    "attack": ("evaluation.attacks.base", ("Attack",)),
}
# the name of an entry point; a path such as module:function does not match
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_IN_MEMORY = re.compile(r"an? \S+ in memory\b")  # how a file records an object
_PARSING = threading.Lock()
_TABLE = "LOSSES"  # the end of the name of a table of losses


def names(kind: str) -> list[str]:
    """List the names of all plug-ins of a kind, of this package and of installed packages, sorted.

    Args:
        kind: One of `KINDS`.

    Raises:
        UserError: There is no such kind.
    """
    return sorted({*builtin(kind), *_entry_points(kind)})


@functools.cache
def builtin(kind: str) -> tuple[str, ...]:
    """List the names of a kind's plug-ins in this package, sorted."""
    modules = _modules(kind)
    if kind != "loss":
        return tuple(sorted(modules))
    return tuple(sorted({name for tree in modules.values() for name in _table_keys(tree)}))


@functools.cache
def _modules(kind: str) -> dict[str, ast.Module]:
    """Parse the modules of this package that hold plug-ins of a kind, by name."""
    if kind not in KINDS:
        raise unknown("kind of plug-in", kind, KINDS)
    mark = _TABLE if kind == "loss" else "PLUGIN"
    trees = {}
    for path in sorted((_ROOT / KINDS[kind]).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if mark in text:
            trees[path.stem] = _parse(text)
    defines = _table_keys if kind == "loss" else functools.partial(_assigned_value, name="PLUGIN")
    return {stem: tree for stem, tree in trees.items() if defines(tree)}


def _parse(text: str) -> ast.Module:
    """Parse a module's text, one thread at a time.

    Python 3.11 counts the depth of the syntax trees of all threads together. It raises SystemError
    if two of them are built at once (github.com/python/cpython/issues/106905).
    """
    with _PARSING:
        return ast.parse(text)


def _assigned_value(tree: ast.Module, name: str) -> ast.expr | None:
    """Return the value that a module assigns to a name at its top level, or None."""
    return next((value for target, value in _assignments(tree) if target == name), None)


def _assignments(tree: ast.Module) -> list[tuple[str, ast.expr]]:
    """List the names that a module assigns at its top level, with the values."""
    pairs: list[tuple[str, ast.expr]] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            pairs += [(t.id, node.value) for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            pairs.append((node.target.id, node.value))
    return pairs


def _table_keys(tree: ast.Module) -> list[str]:
    """List the names in a module's tables of losses."""
    tables = [value for name, value in _assignments(tree) if name.endswith(_TABLE)]
    keys = [key for table in tables if isinstance(table, ast.Dict) for key in table.keys]
    return [str(key.value) for key in keys if isinstance(key, ast.Constant)]


def _entry_points(kind: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Find the plug-ins of a kind in installed packages, by name. Built-in names are excluded."""
    return _installed_plugins(kind, tuple(sys.path), _working_folder()) if kind in GROUPS else {}


def _working_folder() -> str:
    """Return the working folder, or "" if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


@functools.cache
def _installed_plugins(
    kind: str, _path: tuple[str, ...], folder: str
) -> dict[str, tuple[EntryPoint, ...]]:
    """Do the work of `_entry_points`, with a cache.

    A package in the working folder does not count as installed. `python -m` searches that folder
    too, and it may hold files of a stranger.
    """
    points: dict[str, tuple[EntryPoint, ...]] = {}
    for point in importlib.metadata.entry_points(group=GROUPS[kind]):
        problem = f"the {kind} {point.name!r} of the package {_package(point)} is not used"
        if point.dist and os.path.abspath(str(point.dist.locate_file(""))) == folder:
            log.error("%s: the package lies in the working folder; install it", problem)
        elif point.name in builtin(kind) or point.name in named(kind):
            log.error("%s: the built-in %s %r has the same name", problem, kind, point.name)
        elif not _NAME.fullmatch(point.name):
            log.error("%s: a name has letters, digits, - and _ only", problem)
        else:
            points[point.name] = (*points.get(point.name, ()), point)
    return points


def _package(point: EntryPoint) -> str:
    """Return the name and the version of an entry point's package."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "(unknown)"


def _point(kind: str, name: str) -> EntryPoint:
    """Return the entry point of a name. Raises UserError if two packages have it."""
    first, *others = _entry_points(kind)[name]
    if others:
        packages = ", ".join(_package(point) for point in (first, *others))
        raise UserError(
            f"the {kind} {name!r} is in several packages: {packages}; uninstall all but one"
        )
    return first


@functools.cache
def named(kind: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the settings with a name of their own: that name -> (plug-in, its options).

    Nothing is imported for this.
    """
    settings: dict[str, tuple[str, dict[str, Any]]] = {}
    for plugin, tree in _modules(kind).items():
        value = _assigned_value(tree, "NAMED")
        if value is not None:
            settings |= {
                alias: (plugin, preset) for alias, preset in ast.literal_eval(value).items()
            }
    return settings


def resolve(kind: str, name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the plug-in of a name, and all its options.

    Raises ValueError if the options contradict the name.
    """
    plugin, fixed = named(kind).get(name, (name, {})) if kind in KINDS else (name, {})
    for key in fixed.keys() & options.keys():
        if options[key] != fixed[key]:
            raise ValueError(
                f"{key}: the {kind} {name!r} is {plugin!r} with {key}: {fixed[key]!r}, "
                f"found {quote(options[key])}; use name: {plugin} to set it"
            )
    return plugin, {**fixed, **options}


def load(kind: str, name: str) -> type[Any]:
    """Import the class of a plug-in.

    Args:
        kind: One of `KINDS`.
        name: The name of the plug-in, or of a setting.

    Raises:
        UserError: There is no such plug-in; the message has the closest name. Or the entry point of
            an installed package is not a class of this kind.
    """
    name = named(kind).get(name, (name, {}))[0]
    if name in _entry_points(kind):
        return _class_of(kind, name)
    if name not in builtin(kind):
        raise unknown(
            kind,
            name,
            [*names(kind), *named(kind)],
            hint=f"see `concept-eraser list {plural(kind)}`",
        )
    if kind == "loss":
        raise UserError(
            f"the loss {name!r} has a formula for each target; see concept_eraser.losses.find"
        )
    module = importlib.import_module(_module_of(kind, name))
    plugin: type[Any] = module.PLUGIN
    return plugin


def plural(kind: str) -> str:
    return "losses" if kind == "loss" else f"{kind}s"


def _module_of(kind: str, name: str) -> str:
    return f"concept_eraser.{KINDS[kind].replace('/', '.')}.{name}"


def _class_of(kind: str, name: str) -> type[Any]:
    """Import the class of an entry point.

    Raises UserError, with the name of the package, if it is not a class of this kind.
    """
    point = _point(kind, name)
    subject = f"the {kind} {name!r} of the package {_package(point)}"
    try:
        plugin = point.load()
    except Exception as error:  # whatever the import of another package raises
        raise UserError(
            f"{subject} cannot be imported ({first_line(error)}); upgrade or uninstall the package"
        ) from error
    if not (isinstance(plugin, type) and issubclass(plugin, _bases(kind))):
        raise UserError(
            f"{subject} is {point.value}, which is no class derived from {_bases_text(kind)}"
        )
    return plugin


def _bases(kind: str) -> tuple[type, ...]:
    module, classes = _BASES[kind]
    return tuple(
        getattr(importlib.import_module(f"concept_eraser.{module}"), name) for name in classes
    )


def _bases_text(kind: str) -> str:
    module, classes = _BASES[kind]
    return " or ".join(f"concept_eraser.{module}.{name}" for name in classes)


def summary(kind: str, name: str) -> str:
    """Return the line about a plug-in in a list, without importing the plug-in.

    For a built-in it is the first line of the module's docstring. For a loss it is the formula. For
    an entry point it is the first line of the class's docstring, with the package.
    """
    if name in _entry_points(kind):
        return _outside_summary(kind, name)
    if kind == "loss":
        return next(iter(formulas(name).values()), "")
    return (ast.get_docstring(_modules(kind)[name]) or "").split("\n")[0]


def family(attack: str) -> str:
    """Return the family of an attack or of an attack's named setting, without importing it.

    It is "other" if the class of another package does not state one.
    """
    name, _ = resolve("attack", attack, {})
    if name in _entry_points("attack"):
        point = _entry_points("attack")[name][0]
        path = _source_of(point)
        tree = _parse(path.read_text(encoding="utf-8")) if path is not None else ast.Module([], [])
        class_name = point.attr
    else:
        tree = _modules("attack")[name]
        value = _assigned_value(tree, "PLUGIN")
        class_name = value.id if isinstance(value, ast.Name) else ""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            stated = dict(_assignments(ast.Module(node.body, []))).get("family")
            if isinstance(stated, ast.Constant):
                return str(stated.value)
    return "other"


def formulas(loss: str) -> dict[str, str]:
    """Return the formulas of a built-in loss by module, those of one module on one line."""
    return {module: " / ".join(items) for module, items in formula_items(loss).items()}


def formula_items(loss: str) -> dict[str, list[str]]:
    """Return the formulas of a built-in loss from the docstrings of its modules, by module.

    A module of several targets has one for each target.
    """
    lines = {
        module: (ast.get_docstring(tree) or "").splitlines()
        for module, tree in _modules("loss").items()
    }
    start = f"* {loss} "
    texts = {}
    for module, text in lines.items():
        starts = [i for i, line in enumerate(text) if line.startswith(start)]
        if starts:
            texts[module] = [_item(text, i).removeprefix(start).strip() for i in starts]
    return texts


def _item(lines: list[str], start: int) -> str:
    """Join an item of a list, which is its line and the indented lines below, into one line."""
    end = next(
        (i for i in range(start + 1, len(lines)) if not lines[i].startswith("  ")), len(lines)
    )
    return " ".join(" ".join(lines[start:end]).split())


def _outside_summary(kind: str, name: str) -> str:
    points = _entry_points(kind)[name]
    packages = ", ".join(_package(point) for point in points)
    path = _source_of(points[0])
    text = ""
    if path is not None and len(points) == 1:
        tree = _parse(path.read_text(encoding="utf-8"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        own = ast.get_docstring(classes[points[0].attr]) if points[0].attr in classes else None
        text = (own or ast.get_docstring(tree) or "").split("\n")[0]
    return f"{text} (from {packages})".strip()


def _source_of(point: EntryPoint) -> Path | None:
    """Find the file of an entry point's module without importing it. None if it is elsewhere."""
    if point.dist is None:
        return None
    stem = point.module.replace(".", "/")
    paths = (
        Path(str(point.dist.locate_file(name))) for name in (f"{stem}.py", f"{stem}/__init__.py")
    )
    return next((path for path in paths if path.is_file()), None)


def options(plugin: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options of a plug-in: name -> (type, default). A missing default is MISSING.

    Raises:
        UserError: An option is called `name`, which is the key of the plug-in itself in a file. Or
            an annotation has a name that is not defined while the program runs.
    """
    if not is_dataclass(plugin):
        return {}
    if any(f.name == "name" and f.init for f in fields(plugin)):
        raise UserError(
            f"the class {plugin.__qualname__} has an option `name`, which in a recipe is the name "
            "of the plug-in; give the option another name"
        )
    try:
        hints = typing.get_type_hints(plugin)
    except NameError as error:
        raise UserError(
            f"the class {plugin.__qualname__} has an annotation with {quote(error.name)}, which is "
            "not defined while the program runs; import it outside `if TYPE_CHECKING:`"
        ) from error
    return {f.name: (hints[f.name], _default(f)) for f in fields(plugin) if f.init}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def problems(kind: str, name: str, option_values: Mapping[str, Any]) -> list[str]:
    """List all mistakes in a plug-in's name and options, one message each."""
    try:
        name, option_values = resolve(kind, name, option_values)
    except ValueError as error:
        return [str(error)]
    if name not in names(kind):
        return [unknown_message(kind, name, [*names(kind), *named(kind)])]
    try:
        plugin = load(kind, name)
        annotations = options(plugin)
    except UserError as error:
        return [str(error)]
    mistakes = [
        unknown_message(f"option of {kind} {name!r}", key, annotations)
        for key in option_values
        if key not in annotations
    ]
    values = {}
    for key, value in option_values.items():
        if key in annotations:
            try:
                values[key] = coerce(value, annotations[key][0])
                limits.require_option(key, values[key])
            except ValueError as error:
                mistakes.append(f"{key}: {error}")
    missing = [
        key
        for key, (_, default) in annotations.items()
        if default is MISSING and key not in option_values
    ]
    mistakes += [f"{key}: required by {kind} {name!r}" for key in missing]
    if not mistakes:
        try:
            plugin(**values)
        except ValueError as error:
            mistakes.append(str(error))
    return mistakes


def build(kind: str, name: str, option_values: Mapping[str, Any]) -> Any:
    """Make a plug-in from its options, coerced by annotation (YAML reads 1e-5 as a string).

    Args:
        kind: One of `KINDS`.
        name: The name of the plug-in, or of a setting.
        option_values: Its options. The others have their defaults.

    Raises:
        UserError: The name is unknown, or options are wrong. The message has every mistake.
    """
    mistakes = problems(kind, name, option_values)
    if mistakes:
        raise UserError("; ".join(mistakes))
    name, option_values = resolve(kind, name, option_values)
    plugin = load(kind, name)
    annotations = options(plugin)
    return plugin(
        **{key: coerce(value, annotations[key][0]) for key, value in option_values.items()}
    )


class Plugin:
    """The value of a plug-in in a recipe or a suite: a name with options, or an object from Python.

    An object becomes a name with options if its class has a name and the options describe it
    completely. A file records any other object by its class, its module and its options. No plug-in
    name has that form, so such an object cannot be loaded.

    Attributes:
        kind: A key of `GROUPS`.
        name: The name. For an object "a MyMethod in memory (my_package.my_module)".
        options: The options. For an object, as far as YAML can hold them.
        value: The object. None for a name.
    """

    def __init__(self, kind: str, name: str, options: Mapping[str, Any], value: Any = None) -> None:
        self.kind, self.name, self.options, self.value = kind, name, dict(options), value

    def build(self) -> Any:
        """Return the object itself, or make a new one from the name.

        A method or an attack from Python is copied, so that no state passes from one run to the
        next.

        Raises:
            UserError: The name is unknown or stands for an object of another process.
        """
        if self.value is not None:
            is_copy = self.kind in ("method", "attack") and is_dataclass(self.value)
            return dataclasses.replace(self.value) if is_copy else self.value
        require_loadable(self.kind, self.name)
        return build(self.kind, self.name, self.options)

    @property
    def is_record(self) -> bool:
        """Whether this is only the record of an object of another process."""
        return self.value is None and in_memory(self.name)

    def describe(self) -> str | dict[str, Any]:
        """Return the record for a file: the name, with the options if there are any."""
        return {"name": self.name, **self.options} if self.options else self.name

    def __repr__(self) -> str:
        return repr(self.name)

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Plugin) and (self.kind, self.describe()) == (
            other.kind,
            other.describe(),
        )
        return same and self.value is other.value  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.kind, self.name))


def memory_name(value: Any) -> str:
    """Return the record of an object: its class and its module, in a form that no name has."""
    return f"a {type(value).__qualname__} in memory ({type(value).__module__})"


def in_memory(name: str) -> bool:
    """Whether a name is the record of an object."""
    return _IN_MEMORY.match(name) is not None


def require_loadable(kind: str, name: str) -> None:
    """Raise UserError if a name stands for an object that was passed to another process."""
    if in_memory(name):
        raise UserError(
            f"the {kind} was {name}, which cannot be loaded by its name; pass an object "
            "of this class from Python in its place"
        )


def read(kind: str, value: Any) -> Plugin:
    """Make a `Plugin` from the value in a recipe, in a suite or from a caller.

    Args:
        kind: A key of `GROUPS`.
        value: A name, a mapping of `name` and options, an object, or a `Plugin`.

    Raises:
        ValueError: The value is none of these. `problems` checks names and options.
        UserError: The options of the object's class cannot be read.
    """
    if isinstance(value, Plugin) and value.kind == kind:
        return value
    if isinstance(value, str):
        return Plugin(kind, value, {})
    if isinstance(value, Mapping):
        option_values = dict(value)
        if not isinstance(name := option_values.pop("name", None), str):
            raise ValueError(
                f"a {kind} is a name, or a mapping with `name` and its options, found "
                f"{quote(value)}"
            )
        return Plugin(kind, name, option_values)
    if isinstance(value, type):
        raise ValueError(
            f"expected an object, found the class {value.__name__}; give {value.__name__}(...)"
        )
    if isinstance(value, int | float | list | tuple | None) or not isinstance(value, _bases(kind)):
        raise ValueError(
            f"a {kind} is a name, or an object derived from {_bases_text(kind)}, found "
            f"{quote(value)}"
        )
    if kind in ("method", "attack") and not is_dataclass(value):
        raise ValueError(
            f"{type(value).__name__} is no dataclass; a {kind} is one, whose fields are its options"
        )
    return _by_name(kind, value) or _by_class(kind, value)


def _by_name(kind: str, value: Any) -> Plugin | None:
    """Describe an object by a name and options.

    Returns None if its class has no name, or the options do not describe it completely.
    """
    name = _name_of(kind, type(value))
    if name is None or not is_dataclass(value):
        return None
    cls: type[Any] = type(value)
    values = {key: getattr(value, key) for key in options(cls)}
    changes = {key: option for key, option in values.items() if option != options(cls)[key][1]}
    if any(_plain(option) != option for option in changes.values()):
        return None
    return Plugin(kind, name, changes) if cls(**changes) == value else None


def _name_of(kind: str, plugin: type[Any]) -> str | None:
    """Return the name of a class among the plug-ins, or None."""
    stem = plugin.__module__.rpartition(".")[2]
    if stem in _modules(kind) and plugin.__module__ == _module_of(kind, stem):
        return stem if load(kind, stem) is plugin else None
    place = (plugin.__module__, plugin.__qualname__)
    return next(
        (
            name
            for name, (point, *_) in _entry_points(kind).items()
            if (point.module, point.attr) == place
        ),
        None,
    )


def _by_class(kind: str, value: Any) -> Plugin:
    cls = type(value)
    values = {key: _plain(getattr(value, key)) for key in options(cls)}
    return Plugin(kind, memory_name(value), values, value)


def _plain(value: Any) -> Any:
    """Convert a value to one that YAML can hold. Other values become their shortened `repr`."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if type(value) in (str, int, float, bool, types.NoneType) else quote(value)


def coerce(value: Any, annotation: Any) -> Any:
    """Convert a value from YAML or the command line to an annotated type.

    A number must be finite, because no option of a plug-in may be infinite. Raises ValueError,
    which says what is allowed.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(
                unknown_message(
                    "value",
                    quote(value) if not isinstance(value, str) else value,
                    map(str, arguments),
                )
            )
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        for option in (a for a in arguments if a is not type(None)):
            try:
                return coerce(value, option)
            except ValueError:
                continue
        raise ValueError(f"expected {annotation}, found {quote(value)}")
    if origin is tuple and arguments[1:] == (Ellipsis,):
        parts = (value.split(",") if value else []) if isinstance(value, str) else value
        parts = list(parts) if isinstance(parts, list | tuple) else [parts]
        return tuple(
            coerce(part.strip() if isinstance(part, str) else part, arguments[0]) for part in parts
        )
    if annotation is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise ValueError(f"expected true or false, found {quote(value)}")
    if annotation in (int, float, str):
        name = "a finite number" if annotation is float else annotation.__name__
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"expected {name}, found {quote(value)}")
        if annotation is int and isinstance(value, float) and not value.is_integer():
            raise ValueError(f"expected {name}, found {quote(value)}")
        try:
            result = annotation(value)
        except (ValueError, OverflowError):  # not a number, or one with thousands of digits
            raise ValueError(f"expected {name}, found {quote(value)}") from None
        if annotation is float and not math.isfinite(result):
            raise ValueError(f"expected {name}, found {quote(value)}")
        return result
    return value
