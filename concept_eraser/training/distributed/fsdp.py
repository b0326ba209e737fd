"""The denoiser's frozen weights split among the processes, under a LoRA that is trained
(training.shard: weights).

PyTorch's FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao et al., arXiv 2304.11277) keeps one
piece of every weight in each process. A block's weights are put together before the block is asked,
forwards and backwards, and let go afterwards.

It never sees what is trained: the factors are whole in every process, their gradients come from
`torch.autograd.grad` and are reduced by the closure, one an objective, as without it. So methods,
teachers (the factors' start put in their place) and differences of gradients stay what they are.
What it cannot serve is refused by the recipe (consistency.py):

* trained weights in pieces: FSDP keeps the gradient of one loss, in pieces too, and methods ask for
inner products;
* double backward (hvp: exact): the weights that it reads again have been let go;
* layers asked outside of their blocks (the loss resteer), and passes that one process makes alone
(watch, look).

FSDP changes layers and has no way back. So it is given a hull, a second tree of layers around the
same tensors, which takes the denoiser's place while it trains and is thrown away.
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
    """Raise UserError where torch has no FSDP2 that can leave the factors alone."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        is_supported = False
    else:
        is_supported = "ignored_params" in inspect.signature(fully_shard).parameters
    if not is_supported:
        raise UserError(
            "training.shard: weights needs a newer torch, whose fully_shard knows "
            f"ignored_params; found torch {torch.__version__}. Install a newer one, or "
            "use training.shard: optimizer"
        )


@contextmanager
def split(model: Any, device: torch.device) -> Iterator[None]:
    """Inside, each process holds a piece of the denoiser's weights, all but those that require
    gradients.

    device: where the model lies. All processes must come here together, and make the same number of
    passes through the denoiser inside: `model.partial` is made to. Afterwards the weights are whole
    again, on the CPU, since the device may not hold them; so are the model's other parts.

    After an error, which may have come to one process alone, nobody waits for the others' pieces:
    the denoiser is then left without weights, and the model must be loaded anew. After a stop by
    Ctrl-C or SIGTERM, which comes to all, it is whole.
    """
    denoiser = model.denoiser
    hull = _hull(denoiser)
    _divide(hull, device)
    model.parts["denoiser"] = hull
    model.partial = _in_step(model.partial)
    all_arrived = False
    try:
        with warnings.catch_warnings():
            # about operations in place on a block's output: no family does any, or its gradients
            # would be wrong (tests)
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
    """A second tree of layers around the same tensors."""
    return copy.deepcopy(
        module, {id(value): value for value in (*module.parameters(), *module.buffers())}
    )


def blocks(network: nn.Module) -> list[nn.Module]:
    """The layers whose weights are put together at once, inner ones first: those that diffusers
    says belong on one device, else the entries of the network's own lists."""
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
    """Split the weights block by block, so that never more than one is there twice."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    factors = {p for p in hull.parameters() if p.requires_grad}
    for layer in [*blocks(hull), hull]:
        frozen = [p for p in layer.parameters() if p not in factors and not isinstance(p, DTensor)]
        for parameter in frozen:  # convolutions may be stored channels last
            parameter.data = parameter.data.contiguous()
        # the root too, or it would keep its weights together after a teacher's pass, which has no
        # backward to end it
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=factors)
        # the hull has pieces in its place; the denoiser gets its values back from these
        for parameter in frozen:
            parameter.data = parameter.data.new_empty(0)


def _gather(hull: nn.Module, whole: nn.Module) -> None:
    """Put the pieces together, one weight after the other, on the CPU of every process."""
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
    """Sampling that stops at another step in each process, filled up with idle passes: a block's
    weights are put together by all processes, or by none."""

    def predict_together(*given: Any, stop: int, **told: Any) -> tuple[Tensor, int]:
        furthest = torch.tensor(stop, device=given[0].device)
        torch.distributed.all_reduce(furthest, torch.distributed.ReduceOp.MAX)
        found = partial(*given, stop=stop, **told)
        if idle := int(furthest) - stop:
            partial(*given, stop=idle, **told)
        return found

    return predict_together
