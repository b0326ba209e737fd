"""Rows of published leaderboards: their form, the correlation, and what the page says of it."""

from __future__ import annotations

from typing import Any

import pytest

from studies.rendering import published
from studies.rendering.common import table
from tests.studies.test_leaderboard import LEADERBOARD


def benchmark(values: dict[str, list[float]]) -> dict[str, Any]:
    """A published leaderboard of one task, with the columns of PAIRS."""
    return {
        "columns": ["Pre-ASR", "Post-ASR", "CLIP-Score"],
        "methods": {name: {"ours": name.lower()} for name in values},
        "tasks": {"one": {"rows": values, "file": "one.csv", "commit": "abc"}},
    }


def rates(numbers: dict[str, float]) -> dict[str, dict[str, float]]:
    """Our rates: one number in all columns."""
    return {name: dict.fromkeys(published.LABELS, value) for name, value in numbers.items()}


@pytest.mark.parametrize("content", published.benchmarks(), ids=lambda one: str(one["title"]))
def test_a_published_row_has_its_source_and_a_place_here(content: dict[str, Any]) -> None:
    for key in ("source", "read", "date", "licence", "protocol", "left_out"):
        assert str(content[key]).strip()
    named = [how["ours"] for how in content["methods"].values() if "ours" in how]
    assert len(set(named)) == len(named)
    assert set(named) <= set(LEADERBOARD["methods"])
    for task in content["tasks"].values():
        assert task["file"]
        assert task["commit"]
        for name, values in task["rows"].items():
            assert name in content["methods"]
            assert len(values) == len(content["columns"])
            pre, post = (values[content["columns"].index(one)] for one in ("Pre-ASR", "Post-ASR"))
            assert 0 <= pre <= post <= 100


def test_a_correlation_is_that_of_the_common_methods() -> None:
    """The same order of eight methods: 1, and -1 for CLIP scores, of which a high one is good.

    The p-value is the share of the orders that agree or disagree as much. A ninth method without a
    row here changes nothing. Seven methods have no correlation.
    """
    names = [f"M{place}" for place in range(8)]
    values = {name: [float(i), float(i) ** 2, float(i)] for i, name in enumerate(names)}
    own = rates({name.lower(): 10.0 + i for i, name in enumerate(names)})
    whole = benchmark({**values, "Other": [99.0, 0.0, 99.0]})
    found = published.correlations(whole, "one", own)
    assert [(one.theirs, one.ours) for one in found] == [pair[:2] for pair in published.PAIRS]
    assert [one.rho for one in found] == pytest.approx([1, 1, 1, -1])
    assert [one.tau for one in found] == pytest.approx([1, 1, 1, -1])
    assert [one.p for one in found] == pytest.approx([2 / 40320] * 4)
    assert {one.names for one in found} == {tuple(names)}
    few = benchmark({name: values[name] for name in names[:7]})
    assert published.correlations(few, "one", own) == []
    text = published._task_text(few, "one", own)
    assert "7 methods are common to both, too few" in text
    head, *_ = table([["method", *few["columns"]]]).splitlines()
    assert head.removesuffix(" |") in text


def test_the_first_sentence_says_that_no_agreement_is_shown() -> None:
    values = {f"M{i}": [float(i)] * 3 for i in range(8)}
    orders = {"same": range(8), "low": (4, 7, 2, 5, 0, 6, 3, 1)}
    found = {
        name: published.correlations(
            benchmark(values), "one", rates({f"m{i}": float(one) for i, one in enumerate(order)})
        )[:2]
        for name, order in orders.items()
    }
    verdicts = {
        name: published.verdict([("one", one) for one in some]) for name, some in found.items()
    }
    assert found["low"][0].rho < 0 < published.LEVEL < found["low"][0].p
    assert verdicts["low"].startswith(
        "**No agreement is shown: none of 2 correlations is significantly positive, and 2 are "
        "negative.**"
    )
    assert verdicts["same"].startswith("**2 of 2 rank correlations are significantly positive.**")
    assert published.verdict([]).startswith("No published table has 8 methods")


def test_the_first_sentence_counts_the_negative_coefficients_that_it_prints() -> None:
    """Spearman's coefficient is printed. It may be negative where Kendall's is 0."""
    one = published.Correlation("Post-ASR", "attack_success", ("A",), rho=-0.05, tau=0.0, p=1.0)
    text = published.verdict([("one", one)])
    assert text.startswith("**No agreement is shown: none of 1 correlations is significantly ")
    assert ", and 1 is negative.** Spearman's rho: " in text
    assert text.endswith(": -0.05.")
