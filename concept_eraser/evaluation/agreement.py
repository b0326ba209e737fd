"""Agreement of two judges on the same images.

A conclusion that depends on one judge may be a property of that judge. So a second judge, which
selects nothing, labels the same images. For each attribute that both judges know, the share of
images with the same label and Cohen's kappa are reported, and images with different labels are
shown.

Cohen's kappa is the agreement beyond that of two independent judges with the same shares of labels:
1 is full agreement, 0 is chance. It and its interval are computed by statsmodels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation.base import Group, Judge
from concept_eraser.evaluation.outcomes import label_columns, read_probabilities
from concept_eraser.evaluation.statistics import Interval, interval_text, wilson
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.extras import import_from_extra

ALL = "all"  # the images of all groups together
STAGES = ("before", "after")


@dataclass(frozen=True)
class Agreement:
    """How often two judges give the same label.

    Attributes:
        attribute: an attribute that both judges know.
        group: a group of prompts, or "all".
        stage: "before" or "after".
        agreed: the share of images with the same label, with its Wilson interval.
        kappa: Cohen's kappa with its 95 % interval. The value is nan where each judge gives all
            images one and the same label.
    """

    attribute: str
    group: str
    stage: str
    agreed: Interval
    kappa: Interval

    def texts(self) -> tuple[str, str]:
        """Return the share in percent and kappa, with their intervals; "-" for no value."""
        kappa = None if math.isnan(self.kappa.value) else self.kappa
        return interval_text(self.agreed, True), interval_text(kappa, False)


@dataclass(frozen=True)
class Difference:
    """An image for which the two judges differ.

    Attributes:
        group: its group of prompts.
        stage: "before" or "after".
        position: its place in the group, from 0.
        labels: attribute -> the label of the first and of the second judge, where they differ.
    """

    group: str
    stage: str
    position: int
    labels: Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class SecondOpinion:
    """What a second judge reads from the images of an evaluation.

    Attributes:
        judge: the fingerprint of the second judge.
        labels: group -> stage -> attribute -> its labels, [n] names.
        probabilities: group -> stage -> as `outcomes.read_probabilities`.
        agreements: the agreement with the first judge.
        concept_rates: group -> stage -> the share of images in which it detects the concept.
        differences: the images for which the judges differ, those that differ in the concept's
            attribute first.
    """

    judge: str
    labels: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]]
    probabilities: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]]
    agreements: Sequence[Agreement]
    concept_rates: Mapping[str, Mapping[str, Interval]]
    differences: Sequence[Difference]

    def as_dict(self) -> dict[str, Any]:
        """Return the part of evaluation.json. Labels of single images are in the outcomes."""
        return {
            "judge": self.judge,
            "agreement": [asdict(row) for row in self.agreements],
            "concept_rate": {
                group: {stage: asdict(rate) for stage, rate in rates.items()}
                for group, rates in self.concept_rates.items()
            },
            "images_that_differ": len(self.differences),
        }


def cohens_kappa(first: np.ndarray, second: np.ndarray) -> Interval:
    """Return Cohen's kappa (1960) of two series of labels [n], with its 95 % interval.

    The value is nan where both series are one and the same label, since agreement by chance is then
    certain. The interval is nan where its normal approximation has no variance, as at 1.

    Raises:
        UserError: the series have different lengths or fewer than 2 labels, or statsmodels is
            missing.
    """
    if len(first) != len(second) or len(first) < 2:
        raise UserError(
            f"kappa needs two labels of each of at least 2 images, found {len(first)} and "
            f"{len(second)}"
        )
    require_statsmodels()
    from statsmodels.stats.inter_rater import cohens_kappa as kappa_of_table

    names, codes = np.unique(np.concatenate([first, second]), return_inverse=True)
    if len(names) == 1:
        return Interval(math.nan, math.nan, math.nan, len(first))
    table = np.zeros((len(names), len(names)))
    np.add.at(table, (codes[: len(first)], codes[len(first) :]), 1)
    with np.errstate(invalid="ignore"):  # a variance of zero may be below it by rounding
        result = kappa_of_table(table)
    if not result.std_kappa > 1e-6:
        return Interval(float(result.kappa), math.nan, math.nan, len(first))
    low, high = float(result.kappa_low), float(result.kappa_upp)
    return Interval(float(result.kappa), max(low, -1.0), min(high, 1.0), len(first))


def require_statsmodels() -> None:
    """Raise UserError if statsmodels is missing, before images are generated for nothing."""
    with import_from_extra("statistics", "the agreement of two judges"):
        import statsmodels.stats.inter_rater  # noqa: F401


def require_second(judge: Judge, second: Judge, concept: tuple[str, str]) -> None:
    """Raise UserError if the second judge is the first, or does not know the concept, or if
    statsmodels is missing.
    """
    require_another(judge, second, concept)
    require_statsmodels()


def require_another(judge: Judge, second: Judge, concept: tuple[str, str]) -> None:
    """Raise UserError if the second judge is the first, or does not know the concept."""
    attribute, value = concept
    if second.fingerprint == judge.fingerprint:
        raise UserError(
            "the second judge is the first one, so they cannot differ; give another `second_judge`"
        )
    if value not in second.classes.get(attribute, ()):
        classes = "; ".join(f"{name}: {', '.join(some)}" for name, some in second.classes.items())
        raise UserError(f"the second judge cannot detect {attribute} {value!r}; it knows {classes}")


def compare_judges(
    groups: Mapping[str, Group],
    judge: Judge,
    second: Judge,
    concept: tuple[str, str],
) -> SecondOpinion:
    """Label the images of all groups by a second judge, and compare its labels with the first's.

    Args:
        groups: the images with the labels of the first judge.
        judge: the first judge.
        second: the second judge.
        concept: the attribute and the value of the erased concept.

    Raises:
        UserError: as `require_second`.
    """
    require_second(judge, second, concept)
    labels = {
        name: {stage: second.classify(images) for stage, images in group.images.items()}
        for name, group in groups.items()
    }
    probabilities = {
        name: {
            stage: read_probabilities(second, concept, images)
            for stage, images in group.images.items()
        }
        for name, group in groups.items()
    }
    attribute, value = concept
    shared = [name for name in judge.classes if name in second.classes]
    return SecondOpinion(
        judge=second.fingerprint,
        labels=labels,
        probabilities=probabilities,
        agreements=_agreements(groups, labels, shared),
        concept_rates={
            name: {
                stage: wilson(int((some[attribute] == value).sum()), len(some[attribute]))
                for stage, some in by_stage.items()
            }
            for name, by_stage in labels.items()
        },
        differences=_differences(groups, labels, shared, first=attribute),
    )


def add_second_judge(
    rows: Sequence[dict[str, Any]],
    judge: Judge,
    concept: tuple[str, str],
    opinion: SecondOpinion,
) -> None:
    """Add the columns of a second judge to the outcomes, in place.

    They are `second_judge`, its fingerprint, and `second_predicted_ATTRIBUTE`,
    `second_probability_ATTRIBUTE`, `second_concept_probability` and `second_shows_concept`.

    Args:
        rows: the outcomes of all groups, as `outcomes.rows_of_group` returns them.
        judge: the second judge.
        concept: the attribute and the value of the erased concept.
        opinion: its labels and probabilities.
    """
    for row in rows:
        group, stage, number = row["group"], row["stage"], row["position"]
        labels = {name: values[[number]] for name, values in opinion.labels[group][stage].items()}
        probabilities = {
            name: values[[number]] for name, values in opinion.probabilities[group][stage].items()
        }
        prompt = Prompt(row["prompt"], {})
        (columns,) = label_columns(
            judge, concept, prompts=[prompt], labels=labels, probabilities=probabilities
        )
        row["second_judge"] = opinion.judge
        row |= {
            f"second_{name}": value
            for name, value in columns.items()
            if not name.startswith("expected_")
        }


def _agreements(
    groups: Mapping[str, Group],
    labels: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]],
    attributes: Sequence[str],
) -> list[Agreement]:
    rows = []
    for attribute in attributes:
        for stage in STAGES:
            pairs = {
                name: (
                    np.asarray(group.labels[stage][attribute], str),
                    np.asarray(labels[name][stage][attribute], str),
                )
                for name, group in groups.items()
            }
            firsts, seconds = zip(*pairs.values(), strict=True)
            pairs = {ALL: (np.concatenate(firsts), np.concatenate(seconds)), **pairs}
            for name, (first, second) in pairs.items():
                agreed = wilson(int((first == second).sum()), len(first))
                rows.append(
                    Agreement(
                        attribute,
                        group=name,
                        stage=stage,
                        agreed=agreed,
                        kappa=cohens_kappa(first, second),
                    )
                )
    return rows


def _differences(
    groups: Mapping[str, Group],
    labels: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]],
    attributes: Sequence[str],
    *,
    first: str,
) -> list[Difference]:
    rows = []
    for name, group in groups.items():
        for stage in STAGES:
            for position in range(len(group.prompts)):
                pairs = {
                    attribute: (
                        str(group.labels[stage][attribute][position]),
                        str(labels[name][stage][attribute][position]),
                    )
                    for attribute in attributes
                }
                pairs = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
                if pairs:
                    rows.append(Difference(name, stage, position, pairs))
    return sorted(rows, key=lambda row: first not in row.labels)  # stable
