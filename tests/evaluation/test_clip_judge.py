"""The zero-shot judge on a real open_clip model: the bundled CLIP has another format."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from concept_eraser import registry
from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation import agreement
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.base import Evidence, Group
from concept_eraser.utils.errors import UserError

LABELS = ["a star", "a circle", "a house"]


@pytest.fixture
def judge(clip_folder: Path) -> Any:
    return registry.build("judge", "clip", {"labels": LABELS, "model": f"local-dir:{clip_folder}"})


def test_the_label_with_the_largest_cosine_is_the_judgement(judge: Any) -> None:
    images = torch.randint(0, 256, (6, 40, 40, 3), dtype=torch.uint8)
    labels = judge.classify(images)["concept"]
    scores = np.stack([judge.clip_scores(images, [f"a photo of {one}"] * 6) for one in LABELS])
    assert list(labels) == [LABELS[i] for i in scores.argmax(0)]
    assert judge.features(images).shape == (6, 16)


def test_a_clip_score_names_the_model_of_its_judge(judge: Any, clip_folder: Path) -> None:
    images = torch.randint(0, 256, (2, 40, 40, 3), dtype=torch.uint8)
    prompts = [Prompt("a star"), Prompt("a house")]
    group = Group("kept", "retain", prompts, {"before": images, "after": images}, {})
    evidence = Evidence({"kept": group}, ("concept", "a star"), judge, 0)
    (result,) = registry.build("metric", "clip_score", {}).measure(evidence)
    assert result.metric == "clip_score"
    assert result.settings["model"].startswith(clip_folder.name)
    assert result.settings["weights"] in judge.fingerprint
    assert result.settings["scale"] == "cosine"


def test_other_labels_are_another_protocol() -> None:
    content: dict[str, Any] = {
        "concept": {"concept": "a star"},
        "groups": {"direct": {"prompts": ["a star"], "role": "forget", "n": 2}},
    }
    one, other = (
        suites.load({**content, "judge": {"name": "clip", "labels": labels}})
        for labels in (LABELS, LABELS[:2])
    )
    assert one.model_dump(mode="json") != other.model_dump(mode="json")


def test_other_labels_are_another_judge(judge: Any) -> None:
    """So a judge with more labels may be the second one."""
    other = dataclasses.replace(judge, labels=[*LABELS, "a cat"])
    same = dataclasses.replace(judge)
    assert same.fingerprint == judge.fingerprint != other.fingerprint
    agreement.require_another(judge, other, ("concept", LABELS[0]))
    with pytest.raises(UserError, match="the second judge is the first one"):
        agreement.require_another(judge, same, ("concept", LABELS[0]))


@pytest.mark.parametrize("labels", [[], ["a star"], ["a star", "a star"], "a star", [1, 2]])
def test_wrong_labels(labels: Any) -> None:
    with pytest.raises(UserError, match="labels: expected"):
        registry.build("judge", "clip", {"labels": labels})


def test_weights_that_are_not_here_are_named() -> None:
    judge = registry.build("judge", "clip", {"labels": LABELS})
    with pytest.raises(UserError, match=r"ViT-B-32.* not on this machine"):
        judge.classify(torch.zeros(1, 32, 32, 3, dtype=torch.uint8))
