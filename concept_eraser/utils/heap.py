"""Give memory back to the system where a model's weights change their precision.

glibc serves a request of up to 32 MB from its heap, once the process has freed a block of that
size. Weights in fp32 that become bf16 then leave holes there, which fp32 weights of other sizes do
not fill. SDXL with frozen weights in bf16 took 11.7 GB in place of 7.5 GB while it trained on a
CPU, and 19.0 GB in place of 13.7 GB at its end. Blocks with pages of their own have no holes. They
cost time in a training step, which makes many of them, so this is only done around conversions.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
_LARGE = 2**20  # bytes
# variables of the environment that set thresholds
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
# glibc's own thresholds in a process that has freed a large block
_USUAL = {_M_MMAP_THRESHOLD: 2**25, _M_TRIM_THRESHOLD: 2**26}


@contextmanager
def own_pages() -> Iterator[None]:
    """Give each block of at least 1 MB pages of its own inside the context.

    It does nothing with another C library, and where the environment may have a threshold.
    """
    is_set = any(name in os.environ for name in _VARIABLES)
    mallopt = None if is_set else _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        for option, value in _USUAL.items():
            mallopt(option, value)


def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's function, or None with another C library."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - only glibc has it
        return library.mallopt
    except (AttributeError, OSError, TypeError):
        return None
