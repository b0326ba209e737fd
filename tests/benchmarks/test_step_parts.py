"""The parts of a training step: they add up, and the page shows what was measured."""

from __future__ import annotations

import json

import pytest

from benchmarks import step_parts
from studies.rendering.common import fill_blocks


def test_the_parts_of_a_step_add_up() -> None:
    row = step_parts.measure("cross-attention", batch=1, repetitions=1)
    assert sum(row["share"].values()) == pytest.approx(1, abs=1e-3)
    assert min(row["share"].values()) > 0
    assert row["share"]["passes"] > 0.5
    assert row["cpu_seconds"].keys() == set(step_parts.METHODS)
    # UNO's two Hessian products take a pass each, or two
    assert row["ratio"]["UNO / MUNBa"][0] > 1.2


def test_the_page_shows_the_measured_parts() -> None:
    content, page = json.loads(step_parts.FILE.read_text()), step_parts.PAGE.read_text()
    assert fill_blocks(page, {"parts": lambda: step_parts.block(content)}) == page
    assert {row["trained"] for row in content["rows"]} == set(step_parts.TRAINED)
    assert all(row["n"] >= 7 for row in content["rows"])
