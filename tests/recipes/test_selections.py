"""Selections of parameters by regular expression: those of the real model, and those that would
never end.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from concept_eraser.recipes import recipe
from concept_eraser.recipes.selections import SECONDS, problem, select
from concept_eraser.utils.errors import UserError
from tests.conftest import short


@pytest.fixture
def names(shared_tiny: Any) -> list[str]:
    """Of the bundled model's denoiser."""
    return [name for name, _ in shared_tiny.denoiser.named_parameters()]


@pytest.mark.parametrize(
    "expression", [r"attn2\.to_[kv]", r"^down_blocks\.\d+\.", r"(?i)ATTN1", r"norm\d?\.weight$", ""]
)
def test_an_expression_selects_what_python_finds(expression: str, names: list[str]) -> None:
    assert select(names, f"re:{expression}") == [
        name for name in names if re.search(expression, name)
    ]


@pytest.mark.parametrize(
    "expression",
    [
        r"(\w+\.?)+!",
        r"([a-z_]+)*([a-z_.0-9]+)*X",
        r"(.*)*(.*)*(.*)*y!",
        r"^((\w|\.)+)+$!",
        r"(?=(\w+\.?)+!)",
    ],
)
def test_an_expression_that_never_ends_is_stopped(expression: str, names: list[str]) -> None:
    import os

    began = os.times()
    with pytest.raises(UserError, match=f"takes more than {SECONDS} seconds"):
        select(names, f"re:{expression}")
    ended = os.times()
    assert (
        ended.children_user + ended.children_system - began.children_user - began.children_system
        < 3 * SECONDS
    )


def test_the_example_of_the_audit_ends(names: list[str]) -> None:
    """(a+)+$ needs a name of many a's to take long; real names have none, this one has forty."""
    began = time.process_time()
    assert select([*names, "x.aaaa"], "re:(a+)+$")
    with pytest.raises(UserError, match="takes more than"):
        select([*names, "a" * 40 + "!"], "re:(a+)+$")
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ("re:(", "is no regular expression"),
        ("re:" + "(" * 450, "is no regular expression"),
        ("re:x{99999999999}", "is no regular expression"),
        ("re:" + "x" * 500, "at most 500"),
        ("cross_atention", "did you mean 'cross_attention'"),
        ("x" * 10_000, "unknown selection"),
    ],
)
def test_what_is_no_selection(selection: str, words: str) -> None:
    assert words in str(problem(selection))
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        recipe.load(short(trainable__select=selection))
    assert len(str(caught.value)) < 1500
