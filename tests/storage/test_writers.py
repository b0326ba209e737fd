"""Writers of files and folders: they write the whole or nothing, and never replace or remove a
user's files.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from concept_eraser.storage import manifest, output_folder, writers
from concept_eraser.utils.errors import UserError
from tests.storage.test_locks import open_files


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_a_file_writer_never_removes_a_folder(tmp_path: Path) -> None:
    (tmp_path / "runs" / "star").mkdir(parents=True)
    (tmp_path / "runs" / "star" / "weights").write_text("w")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="is a folder"):
            writers.write_text(tmp_path / "runs", "text", overwrite=overwrite)
    assert tree(tmp_path) == {"runs/star/weights": b"w"}


def test_a_folder_writer_never_removes_a_file_that_it_did_not_write(run_folder: Path) -> None:
    writers.write_folder(run_folder / "model", lambda p: (p / "a").write_text("1") and None)
    (run_folder / "model" / "mine").write_text("mine")
    with pytest.raises(UserError, match=r"mine was not written by concept_eraser"):
        writers.write_folder(run_folder / "model", lambda p: (p / "a").write_text("2") and None)
    assert (run_folder / "model" / "a").read_text() == "1"
    (run_folder / "model" / "mine").unlink()
    writers.write_folder(run_folder / "model", lambda p: (p / "b").write_text("2") and None)
    assert tree(run_folder / "model") == {"b": b"2"}
    assert set(manifest.read(run_folder).files) == {"model/b"}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_folder_writer_needs_a_folder(run_folder: Path, kind: str) -> None:
    other = run_folder.parent / "other"
    other.mkdir()
    if kind == "file":
        (run_folder / "model").write_text("mine")
    else:
        (run_folder / "model").symlink_to(other)
    with pytest.raises(UserError, match=f"is a {kind}"):
        writers.write_folder(run_folder / "model", lambda p: (p / "a").write_text("1") and None)
    assert list(other.iterdir()) == []


def test_an_unlisted_file_is_replaced_only_with_overwrite(tmp_path: Path, run_folder: Path) -> None:
    for folder in (tmp_path, run_folder):
        (folder / "x.json").write_text("mine")
        with pytest.raises(UserError, match="was not written by concept_eraser"):
            writers.write_text(folder / "x.json", "ours")
        assert (folder / "x.json").read_text() == "mine"
        writers.write_text(folder / "x.json", "ours", overwrite=True)
        assert (folder / "x.json").read_text() == "ours"
    writers.write_text(run_folder / "x.json", "again")  # listed now
    assert (run_folder / "x.json").read_text() == "again"


def test_nothing_is_written_through_a_link(tmp_path: Path, run_folder: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (run_folder / "log.jsonl").symlink_to(precious)
    for overwrite in (False, True):
        with pytest.raises(UserError, match="is a link"):
            writers.write_text(run_folder / "log.jsonl", "x", overwrite=overwrite)
    with pytest.raises(UserError, match="is a link"):
        writers.append_line(run_folder / "log.jsonl", {"step": 1})
    assert precious.read_text() == "mine"


def test_an_error_while_writing_leaves_the_earlier_file_and_nothing_else(run_folder: Path) -> None:
    writers.write_text(run_folder / "a", "1")

    def fail(partial: Path) -> None:
        partial.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="the disk is full"):
        writers.write_file(run_folder / "a", fail)
    with pytest.raises(KeyboardInterrupt):
        writers.write_file(run_folder / "a", lambda p: (_ for _ in ()).throw(KeyboardInterrupt))
    assert tree(run_folder) == {"a": b"1", manifest.MARK: (run_folder / manifest.MARK).read_bytes()}


def test_an_error_while_writing_a_folder_leaves_the_earlier_one(run_folder: Path) -> None:
    writers.write_folder(run_folder / "m", lambda p: (p / "a").write_text("1") and None)

    def fail(partial: Path) -> None:
        (partial / "a").write_text("2")
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(UserError, match="cannot write"):
        writers.write_folder(run_folder / "m", fail)
    assert tree(run_folder / "m") == {"a": b"1"}
    assert [p.name for p in run_folder.iterdir() if "partial" in p.name] == []


def test_what_a_killed_process_left_is_cleared_away_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    partial = tmp_path / f".a.json.{dead.pid}-01234567.partial"
    alive = tmp_path / f".a.json.{os.getppid()}-01234567.partial"
    other = tmp_path / f".b.json.{dead.pid}-01234567.partial"
    for path in (partial, alive, other):
        path.write_text("half")
    writers.write_text(tmp_path / "a.json", "{}")
    assert not partial.exists()
    assert alive.exists()
    assert other.exists()


def test_a_killed_write_is_known_to_the_manifest(run_folder: Path) -> None:
    """The file is listed before it gets its name, so that the run can continue and replace it."""
    code = (
        "import os, sys; from pathlib import Path; from concept_eraser.storage import "
        "writers, manifest\n"
        "manifest.record = lambda paths: os._exit(9)\n"
        "writers.write_text(Path(sys.argv[1]) / 'weights', 'x')"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run_folder)]).returncode == 9
    assert (run_folder / "weights").read_text() == "x"
    writers.write_text(run_folder / "weights", "y")
    assert manifest.verify(run_folder)[0].state == "intact"


def test_json_has_null_for_a_number_that_is_not_finite(tmp_path: Path) -> None:
    content = {"auc": math.nan, "table": [(math.inf, 0.5), {"low": -math.inf, "n": 3}], "ok": True}
    writers.write_json(tmp_path / "a.json", content)
    text = (tmp_path / "a.json").read_text()
    expected = {"auc": None, "table": [[None, 0.5], {"low": None, "n": 3}], "ok": True}
    assert json.loads(text, parse_constant=lambda name: name) == expected


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    """safetensors writes its metadata in another order in every process."""
    header = {f"key{i}": str(i) for i in range(12)}
    code = (
        "import sys, torch; from pathlib import Path; from concept_eraser.storage.writers "
        "import write_tensors; write_tensors(Path(sys.argv[1]), {'b': torch.ones(3), 'a': "
        "torch.zeros(2)}, {f'key{i}': str(i) for i in range(12)})"
    )
    files = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for file in files:
        subprocess.run([sys.executable, "-c", code, str(file)], check=True)
    assert len({file.read_bytes() for file in files}) == 1
    content = files[0].read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    assert json.loads(content[8 : 8 + length])["__metadata__"] == header
    assert list(json.loads(content[8 : 8 + length])["__metadata__"]) == sorted(header)
    from safetensors.torch import load_file

    assert torch.equal(load_file(files[0])["b"], torch.ones(3))


def test_a_log_goes_on_behind_a_line_that_was_cut(run_folder: Path) -> None:
    writers.write_growing(run_folder / "log.jsonl", '{"step": 1}\n{"st')
    writers.append_line(run_folder / "log.jsonl", {"step": 2})
    assert (run_folder / "log.jsonl").read_text() == '{"step": 1}\n{"st\n{"step": 2}\n'
    assert manifest.verify(run_folder)[0].state == "growing"
    output_folder.seal(run_folder)
    assert manifest.verify(run_folder)[0].state == "intact"
    writers.append_line(run_folder / "log.jsonl", {"step": 3})
    assert manifest.verify(run_folder)[0].state == "growing"


def test_permissions_follow_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        writers.write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)}, {})
        writers.write_text(tmp_path / "a.txt", "")
    finally:
        os.umask(before)
    assert [(tmp_path / n).stat().st_mode & 0o777 for n in ("a.safetensors", "a.txt")] == [
        0o644,
        0o644,
    ]
    (tmp_path / "a.txt").chmod(0o601)  # not what safetensors sets
    writers._finish(tmp_path / "a.txt")
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o601


def test_content_is_on_the_disk_before_it_gets_its_name(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (order.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1]
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(f"rename {b}"), replace(a, b))[1])
    writers.write_text(run_folder / "a", "1")
    rename = order.index(f"rename {run_folder / 'a'}")
    assert any(Path(one).name.startswith(".a.") for one in order[:rename])
    assert str(run_folder) in order[rename:]  # and the folder after it


def test_only_what_is_listed_is_removed(run_folder: Path) -> None:
    writers.write_text(run_folder / "state.ckpt", "x")
    (run_folder / "mine").write_text("x")
    writers.remove_file(run_folder / "state.ckpt")
    writers.remove_file(run_folder / "missing")
    with pytest.raises(UserError, match="is not removed"):
        writers.remove_file(run_folder / "mine")
    assert not (run_folder / "state.ckpt").exists()
    assert manifest.read(run_folder).files == {}


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_names_that_cannot_be_are_errors(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError):
        writers.write_text(tmp_path / name, "")


def test_a_path_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        writers.write_text(tmp_path / "file" / "x", "")


def test_many_files_change_the_manifest_twice(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    write = manifest.write
    monkeypatch.setattr(
        manifest, "write", lambda folder, content: (calls.append(folder), write(folder, content))[1]
    )
    writers.write_files(
        run_folder / "images", {f"{i}.png": (lambda i=i: bytes([i])) for i in range(50)}
    )
    assert len(calls) == 2
    assert [one.state for one in manifest.verify(run_folder)] == ["intact"] * 50
    assert (run_folder / "images" / "7.png").read_bytes() == b"\x07"


def test_many_files_of_which_one_fails(run_folder: Path) -> None:
    def fail() -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="the disk is full"):
        writers.write_files(run_folder, {"a": lambda: b"1", "b": fail, "c": lambda: b"3"})
    assert {name for name in tree(run_folder) if name != manifest.MARK} == {"a"}
    states = {one.name: one.state for one in manifest.verify(run_folder)}
    assert states == {"a": "intact", "b": "missing", "c": "missing"}
    # so the command can be given again
    writers.write_files(run_folder, {"a": lambda: b"1", "b": lambda: b"2"})
    (run_folder / "mine").write_text("mine")
    with pytest.raises(UserError, match="was not written by"):
        writers.write_files(run_folder, {"d": lambda: b"1", "mine": lambda: b"2"})
    assert not (run_folder / "d").exists()


@pytest.mark.parametrize("has_mark", [False, True])
def test_a_link_inside_a_marked_folder_leads_no_writer_out(
    run_folder: Path, has_mark: bool
) -> None:
    outside = run_folder.parent / "outside"
    outside.mkdir()
    if has_mark:  # another run folder
        output_folder.claim(outside, "run", alone=True)
    (run_folder / "exports").symlink_to(outside)
    before = tree(outside)
    for call in (
        lambda: writers.write_text(run_folder / "exports" / "x", "1"),
        lambda: writers.write_text(run_folder / "exports" / "deeper" / "x", "1", overwrite=True),
        lambda: writers.write_folder(run_folder / "exports" / "x", lambda p: None),
        lambda: writers.append_line(run_folder / "exports" / "x", {}),
        lambda: writers.write_files(run_folder / "exports", {"x": lambda: b"1"}),
    ):
        with pytest.raises(UserError, match="leads out of"):
            call()
    assert tree(outside) == before


def test_a_run_that_is_reached_by_a_link_is_written_to(run_folder: Path) -> None:
    (run_folder.parent / "latest").symlink_to(run_folder)
    writers.write_text(run_folder.parent / "latest" / "x", "1")
    assert (run_folder / "x").read_text() == "1"
    assert manifest.verify(run_folder)[0].state == "intact"


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def record_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that collects the paths of all later calls of fsync."""
    paths: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (paths.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1]
    )
    return paths


def record_marks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folders: list[Path] = []
    write = manifest.write
    monkeypatch.setattr(
        manifest,
        "write",
        lambda folder, content: (folders.append(folder), write(folder, content))[1],
    )
    return folders


def dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_every_writer_creates_folders_and_replaces_only_with_overwrite(tmp_path: Path) -> None:
    calls = {
        "text": lambda path, **how: writers.write_text(path, "ü", **how),
        "bytes": lambda path, **how: writers.write_bytes(path, b"\x00\xff", **how),
        "json": lambda path, **how: writers.write_json(path, {"a": [1]}, **how),
        "tensors": lambda path, **how: writers.write_tensors(path, {"a": torch.ones(2)}, {}, **how),
    }
    for name, call in calls.items():
        path = tmp_path / "deep" / "in" / name
        call(path)
        with pytest.raises(UserError, match="was not written by concept_eraser"):
            call(path)
        call(path, overwrite=True)
    folder = tmp_path / "deep" / "in"
    assert (folder / "text").read_bytes() == "ü".encode()
    assert (folder / "bytes").read_bytes() == b"\x00\xff"
    assert json.loads((folder / "json").read_text()) == {"a": [1]}
    assert (folder / "json").read_text().endswith("}\n")
    assert sorted(p.name for p in folder.iterdir()) == sorted(calls)


@pytest.mark.parametrize(
    "tensors", [{}, {"w": torch.arange(6.0).view(2, 3).T}, {"w": torch.ones(2, requires_grad=True)}]
)
@pytest.mark.parametrize("metadata", [{}, {"b": "ü", "a": "1"}])
def test_tensors_come_back(tmp_path: Path, tensors: dict, metadata: dict) -> None:
    from safetensors import safe_open

    writers.write_tensors(tmp_path / "a.safetensors", tensors, metadata)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert (file.metadata() or {}) == metadata
        assert list(file.keys()) == list(tensors)
        assert all(torch.equal(file.get_tensor(name), value) for name, value in tensors.items())


def test_the_header_of_tensors_is_in_order(tmp_path: Path) -> None:
    header = {f"key{i}": str(i) for i in range(12)}
    writers.write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(2)}, header)
    content = (tmp_path / "a.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    assert list(json.loads(content[8 : 8 + length])["__metadata__"]) == sorted(header)


def test_a_folder_is_replaced_without_a_trace_of_the_old_one(run_folder: Path) -> None:
    for kind in (None, "model"):
        for name in ("a", "b"):
            if kind is None or name == "a":
                writers.write_folder(
                    run_folder / f"m{kind}",
                    lambda p, name=name: (p / name).write_text(name) and None,
                    kind=kind,
                )
    assert sorted(p.name for p in run_folder.iterdir()) == [manifest.MARK, "mNone", "mmodel"]
    assert set(manifest.read(run_folder).files) == {"mNone/b"}


def test_a_file_with_a_writer_of_its_own_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(UserError, match="was not written by concept_eraser"):
        writers.write_file(tmp_path / "a", lambda p: p.write_text("1") and None)
    assert (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize("keys", [[], ["a"], ["b", "a"], ["ü", "b", "a"]])
def test_only_the_order_of_a_header_changes(tmp_path: Path, keys: list[str]) -> None:
    entry = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    header = {"__metadata__": dict.fromkeys(keys, "ä"), "w": entry} if keys else {"w": entry}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(len(text) + 5)
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\x01\x02\x03")
    writers.order_header(path)
    content = path.read_bytes()
    assert content[:8] == struct.pack("<Q", len(text))
    assert content[8 + len(text) :] == b"\x01\x02\x03"
    new_header = json.loads(content[8 : 8 + len(text)])
    assert new_header == header
    assert list(new_header.get("__metadata__", {})) == sorted(keys)


def test_a_header_that_would_not_fit_stays(tmp_path: Path) -> None:
    text = b'{"__metadata__":{"b":1e5,"a":""}}'  # 1e5 is written longer
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\x01")
    writers.order_header(path)
    assert path.read_bytes() == struct.pack("<Q", len(text)) + text + b"\x01"


def test_a_line_follows_the_last_one_whether_that_was_cut_or_not(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log"
    for start, between in (
        (None, ""),
        ("", ""),
        ("a\n", ""),
        ("\n", ""),
        ("a", "\n"),
        ("a\nb", "\n"),
        ("a\n\n", ""),
    ):
        if start is not None:
            path.write_text(start)
        writers.append_line(path, {"step": 1})
        assert path.read_text() == f'{start or ""}{between}{{"step": 1}}\n'


def test_a_log_has_the_users_permissions(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        writers.append_line(tmp_path / "log", {})
        writers.write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)}, {})
        os.umask(0o027)
        writers.write_tensors(tmp_path / "b.safetensors", {"a": torch.zeros(1)}, {})
        assert os.umask(0) == 0o027  # as it was
    finally:
        os.umask(before)
    modes = [
        (tmp_path / name).stat().st_mode & 0o777
        for name in ("log", "a.safetensors", "b.safetensors")
    ]
    assert modes == [0o666, 0o666, 0o640]


def test_a_log_changes_the_manifest_once(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = run_folder.parent / "other"
    output_folder.claim(other, "run")
    folders = record_marks(monkeypatch)
    for step in range(5):
        for folder in (run_folder, other):
            writers.append_line(folder / "log", {"step": step})
    assert sorted(folders) == sorted([run_folder, other])
    output_folder.seal(run_folder)
    folders.clear()
    for folder in (run_folder, other):
        writers.append_line(folder / "log", {"step": 5})
    # sealed, so it is listed as growing again; the other one has not changed
    assert folders == [run_folder]
    assert {one.state for place in (run_folder, other) for one in manifest.verify(place)} == {
        "growing"
    }


def test_a_log_after_a_whole_file_grows_again(run_folder: Path) -> None:
    writers.append_line(run_folder / "log", {})
    writers.write_text(run_folder / "log", "{}\n")
    assert manifest.verify(run_folder)[0].state == "intact"
    writers.append_line(run_folder / "log", {})
    assert manifest.verify(run_folder)[0].state == "growing"
    writers.write_growing(run_folder / "other", "{}\n")
    assert {one.state for one in manifest.verify(run_folder)} == {"growing"}


def test_a_folder_with_a_mark_of_its_own(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "deep").mkdir()
        (folder / "deep" / "a").write_text("1")
        header = {"__metadata__": {"b": "", "a": ""}}
        text = json.dumps(header).encode()
        (folder / "w.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)

    paths = record_syncs(monkeypatch)
    for kind, place in (
        ("model", run_folder.parent / "deep" / "model"),
        ("model", run_folder / "model"),
        (None, run_folder / "plain"),
    ):
        paths.clear()
        writers.write_folder(place, fill, kind=kind)
        names = [Path(path).name for path in paths]
        assert {"a", "w.safetensors", place.parent.name} <= set(names)
        assert b'{"a":"","b":""}' in (place / "w.safetensors").read_bytes()
        if kind:
            assert manifest.read(place).kind == kind
            states = manifest.verify(place)
        else:
            assert not (place / manifest.MARK).exists()
            states = manifest.verify(run_folder)[:2]
        assert [Path(one.name).name for one in states] == ["a", "w.safetensors"]
        assert {one.state for one in states} == {"intact"}
        assert [
            p.name for p in place.parent.iterdir() if "partial" in p.name or "earlier" in p.name
        ] == []
    assert set(manifest.read(run_folder).files) == {"plain/deep/a", "plain/w.safetensors"}


def test_a_folder_that_is_put_in_place_before_a_kill_is_known(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(paths: object) -> None:
        raise KeyboardInterrupt

    def fill(partial: Path) -> None:
        (partial / "a").write_text("1")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "record", kill)
        for call in (
            lambda: writers.write_folder(run_folder / "model", fill),
            lambda: writers.write_text(run_folder / "text", "1"),
            lambda: writers.write_files(run_folder / "many", {"a": lambda: b"1"}),
        ):
            with pytest.raises(KeyboardInterrupt):
                call()
    writers.write_folder(run_folder / "model", fill)
    writers.write_text(run_folder / "text", "1")
    writers.write_files(run_folder / "many", {"a": lambda: b"1"})
    assert {one.state for one in manifest.verify(run_folder)} == {"intact"}


def test_a_second_name_is_no_copy_where_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("1")
    writers.give_second_name(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    writers.give_second_name(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "1"
    assert not (tmp_path / "a").samefile(tmp_path / "c")


def test_many_files_are_on_the_disk_and_in_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = record_syncs(monkeypatch)
    before = open_files(tmp_path)
    writers.write_files(tmp_path / "deep" / "in", {"a": lambda: b"1", "b": lambda: b"2"})
    assert tree(tmp_path) == {"deep/in/a": b"1", "deep/in/b": b"2"}
    assert sorted(Path(path).name.split(".")[1] for path in paths[:-1]) == ["a", "b"]
    assert paths[-1] == str(tmp_path / "deep" / "in")
    assert open_files(tmp_path) == before


def test_a_place_is_probed_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers.probe(tmp_path / "deep" / "in" / "a")
    (tmp_path / "mine").write_text("mine")
    writers.probe(tmp_path / "mine")
    assert tree(tmp_path) == {"mine": b"mine"}
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    monkeypatch.setattr(Path, "open", failing(errno.ENOSPC))
    with pytest.raises(UserError, match="the disk is full"):
        writers.probe(tmp_path / "deep" / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_listed_by_the_nearest_manifest(tmp_path: Path, run_folder: Path) -> None:
    writers.write_text(run_folder / "deep" / "a", "1")
    (run_folder / "mine").write_text("")
    (tmp_path / "mine").write_text("")
    assert writers.is_listed(run_folder / "deep" / "a") is True
    for path in (
        run_folder / "mine",
        run_folder / "deep",
        run_folder / "a",
        tmp_path / "mine",
        tmp_path / "missing" / "a",
    ):
        assert writers.is_listed(path) is False


def test_names_near_the_systems_limit_can_be_written(tmp_path: Path) -> None:
    name = "x" * 250
    writers.write_text(tmp_path / name, "1")
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a.json", "a[1]*?.json", "x" * 200, "x" * 120, "x" * 121])
def test_what_a_killed_process_left_for_this_name_is_cleared_away(
    tmp_path: Path, name: str
) -> None:
    partials: list[Path] = []

    def write(partial: Path) -> None:
        partials.append(partial)
        partial.write_text("1")

    writers.write_file(tmp_path / name, write)
    half = partials[0].name  # a kill at this moment would leave it
    assert str(os.getpid()) in half
    dead = tmp_path / half.replace(f".{os.getpid()}-", f".{dead_process()}-")
    alive = tmp_path / half
    longer = tmp_path / dead.name.replace(name[:120], f"{name[:100]}.more", 1)
    for path in (dead, alive, longer):
        path.write_text("half")
    folder = tmp_path / dead.name.replace("-", "-0", 1).replace("-0", "-", 1).replace(
        ".partial", "0.partial"
    )
    folder.write_text("mine")  # not a name of a partial file
    writers.write_text(tmp_path / name, "2", overwrite=True)
    assert not dead.exists()
    assert alive.exists()
    assert longer.exists()
    assert folder.exists()


def test_a_half_written_folder_is_cleared_away(tmp_path: Path) -> None:
    dead = tmp_path / f".model.{dead_process()}-01234567.partial"
    (dead / "deep").mkdir(parents=True)
    (dead / "deep" / "w").write_text("half")
    writers.write_folder(tmp_path / "model", lambda p: (p / "w").write_text("1") and None)
    assert tree(tmp_path) == {"model/w": b"1"}
    outside = tmp_path / "model"
    dead.symlink_to(outside)  # the link is removed, and not its target
    writers.write_folder(tmp_path / "model2", lambda p: (p / "w").write_text("1") and None)
    writers.write_text(tmp_path / "text", "1")
    assert dead.is_symlink()
    (tmp_path / f".text.{dead_process()}-01234567.partial").symlink_to(outside)
    writers.write_text(tmp_path / "text", "2", overwrite=True)
    assert set(tree(tmp_path)) == {"model/w", "model2/w", "text"}
    assert not any(p.name.startswith(".text") for p in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EFBIG, "a size limit"),
        (errno.ELOOP, "is a link"),
        (errno.EISDIR, "is a folder"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "this user may not"),
        (errno.EPERM, "this user may not"),
        (errno.ENAMETOOLONG, "the name is too long"),
        (errno.EIO, "input/output error"),
    ],
)
def test_each_write_error_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    calls = {
        "replace": lambda: writers.write_text(tmp_path / "a", "1"),
        "rename": lambda: writers.write_folder(tmp_path / "a", lambda p: None),
        "open": lambda: writers.append_line(tmp_path / "a", {}),
    }
    for name, call in calls.items():
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(code))
            with pytest.raises(UserError, match=text) as error:
                call()
        assert str(tmp_path / "a") in str(error.value)
        assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_library_that_means_a_full_disk_is_one(tmp_path: Path) -> None:
    def fail(text: str) -> Callable[[Path], None]:
        def write(partial: Path) -> None:
            partial.write_text("half")
            raise RuntimeError(text)

        return write

    for text in (
        "I/O error: No space left on device (os error 28)",
        "unexpected pos 64 vs 0",
        "File too large",
    ):
        with pytest.raises(UserError, match="the disk is full"):
            writers.write_file(tmp_path / "a", fail(text))
    with pytest.raises(
        RuntimeError, match="something else"
    ):  # a fault of the package is not hidden
        writers.write_file(tmp_path / "a", fail("something else"))
    with pytest.raises(UserError, match="by name"):
        writers.write_file(tmp_path / "a", lambda p: (_ for _ in ()).throw(UserError("by name")))
    assert list(tmp_path.iterdir()) == []


def test_a_name_with_a_zero_in_it_is_an_error(tmp_path: Path) -> None:
    for overwrite in (False, True):
        with pytest.raises(UserError, match="cannot be the name of a file"):
            writers.require_free(tmp_path / "a\0b", overwrite=overwrite)
    writers.require_free(tmp_path / "a")
    writers.require_free_folder(tmp_path / "a")


@pytest.mark.parametrize("has_call", [True, False])
def test_a_copied_file_has_the_same_bytes(
    has_call: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is not sorted, a link is followed, and the two share no name on the disk."""
    if not has_call:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    header = json.dumps(
        {
            "__metadata__": {"z": "1", "a": "2"},
            "x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        }
    ).encode()
    content = len(header).to_bytes(8, "little") + header + b"\x07" + b"0" * 100_000
    blob = tmp_path / "blob"
    blob.write_bytes(content)
    source = tmp_path / "model.safetensors"
    source.symlink_to(blob)
    writers.write_folder(
        tmp_path / "out", lambda place: writers.copy_file(source, place / source.name)
    )
    copy = tmp_path / "out" / source.name
    assert copy.read_bytes() == content
    assert not copy.is_symlink()
    assert copy.stat().st_ino != blob.stat().st_ino
    with pytest.raises(FileExistsError):
        writers.copy_file(source, copy)


def test_a_copy_on_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    (tmp_path / "a").write_bytes(b"1")
    with pytest.raises(UserError, match="the disk is full"):
        writers.write_folder(
            tmp_path / "out", lambda place: writers.copy_file(tmp_path / "a", place / "a")
        )
    assert not (tmp_path / "out").exists()
