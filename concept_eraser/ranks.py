"""Several processes under one `accelerate launch`: which work is whose, and waiting for each other.

Work is shared through files (the caches of pictures and detections): each process does its part, all wait, all read.
Alone, a process is rank 0 of 1 and waits for nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def _state() -> Any:
    """accelerate's state, if this process was launched beside others; else None, and accelerate is not loaded."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    import torch
    from accelerate import PartialState

    return PartialState(cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()))


def alone() -> bool:
    return _state() is None


def is_first() -> bool:
    """Whether this process writes what is written once."""
    state = _state()
    return state is None or state.is_main_process


def mine(work: Iterable[T]) -> Iterator[T]:
    """Every so-many-th piece of some work."""
    state = _state()
    for number, piece in enumerate(work):
        if state is None or number % state.num_processes == state.process_index:
            yield piece


def wait() -> None:
    """Until all have come here. Every process must call it equally often."""
    state = _state()
    if state is not None:
        state.wait_for_everyone()
