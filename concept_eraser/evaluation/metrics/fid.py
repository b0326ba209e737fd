"""FID and KID: how far the retained pictures are from a reference (arXiv 1706.08500; KID: arXiv 1801.01401).

A distance depends on the features, on how pictures are resized, on how many there are and on the reference, so all of these
are its settings. By default the features are the judge's and the reference its pictures of the same prompts: such a
number says how far a model has moved, and is comparable with nothing outside its suite.

The square root of the covariances is computed in statistics.py: clean-fid's needs an argument that SciPy 1.18 removes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from concept_eraser import environment, registry
from concept_eraser.errors import UserError
from concept_eraser.evaluation.base import Evidence, Group, Metric, Refused, Result
from concept_eraser.evaluation.features.base import Features, picture_hash
from concept_eraser.evaluation.features.judge import JudgeFeatures
from concept_eraser.evaluation.statistics import Interval, frechet_of_features, kernel_distance

FEW = 2000  # pictures below which FID is far above its limit


def features(name: str, **options: str | None) -> Features:
    """The features by name, with the options that are not None. Raises UserError for unknown ones."""
    return registry.build("feature", name, {key: value for key, value in options.items() if value is not None})


def distances(pictures: np.ndarray, reference: np.ndarray, seed: int) -> tuple[dict[str, Interval], dict[str, str]]:
    """fid and kid of two sets of features, [n, d] and [m, d]; and, by name, why one of them cannot be had."""
    found, refused = {}, {}
    try:  # FID has no interval: it is one number of all pictures
        found["fid"] = Interval(frechet_of_features(pictures, reference), float("nan"), float("nan"), len(pictures))
    except UserError as error:
        refused["fid"] = str(error)
    try:
        found["kid"] = kernel_distance(pictures, reference, seed=seed)
    except UserError as error:
        refused["kid"] = str(error)
    return found, refused


def described(asked: str, used: Features, n: int, m: int, reference: str) -> dict[str, Any]:
    """The settings that a distance of n pictures from m travels with; few pictures are warned of."""
    settings = {"features": asked, **used.settings, "n": n, "n_reference": m, "reference": reference}
    if (least := min(n, m)) < FEW:
        settings["warning"] = f"{least} pictures, fewer than {FEW:,}: FID is too high by an amount that depends on their number"  # fmt: skip
        if asked != "judge":  # whose numbers are compared within one suite only, and so at one size
            logging.getLogger(__name__).warning("fid_%s: %s", asked, settings["warning"])
    return settings


@dataclass(frozen=True)
class FID(Metric):
    """features: judge, inception, clip or torchmetrics64; mode, model, weights: their options; reference: before, or a folder."""

    title: ClassVar[str] = "FID and KID"
    features: str = "judge"
    mode: str | None = None
    model: str | None = None
    weights: str | None = None
    reference: str | None = None

    def __post_init__(self) -> None:
        self._features()

    def _features(self) -> Features:
        return features(self.features, mode=self.mode, model=self.model, weights=self.weights)

    def called(self) -> str:
        return f"fid_{self.features}"

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        used = JudgeFeatures(evidence.judge) if self.features == "judge" else self._features()
        folder = self._folder(used) if self.reference not in (None, "before") else None
        results: list[Result] = []
        refused: dict[str, str] = {}
        for group in evidence.groups.values():
            if group.role == "retain":
                some, reasons = self._group(group, used, folder or self._pictures(group, used, evidence), evidence.seed)
                results += some
                refused |= {f"{name}_{self.features}, {group.name}": why for name, why in reasons.items()}
        if refused:
            raise Refused("; ".join(f"{name}: {why}" for name, why in refused.items()), results)
        return results

    def _group(self, group: Group, used: Features, reference: tuple[np.ndarray, str], seed: int) -> tuple[list[Result], dict[str, str]]:  # fmt: skip
        rows, told = reference
        # the original model's distance from its own pictures would be 0 by construction
        times = ("after",) if self.reference == "before" else ("before", "after")
        found: dict[str, dict[str, Interval]] = {}
        refused: dict[str, str] = {}
        for when in times:
            found[when], reasons = distances(used.extract(group.pictures[when]), rows, seed)
            refused |= reasons
        settings = described(self.features, used, len(group.pictures["after"]), len(rows), told)
        return [Result(f"{name}_{self.features}", group.name, after, "lower", found.get("before", {}).get(name), settings=settings) for name, after in found["after"].items()], refused  # fmt: skip

    def _folder(self, used: Features) -> tuple[np.ndarray, str]:
        rows, told = used.of_folder(Path(str(self.reference)))
        for reason in told["left_out"]:
            logging.getLogger(__name__).warning("left out of the reference: %s", reason)
        return rows, f"folder {told['folder']} ({told['hash']})"

    def _pictures(self, group: Group, used: Features, evidence: Evidence) -> tuple[np.ndarray, str]:
        if self.reference == "before":
            drawn = environment.fingerprint([picture_hash(np.asarray(p)) for p in group.pictures["before"]])
            return used.extract(
                group.pictures["before"]
            ), f"the original model's pictures of the same prompts and seeds ({drawn})"
        if isinstance(used, JudgeFeatures):
            return evidence.judge.reference_features(group.prompts, evidence.seed), "painted pictures of the same prompts"  # fmt: skip
        return used.extract(evidence.judge.reference_pictures(group.prompts, evidence.seed)), "painted pictures of the same prompts"  # fmt: skip


PLUGIN = FID
