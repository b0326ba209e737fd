"""The record of the last iterations of a training.

Mini-Unlearning (arXiv 2406.16986) and rewind need it. It is written while the model is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from concept_eraser.methods.vectors import Vec
from concept_eraser.storage.writers import write_file, write_text


@dataclass(frozen=True)
class Iteration:
    """One SGD step: the weights before it, its samples, learning rate and momentum buffer."""

    weights: Vec
    indices: tuple[int, ...]
    lr: float
    momentum: float = 0.0
    velocity: Vec | None = None  # v_{i-1}


@dataclass
class History:
    """The last `k` iterations of a training by SGD (with or without heavy ball).

    They are held in memory or in a folder. Call `record` before each optimiser step. The forget set
    need not be known then.
    """

    params: Vec
    k: int
    folder: Path | None = None
    recorded_count: int = 0
    _iterations: list[Iteration] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"the history must keep at least one iteration, found k = {self.k}")

    def record(
        self, indices: Sequence[int], lr: float, momentum: float = 0.0, velocity: Vec | None = None
    ) -> None:
        """Record an iteration.

        Args:
            indices: The indices of its samples.
            lr: Its learning rate.
            momentum: Its momentum.
            velocity: The momentum buffer before it.
        """
        weights = tuple(p.detach().clone() for p in self.params)
        before = tuple(v.detach().clone() for v in velocity) if velocity is not None else None
        step = Iteration(
            weights,
            indices=tuple(int(i) for i in indices),
            lr=float(lr),
            momentum=float(momentum),
            velocity=before,
        )
        if self.folder is not None:
            path = self.folder / f"{self.recorded_count % self.k}.pt"
            write_file(path, lambda partial: torch.save(vars(step), partial), overwrite=True)
        else:
            self._iterations = [*self._iterations, step][-self.k :]
        self.recorded_count += 1
        if self.folder is not None:
            write_text(
                self.folder / "seen.txt", f"{self.recorded_count} of {self.k}", overwrite=True
            )

    @classmethod
    def open(cls, params: Vec, folder: Path) -> History:
        """Return the history that an earlier process recorded in a folder.

        Raises ValueError if there is none.
        """
        counter = folder / "seen.txt"
        if not counter.exists():
            raise ValueError(
                f"{folder} holds no recorded history; train with History(..., folder=...) first"
            )
        count, k = (int(part) for part in counter.read_text().split(" of "))
        return cls(params, k, folder, count)

    def last(self, k: int) -> list[Iteration]:
        """Return the last `k` iterations, oldest first, on the device of the parameters.

        Raises ValueError if fewer are recorded.
        """
        available = min(self.recorded_count, self.k)
        if k > available:
            raise ValueError(
                f"{k} iterations were requested, {available} are recorded; record more "
                "while training (History(k=...)), or ask for fewer"
            )
        if self.folder is None:
            return [self._moved(one) for one in self._iterations[len(self._iterations) - k :]]
        files = [
            self.folder / f"{i % self.k}.pt"
            for i in range(self.recorded_count - k, self.recorded_count)
        ]
        # the device of the recording may not exist here
        contents = (torch.load(file, map_location="cpu", weights_only=True) for file in files)
        return [self._moved(Iteration(**content)) for content in contents]

    def _moved(self, iteration: Iteration) -> Iteration:
        """Return an iteration on the device of the parameters, which may have moved since."""
        device = self.params[0].device
        velocity = iteration.velocity
        return replace(
            iteration,
            weights=tuple(w.to(device) for w in iteration.weights),
            velocity=None if velocity is None else tuple(v.to(device) for v in velocity),
        )
