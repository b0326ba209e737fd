"""Plug-ins by file name: `methods/munba.py` is the method "munba".

A plug-in module defines PLUGIN, a frozen dataclass whose fields are its options, and may define NAMED: settings of it
that papers give a name of their own (`s` is `surgery` with rule: descent). Listing is a folder listing, so that `list`
and `--help` need not import torch; a module is imported when it is asked for.
"""

from __future__ import annotations

import ast
import functools
import importlib
import math
import types
import typing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from concept_eraser import limits
from concept_eraser.errors import UserError, shown, unknown, unknown_message

_ROOT = Path(__file__).parent
KINDS = {
    "method": "methods",
    "model": "models",
    "metric": "evaluation/metrics",
    "judge": "evaluation/judges",
    "feature": "evaluation/features",
    "attack": "evaluation/attacks",
    "dataset": "datasets",
    "architecture": "architectures",
}
_NOT_PLUGINS = {
    "__init__",
    "base",
    "blind",
    "cross_attention",
    "flow",
    "completeness",
    "folder_check",
    "guards",
    "hub",
    "latent",
    "loading",
    "lora",
    "lora_files",
    "module",
    "overlay",
    "pieces",
    "single_file",
    "fisher",
    "gaussian_mechanism",
    "history",
    "words",
}


def names(kind: str) -> list[str]:
    """The plug-ins of a kind, sorted."""
    if kind not in KINDS:
        raise unknown("kind of plug-in", kind, KINDS)
    return sorted(path.stem for path in (_ROOT / KINDS[kind]).glob("*.py") if path.stem not in _NOT_PLUGINS)


def _tree(kind: str, name: str) -> ast.Module:
    return ast.parse((_ROOT / KINDS[kind] / f"{name}.py").read_text(encoding="utf-8"))


@functools.cache
def named(kind: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Settings with a name of their own: that name -> (plug-in, its options); read without importing."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for plugin in names(kind):
        for node in _tree(kind, plugin).body:
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "NAMED" for t in node.targets):
                found |= {alias: (plugin, given) for alias, given in ast.literal_eval(node.value).items()}
    return found


def resolve(kind: str, name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The plug-in behind a name and all options it is given. Raises ValueError where they contradict the name."""
    plugin, fixed = named(kind).get(name, (name, {})) if kind in KINDS else (name, {})
    for key in fixed.keys() & given.keys():
        if given[key] != fixed[key]:
            raise ValueError(
                f"{key}: the {kind} {name!r} is {plugin!r} with {key}: {fixed[key]!r}, found {shown(given[key])}; use name: {plugin} to set it"
            )
    return plugin, {**fixed, **given}


def load(kind: str, name: str) -> type:
    """The class of a plug-in, by its name or that of a setting. Raises UserError with the closest name where there is none."""
    available = names(kind)
    name = named(kind).get(name, (name, {}))[0]
    if name not in available:
        raise unknown(kind, name, [*available, *named(kind)], hint=f"see `concept-eraser list {kind}s`")
    module = importlib.import_module(f"concept_eraser.{KINDS[kind].replace('/', '.')}.{name}")
    return module.PLUGIN


def summary(kind: str, name: str) -> str:
    """The first sentence of a plug-in's module docstring, read without importing it."""
    return (ast.get_docstring(_tree(kind, name)) or "").split("\n")[0]


def options(plugin: type) -> dict[str, tuple[Any, Any]]:
    """The options of a plug-in: name -> (type, default; MISSING where there is none)."""
    hints = typing.get_type_hints(plugin)
    return {
        f.name: (hints[f.name], f.default if f.default is not MISSING else MISSING) for f in fields(plugin) if f.init
    }


def problems(kind: str, name: str, given: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a plug-in's name and options, one message each; [] where nothing is."""
    available = names(kind)
    try:
        name, given = resolve(kind, name, given)
    except ValueError as error:
        return [str(error)]
    if name not in available:
        return [unknown_message(kind, name, [*available, *named(kind)])]
    plugin = load(kind, name)
    known = options(plugin)
    found = [unknown_message(f"option of {kind} {name!r}", key, known) for key in given if key not in known]
    coerced = {}
    for key, value in given.items():
        if key in known:
            try:
                coerced[key] = coerce(value, known[key][0])
                limits.require_option(key, coerced[key])
            except ValueError as error:
                found.append(f"{key}: {error}")
    found += [f"{key}: required by {kind} {name!r}" for key, (_, default) in known.items() if default is MISSING and key not in given]  # fmt: skip
    if not found:
        try:
            plugin(**coerced)
        except ValueError as error:
            found.append(str(error))
    return found


def build(kind: str, name: str, given: dict[str, Any]) -> Any:
    """Make a plug-in from its options, coerced by annotation (YAML reads 1e-5 as a string)."""
    wrong = problems(kind, name, given)
    if wrong:
        raise UserError("; ".join(wrong))
    name, given = resolve(kind, name, given)
    plugin = load(kind, name)
    known = options(plugin)
    return plugin(**{key: coerce(value, known[key][0]) for key, value in given.items()})


def coerce(value: Any, annotation: Any) -> Any:
    """Convert a YAML or command-line value to an annotated type, or raise ValueError with what is allowed.

    A number must be finite: no plug-in has an option that may be infinite.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(
                unknown_message("value", shown(value) if not isinstance(value, str) else value, map(str, arguments))
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
        raise ValueError(f"expected {annotation}, found {shown(value)}")
    if annotation is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise ValueError(f"expected true or false, found {shown(value)}")
    if annotation in (int, float, str):
        name = "a finite number" if annotation is float else annotation.__name__
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"expected {name}, found {shown(value)}")
        if annotation is int and isinstance(value, float) and not value.is_integer():
            raise ValueError(f"expected {name}, found {shown(value)}")
        try:
            result = annotation(value)
        except (ValueError, OverflowError):  # no number, one of thousands of digits
            raise ValueError(f"expected {name}, found {shown(value)}") from None
        if annotation is float and not math.isfinite(result):
            raise ValueError(f"expected {name}, found {shown(value)}")
        return result
    return value
