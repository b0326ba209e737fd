"""The GPU of this machine, if it has one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def find_gpu() -> Any:
    """Return the GPU that models move to on their own, as a torch.device, or None.

    It is that of CUDA, or of a backend that was added to PyTorch (its PrivateUse1 device). Apple's
    is not among them: it is used where a recipe asks for it. Each process of a launch has its own,
    which is the one that accelerate takes.
    """
    import torch

    if torch.cuda.is_available():
        # before accelerate has made it the current one, "cuda" is the first GPU in every process
        rank = os.environ.get("LOCAL_RANK", "")
        count = torch.cuda.device_count()
        return torch.device("cuda", int(rank) % count) if rank.isdigit() else torch.device("cuda")
    name = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, name, None)
    return torch.device(name) if module is not None and module.is_available() else None


def gpu_module() -> Any:
    """Return the module of PyTorch for that GPU, such as torch.cuda, or None."""
    import torch

    gpu = find_gpu()
    return None if gpu is None else torch.get_device_module(gpu)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device of a model, if it is not there.

    A blocking copy to CUDA also waits for all operators before it. This one does not. The memory of
    the host may be freed at once, since CUDA copies from a buffer of its own.
    """
    return tensor.to(device, non_blocking=device.type not in ("cpu", "mps"))
