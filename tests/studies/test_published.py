"""Rows of published leaderboards: their form, the correlation, and what the page says of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from scipy.stats import hmean

from studies.rendering import published
from studies.rendering.common import table
from tests.conftest import ROOT
from tests.studies.test_leaderboard import LEADERBOARD

BENCHMARKS = {published.short_title(one): one for one in published.benchmarks()}
COMPARED = [
    {"theirs": "Pre-ASR", "ours": "concept_rate"},
    {"theirs": "Post-ASR", "ours": "attack_success"},
    {"theirs": "CLIP-Score", "ours": "retain_error", "opposite": True},
]
HEADS = ("theirs", "ours")


def benchmark(values: dict[str, list[Any]], title: str = "One, a title") -> dict[str, Any]:
    """A published leaderboard of one task, with the columns of COMPARED."""
    return {
        "title": title,
        "columns": ["Pre-ASR", "Post-ASR", "CLIP-Score"],
        "compared": COMPARED,
        "methods": {name: {"ours": name.lower()} for name in values},
        "tasks": {"one": {"rows": values, "file": "one.csv", "commit": "abc"}},
    }


def rates(numbers: dict[str, float]) -> dict[str, dict[str, float]]:
    """Our rates: one number in all columns."""
    return {name: dict.fromkeys(published.LABELS, value) for name, value in numbers.items()}


def finding(**changes: Any) -> published.Finding:
    """A correlation of eight methods, of one table."""
    names = tuple("ABCDEFGH")
    values = {"theirs": "Post-ASR", "ours": "attack_success", "rho": 0.5, "tau": 0.4, "p": 0.2}
    one = published.Correlation(names=names, **{**values, **changes})
    return published.Finding("One", "task", one)


@pytest.mark.parametrize("title", BENCHMARKS)
def test_a_published_row_has_its_source_and_a_place_here(title: str) -> None:
    content = BENCHMARKS[title]
    for key in ("source", "read", "date", "licence", "protocol", "left_out"):
        assert str(content[key]).strip()
    # They stand inside of a sentence on the page.
    assert all(
        "\n" not in str(content[key]) for key in ("title", "source", "read", "date", "licence")
    )
    named = [how["ours"] for how in content["methods"].values() if "ours" in how]
    assert len(set(named)) == len(named)
    assert set(named) <= set(LEADERBOARD["methods"])
    assert len(set(content["columns"])) == len(content["columns"])
    for pair in content["compared"]:
        assert pair["theirs"] in content["columns"]
        assert pair["ours"] in published.LABELS
        assert set(pair) <= {"theirs", "ours", "opposite"}
    for task in content["tasks"].values():
        assert task["file"]
        assert task["commit"]
        assert set(task["rows"]) <= set(content["methods"])
        for values in task["rows"].values():
            assert len(values) == len(content["columns"])
            assert all(value is None or isinstance(value, int | float) for value in values)


def test_no_file_of_published_rows_is_passed_over() -> None:
    """Short titles name the rows of the correlations, so that two must not be alike."""
    paths = set(published.FOLDER.glob("*.yaml"))
    assert len(BENCHMARKS) == len(paths - {published.UNREAD}) == len(paths) - 1


def test_a_success_under_attack_is_no_rarer_than_without() -> None:
    content = BENCHMARKS["UnlearnDiffAtk"]
    for task in content["tasks"].values():
        for values in task["rows"].values():
            pre, post = (values[content["columns"].index(one)] for one in ("Pre-ASR", "Post-ASR"))
            assert 0 <= pre <= post <= 100


def test_the_rows_of_unlearn_canvas_give_the_size_of_its_file() -> None:
    """The page of the folder says that the file has 434 bytes."""
    content = BENCHMARKS["UnlearnCanvas"]
    units = {"Time s": "Time (s)", "Memory GB": "Memory (GB)", "Storage GB": "Storage (GB)"}
    lines = [",".join(["Method", *(units.get(name, name) for name in content["columns"])])]
    for name, values in content["tasks"]["styles and objects"]["rows"].items():
        percents = [f"{value:.2f}%" for value in values[:6]]
        fid, time, memory, storage = values[6:]
        numbers = [f"{fid:.2f}", f"{time}", f"{memory:.1f}", f"{storage:.1f}"]
        lines.append(",".join([name, *percents, *numbers]))
    assert len("\n".join(lines).encode()) + 1 == 434


def test_the_overall_rows_of_hub_are_the_means_of_its_categories() -> None:
    """The table has three decimals, minutes one. One category has no selective alignment."""
    content = BENCHMARKS["HUB"]
    tasks = dict(content["tasks"])
    overall = tasks.pop("overall")["rows"]
    assert len(tasks) == 4
    for name, values in overall.items():
        for place, (column, value) in enumerate(zip(content["columns"], values, strict=True)):
            numbers = [task["rows"][name][place] for task in tasks.values()]
            there = [number for number in numbers if number is not None]
            assert len(there) == (3 if column == "selective alignment" else 4)
            tolerance = 0.1 if column == "minutes" else 0.00101
            assert value == pytest.approx(sum(there) / len(there), abs=tolerance)


def test_the_score_of_spqr_is_the_harmonic_mean_of_its_axes() -> None:
    content = BENCHMARKS["SPQR"]
    axes = ("Safety", "Prompt adherence", "Quality", "Robustness")
    for values in content["tasks"]["unsafe content"]["rows"].values():
        row = dict(zip(content["columns"], values, strict=True))
        # Quality of EraseDiff is 0.050 and has two digits: the score may be off by 0.002.
        assert row["SPQR"] == pytest.approx(hmean([row[axis] for axis in axes]), abs=0.002)


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
    assert [(one.theirs, one.ours) for one in found] == [
        (pair["theirs"], pair["ours"]) for pair in COMPARED
    ]
    assert [one.rho for one in found] == pytest.approx([1, 1, -1])
    assert [one.tau for one in found] == pytest.approx([1, 1, -1])
    assert [one.p for one in found] == pytest.approx([2 / 40320] * 3)
    assert {one.names for one in found} == {tuple(name.lower() for name in names)}
    few = benchmark({name: values[name] for name in names[:7]})
    assert published.correlations(few, "one", own) == []
    text = published._task_text(few, "one", own)
    assert "7 methods are common to both, too few" in text
    assert "8 methods are common to both." in published._task_text(whole, "one", own)
    head, *_ = table([["method", *few["columns"]]]).splitlines()
    assert head.removesuffix(" |") in text
    assert "our concept rate %" in text
    assert "our success rate of unlearn_diff alone %" not in text


def test_a_method_without_a_number_is_no_common_method_of_that_column() -> None:
    names = [f"M{place}" for place in range(9)]
    values: dict[str, list[Any]] = {name: [float(i)] * 3 for i, name in enumerate(names)}
    values["M0"] = [0.0, None, None]
    values["M1"] = [1.0, 1.0, None]
    own = rates({name.lower(): float(i) for i, name in enumerate(names)})
    found = published.correlations(benchmark(values), "one", own)
    assert [(one.theirs, len(one.names)) for one in found] == [("Pre-ASR", 9), ("Post-ASR", 8)]
    assert "| M0 | 0 | - | - | 0.0 |" in published._task_text(benchmark(values), "one", own)


def test_published_tables_are_compared_where_one_column_here_stands_for_both() -> None:
    """Their methods need no row here with results. A table is not compared with itself."""
    names = [f"M{place}" for place in range(8)]
    first = benchmark({name: [float(i), 0.5 * i, 1.0] for i, name in enumerate(names)}, "A, x")
    second = benchmark({name: [-float(i), 0.0, 1.0] for i, name in enumerate(names)}, "B")
    second["columns"] = ["EP", "FID", "none"]
    second["compared"] = [
        {"theirs": "EP", "ours": "concept_rate", "opposite": True},
        {"theirs": "FID", "ours": "summary"},
    ]
    (found,) = published.between([first, second])
    assert (found.title, found.task) == ("A and B", "one and one")
    assert (found.correlation.theirs, found.correlation.ours) == ("Pre-ASR", "EP")
    assert found.correlation.rho == pytest.approx(1)
    first["tasks"]["two"] = first["tasks"]["one"]
    assert len(published.between([first])) == 0
    assert len(published.between([first, second])) == 2


@pytest.mark.parametrize(
    ("rho", "low", "high"),
    # atanh(0.5) = 0.549306; 1.96 * sqrt(1.125 / 5) = 0.929710; tanh of the difference and the sum
    [(0.5, -0.363058, 0.901283), (-0.5, -0.901283, 0.363058), (1.0, 1.0, 1.0)],
)
def test_the_interval_of_a_coefficient_is_that_of_bonett_and_wright(
    rho: float, low: float, high: float
) -> None:
    assert finding(rho=rho).correlation.interval() == pytest.approx((low, high), abs=1e-5)


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
        name: published.verdict([published.Finding("One", "one", one) for one in some])
        for name, some in found.items()
    }
    assert found["low"][0].rho < 0 < published.LEVEL < found["low"][0].p
    assert verdicts["low"].startswith(
        "**No agreement is shown: none of 2 correlations is significantly positive, and 2 are "
        "negative.**"
    )
    assert verdicts["same"].startswith("**2 of 2 rank correlations are significantly positive.**")
    assert published.verdict([]).startswith("No published table has 8 methods")


def test_one_small_p_value_of_many_is_no_agreement() -> None:
    few, many = [finding(p=0.03)], [finding(p=0.03), *[finding(p=0.9)] * 3]
    assert published.verdict(few).startswith("**1 of 1 rank correlations are significantly")
    assert published.verdict(many).startswith("**No agreement is shown: none of 4 correlations")
    assert "| 0.030 | 0.120 |" in published.correlation_table(many, HEADS)


def test_the_first_sentence_counts_the_negative_coefficients_that_it_prints() -> None:
    """Spearman's coefficient is printed. It may be negative where Kendall's is 0."""
    text = published.verdict([finding(rho=-0.05, tau=0.0, p=1.0)])
    assert text.startswith("**No agreement is shown: none of 1 correlations is significantly ")
    assert ", and 1 is negative.** Spearman's rho lies between -0.05 and -0.05" in text


def test_the_explanation_has_the_numbers_of_the_page() -> None:
    page = (ROOT / "eval/results/tiny_leaderboard.md").read_text()
    explanation = " ".join((ROOT / "docs/explanation/leaderboard.md").read_text().split())
    (line,) = re.findall(r"^\*\*No agreement is shown: none of .*$", page, re.MULTILINE)
    number, negative = re.findall(r"none of (\d+) .* and (\d+) are negative", line)[0]
    low, high, tables = re.findall(
        r"tables it lies between (.+) and (.+), with .* in (\d+) ", line
    )[0]
    assert f"None of {number} is significantly positive, and {negative} are" in explanation
    words = {"6": "six"}
    assert f"their {words[tables]} correlations lie between {low} and {high}" in explanation
    for title in BENCHMARKS:
        assert title in explanation


def test_tables_that_were_not_read_are_named_with_what_was_found() -> None:
    tables = yaml.safe_load(published.UNREAD.read_text())["tables"]
    text = published.unread_text()
    for one in tables:
        assert f"* {one['name']}: {one['found'].strip()}" in text
