"""One process at a time in an output folder.

The lock is a file in the folder that the process locks (flock). It has the id of the process. The
system releases the lock when the process ends, however it ends. So the lock of a killed process is
stale, and another process takes it over. On a network folder the system's lock may not reach other
machines. There the name of the host in the file decides.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from concept_eraser.storage.readers import cannot
from concept_eraser.utils.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows, where the process id in the file decides
    fcntl = None  # type: ignore[assignment]

LOCK = ".concept_eraser.lock"
# Windows lacks the first two and has the third
_FLAGS = os.O_RDWR | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY"))
_BUSY = (errno.EACCES, errno.EAGAIN)


@contextmanager
def hold_lock(folder: Path, purpose: str) -> Iterator[None]:
    """Hold the lock of an output folder. A missing folder is made.

    This also checks the place: an error in writing to it is raised before any work. Folders that
    were made for the lock are removed again if nothing was written into them.

    Args:
        folder: the output folder.
        purpose: what the process does there, for messages to other processes, e.g. "erase".

    Raises:
        UserError: another process works in the folder, or the folder cannot be made or written to.
    """
    new_folders = make_folder(folder)
    try:
        descriptor = _acquire(folder, purpose)
    except BaseException:
        remove_empty(new_folders)
        raise
    try:
        yield
    finally:
        if fcntl is None:  # Windows removes no file that is open
            os.close(descriptor)
        with suppress(OSError):
            (folder / LOCK).unlink()
        if fcntl is not None:
            os.close(descriptor)
        remove_empty(new_folders)


def holder_of(folder: Path) -> dict[str, Any] | None:
    """Return the process that works in a folder; None without one.

    It has an id, a host, a purpose and a start.
    """
    path = folder / LOCK
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError:
        return None
    try:
        if _take(descriptor) is True:
            holder = _read(descriptor)
            return holder if holder and holder.get("host") != socket.gethostname() else None
        return _read(descriptor) or {}
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents. Returns the new folders, the outermost first.

    Raises UserError if it cannot be made, or is a file.
    """
    new_folders = []
    place = folder
    try:
        while not place.exists():
            new_folders.append(place)
            if place == place.parent:
                break
            place = place.parent
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{folder} is a file; give a folder with --output") from None
    except (OSError, ValueError) as error:
        raise UserError(_no_place(folder, error)) from None
    return new_folders[::-1]


def _acquire(folder: Path, purpose: str) -> int:
    """Return the descriptor of the locked lock file, which has this process's name."""
    path = folder / LOCK
    for _ in range(100):
        try:
            descriptor = os.open(path, _FLAGS | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(_no_place(folder, error)) from None
        try:
            is_locked = _take(descriptor)
            holder = _read(descriptor)
            if is_locked is False or (holder and not _is_stale(holder, certain=is_locked is True)):
                raise UserError(_refusal(folder, holder))
            if _is_still(path, descriptor):
                _write(descriptor, purpose)
                return descriptor
        except UserError:
            os.close(descriptor)
            raise
        except OSError as error:  # this process has the lock, but its file cannot be written
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)
            raise UserError(_no_place(folder, error)) from None
        os.close(descriptor)  # its owner has just removed it, so the next attempt makes a new one
        time.sleep(0.01)
    raise UserError(
        f"{folder} could not be locked; another process locks and releases it repeatedly. "
        "Give another --output"
    )


def _take(descriptor: int) -> bool | None:
    """Return whether the system gave the lock; None if this file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _BUSY else None
    return True


def _read(descriptor: int) -> dict[str, Any] | None:
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        content = json.loads(os.read(descriptor, 4096).decode())
    except (ValueError, OSError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _write(descriptor: int, purpose: str) -> None:
    content = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "purpose": purpose,
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, (json.dumps(content) + "\n").encode())


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the open file."""
    try:
        path_status, file_status = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except OSError:
        return False
    return (path_status.st_ino, path_status.st_dev) == (file_status.st_ino, file_status.st_dev)


def _is_stale(holder: dict[str, Any], *, certain: bool) -> bool:
    """Whether the process that a lock names has ended.

    certain: the system gave the lock, so on this host the process has ended.
    """
    if holder.get("host") != socket.gethostname():
        return False
    return certain or not is_alive(holder.get("pid"))


def is_alive(pid: Any) -> bool:
    """Whether a process with this id runs on this machine."""
    if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid < 2**31:
        return False
    if sys.platform == "win32":
        return True  # os.kill would end it; the user removes a lock there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _refusal(folder: Path, holder: dict[str, Any] | None) -> str:
    if not holder:
        return (
            f"{folder} is in use by another process; wait until it has ended, or give "
            "another --output"
        )
    pid, host, purpose, start_time = (
        _plain(holder.get(key)) for key in ("pid", "host", "purpose", "started")
    )
    who = f"process {pid} on {host}, which began to {purpose} at {start_time}"
    if holder.get("host") != socket.gethostname():
        return (
            f"{folder} is in use by {who}; wait until it has ended, or give another "
            f"--output. If that machine no longer runs it, remove {folder / LOCK}"
        )
    return f"{folder} is in use by {who}; wait until it has ended, or give another --output"


def _plain(text: Any) -> str:
    """Return a field of a lock file, which may come from a stranger, without control characters."""
    return "".join(letter for letter in str(text)[:80] if letter.isprintable())


def _no_place(folder: Path, error: BaseException) -> str:
    code = getattr(error, "errno", None)
    if code == errno.ELOOP:
        return (
            f"{folder / LOCK} is a link, which concept_eraser does not make; remove it, or "
            "give another --output"
        )
    if code in (errno.EROFS, errno.EACCES, errno.EPERM):
        return (
            f"cannot write to {folder}: this user may not, or it is read-only; give another "
            "--output"
        )
    if code in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"cannot write to {folder}: the disk is full; free some space, or give another --output"
        )
    return f"{cannot('write to', folder, error)}, or give another --output"


def remove_empty(folders: list[Path]) -> None:
    """Remove folders that were made and not used, innermost first, up to one that is not empty."""
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:
            return
