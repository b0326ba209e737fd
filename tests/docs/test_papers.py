"""The pages on the papers name files, functions and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "papers"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem != "index")
SEEDS = ("munba", "uno", "forum", "natural_gradient", "mini_unlearning")
# The numbered statements of each paper, as far as their numbers are known.
STATEMENTS: dict[str, dict[str, list[Any]]] = {
    "munba": {
        "Eq.": [*range(1, 44)],
        "Lemma": ["2.1", "2.2", "2.4", "2.8", "6.1"],
        "Theorem": ["2.3", "2.5", "2.6", "2.9", "2.10"],
        "Remark": ["2.7"],
        "Algorithm": [1],
        "Table": [*range(1, 10)],
        "Figure": [*range(1, 5)],
    },
    "uno": {"Algorithm": [*range(1, 11)], "Table": [1, 2], "Figure": [*range(1, 8)]},
    "forum": {
        "Eq.": [*range(1, 25)],
        "Table": [*range(1, 6)],
        "Figure": [1, 2],
        "Algorithm": [1],
    },
    "natural_gradient": {
        "Eq.": [*range(1, 77)],
        "Figure": [1, 2],
        "Algorithm": [1, 2],
        "Theorem": [1],
        "Lemma": [1],
        "Definition": [1, 2],
    },
    "mini_unlearning": {
        "Eq.": [*range(1, 15)],
        "Table": [1, 2],
        "Algorithm": [*range(1, 5)],
        "Theorem": [1],
    },
}
# pages on which each number has one row, and unread rows make no claim
STRICT = ("forum", "mini_unlearning", "natural_gradient")
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


def numbers(text: str, kind: str) -> list[str]:
    """Return the numbers that a text names after a kind: `Eqs. 4, 5 and 14 to 22`, `Eqs. 1-3`."""
    plural = "Eqs?\\." if kind == "Eq." else f"{kind}s?"
    number = r"\d+(?:\.\d+)?"
    named: list[str] = []
    for match in re.findall(rf"\b{plural} ({number}(?:(?:-|, | and | to ){number})*)", text):
        for part in re.split(r", | and ", match):
            first, *others = re.split(r"-| to ", part)
            last = others[-1] if others else ""
            named += map(str, range(int(first), int(last) + 1)) if last else [first]
    return named


def test_numbers_of_statements_are_read() -> None:
    text = "Theorem 2.3, Eqs. 4, 5 and 14 to 16: x; Lemmas 2.1 and 2.10 | Tables 5, 6 and after 9"
    assert numbers(text, "Eq.") == ["4", "5", "14", "15", "16"]
    assert numbers(text, "Lemma") == ["2.1", "2.10"]
    assert numbers(text, "Theorem") == ["2.3"]
    assert numbers(text, "Table") == ["5", "6"]
    assert numbers(text, "Figure") == []
    text = "Eqs. 1-3, 5 and 7, a step; Eq. 9; Table 2: 5, 10"
    assert numbers(text, "Eq.") == ["1", "2", "3", "5", "7", "9"]
    assert numbers(text, "Table") == ["2"]


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kinds in STATEMENTS.items() for kind in kinds]
)
def test_every_numbered_statement_has_a_row(name: str, kind: str) -> None:
    text = (FOLDER / f"{name}.md").read_text()
    listed = [number for row in rows_of(text) for number in numbers(row[0], kind)]
    expected = [str(number) for number in STATEMENTS[name][kind]]
    assert set(expected) - set(listed) == set()
    if name in STRICT:
        assert sorted(listed) == sorted(expected)


@pytest.mark.parametrize("name", STRICT)
def test_what_was_not_read_is_no_claim(name: str) -> None:
    """A row that is not read here names no code, no test and no measurement."""
    text = (FOLDER / f"{name}.md").read_text()
    assert '"Not read here"' in text
    unread = [row for row in rows_of(text) if row[4].startswith("not read here")]
    assert unread
    for row in unread:
        assert row[1:4] == ["-"] * 3, row
