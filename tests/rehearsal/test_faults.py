"""Faults that a GPU would have shown first, each with the part of the package that had it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import concept_eraser
from benchmarks.device_counts import Counts
from benchmarks.rehearsal_device import count
from concept_eraser import registry
from concept_eraser.data.prompts import Prompt
from concept_eraser.methods.history import History
from concept_eraser.methods.vectors import dot, gramian, is_finite
from tests import golden
from tests.conftest import short
from tests.rehearsal.jobs import on_digits


def test_a_history_follows_its_parameters(device: torch.device, tmp_path: Path) -> None:
    """It was recorded on the CPU, in memory or in files, and the model is on the GPU now."""
    for folder in (None, tmp_path):
        params = [torch.zeros(2, requires_grad=True)]
        history = History(tuple(params), 2, folder)
        history.record([0], 0.1, 0.5, (torch.ones(2),))
        history.params = (params[0].detach().to(device).requires_grad_(),)
        (step,) = history.last(1)
        assert step.velocity is not None
        assert step.weights[0].device == step.velocity[0].device == device


@pytest.mark.parametrize(
    "method", [name for name, one in golden.CLASSIFIER_METHODS.items() if "k" in one["method"]]
)
def test_methods_with_a_history(method: str, device: torch.device, tmp_path: Path) -> None:
    run = on_digits(golden.CLASSIFIER_METHODS[method], tmp_path)
    assert run.folder.is_dir()


@pytest.mark.parametrize("name", ["tiny", "tiny2"])
def test_bundled_judges_judge_before_and_after_a_loss(name: str, device: torch.device) -> None:
    """`probability` gets images of the GPU, and the other functions get bytes of the CPU."""
    judge = registry.build("judge", name, {})
    images = torch.zeros(2, 64, 64, 3, dtype=torch.uint8)
    with count() as counts:
        labels = judge.classify(images)
    assert counts.operators > 10
    if not judge.only_reports:
        pixels = torch.full((2, 3, 64, 64), -1.0, device=device)
        assert judge.probability(pixels, "shape", "star").device == device
    assert judge.classify(images)["shape"].tolist() == labels["shape"].tolist()
    assert judge.probabilities(images)["shape"].shape[0] == 2
    assert judge.features(images).shape[0] == 2
    assert judge.clip_scores(images, ["a red star", "a blue circle"]).shape == (2,)
    assert judge.reference_features([Prompt("a red star")], 0).shape[0] == 1


def test_inner_products_wait_once(device: torch.device) -> None:
    vectors = [tuple(torch.ones(3, 2, device=device) * i for _ in range(5)) for i in (1, 2, 3)]
    with count() as counts:
        gram = gramian(vectors)
    assert counts.syncs == 1
    assert gram.tolist() == [[30.0 * i * j for j in (1, 2, 3)] for i in (1, 2, 3)]
    with count() as counts:
        assert float(dot(vectors[0], vectors[1])) == 60
    assert counts.syncs == 1
    with count() as counts:
        assert is_finite(vectors[0])
    assert counts.syncs == 1
    assert not is_finite((*vectors[0], torch.full((2,), float("nan"), device=device)))


def test_one_process_uses_one_device_after_the_other(device: torch.device, tmp_path: Path) -> None:
    """accelerate keeps the device of a process: it refused the CPU, or stayed on it."""
    for number, name in enumerate(("cpu", "auto", "cpu")):
        training = {"steps": 1, "batch_size": 2, "device": name}
        with count() as counts:
            concept_eraser.erase(short(training=training), output=tmp_path / str(number))
        assert bool(counts.operators) == (name == "auto")


CASES: dict[str, tuple[dict[str, Any], int]] = {  # -> the recipe's changes, and syncs in a step
    "one pass": ({"training__one_pass": "on"}, 1),
    "LoRA": ({"trainable": {"select": "cross_attention", "lora": 2}}, 1),
    "weighted": ({"method": "weighted"}, 1),
    "no images": (
        {"forget__images": "free", "retain__images": "free", "retain__loss": "distill"},
        1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_how_often_a_step_waits(case: str, steps: list[Counts], tmp_path: Path) -> None:
    """Once: the losses and the inner products of the gradients tell whether it is finite."""
    changes, syncs = CASES[case]
    recipe = short(**{"training": {"steps": 2, "batch_size": 2}, **changes})
    concept_eraser.erase(recipe, output=tmp_path)
    assert [step.syncs for step in steps] == [syncs, syncs]
