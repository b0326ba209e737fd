"""Shares, means, accuracies and concept rates on labels that are given."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from scipy import stats

from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation.base import Evidence, Group
from concept_eraser.evaluation.judges.tiny import TinyJudge
from concept_eraser.evaluation.metrics.accuracy import Accuracy
from concept_eraser.evaluation.metrics.concept_rate import ConceptRate, mean_result, share_result


class Two(TinyJudge):
    """A judge of two attributes. The tests give its labels."""

    classes: ClassVar[Any] = {"shape": ("star", "house", "none"), "color": ("red", "blue")}


def group(name: str, role: Any, fields: list[dict[str, str]], **labels: list[list[str]]) -> Group:
    """Return a group whose labels before and after are given for each attribute."""
    by_time = {
        when: {attribute: np.array(pair[place]) for attribute, pair in labels.items()}
        for place, when in enumerate(("before", "after"))
    }
    prompts = [Prompt("", one) for one in fields]
    return Group(name, role, prompts, images={}, labels=by_time)  # type: ignore[arg-type]


def measure(metric: Any, *groups: Group) -> dict[tuple[str, str], Any]:
    evidence = Evidence({one.name: one for one in groups}, ("shape", "star"), Two(), seed=0)
    return {(result.metric, result.group): result for result in metric.measure(evidence)}


def test_a_mean_has_the_test_of_its_differences() -> None:
    before = np.array([0.1, 0.5, 0.9, 0.3, 0.7, 0.2, 0.8])
    after = before + np.array([0.05, -0.1, -0.02, -0.2, -0.03, -0.15, -0.01])
    result = mean_result("m", "g", before, after, "higher", bounds=(0, 1))
    assert result.p == pytest.approx(stats.wilcoxon(after - before).pvalue)
    assert result.difference is not None
    assert result.difference.value == pytest.approx((after - before).mean())
    margin = stats.t(6).ppf(0.975) * before.std(ddof=1) / np.sqrt(7)
    assert result.before is not None
    assert result.before.low == pytest.approx(before.mean() - margin)
    wide = mean_result("m", "g", np.array([0.0, 1, 1]), np.array([0.0, 0, 1]), "higher", {}, (0, 1))
    assert (wide.before.low, wide.before.high) == (0, 1)  # type: ignore[union-attr]
    assert (wide.after.low, wide.after.high) == (0, 1)
    assert wide.difference.low < -1  # type: ignore[union-attr]


def test_a_share_has_the_test_of_its_changes() -> None:
    """Of six images that change, one appears: 2 (1 + 6) / 2^6."""
    before = np.array([True] * 7 + [False] * 3)
    after = np.array([True] * 2 + [False] * 5 + [True] + [False] * 2)
    result = share_result("m", "g", before, after, "lower")
    assert result.p == pytest.approx(2 * 7 / 64)
    assert result.difference is not None
    assert result.difference.value == pytest.approx(-0.4)
    assert (result.before.value, result.after.value) == (0.7, 0.3)  # type: ignore[union-attr]


def test_accuracies_by_hand() -> None:
    """A forget group has all attributes but the erased one; a retain group also single values."""
    stars = group(
        "direct",
        "forget",
        [{"shape": "star", "color": "red"}] * 2,
        shape=[["star", "star"], ["house", "none"]],
        color=[["red", "red"], ["red", "blue"]],
    )
    others = group(
        "rest",
        "retain",
        [
            {"shape": "house", "color": "red"},
            {"shape": "house", "color": "red"},
            {"shape": "house", "color": "blue"},
            {"shape": "lighthouse", "color": "blue"},  # a shape that the judge has no class for
        ],
        shape=[["house", "house", "house", "house"], ["house", "star", "none", "house"]],
        color=[["red", "red", "blue", "red"], ["red", "red", "red", "blue"]],
    )
    near = group(
        "near",
        "neighbour",
        [{"shape": "house", "color": "red"}] * 2,
        shape=[["house", "house"], ["house", "star"]],
        color=[["red", "red"], ["red", "red"]],
    )
    results = measure(Accuracy(), stars, others, near)
    values = {
        key: (result.before.value, result.after.value, result.after.n)
        for key, result in results.items()
    }
    third = pytest.approx(1 / 3)
    assert values == {
        ("accuracy_color", "direct"): (1, 0.5, 2),
        ("accuracy_shape", "rest"): (1, third, 3),
        ("accuracy_shape", "rest:house"): (1, third, 3),
        ("accuracy_color", "rest"): (0.75, 0.75, 4),
        ("accuracy_color", "rest:red"): (1, 1, 2),
        ("accuracy_color", "rest:blue"): (0.5, 0.5, 2),
        ("accuracy_shape", "near"): (1, 0.5, 2),
        ("accuracy_color", "near"): (1, 1, 2),
    }
    assert {result.better for result in results.values()} == {"higher"}


def test_concept_rates_by_hand() -> None:
    """Only in a forget group is a lower rate better."""
    groups = [
        group(name, role, [{}] * 4, shape=[["star", "star", "house", "none"], after])
        for name, role, after in (
            ("direct", "forget", ["none", "none", "none", "star"]),
            ("rest", "retain", ["house", "house", "house", "house"]),
        )
    ]
    results = measure(ConceptRate(), *groups)
    assert {
        key: (result.before.value, result.after.value, result.better)
        for key, result in results.items()
    } == {
        ("concept_rate", "direct"): (0.5, 0.25, "lower"),
        ("no_object_rate", "direct"): (0.25, 0.75, "neither"),
        ("concept_rate", "rest"): (0.5, 0, "neither"),
        ("no_object_rate", "rest"): (0.25, 0, "neither"),
    }
