"""FORUM and its baselines on bi-level problems: the settings and the training loop.

The studies bilevel_eq24, bilevel_cleaning and bilevel_time share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from concept_eraser.methods.base import Direction, Method
from concept_eraser.methods.bome import Bome
from concept_eraser.methods.forum import Forum
from concept_eraser.methods.moco import Moco
from concept_eraser.methods.moml import Moml
from concept_eraser.training.closure import LossClosure

METHODS = ("MOML", "MoCo", "BOME", "FORUM")


def build(name: str, *, steps: int, inner_lr: float, outer_lr: float, rho: float) -> Method:
    """Return a method with the settings of FORUM's experiments.

    Args:
        name: One of METHODS.
        steps: T of the lower level.
        inner_lr: Its step size eta.
        outer_lr: The step size of the lower-level variable, for FORUM and BOME.
        rho: The paper's rho, for FORUM (read as rho_e = rho/2) and as BOME's eta.
    """
    lower: dict[str, Any] = {"inner_steps": steps, "inner_lr": inner_lr}
    if name == "FORUM":
        return Forum(rho_e=rho / 2, normalize=False, outer_lr=outer_lr, **lower)
    if name == "BOME":
        # the mean of the objectives, so that its steps are as long as those of the others
        return Bome(eta=rho, outer_lr=outer_lr, retain=0.5, forget=0.5, **lower)
    return Moml(hvp="exact", **lower) if name == "MOML" else Moco(hvp="exact", **lower)


def train(closure: LossClosure, method: Method, lr: float, steps: int) -> Iterator[Direction]:
    """Move alpha by `lr` along the method's step, and the lower level's variable by its own.

    Yields the direction of each step after the parameters have moved.
    """
    for step in range(steps):
        closure.step = step
        direction = method.direction(closure)
        with torch.no_grad():
            for i, (parameter, v) in enumerate(zip(closure.params, direction.vec, strict=True)):
                parameter -= v if i in closure.inner else lr * v
        yield direction
