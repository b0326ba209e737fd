"""What methods share that harden a model against a later fine-tuning, the objective `relearn`."""

from __future__ import annotations

from typing import Literal

import torch

from concept_eraser.methods.base import Closure
from concept_eraser.methods.vectors import Vec

RELEARN = "relearn"  # the objective whose loss a later fine-tuning minimises

TuningSteps = Literal["adam", "gradient"]


def require_objectives(name: str, objectives: tuple[str, ...]) -> None:
    """Raise ValueError for objectives other than retain, forget and relearn."""
    if set(objectives) != {"retain", "forget", RELEARN}:
        raise ValueError(
            f"{name} needs the objectives retain, forget and {RELEARN} and no other; found "
            f"{', '.join(objectives)}. Give the recipe a `relearn:` section, e.g. relearn: "
            "{prompts: tiny_star, loss: data}"
        )


def fine_tuned(closure: Closure, steps: int, lr: float, optimizer: TuningSteps) -> Vec:
    """Fine-tune on the objective `relearn`, and return the change of the parameters.

    Args:
        closure: The losses of the step. Its parameters keep their values.
        steps: The number of steps.
        lr: Their learning rate.
        optimizer: Plain gradient steps (gradient), or those of Adam, with its moments at 0 at the
            start (adam).
    """
    change = [torch.zeros_like(parameter) for parameter in closure.params]
    make = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    moves = make(change, lr=lr)
    for _ in range(steps):
        with closure.at(tuple(change)):
            gradient = closure.grad(RELEARN)
        for part, slope in zip(change, gradient, strict=True):
            part.grad = slope.to(part.dtype)
        moves.step()
    return tuple(part.detach() for part in change)
