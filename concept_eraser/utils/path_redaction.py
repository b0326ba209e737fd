"""Shorten the paths of this machine in published texts: a path becomes its last component."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

_PART = r"[\w.@+~-]+"
# the folder of a user, whose name may have spaces
_USER = r"(?:home|Users)[\\/]+[\w@+~-]+(?: [\w@+~-]+){0,3}[\\/]+"
# a path in a sentence, but not in a URL or in `and/or`. Backslashes are doubled in a `repr`. A
# folder before a backslash may have spaces.
_WITHIN = re.compile(
    r"(?<![\w.:/\\~-])(?:"
    rf"(?:[A-Za-z]:|\\\\+{_PART})[\\/]+(?:{_USER})?"
    rf"(?:{_PART}[\\/]+|{_PART}(?: {_PART})+\\+)*{_PART}"
    rf"|/{_USER}(?:{_PART}/)*{_PART}"
    rf"|(?:~|\.\.)?/(?:{_PART}/)+{_PART})"
)
# the name of a model in evaluations: a path and a fingerprint
_MODEL = re.compile(r"(.+?)( \([0-9a-f]+\))?")

# FILE.safetensors@BASE: a checkpoint of one file, and its base
FILE_ON = ".safetensors@"


def _file_and_base(text: str) -> tuple[str, str]:
    file, _, base = text.partition(FILE_ON)
    return file + FILE_ON[:-1], base


def base_of(text: str) -> str:
    """Return the base of a checkpoint of one file. Of any other model, return the text itself."""
    return _file_and_base(text)[1] if FILE_ON in text else text


def is_place(text: str) -> bool:
    """Whether a text is a path of a machine: absolute, from a home, or with `..`."""
    if "\n" in text or not text.strip("/"):
        return False
    if FILE_ON in text:
        return any(map(is_place, _file_and_base(text)))
    if re.match(r"[A-Za-z]:[\\/]|\\\\", text):
        return True
    parts = PurePosixPath(text).parts
    if parts[0] == "~" or ".." in parts:
        return True
    # "/imagine a star" is a prompt
    return parts[0].startswith("/") and (len(parts) > 2 or " " not in text)


def last(text: str) -> str:
    """Return the last component of a path. For a file on a base, return those of both.

    It is "local" for the home folder, whose last component is the name of the user.
    """
    if FILE_ON in text:
        return "@".join(last(one) if is_place(one) else one for one in _file_and_base(text))
    path = PureWindowsPath(text) if "\\" in text else PurePosixPath(text)
    if path.as_posix() in {home.as_posix() for home in _folders(Path.home)}:
        return "local"
    return path.name if path.name not in ("", "..", "~") else "local"


def _folders(*functions: Callable[[], Path]) -> Iterator[Path]:
    """Yield the folders that functions return. A root, or a folder without a name, is left out."""
    for function in functions:
        try:
            folder = function()
        except (OSError, RuntimeError):  # the working folder was removed, or there is no home
            continue
        if folder.name:
            yield folder


def _without_own_folders(text: str) -> str:
    """Shorten the paths in the home folder and the working folder, which may have spaces."""
    folders = {name for one in _folders(Path.home, Path.cwd) for name in (str(one), one.as_posix())}
    for folder in sorted(folders, key=len, reverse=True):
        if folder in text:
            path = rf"{re.escape(folder)}(?![\w@+~-]|\.\w)(?:[\\/](?:{_PART}[\\/])*{_PART})?"
            text = re.sub(rf"(?<![\w.~-]){path}", lambda match: last(match[0]), text)
    return text


def shorten(text: str) -> str:
    """Return a text with its paths shortened.

    The whole text may be a path, or "PATH (fingerprint)", or "PATH on PATH". Paths within a
    sentence are shortened too. They end at a space, but the folder of a user, the working folder
    and folders before a backslash may have spaces.
    """
    path, print_ = _MODEL.fullmatch(text).groups() if _MODEL.fullmatch(text) else (text, None)  # type: ignore[union-attr]
    if " on " in path and any(map(is_place, path.split(" on "))):
        return " on ".join(last(one) if is_place(one) else one for one in path.split(" on ")) + (
            print_ or ""
        )
    if is_place(path):
        return last(path) + (print_ or "")
    return _WITHIN.sub(lambda match: last(match[0]), _without_own_folders(text))


def clean(value: Any) -> Any:
    """Return the same mapping, list or text with every text in it shortened.

    Lists of prompts do not change, since they are no paths.
    """
    if isinstance(value, dict):
        return {
            k: v if k == "prompts" and isinstance(v, list) else clean(v) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [clean(one) for one in value]
    return shorten(value) if isinstance(value, str) else value


def name_paths(value: Any, names: list[str] | None = None) -> Any:
    """Replace every text that is a path by its last component.

    `names` collects these components.
    """
    if isinstance(value, dict):
        return {
            k: v if k == "prompts" and isinstance(v, list) else name_paths(v, names)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [name_paths(one, names) for one in value]
    if not isinstance(value, str) or not is_place(value):
        return value
    if names is not None:
        names.append(last(value))
    return last(value)
