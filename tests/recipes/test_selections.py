"""Selections of parameters by regular expression: on the real model, and with expressions that
would never end.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel, ZImageTransformer2DModel

from concept_eraser.recipes import recipe
from concept_eraser.recipes.selections import SECONDS, problem, select
from concept_eraser.utils.errors import UserError
from tests.conftest import short


@pytest.fixture
def names(shared_tiny: Any) -> list[str]:
    """The parameters of the bundled model's denoiser."""
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

    start = os.times()
    with pytest.raises(UserError, match=f"takes more than {SECONDS} seconds"):
        select(names, f"re:{expression}")
    end = os.times()
    assert (
        end.children_user + end.children_system - start.children_user - start.children_system
        < 3 * SECONDS
    )


def test_the_example_of_the_audit_ends(names: list[str]) -> None:
    """(a+)+$ is slow on a name with many a's only: no real name has them, this one has forty."""
    start = time.process_time()
    assert select([*names, "x.aaaa"], "re:(a+)+$")
    with pytest.raises(UserError, match="takes more than"):
        select([*names, "a" * 40 + "!"], "re:(a+)+$")
    assert time.process_time() - start < SECONDS


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
    with pytest.raises(UserError, match=re.escape(words)) as error:
        recipe.load(short(trainable__select=selection))
    assert len(str(error.value)) < 1500


def test_a_model_without_cross_attention_names_what_it_has() -> None:
    with torch.device("meta"):
        zimage: Any = ZImageTransformer2DModel(
            dim=16, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, axes_dims=[4, 2, 2]
        )
        dit: Any = DiTTransformer2DModel(num_layers=1, num_attention_heads=2)
    for model, reason in (
        (zimage, "image and text are one sequence with one set of weights"),
        (dit, "it reads no text"),
    ):
        names = [name for name, _ in model.named_parameters()]
        with pytest.raises(UserError) as error:
            select(names, "cross_attention")
        text = str(error.value)
        assert f"matches none of the {len(names)} tensors ({reason})" in text
        for selection in ("all", "blocks", "self_attention"):
            assert f"{selection} ({len(select(names, selection))})" in text
        assert "text_attention" not in text, "no selection of CLIP"
        assert "all_but_cross_attention" not in text, "it is the same as all"
        with pytest.raises(UserError, match=r"this model has all \(\d+\), blocks"):
            select(names, "re:attn3")
