"""One process at a time in an output folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from concept_eraser.errors import UserError
from concept_eraser.storage import locks

HOLD = """
import sys, time
from pathlib import Path
from concept_eraser.storage import locks
with locks.locked(Path(sys.argv[1]), "erase"):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_process_is_refused_with_one_sentence(tmp_path: Path) -> None:
    process = holder(tmp_path / "run")
    try:
        refusal = pytest.raises(UserError, match=f"in use by process {process.pid} on {socket.gethostname()}")
        with refusal as caught, locks.locked(tmp_path / "run", "evaluate"):
            pass
        assert "\n" not in str(caught.value)
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
    with locks.locked(tmp_path / "run", "erase"):
        assert json.loads((tmp_path / "run" / locks.LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / "run" / locks.LOCK).exists()


def test_a_lock_of_another_machine_is_respected(tmp_path: Path) -> None:
    (tmp_path / locks.LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "purpose": "erase", "started": "now"}))  # fmt: skip
    with pytest.raises(UserError, match=r"on elsewhere.*remove"), locks.locked(tmp_path, "erase"):
        pass
    assert locks.holder_of(tmp_path)["host"] == "elsewhere"
    assert (tmp_path / locks.LOCK).exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"{", b'{"pid": "x"}', b'{"pid": -1}', b"9" * 9000])
def test_a_damaged_lock_that_nobody_holds_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / locks.LOCK).write_bytes(content)
    if content.startswith(b'{"pid'):
        with pytest.raises(UserError, match="in use"), locks.locked(tmp_path, "erase"):
            pass  # it names no host, so it may be another machine's
        return
    with locks.locked(tmp_path, "erase"):
        pass


def test_without_locks_of_the_system_the_process_id_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    for pid, free in ((os.getppid(), False), (2**22 + 12345, True)):
        (tmp_path / locks.LOCK).write_text(json.dumps({"pid": pid, "host": socket.gethostname()}))
        if free:
            with locks.locked(tmp_path, "erase"):
                pass
        else:
            with pytest.raises(UserError, match="in use"), locks.locked(tmp_path, "erase"):
                pass


def test_folders_made_for_a_lock_go_again_where_nothing_came_of_it(tmp_path: Path) -> None:
    with locks.locked(tmp_path / "a" / "b", "erase"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with locks.locked(tmp_path / "a" / "b", "erase"):
        (tmp_path / "a" / "b" / "result").write_text("x")
    assert (tmp_path / "a" / "b" / "result").exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / locks.LOCK).symlink_to(precious)
    with pytest.raises(UserError, match="is a link"), locks.locked(tmp_path / "run", "erase"):
        pass
    assert precious.read_text() == "mine"


def test_a_place_that_cannot_be_is_said_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/nothing/here"), tmp_path / ("x" * 300)):
        with pytest.raises(UserError), locks.locked(place, "erase"):
            pass


def test_many_who_want_it_get_it_one_after_the_other(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from concept_eraser.errors import UserError
from concept_eraser.storage import locks
folder, done = Path(sys.argv[1]), 0
while done < 5:
    try:
        with locks.locked(folder, "count"):
            n = int((folder / "n").read_text()) if (folder / "n").exists() else 0
            time.sleep(0.003)
            (folder / "n").write_text(str(n + 1))
        done += 1
    except UserError:
        time.sleep(0.001)
"""
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")]) for _ in range(4)]
    began = time.monotonic()
    assert [process.wait(60) for process in processes] == [0] * 4
    assert (tmp_path / "run" / "n").read_text() == "20"
    assert time.monotonic() - began < 60
