"""Every attack names the published definition that it follows and its differences, or says that it
is ours.
"""

from __future__ import annotations

import importlib
import re

import pytest

from concept_eraser import registry


def missing(text: str) -> list[str]:
    """Return what a module's docstring lacks: the paper, the authors' code, the differences."""
    if re.search(r"The\s(attack|control) is ours", text):
        return []
    parts = {
        "paper": r"arXiv\s\d{4}\.\d{5}",
        "code": (
            r"\b[\w-]+/[\w-]+\b[^.]*,\s+[\w/ -]+\.(?:py|ipynb)|one script for each"
            r"|`[^`]+\.(?:py|ipynb)`[^()]*\s(?:of|in)\s+[\w-]+/[\w-]+|code were not read\s+here"
        ),
        "differences": r"^Differences?\b[^:\n]*: ",
    }
    return [name for name, pattern in parts.items() if not re.search(pattern, text, re.M)]


@pytest.mark.parametrize("name", registry.builtin("attack"))
def test_each_attack_names_the_published_definition_and_its_differences(name: str) -> None:
    module = importlib.import_module(f"concept_eraser.evaluation.attacks.{name}")
    assert missing(module.__doc__ or "") == []


def test_what_a_docstring_lacks_is_noticed() -> None:
    assert missing("An attack.") == ["paper", "code", "differences"]
    whole = "By A, arXiv 2101.00001: owner/name, src/attack.py, line 3.\n\nDifferences: none."
    assert missing(whole) == []
    assert missing(whole.replace("Differences", "Remarks")) == ["differences"]
