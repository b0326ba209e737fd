"""One process at a time in an output folder.

The lock is a file in the folder that the process holds locked (flock) and that says who it is. The
system gives the lock up when the process ends, however it ends, so a lock of a process that was
killed is stale and is taken over. On a network folder the system's lock may not reach other
machines; there the name of the host in the file decides.
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
except ImportError:  # not on Windows: the process id in the file decides there
    fcntl = None  # type: ignore[assignment]

LOCK = ".concept_eraser.lock"
_BUSY = (errno.EACCES, errno.EAGAIN)


@contextmanager
def hold_lock(folder: Path, purpose: str) -> Iterator[None]:
    """Hold the lock of an output folder; the folder is made where it is missing.

    This is also the probe of the place: what cannot be written to is said here, before any work.
    Folders that were made for the lock are removed again where nothing was written into them.

    Args:
        folder: the output folder.
        purpose: what the process does there, for the message to another one, e.g. "erase".

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
        with suppress(OSError):
            (folder / LOCK).unlink()
        os.close(descriptor)
        remove_empty(new_folders)


def holder_of(folder: Path) -> dict[str, Any] | None:
    """Who works in a folder now: its process id, host, purpose and start; None where nobody
    does.
    """
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
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
    """Make a folder with those above it; which were made, the outermost first.

    Raises UserError where it cannot be made, or is a file.
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
    """The descriptor of the lock file, held locked, with this process's name in it."""
    path = folder / LOCK
    for _ in range(100):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
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
        except OSError as error:  # the lock is ours, but its file cannot be written
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)
            raise UserError(_no_place(folder, error)) from None
        os.close(descriptor)  # its owner has just removed it: another try makes a new one
        time.sleep(0.01)
    raise UserError(
        f"{folder} could not be locked; another process locks and frees it all the time. "
        "Give another --output"
    )


def _take(descriptor: int) -> bool | None:
    """Whether the system gave the lock; None where this file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _BUSY else None
    return True


def _read(descriptor: int) -> dict[str, Any] | None:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0).decode())
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
    os.pwrite(descriptor, (json.dumps(content) + "\n").encode(), 0)


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the file that is open."""
    try:
        path_status, file_status = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except OSError:
        return False
    return (path_status.st_ino, path_status.st_dev) == (file_status.st_ino, file_status.st_dev)


def _is_stale(holder: dict[str, Any], *, certain: bool) -> bool:
    """Whether the process that a lock names has ended. certain: the system gave us the lock, so on
    this host it has.
    """
    if holder.get("host") != socket.gethostname():
        return False
    return certain or not is_alive(holder.get("pid"))


def is_alive(pid: Any) -> bool:
    """Whether a process with this id runs on this machine."""
    if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid < 2**31:
        return False
    if sys.platform == "win32":
        return True  # os.kill would end it; a lock there is removed by hand
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
    """A field of a lock file, which may come from a stranger, without control characters."""
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
    """Remove folders that were made for nothing, innermost first, up to the first that holds
    something.
    """
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:
            return
