"""The pages on the papers name files, functions and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "papers"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem != "index")
SEEDS = ("munba", "uno", "forum", "natural_gradient", "mini_unlearning")
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


# The numbered statements of a paper, as far as their numbers are known.
STATEMENTS = {
    "munba": {
        "Eq.": [*range(1, 44)],
        "Lemma": ["2.1", "2.2", "2.4", "2.8", "6.1"],
        "Theorem": ["2.3", "2.5", "2.6", "2.9", "2.10"],
        "Remark": ["2.7"],
        "Table": [*range(1, 10)],
        "Figure": [*range(1, 5)],
    },
    "uno": {"Algorithm": [*range(1, 11)], "Table": [1, 2], "Figure": [*range(1, 8)]},
}


def numbers(text: str, kind: str) -> set[str]:
    """Return the numbers that a text names after a kind: `Eqs. 4, 5 and 14 to 22`."""
    plural = "Eqs?\\." if kind == "Eq." else f"{kind}s?"
    number = r"\d+(?:\.\d+)?"
    named: set[str] = set()
    for match in re.findall(rf"\b{plural} ({number}(?:(?:, | and | to ){number})*)", text):
        for part in re.split(r", | and ", match):
            first, _, last = part.partition(" to ")
            named |= {str(n) for n in range(int(first), int(last) + 1)} if last else {first}
    return named


@pytest.mark.parametrize("name", STATEMENTS)
def test_every_numbered_statement_has_a_row(name: str) -> None:
    page = (FOLDER / f"{name}.md").read_text()
    first_cells = "\n".join(
        line.split("|")[1] for line in page.splitlines() if line.startswith("|")
    )
    for kind, expected in STATEMENTS[name].items():
        assert {str(number) for number in expected} - numbers(first_cells, kind) == set(), kind
    assert "have no row" not in page


def test_numbers_of_statements_are_read() -> None:
    text = "Theorem 2.3, Eqs. 4, 5 and 14 to 16: x; Lemmas 2.1 and 2.10 | Tables 5, 6 and after 9"
    assert numbers(text, "Eq.") == {"4", "5", "14", "15", "16"}
    assert numbers(text, "Lemma") == {"2.1", "2.10"}
    assert numbers(text, "Theorem") == {"2.3"}
    assert numbers(text, "Table") == {"5", "6"}
    assert numbers(text, "Figure") == set()
