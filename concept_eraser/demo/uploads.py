"""The quota of uploaded pictures: how much one request, and all together, may put into the scratch folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from concept_eraser.demo.safety import UPLOADS

FILE = 10 * 10**6  # bytes of one picture; Gradio checks it
REQUEST = UPLOADS * FILE + 2**16  # bytes of one request
TOTAL = 400 * 10**6  # bytes of all pictures
FILES = 500
AGE = 1800.0  # seconds after which a picture is removed


@dataclass
class Uploads:
    """The scratch folder of a server. clock: seconds since the epoch, for tests."""

    folder: Path
    request: int = REQUEST
    total: int = TOTAL
    files: int = FILES
    age: float = AGE
    clock: Callable[[], float] = time.time
    under_way: int = field(default=0, init=False)  # bytes of requests that are being received
    requests: int = field(default=0, init=False)

    def reserve(self, size: int) -> float | None:
        """Remove old pictures and make room for a request: None, or in how many seconds there may be some."""
        now = self.clock()
        kept = [(at, size) for at, size, path in self._listed() if not self._remove_old(path, now - at)]
        taken = sum(size for _, size in kept) + self.under_way
        # every request may hold as many pictures as are shown at once; Gradio writes them before it counts
        count = len(kept) + (self.requests + 1) * UPLOADS
        if taken + size > self.total or count > self.files:
            oldest = min((at for at, _ in kept), default=now)
            return max(1.0, self.age - (now - oldest))
        self.under_way += size
        self.requests += 1
        return None

    def release(self, size: int) -> None:
        """The request has been received, and what it brought lies in the folder."""
        self.under_way -= size
        self.requests -= 1

    def _listed(self) -> list[tuple[float, int, Path]]:
        found = []
        for place, _, names in os.walk(self.folder):
            for name in names:
                path = Path(place) / name
                with suppress(OSError):  # removed meanwhile
                    status = path.lstat()
                    found.append((status.st_mtime, status.st_size, path))
        return found

    def _remove_old(self, path: Path, age: float) -> bool:
        """Remove a picture, and its folder where it is then empty, if it is old enough."""
        if age <= self.age:
            return False
        with suppress(OSError):
            path.unlink()
        if path.parent != self.folder:
            with suppress(OSError):
                path.parent.rmdir()
        return not path.exists()
