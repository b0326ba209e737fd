"""Paths of the data files: pipelines/, prompts/ and eval/, and the folder of the image cache."""

from __future__ import annotations

import os
from pathlib import Path

from concept_eraser.utils.errors import UserError, quote, unknown

_PACKAGE = Path(__file__).parents[1]
_KINDS = {"pipelines": "recipe", "prompts": "prompt set", "eval": "evaluation suite"}
_SUFFIXES = (".yaml", ".yml", ".txt")
RECIPE = "recipe.yaml"  # in a run folder
_TABLES = (".csv", ".tsv", ".jsonl", ".json")  # of prompts


def folder(kind: str) -> Path:
    """Return the folder of a kind of data: in a wheel inside the package, else beside it."""
    for root in (_PACKAGE / "data_files", _PACKAGE.parent):
        if (root / kind).is_dir():
            return root / kind
    raise UserError(f"this installation has no {kind}/ folder; reinstall concept-eraser")


def names(kind: str) -> list[str]:
    return sorted(path.stem for path in folder(kind).iterdir() if path.suffix in _SUFFIXES)


def find(kind: str, name: str) -> Path:
    """Return the path of a shipped data file by its name, or the path of the user's own file.

    Raises UserError if there is none.
    """
    own = Path(name)
    if is_path(kind, name):
        if os.path.isfile(own):  # False also for a name that the system cannot have
            return own
        raise _missing(kind, name)
    for suffix in _SUFFIXES:
        path = folder(kind) / f"{name}{suffix}"
        if os.path.isfile(path):
            return path
    if _is_run(kind, name):
        raise _missing(kind, name)
    raise unknown(_KINDS[kind], name, names(kind), hint="or give the path of a file of your own")


def is_path(kind: str, name: str) -> bool:
    """Whether a name has the form of the path of a user's own file, which may be missing."""
    return _has_ending(kind, name) or os.sep in name


def _has_ending(kind: str, name: str) -> bool:
    """Whether a name ends as a file of that kind does."""
    return Path(name).suffix.lower() in (*_SUFFIXES, *(_TABLES if kind == "prompts" else ()))


def _missing(kind: str, name: str) -> UserError:
    """Return the error for a path that leads to no file."""
    shown = name if len(name) <= 300 and name.isprintable() else quote(name)
    if _is_run(kind, name):
        return UserError(
            f"{shown} is the folder of a run, not a recipe; give {Path(shown) / RECIPE}, with "
            f"--output {shown} to repeat or continue the run there"
        )
    advice = "check the path"
    if not Path(name).is_absolute():
        advice += ", or give the command in the folder where it begins"
    if kind == "pipelines" and not _has_ending(kind, name):
        advice = (
            f"a text with {os.sep!r} is read as a path; check the path. `concept-eraser erase` "
            "takes a concept without it, or the concept's prompts in a file after --forget"
        )
    return UserError(f"no such {_KINDS[kind]} file: {shown}; {advice}")


def _is_run(kind: str, name: str) -> bool:
    """Whether a name that should be a recipe's is that of a run folder."""
    return kind == "pipelines" and os.path.isfile(os.path.join(name, RECIPE))


def is_file_name(kind: str, name: str) -> bool:
    """Whether a text is the name of a shipped data file, or has the form of a path.

    A file of the working folder whose name has no ending of data files does not count.
    """
    return is_path("prompts", name) or name in names(kind)  # prompts have the endings of all kinds


def cache() -> Path:
    """Return the folder of the image cache: $CONCEPT_ERASER_CACHE, else ~/.cache/concept_eraser."""
    return Path(os.environ.get("CONCEPT_ERASER_CACHE") or Path.home() / ".cache" / "concept_eraser")


def tiny_weights() -> Path:
    return _PACKAGE / "tiny" / "weights"


def tiny_control(name: str) -> Path:
    """Return the folder of a bundled control: its UNet and the record of its training."""
    return tiny_weights() / "controls" / name


WHOLE_MODEL = ("model", "pipeline")  # subfolders of a run


def whole_model(family: str) -> str:
    """Return the subfolder of a run with the whole model: a diffusers pipeline, or one module."""
    return WHOLE_MODEL[0] if family in ("module", "clip") else WHOLE_MODEL[1]
