"""The number of threads of a command. Two jobs on one machine should not wait for each other."""

from __future__ import annotations

import os

import typer


def use_idle_cores() -> None:
    """Use no more threads than cores are idle now, and say so on stderr if they are fewer.

    The environment variable OMP_NUM_THREADS sets another number. With a GPU nothing is changed:
    it does the work.
    """
    import torch

    from concept_eraser.utils import devices, idle_cores

    if "OMP_NUM_THREADS" in os.environ or devices.find_gpu() is not None:
        return
    idle, threads = idle_cores.count(), torch.get_num_threads()
    if idle is not None and idle < threads:
        torch.set_num_threads(idle)
        typer.echo(
            f"note: other processes are busy, so {idle} of {threads} threads are used; "
            "OMP_NUM_THREADS sets another number",
            err=True,
        )
