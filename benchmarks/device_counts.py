"""What happened on a device: the counts of the rehearsal device, and of a GPU of CUDA."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

_WAIT = "called a synchronizing CUDA operation"


@dataclass(eq=False)
class Counts:
    """What happened on the device.

    Attributes:
        syncs: How often the host waited for the device.
        places: The same by the place in the code, if requested.
        copies_to_device: The number of copies from host to device. CUDA does not count them.
        bytes_to_device, bytes_to_host: The bytes of copies. CUDA does not count them.
        peak_bytes: The largest number of bytes that tensors occupied; on CUDA since its statistics
            were reset.
        operators: The number of operators on the device; on CUDA the number of allocations.
    """

    syncs: int = 0
    places: Counter[str] = field(default_factory=Counter)
    copies_to_device: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    peak_bytes: int = 0
    operators: int = 0
    notes_places: bool = False


@contextmanager
def on_cuda(*, places: bool = False) -> Iterator[Counts]:
    """Count what happens on the current GPU of CUDA inside the context.

    PyTorch warns of each operation for which the host waits. `torch.cuda.synchronize` is not among
    them. Other warnings inside the context are lost.
    """
    counts, before = Counts(notes_places=places), _allocations()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            waits = [one for one in found if _WAIT in str(one.message)]
            counts.syncs = len(waits)
            if places:
                counts.places.update(f"{one.filename}:{one.lineno}" for one in waits)
            counts.operators = _allocations() - before
            counts.peak_bytes = torch.cuda.max_memory_allocated()


def _allocations() -> int:
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))
