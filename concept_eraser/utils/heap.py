"""Return freed memory of the process to the system.

glibc serves blocks of up to 32 MB from its heap, once one of that size was freed. A freed block
stays in the heap, and is only returned at its end. The tensors of a forward and backward pass leave
holes between those that stay. With Stable Diffusion 1.4's architecture at 256 px these holes grew
to 0.8 GB in two steps of a LoRA (benchmarks/README.md).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

# Where less is free, the next pass uses it again, and returning it would cost time.
LEAST = 256 * 2**20


class _Counts(ctypes.Structure):
    """glibc's `struct mallinfo2`. `fordblks` has the free bytes of all heaps."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _functions() -> tuple[Callable[[], _Counts], Callable[[int], int]] | None:
    """Return glibc's functions that count and return free memory; None with another C library."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not all(hasattr(library, name) for name in ("mallinfo2", "malloc_trim")):
        return None
    count, trim = library.mallinfo2, library.malloc_trim
    count.restype, count.argtypes = _Counts, ()
    trim.restype, trim.argtypes = ctypes.c_int, (ctypes.c_size_t,)
    return count, trim


def free_bytes() -> int:
    """Return the freed bytes that the heap still has; 0 with another C library than glibc."""
    functions = _functions()
    return int(functions[0]().fordblks) if functions else 0


def return_free(least: int = LEAST) -> bool:
    """Return the heap's free memory to the system if there is enough of it.

    Args:
        least: The free bytes from which on it is returned.

    Returns:
        Whether it was returned.
    """
    functions = _functions()
    if functions is None or free_bytes() < least:
        return False
    functions[1](0)
    return True
