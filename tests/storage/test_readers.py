"""The guarded readers: they give the results of the standard parsers, and their limits hold to the
byte.
"""

from __future__ import annotations

import errno
import json
import lzma
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from concept_eraser.storage import readers
from concept_eraser.utils.errors import UserError

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(-1e9, 1e9)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
MIB = 1024 * 1024


# --- bytes and texts ------------------------------------------------------------------------------


def test_the_limit_holds_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert readers.read_bytes(path, 100) == b"x" * 100
    with pytest.raises(UserError, match=r"has 100 bytes; at most 99 bytes are read"):
        readers.read_bytes(path, 99)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a system without /proc")
def test_a_file_that_does_not_state_its_size_is_bounded_too() -> None:
    path = Path("/proc/self/status")
    size = len(path.read_bytes())
    assert path.stat().st_size == 0
    assert readers.read_bytes(path, 10 * size)
    with pytest.raises(UserError, match="has more than 10 bytes, which no file of this kind has"):
        readers.read_bytes(path, 10)


@pytest.mark.parametrize(
    ("read", "limit"),
    [
        (readers.read_yaml, 4 * MIB),
        (readers.read_json, 64 * MIB),
        (readers.read_text, 64 * MIB),
        (readers.read_bytes, 64 * MIB),
        (readers.read_lines, 1024 * MIB),
        (readers.read_compressed_lines, 1024 * MIB),
    ],
)
def test_each_kind_has_its_limit(tmp_path: Path, read: Callable, limit: int) -> None:
    """A sparse file has that many bytes and needs no disk space."""
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, limit + 1)
    with pytest.raises(UserError, match=r"at most .* are read of a file of this kind"):
        read(path)
    assert readers.TABLE_BYTES == 1024 * MIB
    if limit > 64 * MIB:
        return  # reading it is slow
    os.truncate(path, limit)
    try:
        read(path)
    except UserError as error:  # zeros are neither YAML nor JSON, which is another error
        assert "are read of" not in str(error)  # noqa: PT017


def wrong_files(folder: Path) -> dict[str, tuple[Path, str]]:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    (folder / "file").write_text("{}")
    (folder / "circle").symlink_to(folder / "circle")
    return {
        "missing": (
            folder / "none",
            "cannot read .*none: no such file or directory; there is no such file",
        ),
        "folder": (folder, "is a folder; give a file"),
        "pipe": (pipe, r"no regular file \(a pipe or a device\); give a file"),
        "device": (Path("/dev/zero"), r"no regular file \(a pipe or a device\); give a file"),
        "under a file": (folder / "file" / "x", "not a directory; a part of its path is a file"),
        "circle": (folder / "circle", "its links form a circle"),
        "long": (folder / ("x" * 300), "its name is too long"),
    }


@pytest.mark.parametrize(
    "kind", ["missing", "folder", "pipe", "device", "under a file", "circle", "long"]
)
@pytest.mark.parametrize(
    "read",
    [
        readers.read_bytes,
        readers.read_text,
        readers.read_yaml,
        readers.read_json,
        readers.read_tensors,
        readers.read_tensor_header,
        readers.require_regular,
    ],
)
def test_what_is_no_file_is_an_error_with_the_reason(
    tmp_path: Path, read: Callable, kind: str
) -> None:
    path, message = wrong_files(tmp_path)[kind]
    with pytest.raises(UserError, match=message):
        read(path)


@pytest.mark.parametrize("read", [readers.read_bytes, readers.read_tensors])
def test_a_path_with_a_null_byte_is_no_path(read: Callable) -> None:
    with pytest.raises(UserError, match=r"null byte|cannot be the name of a file"):
        read(Path("a\0b"))


@pytest.mark.parametrize(
    ("code", "step"),
    [
        (errno.EACCES, "this user may not read it; change its permissions or copy it"),
        (errno.EPERM, "this user may not read it; change its permissions or copy it"),
        (errno.EIO, "the disk could not read it; copy it again from where it came from"),
        (errno.ESTALE, "its network folder is not connected; connect it again"),
        (errno.EISDIR, "it is a folder; give a file"),
        (errno.EBUSY, "check the path and its permissions"),
    ],
)
def test_the_systems_reason_and_a_next_step_are_given(code: int, step: str) -> None:
    message = readers.cannot("read", "x.json", OSError(code, os.strerror(code)))
    assert message == f"cannot read x.json: {os.strerror(code).lower()}; {step}"


def test_an_error_without_a_number_is_quoted_as_it_is() -> None:
    message = readers.cannot("write", Path("x"), ValueError("Bad Thing\nand more"))
    assert message == "cannot write x: ValueError: Bad Thing; check the path and its permissions"


def test_a_refusal_of_the_system_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match="permission denied; this user may not read it"):
        readers.read_bytes(tmp_path / "x")


def test_a_text_is_utf8_with_or_without_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfgr\xc3\xbcn")
    assert readers.read_text(path) == "grün"
    path.write_bytes(b"gr\xfcn")
    with pytest.raises(UserError, match=r"no text in UTF-8 \(byte 2 is wrong\)"):
        readers.read_text(path)


def test_a_refused_path_leaves_no_open_file(tmp_path: Path) -> None:
    """A folder, a pipe and a missing file: the process has no more descriptors than before."""
    wrong = wrong_files(tmp_path)
    before = len(os.listdir("/dev/fd"))
    for kind in ("folder", "pipe", "missing"):
        with pytest.raises(UserError):
            readers.read_bytes(wrong[kind][0])
    assert len(os.listdir("/dev/fd")) == before


def test_a_reader_never_waits_and_never_inherits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags of the system call: read only, no wait for a pipe, no inheritance by child
    processes.
    """
    open_flags, real = [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *rest: open_flags.append(flags) or real(path, flags, *rest)
    )
    path = tmp_path / "file"
    path.write_text("x")
    readers.read_bytes(path)
    assert open_flags[0] & (os.O_RDWR | os.O_WRONLY) == 0
    assert open_flags[0] & os.O_NONBLOCK
    assert open_flags[0] & os.O_CLOEXEC


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (9_999, "9999 bytes"),
        (10_000, "10.0 kB"),
        (999_949, "999.9 kB"),
        (10**6, "1.0 MB"),
        (999 * 10**6, "999.0 MB"),
        (10**9, "1.0 GB"),
        (4 * MIB, "4.2 MB"),
        (12_345_678_901, "12.3 GB"),
    ],
)
def test_sizes_are_written_for_a_reader(count: int, text: str) -> None:
    assert readers.size_text(count) == text


# --- JSON -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(PLAIN)
def test_json_is_what_the_standard_library_reads(value: Any) -> None:
    assert readers.parse_json(json.dumps(value), "x", type(value)) == value


def nest(depth: int, leaf: str = "1") -> str:
    return "[" * depth + leaf + "]" * depth


@pytest.mark.parametrize("leaf", ["1", "", '{"a": 1}', "[]"])
def test_json_is_nested_fifty_deep_and_no_deeper(leaf: str) -> None:
    inner = int(leaf not in ("1", ""))
    assert readers.parse_json(nest(50 - inner, leaf), "x", list) == json.loads(
        nest(50 - inner, leaf)
    )
    with pytest.raises(UserError, match="x is nested deeper than 50 levels"):
        readers.parse_json(nest(51 - inner, leaf), "x", list)


def test_mappings_count_as_levels_in_every_branch() -> None:
    deep: Any = 1
    for level in range(51):
        deep = {"a": 0, "b": deep} if level % 2 else [0, deep, "text"]
    with pytest.raises(UserError, match="nested deeper"):
        readers.parse_json(json.dumps(deep), "x", (dict, list))
    shallower = deep[1]
    assert readers.parse_json(json.dumps(shallower), "x", (dict, list)) == shallower


def test_json_that_ends_the_parsers_recursion_is_refused() -> None:
    with pytest.raises(UserError, match="x is nested deeper than 50 levels"):
        readers.parse_json(nest(100_000), "x", list)


@pytest.mark.parametrize("text", ["{", "", "{'a': 1}", "1" * 5000])
def test_what_is_no_json_is_an_error(text: str) -> None:
    with pytest.raises(
        UserError, match=r"x is damaged: it is no JSON \((JSONDecode|Value)Error: .*copy it again"
    ):
        readers.parse_json(text, "x")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("[]", dict, "expected a mapping, found list"),
        ("{}", list, "expected a list, found dict"),
        ("1", str, "expected a text, found int"),
        ('"a"', (dict, list), "expected a mapping or a list, found str"),
        ('"a"', (int, float), "expected int or float, found str"),
    ],
)
def test_another_kind_than_expected_is_damage(text: str, kind: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        readers.parse_json(text, "x", kind)


def test_a_json_file_is_a_mapping_by_default(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": [1]}')
    assert readers.read_json(path) == {"a": [1]}
    with pytest.raises(UserError, match=f"{path} is damaged: expected a list"):
        readers.read_json(path, list)


def test_whole_mappings_of_a_log_are_kept_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert readers.read_lines(path) == []
    rows = [{"step": 0}, {"step": 1, "text": "grün\u2028"}]
    lines = [
        json.dumps(rows[0]),
        "",
        "[1]",
        "3",
        "{",
        "[" * 100_000,
        json.dumps(rows[1], ensure_ascii=False),
        '{"step": 2',
    ]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe")
    assert readers.read_lines(path) == rows


def test_compressed_lines_are_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl.xz"
    rows = [{"step": 0}, {"step": 1, "text": "grün\u2028"}]
    whole = lzma.compress(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    )
    path.write_bytes(whole)
    assert readers.read_compressed_lines(path) == rows
    path.write_bytes(lzma.compress(b'{"a": 1}\n' * 1000))
    assert len(readers.read_compressed_lines(path, 9000)) == 1000
    cases = {
        whole[:-1]: "its end is missing",
        b"x" + whole[1:]: "no xz file",
        lzma.compress(b'{"a": 1}\n[1]\n'): "1 of its lines are no mappings",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            readers.read_compressed_lines(path)
    path.write_bytes(lzma.compress(b'{"a": 1}\n' * 1000))
    with pytest.raises(UserError, match="holds more than 8999 bytes"):
        readers.read_compressed_lines(path, 8999)


# --- YAML -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(PLAIN)
def test_yaml_is_what_the_safe_loader_reads(value: Any) -> None:
    text = yaml.safe_dump(value)
    assert readers.parse_yaml(text, "x") == yaml.safe_load(text)


def test_an_empty_yaml_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("# nothing\n")
    assert readers.read_yaml(path) is None


def test_a_yaml_text_is_bounded_like_a_file() -> None:
    limit = 4 * MIB
    assert readers.parse_yaml("#" * limit, "x") is None
    with pytest.raises(UserError, match=r"x has 4.2 MB; at most 4.2 MB are read of a YAML file"):
        readers.parse_yaml("#" * (limit + 1), "x")


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ("{a: ", "}")])
def test_yaml_is_nested_fifty_deep_and_no_deeper(opening: str, closing: str) -> None:
    assert readers.parse_yaml(opening * 50 + "1" + closing * 50, "x") is not None
    for depth in (51, 5000, 300_000):  # the last would end the process in libyaml's composer
        with pytest.raises(UserError, match="x is nested deeper than 50 levels; write it flatter"):
            readers.parse_yaml(opening * depth + "1" + closing * depth, "x")


def test_neighbours_do_not_add_up_to_depth() -> None:
    assert len(readers.parse_yaml("[" + ", ".join(["[[]]", "{a: {}}"] * 60) + "]", "x")) == 120


@pytest.mark.parametrize("before", [0, 60])
def test_events_alone_show_the_depth_after_any_number_of_neighbours(before: int) -> None:
    """libyaml may compose nodes only after this check, so that the next check would be too late."""
    neighbours = "[], " * before
    assert readers._require_shallow(f"[{neighbours}{nest(49)}]", "x") is None
    with pytest.raises(UserError, match="x is nested deeper than 50 levels"):
        readers._require_shallow(f"[{neighbours}{nest(50)}]", "x")


def test_the_loader_is_libyamls_where_it_is_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both loaders give plain types only."""
    readers._yaml_loader.cache_clear()
    assert readers._yaml_loader() is getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    readers._yaml_loader.cache_clear()
    try:
        assert readers._yaml_loader() is yaml.SafeLoader
        assert readers.parse_yaml("a: [1, b]", "x") == {"a": [1, "b"]}
    finally:
        readers._yaml_loader.cache_clear()


def chain(links: int, levels: int) -> str:
    """Each anchor wraps the one before in lists: `links * levels` deep with all aliases
    expanded.
    """
    lines = [f"a0: &a0 {nest(levels)}"]
    lines += [f"a{i}: &a{i} {nest(levels, f'*a{i - 1}')}" for i in range(1, links)]
    return "\n".join(lines)


def test_depth_is_that_of_the_value_with_its_aliases_written_out() -> None:
    assert readers.parse_yaml(chain(7, 7), "x")  # 49 lists in a mapping
    with pytest.raises(UserError, match="x is nested deeper than 50 levels"):
        readers.parse_yaml(chain(2, 25), "x")
    with pytest.raises(UserError, match="x is nested deeper than 50 levels"):
        readers.parse_yaml(chain(100, 40), "x")


def bomb(more: int) -> str:
    """199 times a list of 1000 values, with all aliases expanded, and `more` values: 199,001 + more
    in all.
    """
    thousand = "&x [" + ", ".join(["1"] * 999) + "]"
    return "[" + ", ".join([thousand, *["*x"] * 198, *["1"] * more]) + "]"


def test_aliases_count_as_what_they_stand_for() -> None:
    assert len(readers.parse_yaml(bomb(999), "x")) == 199 + 999
    with pytest.raises(
        UserError, match=r"x holds more than 200,000 values, its aliases \(\*name\) written out"
    ):
        readers.parse_yaml(bomb(1000), "x")


def test_keys_of_mappings_are_counted_too() -> None:
    many = "&x {" + ", ".join(f"k{i}: 1" for i in range(500)) + "}"  # 1001 values
    assert readers.parse_yaml("[" + ", ".join([many, *["*x"] * 198]) + "]", "x")
    with pytest.raises(UserError, match="200,000 values"):
        readers.parse_yaml("[" + ", ".join([many, *["*x"] * 199]) + "]", "x")


def test_an_alias_used_twice_is_no_circle() -> None:
    assert readers.parse_yaml("a: &x [1]\nb: *x\nc: [*x]", "x") == {"a": [1], "b": [1], "c": [[1]]}
    for text in ("&a [*a]", "&a {b: [*a]}", "&a {? [*a] : 1}"):
        with pytest.raises(UserError, match=r"x: an alias .* is inside its own value"):
            readers.parse_yaml(text, "x")


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: b: c",
        "!!python/object/apply:os.getcwd []",
        "? [1]\n: 2",
        "2024-02-30",
        "a\x00b",
        "--- 1\n--- 2",
        "1" * 5000,
        "!!timestamp x",
        "!!float x",
    ],
)
def test_what_is_no_plain_yaml_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError, match="x is no valid YAML: ") as error:
        readers.parse_yaml(text, "x")
    assert len(str(error.value)) <= 320
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["!!binary a", "a: !!binary YQ==", "!!set {a, b}"])
def test_types_that_are_no_texts_numbers_lists_or_mappings_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"x has a value marked !!(binary|set)"):
        readers.parse_yaml(text, "x")


@pytest.mark.parametrize(
    "text", ["a: 1\nb: 2\na: 1", "{a: 1, 'a': 1}", "- {c: {1: x, 1: y}}", "&m {a: 1, a: 2}"]
)
def test_a_key_twice_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match=r"x has the key '[a1]' twice \(lines 1 and [13]\); remove"):
        readers.parse_yaml(text, "x")
    assert readers.parse_yaml("m: &m {a: 1}\nn: {<<: *m, a: 2}", "x")["n"] == {"a": 2}
    assert readers.parse_yaml("{1: x, '1': y}", "x") == {1: "x", "1": "y"}


@pytest.mark.parametrize("text", ["010", "-07", "1:30", "1:30.5", "[a, 0_7]"])
def test_a_number_that_yaml_reads_in_another_base_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match="in line 1 is another number in YAML"):
        readers.parse_yaml(text, "x")
    values = readers.parse_yaml("[0, -0, 0.5, 10, 0x10, '010', a 1:30, 08.5, 09]", "x")
    assert values == [0, 0, 0.5, 10, 16, "010", "a 1:30", 8.5, "09"]


def test_a_long_complaint_of_the_parser_is_cut() -> None:
    with pytest.raises(UserError) as error:
        readers.parse_yaml(f"!{'b' * 900} 1", "x")
    assert len(str(error.value)) == len("x is no valid YAML: ") + 300


# --- tensors --------------------------------------------------------------------------------------


def test_tensors_and_their_header(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(1, dtype=torch.int64)}
    save_file(tensors, path, metadata={"made": "here"})
    result = readers.read_tensors(path)
    assert set(result) == {"a", "b"}
    assert all(torch.equal(result[name], tensor) for name, tensor in tensors.items())
    metadata, names = readers.read_tensor_header(path)
    assert metadata == {"made": "here"}
    assert sorted(names) == ["a", "b"]
    save_file(tensors, path)
    assert readers.read_tensor_header(path)[0] == {}


@pytest.mark.parametrize("read", [readers.read_tensors, readers.read_tensor_header])
def test_damaged_tensors_are_a_user_error(tmp_path: Path, read: Callable) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(600.0)}, path)
    whole = path.read_bytes()
    for content in (b"", b"x", whole[:100], b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(
            UserError, match=r"x.safetensors is damaged or truncated \(.+\); copy it again"
        ):
            read(path)


def test_a_regular_file_needs_no_more(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch()
    assert readers.require_regular(path) is None
    link = tmp_path / "link"
    link.symlink_to(path)
    assert readers.require_regular(link) is None
    assert stat.S_ISREG(path.stat().st_mode)
