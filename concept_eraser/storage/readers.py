"""One guarded reader for each kind of file that a user, or a stranger, may give.

A reader first checks that the path is a regular file (a pipe would wait for ever, a device never
ends), and that the file is not larger than files of its kind are. It then parses without running
code. It refuses files that expand: aliases of YAML with more content than such a file could hold,
and nesting beyond DEPTH.

Every reader raises UserError that names the file, what is wrong, and what to do. No reader raises
another exception.
"""

from __future__ import annotations

import errno
import json
import lzma
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from concept_eraser.utils.errors import UserError, first_line, quote

MEGABYTE = 2**20
YAML_BYTES = 4 * MEGABYTE  # recipes, suites, prompt sets
JSON_BYTES = 64 * MEGABYTE  # configurations, evaluations, vocabularies
TABLE_BYTES = 1024 * MEGABYTE  # tables of prompts (the captions of COCO take 67 MB)
LOG_BYTES = 1024 * MEGABYTE  # logs of runs and attacks
TEXT_BYTES = 64 * MEGABYTE
DEPTH = 50  # levels of nested lists and mappings
_UNUSUAL = re.compile(r"[-+]?(0[0-9_]+|[0-9_]+:[0-9_:.]+)")
_NO_PLAIN_TYPES = tuple(f"tag:yaml.org,2002:{name}" for name in ("set", "omap", "pairs", "binary"))
NODES = 200_000  # values in a YAML file, aliases expanded

_NEXT_STEP = {
    errno.ENOENT: "there is no such file; check the path",
    errno.EACCES: "this user may not read it; change its permissions or copy it",
    errno.EPERM: "this user may not read it; change its permissions or copy it",
    errno.EISDIR: "it is a folder; give a file",
    errno.ENOTDIR: "a part of its path is a file; check the path",
    errno.ENAMETOOLONG: "its name is too long for this system; check the path",
    errno.ELOOP: "its links form a circle; give the file itself",
    errno.EIO: "the disk could not read it; copy it again from where it came from",
    errno.ESTALE: "its network folder is not connected; connect it again",
}


def read_bytes(path: Path, limit: int = JSON_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises UserError if there is no such file, it is a folder, pipe or device, it has more than
    `limit` bytes, or the system does not let this user read it.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path} is no regular file (a pipe or a device); give a file")
            if status.st_size > limit:
                raise UserError(
                    f"{path} has {size_text(status.st_size)}; at most {size_text(limit)} "
                    "are read of a file of this kind. Check that it is the right file, "
                    "or split it"
                )
            content = file.read(limit + 1)
    except UserError:  # it is a ValueError
        raise
    except OSError as error:
        raise UserError(cannot("read", path, error)) from None
    except ValueError:  # a path with a null byte
        raise UserError(f"{str(path)!r} cannot be the name of a file; check the path") from None
    if len(content) > limit:  # it grew, or the system does not state its size (/proc)
        raise UserError(
            f"{path} has more than {size_text(limit)}, which no file of this kind has; "
            "check that it is the right file"
        )
    return content


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file that may be a pipe, without waiting for a process that writes into it.

    It is an opener of `open`.
    """
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_text(path: Path, limit: int = TEXT_BYTES) -> str:
    """Read a text in UTF-8. Raises UserError as `read_bytes`, and if the file is no UTF-8."""
    content = read_bytes(path, limit)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is no text in UTF-8 (byte {error.start} is wrong); save it as UTF-8"
        ) from None


def read_yaml(path: Path, limit: int = YAML_BYTES) -> Any:
    """Return the content of a YAML file; None if it is empty.

    Raises UserError as `read_text` and `parse_yaml`.
    """
    return parse_yaml(read_text(path, limit), str(path))


def read_toml(path: Path, limit: int = YAML_BYTES) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises UserError as `read_text`, and if the file is no TOML or is nested deeper than DEPTH.
    """
    import tomllib

    text = read_text(path, limit)
    try:
        content = tomllib.loads(text.replace("\r\n", "\n"))
    except RecursionError:
        raise _too_deep(str(path)) from None
    except (ValueError, OverflowError) as error:  # of the syntax, or a number or date
        raise UserError(f"{path} is no valid TOML: {first_line(error)}") from None
    if _deeper_than(content, DEPTH):
        raise _too_deep(str(path))
    return content


def read_json(path: Path, kind: type | tuple[type, ...] = dict, limit: int = JSON_BYTES) -> Any:
    """Return the content of a JSON file, a mapping by default.

    Raises UserError as `read_text`, and if the file is no JSON, is nested deeper than DEPTH, or
    holds another kind.
    """
    return parse_json(read_text(path, limit), str(path), kind)


def read_lines(path: Path, limit: int = LOG_BYTES) -> list[dict[str, Any]]:
    """Return the mappings of a JSON Lines file; [] without a file.

    A line that is no whole mapping is left out, since a killed process may cut the last line of a
    log.
    """
    return (
        []
        if not path.exists()
        else whole_lines(read_bytes(path, limit).decode("utf-8", errors="replace"))
    )


def read_compressed_lines(path: Path, limit: int = TABLE_BYTES) -> list[dict[str, Any]]:
    """Return the mappings of a JSON Lines file under xz, of at most `limit` decompressed bytes.

    Raises UserError as `read_bytes`, and if the file is no xz file, is cut, is larger, or has a
    line that is no mapping.
    """
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    try:
        content = decompressor.decompress(read_bytes(path, limit), max_length=limit + 1)
    except lzma.LZMAError as error:
        raise UserError(
            f"{path} is damaged: it is no xz file ({first_line(error)}); copy it again"
        ) from None
    if len(content) > limit:
        raise UserError(
            f"{path} holds more than {size_text(limit)}; check that it is the right file"
        )
    if not decompressor.eof:
        raise UserError(f"{path} is damaged: its end is missing; copy it again")
    lines = [line for line in content.decode("utf-8", errors="replace").split("\n") if line]
    rows = whole_lines("\n".join(lines))
    if len(rows) < len(lines):
        raise UserError(
            f"{path} is damaged: {len(lines) - len(rows)} of its lines are no mappings; "
            "copy it again"
        )
    return rows


def whole_lines(text: str) -> list[dict[str, Any]]:
    """Return the mappings in a text of one JSON object per line. Other lines are left out."""
    rows = []
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def parse_json(text: str, where: str, kind: type | tuple[type, ...] = dict) -> Any:
    """Return the value of a JSON text.

    `where` names its source in errors. Raises UserError as `read_json`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise UserError(
            f"{where} is nested deeper than {DEPTH} levels; check that it is the right file"
        ) from None
    except ValueError as error:  # an error of the syntax, or a whole number of thousands of digits
        raise UserError(
            f"{where} is damaged: it is no JSON ({first_line(error)}); copy it again, or "
            "run the command that wrote it"
        ) from None
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds):
        names: dict[type, str] = {dict: "a mapping", list: "a list", str: "a text"}
        expected_kinds = " or ".join(names.get(one, one.__name__) for one in kinds)
        raise UserError(
            f"{where} is damaged: expected {expected_kinds}, found {type(value).__name__}; copy "
            "it again, or run the command that wrote it"
        )
    if _deeper_than(value, DEPTH):
        raise UserError(
            f"{where} is nested deeper than {DEPTH} levels; check that it is the right file"
        )
    return value


def _too_deep(where: str) -> UserError:
    return UserError(f"{where} is nested deeper than {DEPTH} levels; write it flatter")


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text, of plain types only; None if it is empty.

    `where` names its source in errors. Raises UserError if the text is no YAML, is nested deeper
    than DEPTH, has aliases in a circle, or expands to more than NODES values. Also if a mapping has
    a key twice, or a whole number is octal or in the base 60.
    """
    import yaml

    if len(text) > YAML_BYTES:
        raise UserError(
            f"{where} has {size_text(len(text))}; at most {size_text(YAML_BYTES)} are "
            "read of a YAML file"
        )
    loader = None
    try:
        _require_shallow(text, where)
        loader = _yaml_loader()(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _require_bounded(node, where)
        return loader.construct_document(node)
    except UserError:
        raise
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())[:300]
        if "nesting depth" in text:  # newer versions of libyaml have a limit of their own
            raise _too_deep(where) from None
        raise UserError(f"{where} is no valid YAML: {text}") from None
    except RecursionError:
        raise _too_deep(where) from None
    except (ValueError, OverflowError, TypeError, AttributeError) as error:
        # a number of thousands of digits, a date that does not exist, a key that cannot be one
        raise UserError(f"{where} is no valid YAML: {first_line(error)}") from None
    finally:
        if loader is not None:
            loader.dispose()


@cache
def _yaml_loader() -> Any:
    """Return the loader of plain types, if possible libyaml's, which is ten times as fast."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _require_bounded(root: Any, where: str) -> None:
    """Raise UserError if a YAML node is too deep, too large, or circular.

    Its aliases are expanded.
    """
    from yaml import MappingNode, ScalarNode, SequenceNode

    sizes: dict[int, tuple[int, int]] = {}  # results for each node; an alias is the same node again
    open_nodes: set[int] = set()

    def measure(node: Any, depth: int) -> tuple[int, int]:
        """Values in a node and how many levels of lists and mappings it has, at `depth` levels
        inside others.
        """
        if id(node) in open_nodes:
            raise UserError(
                f"{where}: an alias (*name) is inside its own value; write the value out"
            )
        total, height = sizes.get(id(node), (1, int(isinstance(node, SequenceNode | MappingNode))))
        if depth + height > DEPTH:
            raise UserError(f"{where} is nested deeper than {DEPTH} levels; write it flatter")
        if id(node) in sizes:
            return total, height
        children: Iterator[Any] = iter(())
        if str(node.tag) in _NO_PLAIN_TYPES:
            raise UserError(
                f"{where} has a value marked !!{node.tag.rpartition(':')[2]}; write it "
                "as a text or a list"
            )
        if isinstance(node, SequenceNode):
            children = iter(node.value)
        elif isinstance(node, ScalarNode):
            _require_decimal(node, where)
        elif isinstance(node, MappingNode):
            _require_once(node, where)
            children = (one for pair in node.value for one in pair)
        open_nodes.add(id(node))
        for child in children:
            values, levels = measure(child, depth + 1)
            total, height = total + values, max(height, levels + 1)
            if total > NODES:
                raise UserError(
                    f"{where} holds more than {NODES:,} values, its aliases (*name) "
                    "written out; make it smaller"
                )
        open_nodes.discard(id(node))
        sizes[id(node)] = total, height
        return total, height

    measure(root, 0)


def _require_once(mapping: Any, where: str) -> None:
    """Raise UserError if a mapping has a key twice. YAML would use the last one without a word."""
    from yaml import ScalarNode

    lines: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, ScalarNode) or key.tag.endswith(":merge"):
            continue
        name, line = (key.tag, key.value), key.start_mark.line + 1
        if name in lines:
            raise UserError(
                f"{where} has the key {quote(key.value)} twice (lines {lines[name]} and {line}); "
                "remove one"
            )
        lines[name] = line


def _require_decimal(scalar: Any, where: str) -> None:
    """Raise UserError for a number that YAML reads otherwise than people: 010 is 8, 1:30 is 90."""
    kind = scalar.tag.rpartition(":")[2]
    if not scalar.style and kind in ("int", "float") and _UNUSUAL.fullmatch(scalar.value):
        raise UserError(
            f"{where}: {quote(scalar.value)} in line {scalar.start_mark.line + 1} is another "
            "number in YAML (octal, or in the base 60); write it without leading zeros, or put a "
            "text into quotes"
        )


def _require_shallow(text: str, where: str) -> None:
    """Raise UserError if a YAML text is nested too deep.

    It counts events, because libyaml composes nodes by recursion in C, which ends the process at
    the end of the stack.
    """
    import yaml

    depth = 0
    for event in yaml.parse(text, _yaml_loader()):
        if isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            depth += 1
            if depth > DEPTH:
                raise UserError(f"{where} is nested deeper than {DEPTH} levels; write it flatter")
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            depth -= 1


def _deeper_than(value: Any, limit: int) -> bool:
    """Whether lists and mappings are nested more than `limit` deep."""
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return any(isinstance(one, dict | list) for one in level)


def read_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name, on the CPU.

    Raises UserError if it is no regular file, damaged or truncated.
    """
    from safetensors.torch import load_file

    require_regular(path)
    try:
        return load_file(path)
    except Exception as error:  # safetensors has an error class of its own, and raises others too
        raise UserError(
            f"{path} is damaged or truncated ({first_line(error)}); copy it again, or make it again"
        ) from None


def read_tensor_header(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return metadata and names of the tensors of a safetensors file, without reading a tensor.

    Raises UserError as `read_tensors`.
    """
    from safetensors import safe_open

    require_regular(path)
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {}), list(file.keys())
    except Exception as error:
        raise UserError(
            f"{path} is damaged or truncated ({first_line(error)}); copy it again, or make it again"
        ) from None


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file inside the context, to read one tensor after the other.

    Yields safetensors' own object, with `keys()` and `get_tensor(name)`. Raises UserError as
    `read_tensors`.
    """
    from safetensors import SafetensorError, safe_open

    require_regular(path)
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(
            f"{path} is damaged or truncated ({first_line(error)}); copy it again, or make it again"
        ) from None


def read_tensor_types(path: Path) -> dict[str, str]:
    """Return the precision of each tensor of a safetensors file by its name, such as "F16".

    No tensor is read. Raises UserError as `read_tensors`.
    """
    with open_tensors(path) as file:
        names = list(file.keys())
        return {name: file.get_slice(name).get_dtype() for name in names}


def require_regular(path: Path) -> None:
    """Raise UserError if a path is no regular file that can be read."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise UserError(cannot("read", path, error)) from None
    if not stat.S_ISREG(status.st_mode):
        what = (
            "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file (a pipe or a device)"
        )
        raise UserError(f"{path} is {what}; give a file")


def cannot(verb: str, path: Path | str, error: BaseException) -> str:
    """Return the message for a failed access: the path, the system's reason, and what to do."""
    code = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or first_line(error)
    step = _NEXT_STEP.get(code or 0, "check the path and its permissions")
    return f"cannot {verb} {path}: {str(reason).lower() if code else reason}; {step}"


def size_text(count: int) -> str:
    """Format a number of bytes: 12 bytes, 3.4 MB."""
    if count < 10_000:
        return f"{count} bytes"
    unit, size = next(
        (unit, size)
        for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
        if count >= size
    )
    return f"{count / size:.1f} {unit}"
