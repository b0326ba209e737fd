"""The plan of the objectives' prompts: an anchor that is the forgotten prompt itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from concept_eraser.recipes import recipe
from concept_eraser.runs.job import Job
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import silent
from tests.conftest import short

FREE = {"images": "free", "n": 2}


def content(**forget: Any) -> dict[str, Any]:
    return short(
        forget={"loss": "anchor", "anchor": "a red circle", **FREE, **forget},
        retain={"prompts": ["a blue house"], "loss": "distill", **FREE},
    )


@pytest.mark.parametrize("target", ["denoiser", "text_encoder"])
@pytest.mark.parametrize(
    "forget",
    [
        {"prompts": ["a red circle"]},
        {"prompts": ["A red  Circle"]},
        {"prompts": "tiny_star", "anchor": {"shape": "star"}},
    ],
)
def test_a_prompt_that_is_its_anchor_is_no_job(
    tiny, tmp_path: Path, target: str, forget: dict
) -> None:
    job = recipe.load(content(**forget) | {"target": target, "trainable": "all"})
    with pytest.raises(UserError, match=r"forget: the anchor of .* is that prompt itself"):
        Job(job, tiny, tmp_path, silent).eraser()


def test_some_prompts_that_are_their_anchor_are_a_warning(
    tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="concept_eraser"):
        job = recipe.load(content(prompts=["a red circle", "a red star"]))
        Job(job, tiny, tmp_path, silent).eraser()
        assert "so for 1 of 2 examples, which would not be forgotten" in caplog.text
        caplog.clear()
        Job(recipe.load(content(prompts=["a red star"])), tiny, tmp_path, silent).eraser()
        assert caplog.text == ""


def test_a_preserved_prompt_may_be_its_anchor(tiny, tmp_path: Path) -> None:
    retain = {"prompts": ["a blue house"], "loss": "anchor", "anchor": "a blue house", **FREE}
    job = recipe.load(content(prompts=["a red star"]) | {"retain": retain})
    assert Job(job, tiny, tmp_path, silent).eraser().objectives == ("retain", "forget")
