"""FID and KID: the distance of the retained images from a reference.

Sources: arXiv 1706.08500; KID: arXiv 1801.01401. A distance depends on the features, the resizing,
the number of images and the reference, so all of these are its settings. By default the features
are the judge's, and the reference is the judge's images of the same prompts. Such a number measures
how far a model has moved, and is comparable within its suite only.

statistics.py computes the square root of the covariances: clean-fid's code needs an argument that
SciPy 1.18 removes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from concept_eraser import registry
from concept_eraser.evaluation.base import Evidence, Group, Metric, Refused, Result
from concept_eraser.evaluation.features.base import Features, image_hash
from concept_eraser.evaluation.features.judge import JudgeFeatures
from concept_eraser.evaluation.statistics import Interval, frechet_of_features, kernel_distance
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError

FEW = 2000  # with fewer images FID is far above its limit


def features(name: str, **options: str | None) -> Features:
    """Build the features of a name, with the options that are not None.

    Raises:
        UserError: no features have this name.
    """
    arguments = {key: value for key, value in options.items() if value is not None}
    instance: Features = registry.build("feature", name, arguments)
    return instance


def distances(
    images: np.ndarray, reference: np.ndarray, seed: int
) -> tuple[dict[str, Interval], dict[str, str]]:
    """FID and KID of two sets of features, [n, d] and [m, d], with reasons for missing ones."""
    intervals, reasons = {}, {}
    try:  # FID has no interval: all images give one number
        intervals["fid"] = Interval(
            frechet_of_features(images, reference), float("nan"), float("nan"), len(images)
        )
    except UserError as error:
        reasons["fid"] = str(error)
    try:
        intervals["kid"] = kernel_distance(images, reference, seed=seed)
    except UserError as error:
        reasons["kid"] = str(error)
    return intervals, reasons


def distance_settings(
    name: str, features: Features, n: int, m: int, reference: str
) -> dict[str, Any]:
    """The settings of a distance of n images from m. A small number of images adds a warning."""
    settings = {
        "features": name,
        **features.settings,
        "n": n,
        "n_reference": m,
        "reference": reference,
    }
    if (least := min(n, m)) < FEW:
        settings["warning"] = (
            f"{least} images, fewer than {FEW:,}: FID is too high by an amount that "
            "depends on their number"
        )
        if name != "judge":  # the judge's numbers are compared within one suite only, at one size
            logging.getLogger(__name__).warning("fid_%s: %s", name, settings["warning"])
    return settings


@dataclass(frozen=True)
class FID(Metric):
    """Frechet and kernel distance of the retain groups.

    Args:
        features: judge, inception, clip or torchmetrics64.
        mode, model, weights: options of the features.
        reference: before, or a folder.
    """

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

    def result_prefix(self) -> str:
        return f"fid_{self.features}"

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        extractor = JudgeFeatures(evidence.judge) if self.features == "judge" else self._features()
        folder = self._folder(extractor) if self.reference not in (None, "before") else None
        results: list[Result] = []
        all_reasons: dict[str, str] = {}
        for group in evidence.groups.values():
            if group.role == "retain":
                group_results, reasons = self._group(
                    group,
                    extractor,
                    folder or self._images(group, extractor, evidence),
                    evidence.seed,
                )
                results += group_results
                all_reasons |= {
                    f"{name}_{self.features}, {group.name}": why for name, why in reasons.items()
                }
        if all_reasons:
            raise Refused("; ".join(f"{name}: {why}" for name, why in all_reasons.items()), results)
        return results

    def _group(
        self, group: Group, features: Features, reference: tuple[np.ndarray, str], seed: int
    ) -> tuple[list[Result], dict[str, str]]:
        rows, description = reference
        # the original model's distance from its own images would be 0 by construction
        times = ("after",) if self.reference == "before" else ("before", "after")
        values: dict[str, dict[str, Interval]] = {}
        all_reasons: dict[str, str] = {}
        for when in times:
            values[when], reasons = distances(features.extract(group.images[when]), rows, seed)
            all_reasons |= reasons
        settings = distance_settings(
            name=self.features,
            features=features,
            n=len(group.images["after"]),
            m=len(rows),
            reference=description,
        )
        return [
            Result(
                metric=f"{name}_{self.features}",
                group=group.name,
                after=after,
                better="lower",
                before=values.get("before", {}).get(name),
                settings=settings,
            )
            for name, after in values["after"].items()
        ], all_reasons

    def _folder(self, features: Features) -> tuple[np.ndarray, str]:
        rows, summary = features.of_folder(Path(str(self.reference)))
        for reason in summary["left_out"]:
            logging.getLogger(__name__).warning("left out of the reference: %s", reason)
        return rows, f"folder {summary['folder']} ({summary['hash']})"

    def _images(
        self, group: Group, features: Features, evidence: Evidence
    ) -> tuple[np.ndarray, str]:
        if self.reference == "before":
            digest = provenance.fingerprint(
                [image_hash(np.asarray(p)) for p in group.images["before"]]
            )
            return features.extract(
                group.images["before"]
            ), f"the original model's images of the same prompts and seeds ({digest})"
        if isinstance(features, JudgeFeatures):
            return evidence.judge.reference_features(
                group.prompts, evidence.seed
            ), evidence.judge.references
        return features.extract(
            evidence.judge.reference_images(group.prompts, evidence.seed)
        ), evidence.judge.references


PLUGIN = FID
