"""Time to unlearn: the concept rate, measured repeatedly during training.

The definition is UNO's (arXiv 2506.04712, section 4): the training time until the share of
generated samples with the concept is first below a bound (there 0.02). Differences from the paper:
the crossing is interpolated linearly between two measurements, and the time of the measurements
does not count. The measurements end with the first one below the bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concept_eraser.data import generate, prompts
from concept_eraser.evaluation.suite import Suite
from concept_eraser.models.base import Model
from concept_eraser.storage.readers import read_lines
from concept_eraser.storage.writers import write_growing
from concept_eraser.utils import provenance
from concept_eraser.utils.progress import Progress, silent


@dataclass
class Watch:
    """Call `concept_rate` every `every` steps and write each result to a file, one JSON line each.

    The engine calls it after each step with the step number and the seconds of training so far. A
    resumed run measures again from its first step on.
    """

    concept_rate: Callable[[], float]
    path: Path
    every: int
    below: float
    rows: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = read_lines(self.path)

    def __call__(self, step: int, seconds: float) -> None:
        self.rows = [row for row in self.rows if row["step"] < step]
        below_bound = bool(self.rows) and self.rows[-1]["concept_rate"] < self.below
        if step % self.every or below_bound:
            return
        self.rows.append({"step": step, "seconds": seconds, "concept_rate": self.concept_rate()})
        write_growing(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def summary(self) -> dict[str, Any]:
        """Steps and seconds to the bound (None where it was not reached), and the measurements."""
        return {
            "below": self.below,
            **crossing(self.rows, self.below),
            "measurements": self.rows,
        }


def crossing(rows: Sequence[dict[str, float]], below: float) -> dict[str, float | None]:
    """The first crossing of a bound, interpolated linearly: {"steps", "seconds"}, None if there is
    none.
    """
    for i, after in enumerate(rows):
        if after["concept_rate"] >= below:
            continue
        if i == 0:
            return {"steps": after["step"], "seconds": after["seconds"]}
        before = rows[i - 1]
        part = (before["concept_rate"] - below) / (before["concept_rate"] - after["concept_rate"])
        return {
            "steps": before["step"] + part * (after["step"] - before["step"]),
            "seconds": before["seconds"] + part * (after["seconds"] - before["seconds"]),
        }
    return {"steps": None, "seconds": None}


def concept_rate_of(
    model: Model, suite: Suite, group: str, n: int, *, progress: Progress = silent
) -> Callable[[], float]:
    """Make a function that measures the concept rate on `n` images of a suite's group.

    They are the suite's images, each with the seed and the guidance that its prompt states. They
    are not stored, because no later run has these weights.
    """
    judge = suite.build_judge()
    ((attribute, value),) = suite.concept.items()
    rows = prompts.load(suite.groups[group].prompts).take(n, suite.seed)
    seeds = generate.seeds_for(rows.prompts, provenance.derive_seed(suite.seed, group))
    sampling = generate.Sampling(**suite.sampling.model_dump())

    def concept_rate() -> float:
        count = 0
        # the fingerprint is of the cache's key only, and nothing is cached
        request = generate.request_images(model, rows.prompts, seeds, sampling, weights="watched")
        for start in request.starts:
            images = generate.sample_chunk(model, request, start)
            count += int((judge.classify(images)[attribute] == value).sum())
            progress("watching", min(start + sampling.batch_size, len(seeds)), len(seeds))
        return count / len(seeds)

    return concept_rate
