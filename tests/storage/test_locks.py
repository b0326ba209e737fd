"""One process at a time in an output folder."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from concept_eraser.storage import locks
from concept_eraser.utils.errors import UserError

HOLD = """
import sys, time
from pathlib import Path
from concept_eraser.storage import locks
with locks.hold_lock(Path(sys.argv[1]), "erase"):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_process_is_refused_with_one_sentence(tmp_path: Path) -> None:
    process = holder(tmp_path / "run")
    try:
        refusal = pytest.raises(
            UserError, match=f"in use by process {process.pid} on {socket.gethostname()}"
        )
        with refusal as error, locks.hold_lock(tmp_path / "run", "evaluate"):
            pass
        assert "\n" not in str(error.value)
        assert locks.holder_of(tmp_path / "run")["pid"] == process.pid
    finally:
        process.kill()
        process.wait()


def test_a_lock_of_a_killed_process_is_stale(tmp_path: Path) -> None:
    process = holder(tmp_path / "run")
    process.kill()
    process.wait()
    assert (tmp_path / "run" / locks.LOCK).exists()
    assert locks.holder_of(tmp_path / "run") is None
    with locks.hold_lock(tmp_path / "run", "erase"):
        assert json.loads((tmp_path / "run" / locks.LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / "run" / locks.LOCK).exists()


def test_a_lock_of_another_machine_is_respected(tmp_path: Path) -> None:
    (tmp_path / locks.LOCK).write_text(
        json.dumps({"pid": 1, "host": "elsewhere", "purpose": "erase", "started": "now"})
    )
    with (
        pytest.raises(UserError, match=r"on elsewhere.*remove"),
        locks.hold_lock(tmp_path, "erase"),
    ):
        pass
    assert locks.holder_of(tmp_path)["host"] == "elsewhere"
    assert (tmp_path / locks.LOCK).exists()


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b"{", b'{"pid": "x"}', b'{"pid": -1}', b"9" * 9000]
)
def test_a_damaged_lock_that_nobody_holds_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / locks.LOCK).write_bytes(content)
    if content.startswith(b'{"pid'):
        with pytest.raises(UserError, match="in use"), locks.hold_lock(tmp_path, "erase"):
            pass  # it names no host, so it may be another machine's
        return
    with locks.hold_lock(tmp_path, "erase"):
        pass


def test_without_locks_of_the_system_the_process_id_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    for pid, free in ((os.getppid(), False), (2**22 + 12345, True)):
        (tmp_path / locks.LOCK).write_text(json.dumps({"pid": pid, "host": socket.gethostname()}))
        if free:
            with locks.hold_lock(tmp_path, "erase"):
                pass
        else:
            with pytest.raises(UserError, match="in use"), locks.hold_lock(tmp_path, "erase"):
                pass


def test_folders_created_for_a_lock_are_removed_if_they_stay_empty(tmp_path: Path) -> None:
    with locks.hold_lock(tmp_path / "a" / "b", "erase"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with locks.hold_lock(tmp_path / "a" / "b", "erase"):
        (tmp_path / "a" / "b" / "result").write_text("x")
    assert (tmp_path / "a" / "b" / "result").exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / locks.LOCK).symlink_to(precious)
    with pytest.raises(UserError, match="is a link"), locks.hold_lock(tmp_path / "run", "erase"):
        pass
    assert precious.read_text() == "mine"
    precious.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    assert locks.holder_of(tmp_path / "run") is None


def test_a_link_to_the_open_file_is_not_the_file(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    with (tmp_path / "lock").open() as file:
        assert locks._is_still(tmp_path / "lock", file.fileno())
        assert not locks._is_still(tmp_path / "link", file.fileno())


def test_a_folder_that_cannot_be_is_an_error_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (
        tmp_path / "file",
        tmp_path / "file" / "inside",
        Path("/proc/nothing/here"),
        tmp_path / ("x" * 300),
    ):
        with pytest.raises(UserError), locks.hold_lock(place, "erase"):
            pass


def test_many_processes_hold_the_lock_one_after_the_other(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from concept_eraser.utils.errors import UserError
from concept_eraser.storage import locks
folder, done = Path(sys.argv[1]), 0
while done < 5:
    try:
        with locks.hold_lock(folder, "count"):
            n = int((folder / "n").read_text()) if (folder / "n").exists() else 0
            time.sleep(0.003)
            (folder / "n").write_text(str(n + 1))
        done += 1
    except UserError:
        time.sleep(0.001)
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")]) for _ in range(4)
    ]
    start = time.monotonic()
    assert [process.wait(60) for process in processes] == [0] * 4
    assert (tmp_path / "run" / "n").read_text() == "20"
    assert time.monotonic() - start < 60


def open_files(folder: Path) -> int:
    """How many files below a folder this process has open, and the folder itself."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.lexists(link))


@contextmanager
def other_holder(folder: Path, content: str) -> Iterator[None]:
    """Hold the lock as another process does: the system's lock belongs to the opened file."""
    import fcntl

    with (folder / locks.LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)
        file.flush()
        yield


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_held_lock_is_respected_whatever_its_file_contains(tmp_path: Path) -> None:
    before = open_files(tmp_path)
    with other_holder(tmp_path, "no json"):
        with (
            pytest.raises(UserError, match="in use by another process"),
            locks.hold_lock(tmp_path, "erase"),
        ):
            pass
        assert locks.holder_of(tmp_path) == {}
    with other_holder(
        tmp_path,
        json.dumps({"pid": 1, "host": socket.gethostname(), "purpose": "erase", "started": "now"}),
    ):
        with pytest.raises(
            UserError, match=r"in use by process 1 .*began to erase at now"
        ) as error:
            locks.hold_lock(tmp_path, "erase").__enter__()
        assert "remove" not in str(error.value)  # the system knows that it runs
        assert locks.holder_of(tmp_path)["pid"] == 1
    assert locks.holder_of(tmp_path) is None
    with locks.hold_lock(tmp_path, "erase"):
        assert locks.holder_of(tmp_path)["purpose"] == "erase"
        with (
            pytest.raises(UserError, match=f"in use by process {os.getpid()}"),
            locks.hold_lock(tmp_path, "erase"),
        ):
            pass
    assert open_files(tmp_path) == before
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_lock_has_no_holder(tmp_path: Path) -> None:
    assert locks.holder_of(tmp_path) is None
    assert locks.holder_of(tmp_path / "missing") is None
    assert list(tmp_path.iterdir()) == []


def test_a_lock_records_its_holder_whatever_the_file_was_before(tmp_path: Path) -> None:
    (tmp_path / locks.LOCK).write_text("x" * 5000)
    before = os.umask(0)
    try:
        with locks.hold_lock(tmp_path, "erase"):
            content = json.loads((tmp_path / locks.LOCK).read_text())
        with locks.hold_lock(tmp_path, "erase"):
            mode = (tmp_path / locks.LOCK).stat().st_mode & 0o777
    finally:
        os.umask(before)
    assert (content["pid"], content["host"], content["purpose"]) == (
        os.getpid(),
        socket.gethostname(),
        "erase",
    )
    assert mode == 0o644
    assert time.strptime(content["started"], "%Y-%m-%d %H:%M:%S")


def test_a_lock_is_taken_and_freed_as_often_as_one_likes(tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError, match="inside"), locks.hold_lock(tmp_path / "a", "erase"):
            raise RuntimeError("inside")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "this user may not"),
        (errno.EPERM, "this user may not"),
        (errno.ELOOP, "is a link"),
        (errno.EIO, "input/output error"),
    ],
)
def test_a_lock_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    before = open_files(tmp_path)
    for call in ("open", "write"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(code))
            with pytest.raises(UserError, match=text) as error:
                locks.hold_lock(tmp_path / "a" / "b", "erase").__enter__()
        assert "\n" not in str(error.value)
        assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == before


def test_a_lock_whose_owner_removes_it_meanwhile_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, take, times = open_files(tmp_path), locks._take, []

    def take_late(descriptor: int) -> bool | None:
        times.append(1)
        if len(times) == 1:
            (tmp_path / locks.LOCK).unlink()
        elif len(times) == 2:  # and another one has made its own
            (tmp_path / locks.LOCK).unlink()
            (tmp_path / locks.LOCK).write_text("")
        return take(descriptor)

    monkeypatch.setattr(locks, "_take", take_late)
    with locks.hold_lock(tmp_path, "erase"):
        assert json.loads((tmp_path / locks.LOCK).read_text())["pid"] == os.getpid()
    assert len(times) == 3
    assert open_files(tmp_path) == before


def test_a_lock_that_changes_its_holder_all_the_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    before, take = open_files(tmp_path), locks._take

    def take_late(descriptor: int) -> bool | None:
        (tmp_path / locks.LOCK).unlink()
        return take(descriptor)

    monkeypatch.setattr(locks, "_take", take_late)
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(UserError, match="could not be locked"), locks.hold_lock(tmp_path, "erase"):
        pass
    assert min(pauses) > 0
    assert 0.2 < sum(pauses) < 10  # long enough for one who frees it, not for a reader to give up
    assert open_files(tmp_path) == before


def test_where_the_file_system_has_no_locks_the_process_id_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    content = {"pid": os.getppid(), "host": socket.gethostname()}
    (tmp_path / locks.LOCK).write_text(json.dumps(content))
    with pytest.raises(UserError, match="in use"), locks.hold_lock(tmp_path, "erase"):
        pass
    assert locks.holder_of(tmp_path) == content
    (tmp_path / locks.LOCK).write_text(json.dumps(content | {"pid": 2**31 - 1}))
    with locks.hold_lock(tmp_path, "erase"):
        pass


def test_only_numbers_of_processes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert locks.is_alive(child.pid)
        assert child.poll() is None  # asking ends nothing
    finally:
        child.kill()
        child.wait()
    assert locks.is_alive(child.pid) is False
    assert locks.is_alive(os.getpid()) is True
    pids: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: pids.append(pid))
    for other in (0, -1, -5, 2**31, 2**40, True, False, None, "1", 1.0, [1]):
        assert locks.is_alive(other) is False, other
    assert pids == []
    for pid in (1, 2**31 - 1):
        assert locks.is_alive(pid) is True
    assert pids == [1, 2**31 - 1]
    monkeypatch.setattr(os, "kill", failing(errno.EPERM))  # another user's
    assert locks.is_alive(5) is True
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("it would end the process"))
    assert locks.is_alive(5) is True


def test_a_strangers_lock_is_quoted_in_part(tmp_path: Path) -> None:
    (tmp_path / locks.LOCK).write_text(
        json.dumps({"pid": 1, "host": "h" * 500, "purpose": "p", "started": "s"})
    )
    with pytest.raises(UserError) as error, locks.hold_lock(tmp_path, "erase"):
        pass
    assert "h" * 80 + "," in str(error.value)
    assert "h" * 81 not in str(error.value)


def test_folders_are_created_and_removed_again(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c" / "d"
    folders = locks.make_folder(deep)
    assert folders == [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c", deep]
    assert deep.is_dir()
    assert locks.make_folder(deep) == []
    (tmp_path / "a" / "mine").write_text("")
    locks.remove_empty(folders)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["mine"]
    with pytest.raises(UserError, match="mine is a file"):
        locks.make_folder(tmp_path / "a" / "mine")
    with pytest.raises(UserError, match="cannot write to"):
        locks.make_folder(tmp_path / "a" / "mine" / "b")
    with pytest.raises(UserError, match="cannot write to"):
        locks.make_folder(tmp_path / "a\0b")
