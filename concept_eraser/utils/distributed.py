"""Several processes under one `accelerate launch` or `torchrun`: sharing work, and waiting.

Processes share work through files (the caches of images and detections): each process does its
part, all wait, all read. A single process is rank 0 of 1 and waits for no other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from concept_eraser.utils.devices import find_gpu
from concept_eraser.utils.errors import ReportedElsewhere, UserError

T = TypeVar("T")

# time limit of a waiting process; the launcher ends all processes if one of them dies
PATIENCE = timedelta(hours=3)
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")


def _number(names: tuple[str, ...], otherwise: int) -> int:
    return next(
        (int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), otherwise
    )


def join(*, cpu: bool | None = None) -> Any:
    """Return accelerate's state if this process was launched with others, else None.

    Without other processes accelerate is not loaded. cpu: compute on the CPU, whatever else the
    machine has; None for the launcher's setting. The first call decides.
    """
    if alone():
        return None
    import torch
    from accelerate import PartialState

    if cpu is None:
        cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    has_gpu = find_gpu() is not None or torch.backends.mps.is_available()
    return PartialState(cpu=cpu or not has_gpu, timeout=PATIENCE)


def release_device(*, cpu: bool) -> None:
    """Let accelerate choose its device anew if this run needs another one.

    accelerate keeps the device of the first run for the whole process. It would refuse the CPU
    after a GPU, and stay on the CPU if a GPU is asked for. A launch of several processes is left as
    it is.
    """
    from accelerate.state import AcceleratorState, is_initialized

    if alone() and is_initialized() and (AcceleratorState().device.type == "cpu") != cpu:
        AcceleratorState._reset_state(reset_partial_state=True)


def alone() -> bool:
    return _number(_SIZES, 1) < 2 or _number(_RANKS, -1) < 0


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return alone() or _number(_RANKS, 0) == 0


def mine(work: Iterable[T]) -> Iterator[T]:
    """Return this process's share of some work."""
    state = join()
    for number, piece in enumerate(work):
        if state is None or number % state.num_processes == state.process_index:
            yield piece


def wait() -> None:
    """Wait until all processes have called it. Each process must call it equally often."""
    state = join()
    if state is not None:
        state.wait_for_everyone()


def agree(ask: Callable[[], T]) -> T:
    """Return the result of a call that only the first process makes. All processes wait for it.

    Args:
        ask: The call; its result must be picklable.

    Raises:
        UserError: The call raised one. In the other processes it is a `ReportedElsewhere`.
    """
    state = join()
    if state is None:
        return ask()
    from accelerate.utils import broadcast_object_list

    answer_and_message: list[Any] = [None, None]
    own_error: UserError | None = None
    if state.is_main_process:
        try:
            answer_and_message[0] = ask()
        except UserError as error:
            own_error, answer_and_message[1] = error, str(error)
    broadcast_object_list(answer_and_message)
    if own_error is not None:
        raise own_error
    if answer_and_message[1] is not None:
        raise ReportedElsewhere(answer_and_message[1])
    return answer_and_message[0]


def same(value: T) -> bool:
    """Return whether all processes have an equal value."""
    state = join()
    if state is None:
        return True
    from accelerate.utils import gather_object

    return all(other == value for other in gather_object([value]))
