"""Writers of files and folders: whole or not at all, and nothing of a user's is replaced or removed."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from concept_eraser.errors import UserError
from concept_eraser.storage import manifest, output_folder, writers


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A marked, empty folder."""
    folder = tmp_path / "ours"
    output_folder.claim(folder, "run", alone=True)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_file_writer_never_removes_a_folder(tmp_path: Path) -> None:
    (tmp_path / "runs" / "star").mkdir(parents=True)
    (tmp_path / "runs" / "star" / "weights").write_text("w")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="is a folder"):
            writers.write_text(tmp_path / "runs", "text", overwrite=overwrite)
    assert tree(tmp_path) == {"runs/star/weights": b"w"}


def test_a_folder_writer_never_removes_a_file_that_it_did_not_write(ours: Path) -> None:
    writers.write_folder(ours / "model", lambda p: (p / "a").write_text("1") and None)
    (ours / "model" / "mine").write_text("mine")
    with pytest.raises(UserError, match=r"mine was not written by concept_eraser"):
        writers.write_folder(ours / "model", lambda p: (p / "a").write_text("2") and None)
    assert (ours / "model" / "a").read_text() == "1"
    (ours / "model" / "mine").unlink()
    writers.write_folder(ours / "model", lambda p: (p / "b").write_text("2") and None)
    assert tree(ours / "model") == {"b": b"2"}
    assert set(manifest.read(ours).files) == {"model/b"}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_folder_writer_wants_a_folder(ours: Path, kind: str) -> None:
    other = ours.parent / "other"
    other.mkdir()
    if kind == "file":
        (ours / "model").write_text("mine")
    else:
        (ours / "model").symlink_to(other)
    with pytest.raises(UserError, match=f"is a {kind}"):
        writers.write_folder(ours / "model", lambda p: (p / "a").write_text("1") and None)
    assert list(other.iterdir()) == []


def test_a_file_that_nobody_listed_is_replaced_only_where_the_user_says_so(tmp_path: Path, ours: Path) -> None:
    for folder in (tmp_path, ours):
        (folder / "x.json").write_text("mine")
        with pytest.raises(UserError, match="was not written by concept_eraser"):
            writers.write_text(folder / "x.json", "ours")
        assert (folder / "x.json").read_text() == "mine"
        writers.write_text(folder / "x.json", "ours", overwrite=True)
        assert (folder / "x.json").read_text() == "ours"
    writers.write_text(ours / "x.json", "again")  # listed now
    assert (ours / "x.json").read_text() == "again"


def test_nothing_is_written_through_a_link(tmp_path: Path, ours: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (ours / "log.jsonl").symlink_to(precious)
    for overwrite in (False, True):
        with pytest.raises(UserError, match="is a link"):
            writers.write_text(ours / "log.jsonl", "x", overwrite=overwrite)
    with pytest.raises(UserError, match="is a link"):
        writers.append_line(ours / "log.jsonl", {"step": 1})
    assert precious.read_text() == "mine"


def test_an_error_while_writing_leaves_the_earlier_file_and_nothing_else(ours: Path) -> None:
    writers.write_text(ours / "a", "1")

    def fail(partial: Path) -> None:
        partial.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="the disk is full"):
        writers.write_file(ours / "a", fail)
    with pytest.raises(KeyboardInterrupt):
        writers.write_file(ours / "a", lambda p: (_ for _ in ()).throw(KeyboardInterrupt))
    assert tree(ours) == {"a": b"1", manifest.MARK: (ours / manifest.MARK).read_bytes()}


def test_an_error_while_writing_a_folder_leaves_the_earlier_one(ours: Path) -> None:
    writers.write_folder(ours / "m", lambda p: (p / "a").write_text("1") and None)

    def fail(partial: Path) -> None:
        (partial / "a").write_text("2")
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(UserError, match="cannot write"):
        writers.write_folder(ours / "m", fail)
    assert tree(ours / "m") == {"a": b"1"}
    assert [p.name for p in ours.iterdir() if "partial" in p.name] == []


def test_what_a_killed_process_left_is_cleared_away_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".a.json.{dead.pid}-01234567.partial"
    alive = tmp_path / f".a.json.{os.getppid()}-01234567.partial"
    other = tmp_path / f".b.json.{dead.pid}-01234567.partial"
    for path in (left, alive, other):
        path.write_text("half")
    writers.write_text(tmp_path / "a.json", "{}")
    assert not left.exists()
    assert alive.exists()
    assert other.exists()


def test_a_killed_write_is_known_to_the_manifest(ours: Path) -> None:
    """The file is listed before it is put in place, so that the run can go on and replace it."""
    code = (
        "import os, sys; from pathlib import Path; from concept_eraser.storage import writers, manifest\n"
        "manifest.record = lambda paths: os._exit(9)\n"
        "writers.write_text(Path(sys.argv[1]) / 'weights', 'x')"
    )
    assert subprocess.run([sys.executable, "-c", code, str(ours)]).returncode == 9
    assert (ours / "weights").read_text() == "x"
    writers.write_text(ours / "weights", "y")
    assert manifest.verify(ours)[0].state == "intact"


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    """safetensors orders its metadata by chance, anew in every process."""
    header = {f"key{i}": str(i) for i in range(12)}
    code = "import sys, torch; from pathlib import Path; from concept_eraser.storage.writers import write_tensors; write_tensors(Path(sys.argv[1]), {'b': torch.ones(3), 'a': torch.zeros(2)}, {f'key{i}': str(i) for i in range(12)})"  # fmt: skip
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


def test_a_log_goes_on_behind_a_line_that_was_cut(ours: Path) -> None:
    writers.write_growing(ours / "log.jsonl", '{"step": 1}\n{"st')
    writers.append_line(ours / "log.jsonl", {"step": 2})
    assert (ours / "log.jsonl").read_text() == '{"step": 1}\n{"st\n{"step": 2}\n'
    assert manifest.verify(ours)[0].state == "growing"
    output_folder.seal(ours)
    assert manifest.verify(ours)[0].state == "intact"
    writers.append_line(ours / "log.jsonl", {"step": 3})
    assert manifest.verify(ours)[0].state == "growing"


def test_permissions_follow_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        writers.write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)}, {})
        writers.write_text(tmp_path / "a.txt", "")
    finally:
        os.umask(before)
    assert [(tmp_path / n).stat().st_mode & 0o777 for n in ("a.safetensors", "a.txt")] == [0o644, 0o644]


def test_content_is_on_the_disk_before_it_gets_its_name(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    synced, replaced = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(os.readlink(f"/proc/self/fd/{fd}")), synced(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(f"rename {b}"), replaced(a, b))[1])
    writers.write_text(ours / "a", "1")
    rename = order.index(f"rename {ours / 'a'}")
    assert any(Path(one).name.startswith(".a.") for one in order[:rename])
    assert str(ours) in order[rename:]  # and the folder after it


def test_only_what_is_listed_is_removed(ours: Path) -> None:
    writers.write_text(ours / "state.ckpt", "x")
    (ours / "mine").write_text("x")
    writers.remove_file(ours / "state.ckpt")
    writers.remove_file(ours / "missing")
    with pytest.raises(UserError, match="is not removed"):
        writers.remove_file(ours / "mine")
    assert not (ours / "state.ckpt").exists()
    assert manifest.read(ours).files == {}


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_names_that_cannot_be_are_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError):
        writers.write_text(tmp_path / name, "")


def test_a_path_below_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        writers.write_text(tmp_path / "file" / "x", "")
