"""Run a command of the package, and store what its steps took and what this process sent.

    python -m benchmarks.scale_worker FOLDER erase RECIPE -o RUN

`benchmarks.scale` starts it, in one process or in several. Each writes FOLDER/RANK.json. A step is
one of the training loop, or an attacked batch of prompts.

Tensors are counted where torch hands them to a backend, so also those that accelerate sends. The
bytes of the sockets are those of the operating system (Linux), so they have everything that this
process sent by TCP.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed import ProcessGroup

from concept_eraser.cli.main import main as run_command
from concept_eraser.evaluation.attacks.runner import Referee
from concept_eraser.training.engine import Engine

COUNTED = ("allreduce", "broadcast", "allgather", "gather", "send", "recv", "barrier")
# other messages are refused, so that none is left out of the count
REFUSED = (
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_to_all_single"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce_coalesced", "alltoall"),
    *("alltoall_base", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "scatter"),
)
# of Linux's struct tcp_info
BYTES_SENT, BYTES_SENT_AGAIN = slice(200, 208), slice(208, 216)


def size(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(size, tensors)) if isinstance(tensors, list | tuple) else 0


def bytes_on_sockets() -> int:
    """Return the bytes that this process has sent by its open TCP sockets since they were made.

    Packets that a slow receiver made the system send again are not counted.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile, or no TCP
            continue
        sent, again = (
            int.from_bytes(info[part], sys.byteorder) for part in (BYTES_SENT, BYTES_SENT_AGAIN)
        )
        total += sent - again
    return total


class Meter:
    """What a process has sent, and when its steps began and ended.

    Attributes:
        messages: The collective and the bytes of each message since the last step began.
        steps: For each step its start and its end in seconds. Also its messages and the bytes on
            the sockets, both until the next step begins.
        gradient_bytes: Those of one gradient of a training. 0 for an attack.
        objectives: The number of objectives of a training. 0 for an attack.
    """

    def __init__(self) -> None:
        self.messages: list[tuple[str, int]] = []
        self.steps: list[dict[str, Any]] = []
        self.gradient_bytes = 0
        self.objectives = 0

    def counting(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective that is counted."""

        def call(group: ProcessGroup, *args: Any, **options: Any) -> Any:
            position = 1 if name in ("allgather", "gather") else 0  # of what this process gives
            has_content = name not in ("recv", "barrier")
            self.messages.append((name, size(args[position]) if has_content else 0))
            return collective(group, *args, **options)

        return call

    def timing(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that is recorded."""

        def call(owner: Engine | Referee, *args: Any, **options: Any) -> Any:
            if isinstance(owner, Engine):
                # autograd gives a gradient the type of its parameter
                self.gradient_bytes = size([one.data for one in owner.params.values()])
                self.objectives = len(owner.eraser.objectives)
            self.end_record()
            self.messages = []
            record = {"sockets": bytes_on_sockets(), "began": time.monotonic()}
            self.steps.append(record)
            result = step(owner, *args, **options)
            record["ended"] = time.monotonic()
            return result

        return call

    def end_record(self) -> None:
        """Add to the last step what was sent since it began."""
        if self.steps:
            last = self.steps[-1]
            last["sockets"] = bytes_on_sockets() - last["sockets"]
            last["messages"] = self.messages

    def write(self, file: Path) -> None:
        self.end_record()
        names = ("gradient_bytes", "objectives", "steps")
        file.write_text(json.dumps({name: getattr(self, name) for name in names}))


def refusing(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"the benchmark does not count {name}")

    return call


def main() -> None:
    folder, *words = sys.argv[1:]
    sys.argv = ["concept-eraser", *words]
    meter = Meter()
    with ExitStack() as stack:
        for owner, name in ((Engine, "do_step"), (Referee, "play")):
            step = meter.timing(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, step))
        for name in COUNTED:
            collective = meter.counting(name, getattr(ProcessGroup, name))
            stack.enter_context(mock.patch.object(ProcessGroup, name, collective))
        for name in REFUSED:
            if hasattr(ProcessGroup, name):  # older versions of torch lack some
                stack.enter_context(mock.patch.object(ProcessGroup, name, refusing(name)))
        try:
            run_command()
        finally:  # the command ends by SystemExit
            meter.write(Path(folder, f"{os.environ.get('RANK', '0')}.json"))


if __name__ == "__main__":
    main()
