"""The pages on the papers name files, functions and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "papers"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem != "index")
SEEDS = ("munba", "uno", "forum", "natural_gradient", "mini_unlearning")
# the highest number of each kind that the paper has, as far as it was read
HIGHEST = {
    "forum": {"Eqs?\\.": 24, "Tables?": 5, "Figures?": 2, "Algorithms?": 1},
    "natural_gradient": {
        "Eqs?\\.": 76,
        "Figures?": 2,
        "Algorithms?": 2,
        "Theorems?": 1,
        "Lemmas?": 1,
        "Definitions?": 2,
    },
    "mini_unlearning": {"Eqs?\\.": 14, "Tables?": 2, "Algorithms?": 4, "Theorems?": 1},
}
COLUMNS = ["in the paper", "here", "tests", "measured", "missing, and why"]


def problems(text: str) -> list[str]:
    """Return the references of a page that lead nowhere.

    `path` is a file or folder of the repository. `path::name` is a function or class of it, and
    `::name` one of the last file in the cell.
    """
    wrong = []
    for cell in re.split(r"[|\n]", text):
        last_path = ""
        for reference in re.findall(r"`([^`\s]+)`", cell):
            path, separator, name = reference.partition("::")
            if "/" not in path and not separator:
                continue
            path = path or last_path
            last_path = path
            file = ROOT / path
            if not path or not file.exists():
                wrong.append(reference)
            elif separator and not re.search(
                rf"^(?:def|class) {re.escape(name)}\b", file.read_text(), re.M
            ):
                wrong.append(f"{path}::{name}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_and_test_of_a_page_exists(page: Path) -> None:
    assert problems(page.read_text()) == []


def test_references_that_lead_nowhere_are_noticed() -> None:
    here = "tests/docs/test_papers.py"
    assert problems(f"`{here}::problems`, `::SEEDS` | `::problems` | `tests/none.py`, `log`") == [
        f"{here}::SEEDS",
        "::problems",
        "tests/none.py",
    ]


@pytest.mark.parametrize("name", SEEDS)
def test_a_page_has_a_row_for_code_tests_measurement_and_gaps(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    heads = [row for row in rows if row[0] == COLUMNS[0]]
    assert heads == [COLUMNS] * 2
    for row in rows:
        assert len(row) == len(COLUMNS), row
        assert all(row), row
    # a row without a measurement says why, or that its test is the measurement
    for row in rows:
        if row[3] == "-":
            assert row[4] != "-", row
    assert f"({name}.md)" in (FOLDER / "index.md").read_text()


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of every row of a page's tables, without heads and rules."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [row for row in rows if row[0] != COLUMNS[0] and set(row[0]) != {"-"}]


def numbers(cell: str, kind: str) -> list[int]:
    """Return the numbers that follow a word such as "Eqs." in a cell, e.g. 1-3, 5 and 7."""
    result = []
    for part in re.findall(rf"\b{kind} (\d+(?:(?:-|, | and )\d+)*)(?![.\d])", cell):
        for item in re.split(r", | and ", part):
            first, _, last = item.partition("-")
            result += range(int(first), int(last or first) + 1)
    return result


def test_numbers_of_a_cell() -> None:
    cell = "Eqs. 1-3, 5 and 7, a step; Eq. 9; Table 2: 5, 10; Theorem 4.3"
    assert numbers(cell, "Eqs?\\.") == [1, 2, 3, 5, 7, 9]
    assert numbers(cell, "Tables?") == [2]
    assert numbers(cell, "Theorems?") == []


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kinds in HIGHEST.items() for kind in kinds]
)
def test_every_number_of_a_paper_has_one_row(name: str, kind: str) -> None:
    rows = rows_of((FOLDER / f"{name}.md").read_text())
    listed = sorted(number for row in rows for number in numbers(row[0], kind))
    assert listed == list(range(1, HIGHEST[name][kind] + 1))


@pytest.mark.parametrize("name", sorted(HIGHEST))
def test_what_was_not_read_is_no_claim(name: str) -> None:
    """A row that is not read here names no code, no test and no measurement."""
    text = (FOLDER / f"{name}.md").read_text()
    assert '"Not read here"' in text
    unread = [row for row in rows_of(text) if row[4].startswith("not read here")]
    assert unread
    for row in unread:
        assert row[1:4] == ["-"] * 3, row
