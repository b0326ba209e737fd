"""Split the denoiser's frozen weights among processes, under a LoRA (training.shard: weights).

PyTorch's FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao et al., arXiv 2304.11277) stores one
piece of every weight in each process. The weights of a block are gathered before its forward and
backward pass, and freed afterwards.

FSDP does not handle the trained parameters. The matrices of the LoRA are whole in every process.
Their gradients come from `torch.autograd.grad`, and the closure reduces them for each objective. So
methods, teachers (the initial values of the LoRA) and differences of gradients do not change. A
recipe (recipes/validation.py) cannot combine FSDP with:

* splitting the trained weights: FSDP keeps the gradient of one loss, in pieces, and methods need
  inner products;
* double backward (hvp: exact): the weights that it needs again have been freed;
* layers that are called outside of their blocks (the loss resteer), and passes of one process alone
  (watch, on_step).

FSDP changes layers and cannot be undone. So it gets a second tree of layers around the same
tensors. This tree replaces the denoiser while it trains, and is discarded afterwards.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.utils.errors import Interrupted, UserError

CPU = torch.device("cpu")


def require() -> None:
    """Raise UserError if torch has no FSDP2 that can ignore parameters."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        is_supported = False
    else:
        is_supported = "ignored_params" in inspect.signature(fully_shard).parameters
    if not is_supported:
        raise UserError(
            "training.shard: weights needs a newer torch, whose fully_shard has "
            f"ignored_params; found torch {torch.__version__}. Install a newer one, or "
            "use training.shard: optimizer"
        )


@contextmanager
def split(model: Any, device: torch.device) -> Iterator[None]:
    """Split the denoiser's weights among the processes inside the context.

    Parameters that require gradients stay whole. All processes must enter together, and make the
    same number of passes through the denoiser inside; `model.partial` is changed to do so.
    Afterwards the weights are whole again, on the CPU, since the device may not have space for
    them. So are the model's other parts.

    An error may occur in one process alone. Then no process waits for the others' pieces: the
    denoiser has no weights, and the model must be loaded again. After a stop by Ctrl-C or SIGTERM,
    which reaches all processes, it is whole.

    device: the device of the model.
    """
    denoiser = model.denoiser
    hull = _hull(denoiser)
    _divide(hull, device)
    model.parts["denoiser"] = hull
    model.partial = _in_step(model.partial)
    all_arrived = False
    try:
        with warnings.catch_warnings():
            # the warning is about in-place operations on a block's output, which no family has
            # (tests)
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            yield
        all_arrived = True
    except Interrupted:
        all_arrived = True
        raise
    finally:
        model.parts["denoiser"] = denoiser
        del model.partial
        if all_arrived:
            _gather(hull, denoiser)
            model.to(CPU)


def _hull(module: nn.Module) -> nn.Module:
    """Return a second tree of layers around the same tensors."""
    return copy.deepcopy(
        module, {id(value): value for value in (*module.parameters(), *module.buffers())}
    )


def blocks(network: nn.Module) -> list[nn.Module]:
    """Return the layers whose weights are gathered together, inner ones first.

    They are those that diffusers keeps on one device, else the entries of the network's own lists.
    """
    class_names = set(getattr(network, "_no_split_modules", None) or ())
    if class_names:
        return [
            layer
            for layer in reversed(list(network.modules()))
            if type(layer).__name__ in class_names
        ]
    return [
        block for part in network.children() if isinstance(part, nn.ModuleList) for block in part
    ]


def _divide(hull: nn.Module, device: torch.device) -> None:
    """Split the weights block by block, so that at most one block is in memory twice."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    factors = {p for p in hull.parameters() if p.requires_grad}
    for layer in [*blocks(hull), hull]:
        frozen = [p for p in layer.parameters() if p not in factors and not isinstance(p, DTensor)]
        for parameter in frozen:  # convolutions may be stored channels last
            parameter.data = parameter.data.contiguous()
        # the root too: else it would keep its weights gathered after a teacher's pass, which has no
        # backward pass to free them
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=factors)
        # the hull has pieces instead; the denoiser gets its values back from these
        for parameter in frozen:
            parameter.data = parameter.data.new_empty(0)


def _gather(hull: nn.Module, whole: nn.Module) -> None:
    """Gather the pieces, one weight after the other, on the CPU of every process."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for layer in hull.modules():
        if isinstance(layer, FSDPModule):
            layer.reshard()
    places = dict(whole.named_parameters())
    for name, piece in hull.named_parameters():
        if isinstance(piece, DTensor):
            places[name].data = piece.full_tensor().to(CPU)


def _in_step(partial: Callable[..., tuple[Tensor, int]]) -> Callable[..., tuple[Tensor, int]]:
    """Return a sampling that makes the same number of passes in every process.

    It may stop at different steps, but the weights of a block are gathered by all processes
    together. So shorter samplings make additional passes, whose results are discarded.
    """

    def predict_together(*inputs: Any, stop: int, **options: Any) -> tuple[Tensor, int]:
        furthest = torch.tensor(stop, device=inputs[0].device)
        torch.distributed.all_reduce(furthest, torch.distributed.ReduceOp.MAX)
        prediction = partial(*inputs, stop=stop, **options)
        if idle := int(furthest) - stop:
            partial(*inputs, stop=idle, **options)
        return prediction

    return predict_together
