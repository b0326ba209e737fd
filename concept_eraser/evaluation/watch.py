"""How long until a concept is gone: its share, asked again and again while a model is trained.

"Time to unlearn" as in UNO (arXiv 2506.04712, section 4): the training time until the share of generated samples that
show the concept is first below a bound (there 0.02). Differences from the paper: the crossing is interpolated linearly
between two looks, and the time of looking is not counted. The looks end with the first one below the bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concept_eraser import environment, registry
from concept_eraser.data import generate, prompts
from concept_eraser.evaluation.suite import Suite
from concept_eraser.models.base import Model
from concept_eraser.progress import Progress, silent
from concept_eraser.storage.readers import read_lines
from concept_eraser.storage.writers import write_growing


@dataclass
class Watch:
    """Calls `share` every `every` steps and keeps what it said in a file, one JSON line a look.

    Call it after each step with the steps done and the seconds of training so far; the engine does. A run that is
    resumed looks again from where it goes on.
    """

    share: Callable[[], float]
    path: Path
    every: int
    below: float
    rows: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = read_lines(self.path)

    def __call__(self, step: int, seconds: float) -> None:
        self.rows = [row for row in self.rows if row["step"] < step]
        gone = bool(self.rows) and self.rows[-1]["share"] < self.below
        if step % self.every or gone:
            return
        self.rows.append({"step": step, "seconds": seconds, "share": self.share()})
        write_growing(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def summary(self) -> dict[str, Any]:
        """Steps and seconds to the bound (None where it was not reached), and the looks themselves."""
        return {"below": self.below, **crossing(self.rows, self.below), "looks": self.rows}


def crossing(rows: Sequence[dict[str, float]], below: float) -> dict[str, float | None]:
    """Where the share first falls below a bound, linearly between two looks: {"steps", "seconds"}, None if nowhere."""
    for i, after in enumerate(rows):
        if after["share"] >= below:
            continue
        if i == 0:
            return {"steps": after["step"], "seconds": after["seconds"]}
        before = rows[i - 1]
        part = (before["share"] - below) / (before["share"] - after["share"])
        return {
            "steps": before["step"] + part * (after["step"] - before["step"]),
            "seconds": before["seconds"] + part * (after["seconds"] - before["seconds"]),
        }
    return {"steps": None, "seconds": None}


def share_of(model: Model, suite: Suite, group: str, n: int, *, progress: Progress = silent) -> Callable[[], float]:
    """A function that samples `n` pictures of a suite's group and says in which share of them its concept shows.

    The pictures are not kept: no later run has these weights.
    """
    judge = registry.load("judge", suite.judge)()
    ((attribute, value),) = suite.concept.items()
    rows = prompts.load(suite.groups[group].prompts).take(n, suite.seed)
    seeds = generate.seeds_for(rows.prompts, environment.derive_seed(suite.seed, group))
    sampling = generate.Sampling(**suite.sampling.model_dump())

    def share() -> float:
        shown = 0
        for start in range(0, len(seeds), sampling.batch_size):
            part = slice(start, start + sampling.batch_size)
            pictures = model.sample(rows.texts[part], seeds=seeds[part], steps=sampling.steps, guidance=sampling.guidance, autocast=sampling.autocast)  # fmt: skip
            shown += int((judge.look(pictures)[attribute] == value).sum())
            progress("watching", min(start + sampling.batch_size, len(seeds)), len(seeds))
        return shown / len(seeds)

    return share
