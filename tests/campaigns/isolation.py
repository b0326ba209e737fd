"""Code under test in a forked process.

Python's audit events show the files that it writes, the programs that it starts and the hosts that
it contacts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATH_EVENTS = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "shutil.rmtree": (0,),
}
_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn")
_NETWORK = ("socket.connect", "socket.getaddrinfo")


class Watch:
    """Reports what a process does outside of the folders that it may write to.

    The hook stays until the process ends.
    """

    def __init__(
        self, writable_folders: list[Path], report: Callable[[str], Any], *, network: bool = False
    ) -> None:
        self.writable_folders = [str(path.resolve()) for path in writable_folders] + [
            "/dev/null",
            "/proc/self",
            "/dev/shm",
        ]
        self.report, self.network = report, network
        self.on = True
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(flags, int) and flags & _WRITE_FLAGS) or (
                isinstance(mode, str) and set(mode) & set("wax+")
            )
            if writes and isinstance(path, str | bytes | os.PathLike):
                self._check(event, path)
        elif event in _PATH_EVENTS:
            for place in _PATH_EVENTS[event]:
                self._check(event, arguments[place])
        elif event in _PROGRAMS:
            words = arguments[1] if len(arguments) > 1 else arguments[0]
            if not _is_harmless(words):
                self._tell(f"program: {str(words)[:200]}")
        elif self.network and event in _NETWORK and not _is_own_machine(event, arguments):
            self._tell(f"network: {str(arguments)[:200]}")

    def _check(self, event: str, path: Any) -> None:
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if not text:
            return
        whole = os.path.abspath(text)
        real = os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))
        if event == "open":
            real = os.path.realpath(real)
        if not any(
            real == folder or real.startswith(f"{folder}/") for folder in self.writable_folders
        ):
            self._tell(f"{event}: {real[:300]}")

    def _tell(self, text: str) -> None:
        self.on = False
        self.report(text)
        self.on = True


def _is_own_machine(event: str, arguments: tuple[Any, ...]) -> bool:
    address = arguments[1] if event == "socket.connect" else arguments
    host = address[0] if isinstance(address, tuple) and address else address
    return host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", None)


def _is_harmless(words: Any) -> bool:
    """Whether a program only describes the machine for a library: git, uname, lscpu, ldconfig."""
    first = words[0] if isinstance(words, list | tuple) and words else words
    if first == sys.executable and words[1:3] == [
        "-I",
        "-S",
    ]:  # our own search with a regular expression, in a process that may be killed
        return True
    name = (
        os.path.basename(os.fsdecode(first)) if isinstance(first, str | bytes | os.PathLike) else ""
    )
    return name in ("git", "uname", "lscpu", "ldconfig", "gcc", "cc", "sh", "fc-list", "nvidia-smi")
