"""The base classes of judges and metrics, and their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation.statistics import Interval
from concept_eraser.utils.errors import UserError


class Judge(ABC):
    """Labels what an image shows. A file of judges/ holds one judge, named PLUGIN."""

    # attribute -> names, e.g. {"shape": ("star", ..., "none")}
    classes: Mapping[str, Sequence[str]]
    fingerprint: str  # of its weights, since the numbers of two judges are not comparable
    reads_captions: ClassVar[bool] = True  # whether it has clip_scores
    # whether it only reports: no setting may be selected by it, and no loss or attack may use it
    only_reports: ClassVar[bool] = False
    # what its reference images are, which stands beside a distance from them
    references: ClassVar[str] = "the judge's images of the same prompts"

    def probability(self, images: Tensor, attribute: str, value: str) -> Tensor:
        """Return the probabilities [n] that images show a value, differentiable.

        images: [n, 3, h, w] in [-1, 1]. A judge without probabilities raises UserError.
        """
        raise UserError(
            f"the judge {type(self).__name__} is not differentiable, so no loss can be built on it"
        )

    def probabilities(self, images: Tensor) -> Mapping[str, np.ndarray]:
        """Return the probabilities of all classes of an attribute, [n, classes], by attribute.

        images: [n, h, w, 3] uint8. An attribute without probabilities is missing.
        """
        return {}

    @abstractmethod
    def classify(self, images: Tensor) -> dict[str, np.ndarray]:
        """Return the label of each attribute, [n] strings, for images [n, h, w, 3] uint8."""

    @abstractmethod
    def features(self, images: Tensor) -> np.ndarray:
        """Return features [n, d] for a Frechet distance, of images [n, h, w, 3] uint8."""

    @abstractmethod
    def clip_scores(self, images: Tensor, captions: Sequence[str]) -> np.ndarray:
        """Return the agreement of each image with its caption, [n] cosines."""

    def caption_settings(self) -> Mapping[str, Any]:
        """Return the settings of `clip_scores`, which stand beside a CLIP score.

        They must be equal for two scores to be comparable.
        """
        return {"model": type(self).__name__, "weights": self.fingerprint}

    @abstractmethod
    def reference_features(self, rows: Sequence[Prompt], seed: int) -> np.ndarray:
        """Return features of real images of the same prompts, [n, d]."""

    def reference_images(self, rows: Sequence[Prompt], seed: int) -> Tensor:
        """Return those real images, [n, h, w, 3] uint8, for features that are not the judge's.

        A judge without them raises UserError.
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
    labels: Mapping[str, Mapping[str, np.ndarray]]  # "before", "after" -> attribute -> [n] names


@dataclass(frozen=True)
class Evidence:
    """Everything that a metric reads: the images of all groups, the concept and the judge."""

    groups: Mapping[str, Group]
    concept: tuple[str, str]  # attribute and value, e.g. ("shape", "star")
    judge: Judge
    seed: int


@dataclass(frozen=True)
class Result:
    """One number with its interval, its counterpart before, and the paired difference.

    p: the p-value of the paired test of no change (McNemar for shares, signed ranks for means);
    None without pairs.
    per_image: the value of each image [n], by "before" and "after", where the number is a mean or a
    share over images. It goes into the outcomes, not into the JSON.
    """

    metric: str
    group: str
    after: Interval
    better: Literal["lower", "higher", "neither"]
    before: Interval | None = None
    difference: Interval | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    p: float | None = None
    per_image: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        return asdict(replace(self, per_image={}), dict_factory=_without_per_image)


def _without_per_image(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if name != "per_image"}


class Evaluation(ABC):
    """The numbers of one evaluation, with everything needed to repeat it.

    Attributes:
        results: every number with its interval after the erasure, and before it if it was measured.
        environment: versions, commit, device and command line.

    Example:
        >>> import concept_eraser
        >>> evaluation = concept_eraser.evaluate("runs/tiny_star_munba", "tiny_star", n=100)
        >>> for result in evaluation.results:
        ...     print(result.metric, result.group, result.after.value)
    """

    results: list[Result]
    environment: dict[str, Any]

    def find(self, metric: str, group: str) -> Result | None:
        """Return the number of a metric on a group of prompts or a set of examples, or None."""
        return next((r for r in self.results if r.metric == metric and r.group == group), None)

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return the content of evaluation.json."""

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
    """Some of a metric's numbers cannot be computed. `results` are the others."""

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
    """A metric, which makes numbers with intervals from the images of an evaluation.

    A file of metrics/ holds one metric, named PLUGIN. A metric with options is a dataclass.
    """

    title: ClassVar[str]

    def result_prefix(self) -> str:
        """Return the prefix of its numbers, so that a suite can refuse two metrics of one name."""
        return type(self).__name__

    @abstractmethod
    def measure(self, evidence: Evidence) -> Sequence[Result]:
        """Return the numbers."""
