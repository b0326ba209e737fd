"""Paths of this machine in what others will read: a path becomes its last component."""

from __future__ import annotations

import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

_PART = r"[\w.@+~-]+"
# in a sentence; not of a URL or of `and/or`
_WITHIN = re.compile(rf"(?<![\w.:/~-])(?:~|\.\.)?/(?:{_PART}/)+{_PART}")
# as models are named in evaluations: a path and a fingerprint
_MODEL = re.compile(r"(.+?)( \([0-9a-f]+\))?")

# FILE.safetensors@BASE: a checkpoint of one file, and what it is read beside
FILE_ON = ".safetensors@"


def _file_and_base(text: str) -> tuple[str, str]:
    file, _, base = text.partition(FILE_ON)
    return file + FILE_ON[:-1], base


def base_of(text: str) -> str:
    """What a checkpoint of one file is read beside; of any other model the text itself."""
    return _file_and_base(text)[1] if FILE_ON in text else text


def is_place(text: str) -> bool:
    """Whether a text is a path that says where something lies on a machine: absolute, from a home,
    or by way of `..`.
    """
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
    """The last component of a path; of a file on a base, of each."""
    if FILE_ON in text:
        return "@".join(last(one) if is_place(one) else one for one in _file_and_base(text))
    path = PureWindowsPath(text) if "\\" in text else PurePosixPath(text)
    return path.name if path.name not in ("", "..", "~") else "local"


def shorten(text: str) -> str:
    """A text without the places in it: the whole of it, "PATH (fingerprint)", "PATH on PATH", or
    within a sentence.
    """
    path, print_ = _MODEL.fullmatch(text).groups() if _MODEL.fullmatch(text) else (text, None)  # type: ignore[union-attr]
    if " on " in path and any(map(is_place, path.split(" on "))):
        return " on ".join(last(one) if is_place(one) else one for one in path.split(" on ")) + (
            print_ or ""
        )
    if is_place(path):
        return last(path) + (print_ or "")
    return _WITHIN.sub(lambda found: last(found[0]), text)


def clean(value: Any) -> Any:
    """The same mapping, list or text, every text in it `shortened`; lists of prompts, which are no
    paths, stay.
    """
    if isinstance(value, dict):
        return {
            k: v if k == "prompts" and isinstance(v, list) else clean(v) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [clean(one) for one in value]
    return shorten(value) if isinstance(value, str) else value


def name_paths(value: Any, names: list[str] | None = None) -> Any:
    """The same value with every text that is a path as a whole replaced by its last component,
    which `found` collects.
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
