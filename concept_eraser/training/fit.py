"""Train a small model from scratch.

A deletion is compared with such a model ("Retrain"), and a history is recorded during such a
training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from concept_eraser.methods.vectors import Vec
from concept_eraser.utils.progress import Progress, silent

# History.record: positions, lr, momentum, velocity
Record = Callable[[Sequence[int], float, float, Vec | None], None]


@dataclass(frozen=True)
class Plan:
    """The settings of a training: SGD (with heavy ball) or Adam.

    With `decay` the learning rate decreases to 0 along a cosine.
    """

    epochs: int = 10
    batch_size: int = 64
    lr: float = 0.1
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay: bool = True
    seed: int = 0

    def steps(self, examples: int) -> int:
        """Return the number of steps of all epochs."""
        return self.epochs * len(_batches(torch.arange(examples), self.batch_size))


def _batches(rows: Tensor, size: int) -> list[Tensor]:
    """Divide rows into batches. A last batch of one row joins the one before.

    Batch norm over a vector has no variance of one example.
    """
    batches = list(rows.split(size))
    if size > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def fit(
    module: nn.Module,
    loss: Callable[[Sequence[int]], Tensor],
    rows: Tensor,
    plan: Plan,
    *,
    record: Record | None = None,
    what: str = "training",
    progress: Progress = silent,
) -> float:
    """Train all parameters on the examples at `rows` in place. Returns the seconds it took.

    The module is in eval mode at the end.

    loss: the mean loss of some positions. record: called before each step of SGD with its
    positions, learning rate and momentum. The module then keeps its batch-norm statistics frozen,
    as Mini-Unlearning needs.
    """
    if record is not None and plan.optimizer != "sgd":
        raise ValueError(
            f"a history can be recorded of plain SGD only, found optimizer {plan.optimizer!r}"
        )
    module.requires_grad_(True).train(record is None)
    params = tuple(module.parameters())
    if plan.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            params, plan.lr, plan.momentum, weight_decay=plan.weight_decay
        )
    else:
        optimizer = torch.optim.Adam(params, plan.lr, weight_decay=plan.weight_decay)
    total = plan.steps(len(rows))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total) if plan.decay else None
    generator = torch.Generator().manual_seed(plan.seed)
    began, step_count = time.monotonic(), 0
    for _ in range(plan.epochs):
        order = rows[torch.randperm(len(rows), generator=generator)]
        for part in _batches(order, plan.batch_size):
            positions = part.tolist()
            if record is not None:
                record(
                    positions,
                    optimizer.param_groups[0]["lr"],
                    plan.momentum,
                    _velocity(optimizer, params),
                )
            optimizer.zero_grad(set_to_none=True)
            loss(positions).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            step_count += 1
        progress(what, step_count, total)
    module.eval().requires_grad_(False)
    return time.monotonic() - began


def _velocity(optimizer: torch.optim.Optimizer, params: Vec) -> Vec | None:
    """Return the momentum buffers, if there are any yet."""
    buffers = [optimizer.state[p].get("momentum_buffer") for p in params]
    return None if any(v is None for v in buffers) else tuple(buffers)
