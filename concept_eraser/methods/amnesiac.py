"""Amnesiac unlearning: the recorded updates of the forgotten samples are subtracted.

The paper is Graves, Nagisetty & Ganesh, "Amnesiac Machine Learning" (AAAI 2021, arXiv 2010.10981).
Let w_i - w_{i-1} be the update of iteration i, and SB the iterations whose batch has a forgotten
sample. Then

    w' = w_T - sum_{i in SB} (w_i - w_{i-1})

Later updates were computed at weights that contained the subtracted ones, and the retained samples
of these batches are lost too. So w' is not the retrained model where many batches are affected. The
paper expects this, and trains on retained samples afterwards. The number of the paper's section was
not read here. The authors' code is lmgraves/AmnesiacML, `Amnesiac Unlearning - MNIST.ipynb`: the
cell that reads steps/*.pkl subtracts the updates.

Deliberate differences from the paper:
* Its training stores the updates of batches with sensitive samples only. Here the history of
  Mini-Unlearning is read, which stores the weights before each iteration, for any optimiser. The
  forget set need not be known while training.
* Iterations before the recorded ones are not undone. Record the whole training.
* The further training on retained samples is a run of its own (`method: finetune`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from concept_eraser.methods.base import Edit, EditRequest, all_or_nothing
from concept_eraser.methods.history import History
from concept_eraser.methods.mini_unlearning import RecursionOutcome, open_recorded
from concept_eraser.methods.vectors import combine, norm


@dataclass(frozen=True)
class Amnesiac(Edit):
    """Subtract the updates of all recorded iterations that had a forgotten sample.

    Args:
        history: The folder that a History recorded while the model was trained.
        k: The number of last iterations that are used; 0 for all that are recorded.
    """

    title: ClassVar[str] = "Amnesiac machine learning"
    source: ClassVar[str] = "arXiv 2010.10981"
    defaults: ClassVar[Mapping[str, str]] = {
        "history": "where yours lies",
        "k": "the paper: all iterations",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point"})

    history: str = ""
    k: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 0:
            raise ValueError(f"k must be >= 0, found {self.k}")

    def apply(self, history: History, forget: Sequence[int]) -> RecursionOutcome:
        """Move history.params from w_T to w'."""
        steps = history.last(self.k or min(history.recorded_count, history.k))
        forgotten_rows = {int(j) for j in forget}
        removed = tuple(torch.zeros_like(p) for p in history.params)
        lengths, affected_steps = [], 0
        with all_or_nothing(history.params, "record a training that is finite") as final:
            ends = [*(step.weights for step in steps[1:]), final]
            for step, end in zip(steps, ends, strict=True):
                if not forgotten_rows.isdisjoint(step.indices):
                    removed = combine([1.0, 1.0, -1.0], [removed, end, step.weights])
                    affected_steps += 1
                lengths.append(float(norm(removed)))
            if affected_steps:
                with torch.no_grad():
                    for parameter, part in zip(history.params, removed, strict=True):
                        parameter.sub_(part)
        return RecursionOutcome(tuple(lengths), affected_steps / len(steps))

    def edit(self, request: EditRequest) -> Mapping[str, float]:
        history = open_recorded(request, self.history, "Amnesiac unlearning")
        outcome = self.apply(history, request.forget)
        return {"step": outcome.lengths[-1], "touched": outcome.touched_share}


PLUGIN = Amnesiac
