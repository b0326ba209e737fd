"""The memory estimate of a dry run, against what a training step takes on the rehearsal device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import concept_eraser
from benchmarks.device_counts import Counts
from concept_eraser.methods.base import Direction
from concept_eraser.methods.munba import Munba
from concept_eraser.methods.uno import Uno
from concept_eraser.methods.vectors import combine
from concept_eraser.models.loading import load
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs import memory_estimate
from concept_eraser.training.method_memory import vectors_of
from tests import golden
from tests.rehearsal.jobs import two_steps

BOTH = ("retain", "forget")
# It has a matrix beside its vectors; and it takes its attacks in turn, the last steps alone train.
OTHERWISE = {"minmax_ngd", "stereo"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("munba", "uno") else pytest.mark.slow)
        for name in golden.METHODS
        if name not in OTHERWISE
    ],
)
def test_the_estimate_of_each_method(name: str, steps: list[Counts], tmp_path: Path) -> None:
    """With all weights trained, so that the vectors of a method are a large part."""
    if torch.cuda.is_available():
        pytest.skip("CUDA's kernels have workspaces; benchmarks/gpu.py measures there")
    content = two_steps(golden.DENOISER, golden.METHODS[name], {"trainable": {"select": "all"}})
    concept_eraser.erase(content, output=tmp_path / "run")
    peak = max(step.peak_bytes for step in steps)
    job = recipes.load(content)
    estimate = memory_estimate.estimate(job, load(job.model), gpu=False)
    assert estimate.training == pytest.approx(peak, rel=0.1)


def test_vectors_are_counted_by_trying_the_method() -> None:
    """MUNBa holds the first gradient during the second pass, and then both."""
    vectors = vectors_of(Munba, BOTH)
    assert vectors is not None
    assert not vectors.is_exact
    assert vectors.during_pass == pytest.approx(1, abs=0.1)
    assert vectors.peak == pytest.approx(2, abs=0.2)

    class Hoarder(Munba):
        def direction(self, closure: Any) -> Direction:
            held = [closure.grad("retain") for _ in range(6)]
            return Direction(combine([1.0] * 6, held))

    hoarder = vectors_of(Hoarder, BOTH)
    assert hoarder is not None
    assert hoarder.during_pass == pytest.approx(5, abs=0.1)


def test_exact_products_need_the_graph_of_a_gradient() -> None:
    exact, forward = (
        vectors_of(lambda how=how: Uno(hvp=how), BOTH) for how in ("exact", "forward")
    )
    assert exact is not None
    assert forward is not None
    assert exact.is_exact
    assert not forward.is_exact
    # two gradients, the sum of the products so far, the vector and the weights before
    assert forward.during_pass == pytest.approx(5, abs=0.2)


def test_a_method_that_cannot_be_tried_has_no_count() -> None:
    class Demanding(Munba):
        def direction(self, closure: Any) -> Direction:
            raise RuntimeError("it needs a history")

    class Matrix(Munba):
        def direction(self, closure: Any) -> Direction:
            gradient = closure.grad("retain")
            [torch.outer(part, part) for part in gradient]
            return Direction(gradient)

    assert vectors_of(Demanding, BOTH) is None
    assert vectors_of(Matrix, BOTH) is None
