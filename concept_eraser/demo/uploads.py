"""The quota of uploaded images in the scratch folder, per request and in total."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from concept_eraser.demo.safety import UPLOADS

FILE = 10 * 10**6  # bytes of one image; Gradio checks it
REQUEST = UPLOADS * FILE + 2**16  # bytes of one request
TOTAL = 400 * 10**6  # bytes of all images
FILES = 500
AGE = 1800.0  # seconds after which an image is removed


@dataclass
class Uploads:
    """The scratch folder of a server. clock: seconds since the epoch, for tests."""

    folder: Path
    request: int = REQUEST
    total: int = TOTAL
    files: int = FILES
    age: float = AGE
    clock: Callable[[], float] = time.time
    pending_bytes: int = field(default=0, init=False)  # bytes of requests that are being received
    requests: int = field(default=0, init=False)  # number of these requests

    def reserve(self, size: int) -> float | None:
        """Remove old images and reserve space for a request.

        Returns None, or the seconds until there may be space.
        """
        now = self.clock()
        current_files = [
            (at, size)
            for at, size, path in self._list_files()
            if not self._remove_old(path, now - at)
        ]
        used_bytes = sum(size for _, size in current_files) + self.pending_bytes
        # a request may have as many images as are shown at once; Gradio writes them before it
        # counts them
        count = len(current_files) + (self.requests + 1) * UPLOADS
        if used_bytes + size > self.total or count > self.files:
            oldest = min((at for at, _ in current_files), default=now)
            return max(1.0, self.age - max(0.0, now - oldest))  # a clock may have been set back
        self.pending_bytes += size
        self.requests += 1
        return None

    def release(self, size: int) -> None:
        """Release the space of a request after its images are in the folder."""
        self.pending_bytes -= size
        self.requests -= 1

    def _list_files(self) -> list[tuple[float, int, Path]]:
        files = []
        for place, _, names in os.walk(self.folder):
            for name in names:
                path = Path(place) / name
                with suppress(OSError):  # removed meanwhile
                    status = path.lstat()
                    files.append((status.st_mtime, status.st_size, path))
        return files

    def _remove_old(self, path: Path, age: float) -> bool:
        """Remove an image if it is old enough, and its folder if that is empty then."""
        if age <= self.age:
            return False
        with suppress(OSError):
            path.unlink()
        if path.parent != self.folder:
            with suppress(OSError):
                path.parent.rmdir()
        return not path.exists()
