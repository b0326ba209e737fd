"""The bundled weights of the second judge and the second CLIP: records, and a sample measured."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from concept_eraser import UserError, registry
from concept_eraser.cli.application import app
from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation.base import Evidence, Group
from concept_eraser.evaluation.judges.tiny import TinyJudge
from concept_eraser.evaluation.judges.tiny2 import SecondTinyJudge
from concept_eraser.tiny import garbage, painter
from concept_eraser.utils import resources


def record(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((resources.tiny_weights() / f"{name}.json").read_text())
    return content


@pytest.mark.parametrize("name", ["judge2", "clip2"])
def test_the_bundled_weights_are_those_of_the_record(name: str) -> None:
    file = resources.tiny_weights() / name / "model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == record(name)["sha256"]
    assert file.stat().st_size <= 2 * 2**20
    assert record(name)["environment"]["versions"]["torch"]


def test_the_judge_reads_new_drawings_and_calls_noise_none_in_every_head() -> None:
    rng = np.random.default_rng(9)
    scenes, images = painter.paint_batch(100, rng, held_out=True)
    judge = SecondTinyJudge()
    labels = judge.classify(torch.from_numpy(images))
    for name in judge.classes:
        right = np.mean([getattr(scene, name) for scene in scenes] == labels[name])
        assert right >= 0.95, name
    noise = np.stack([garbage.noise(rng) for _ in range(50)])
    for name, values in judge.classify(torch.from_numpy(noise)).items():
        assert (values == "none").mean() >= 0.9, name
    colors = TinyJudge().classify(torch.from_numpy(noise))["color"]
    assert "none" not in colors  # of the first judge, which has no such class


def test_the_clip_scores_of_matching_captions_are_higher() -> None:
    rng = np.random.default_rng(3)
    scenes, images = painter.paint_batch(64, rng, held_out=True)
    captions = [painter.caption(scene, rng, full=True).text for scene in scenes]
    pixels = torch.from_numpy(images)
    judge = SecondTinyJudge()
    match = judge.clip_scores(pixels, captions)
    other = judge.clip_scores(pixels, captions[1:] + captions[:1])
    assert (match > other).mean() > 0.95
    prompts = [Prompt(text) for text in captions]
    group = Group("retained", "retain", prompts, {"before": pixels, "after": pixels.flip(0)}, {})
    evidence = Evidence({"retained": group}, ("shape", "star"), TinyJudge(), 0)
    metric = registry.read("metric", {"name": "clip_score", "model": "tiny2"}).build()
    (result,) = metric.measure(evidence)
    assert result.metric == metric.result_prefix() == "clip_score_tiny2"
    assert result.before.value == pytest.approx(match.mean(), abs=1e-5)
    assert result.after.value < result.before.value
    assert result.settings["weights"] == record("clip2")["sha256"][:16]
    (first,) = registry.build("metric", "clip_score", {}).measure(evidence)
    assert first.before.value != pytest.approx(result.before.value, abs=1e-3)
    assert first.settings["model"] == "tiny CLIP"
    own = replace(evidence, judge=judge)
    (second,) = registry.build("metric", "clip_score", {}).measure(own)
    assert second.before == result.before
    assert second.settings == result.settings


@pytest.mark.parametrize("judge", [TinyJudge(), SecondTinyJudge()])
def test_a_long_caption_counts_up_to_the_clips_length(judge: TinyJudge) -> None:
    pixels = torch.from_numpy(painter.paint_batch(2, np.random.default_rng(4))[1])
    words = "a red star on a blue ground with " * 12
    scores = judge.clip_scores(pixels, [words + "dots", words + "stripes"])
    assert scores == pytest.approx(judge.clip_scores(pixels, [words, words]), abs=1e-6)


def test_weights_of_the_second_clip_are_its_own() -> None:
    with pytest.raises(UserError, match="its own weights"):
        registry.read("metric", {"name": "clip_score", "model": "tiny2", "weights": "file"}).build()


def test_evaluate_takes_a_second_judge(tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        "concept: {shape: star}\n"
        "sampling: {steps: 4, batch_size: 16, precision: bf16}\n"
        "groups: {direct: {prompts: tiny_star, role: forget, n: 8}}\n"
        "metrics: [concept_rate]\n"
    )
    command = ["evaluate", "tiny-sd", "--before", "tiny-sd", "--suite", str(suite)]
    command += ["--second-judge", "tiny2", "-o", str(tmp_path / "out"), "-q"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "two judges agree on the shape, after" in result.output
    content = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert content["second_judge"]["name"] == "tiny2"
    assert content["second_judge"]["judge"] == record("judge2")["sha256"][:16]
    assert {row["attribute"] for row in content["second_judge"]["agreement"]} == set(
        TinyJudge.classes
    )
    assert "Second judge" in (tmp_path / "out/report.html").read_text()
