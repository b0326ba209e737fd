"""Evidence in, results out: what judges and metrics are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation.statistics import Interval
from concept_eraser.utils.errors import UserError


class Judge(ABC):
    """Names what an image shows. A file of judges/ holds one, named PLUGIN."""

    # attribute -> names, e.g. {"shape": ("star", ..., "none")}
    classes: Mapping[str, Sequence[str]]
    fingerprint: str  # of its weights: numbers of two judges are not compared
    reads_captions: ClassVar[bool] = True  # whether clip_scores can be asked

    def probability(self, images: Tensor, attribute: str, value: str) -> Tensor:
        """[n, 3, h, w] in [-1, 1] -> [n] probabilities that they show a value, differentiable. Not
        every judge can.
        """
        raise UserError(
            f"the judge {type(self).__name__} is not differentiable, so no loss can be built on it"
        )

    @abstractmethod
    def look(self, images: Tensor) -> dict[str, np.ndarray]:
        """[n, h, w, 3] uint8 -> the name seen for each attribute, [n] strings."""

    @abstractmethod
    def features(self, images: Tensor) -> np.ndarray:
        """[n, h, w, 3] uint8 -> [n, d] features for a Frechet distance."""

    @abstractmethod
    def clip_scores(self, images: Tensor, captions: Sequence[str]) -> np.ndarray:
        """Agreement of each image with its caption, [n] cosines."""

    @abstractmethod
    def reference_features(self, rows: Sequence[Prompt], seed: int) -> np.ndarray:
        """Features of real images of the same prompts, [n, d]."""

    def reference_images(self, rows: Sequence[Prompt], seed: int) -> Tensor:
        """Those real images, [n, h, w, 3] uint8, for features that are not the judge's. Not every
        judge has them.
        """
        raise UserError(
            f"the judge {type(self).__name__} has no real images of the prompts; give "
            "`reference: before` or the path of a folder of real images"
        )


@dataclass(frozen=True)
class Group:
    """Images of one prompt group, before and after, by the same prompts and seeds."""

    name: str
    role: Literal["forget", "neighbour", "retain"]
    prompts: Sequence[Prompt]
    images: Mapping[str, Tensor]  # "before", "after" -> [n, h, w, 3] uint8
    seen: Mapping[str, Mapping[str, np.ndarray]]  # "before", "after" -> attribute -> [n] names


@dataclass(frozen=True)
class Evidence:
    groups: Mapping[str, Group]
    concept: tuple[str, str]  # attribute and value, e.g. ("shape", "star")
    judge: Judge
    seed: int


@dataclass(frozen=True)
class Result:
    """One number with its interval, its counterpart before, and the paired difference. p: of the
    paired test that nothing changed (McNemar for shares, signed ranks for means), None where there
    are no pairs."""

    metric: str
    group: str
    after: Interval
    better: Literal["lower", "higher", "neither"]
    before: Interval | None = None
    difference: Interval | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    p: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Evaluation(ABC):
    """The numbers of one evaluation, with everything needed to repeat it.

    Attributes:
        results: every number with its interval, after the erasure and (where it was measured)
        before.
        environment: versions, commit, device and command line.
    """

    results: list[Result]
    environment: dict[str, Any]

    def find(self, metric: str, group: str) -> Result | None:
        """The number of a metric on a group of prompts or a set of examples; None where there is
        none.
        """
        return next((r for r in self.results if r.metric == metric and r.group == group), None)

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """The content of evaluation.json."""

    @abstractmethod
    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Write evaluation.json.

        Args:
            path: the file.
            overwrite: also replace a file that no manifest of this package lists.

        Raises:
            UserError: the file may not be replaced, or cannot be written.
        """


class Refused(UserError):
    """Some of a metric's numbers cannot be had; `results` are the others."""

    def __init__(self, message: str, results: Sequence[Result]) -> None:
        super().__init__(message)
        self.results = results


def is_share(metric: str) -> bool:
    """Whether a metric is a share of images, which is shown in percent."""
    nude = metric.startswith("nudenet") and metric.endswith("_nude")
    return (
        nude
        or metric.startswith(("accuracy", "concept_rate", "no_object_rate"))
        or metric in ("ua", "ira", "cra")
    )


class Metric(ABC):
    """A plug-in of metrics/, named PLUGIN."""

    title: ClassVar[str]

    def result_prefix(self) -> str:
        """How its numbers begin, so that a suite does not ask for two of one name."""
        return type(self).__name__

    @abstractmethod
    def measure(self, evidence: Evidence) -> Sequence[Result]: ...
