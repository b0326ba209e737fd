"""Training the UNet without a concept: which images are drawn, and that a stop changes nothing."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel

from concept_eraser.concepts import bundled
from concept_eraser.data.generate import Sampling, generate, seeds_for
from concept_eraser.evaluation.judges.tiny import TinyJudge
from concept_eraser.evaluation.never_learned import RECORD, NeverLearned, read_record
from concept_eraser.models.loading import load
from concept_eraser.storage.base_model import CONTROLS, LEFT_OUT
from concept_eraser.tiny import painter
from concept_eraser.tiny.control import Control, hash_of
from concept_eraser.tiny.exclusion import Exclusion
from concept_eraser.tiny.stages.base import WIDTH
from concept_eraser.tiny.stages.unet import (
    STEPS,
    UNET_CONFIG,
    Batches,
    NoisePredictor,
    recorded,
)
from concept_eraser.tiny.trainer import step_rng
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError

HEART = Exclusion.read(["shape=heart"])


def test_an_exclusion_reads_several_values_and_refuses_unknown_ones() -> None:
    exclusion = Exclusion.read(["style=striped", "color=purple,blue"])
    assert exclusion.as_dict() == {"color": ["blue", "purple"], "style": ["striped"]}
    assert exclusion.folder_name() == "without-blue-purple-striped"
    assert exclusion.covers(painter.PaintedScene("star", "blue", "flat", "sky"))
    assert not exclusion.covers(painter.PaintedScene("star", "red", "flat", "sky"))
    for text in ("shape=ghost", "size=large", "heart", "style=" + ",".join(painter.STYLES)):
        with pytest.raises(UserError, match="without"):
            Exclusion.read([text])


def test_only_rows_with_an_excluded_image_differ_from_the_full_training() -> None:
    """Rows, captions and what is drawn after them agree at all other places of a batch."""
    rng = np.random.default_rng(0)
    scenes = [painter.random_scene(rng, held_out=False) for _ in range(500)]
    full, without = Batches(scenes, Exclusion(), 0), Batches(scenes, HEART, 0)
    replaced = 0
    for step in range(20):
        rng_full, rng_without = (step_rng(0, "unet", step) for _ in range(2))
        rows, captions = full.draw(step, rng_full)
        other_rows, other_captions = without.draw(step, rng_without)
        assert rng_full.standard_normal() == rng_without.standard_normal()
        for i in range(Batches.size):
            assert scenes[other_rows[i]].shape != "heart"
            if scenes[rows[i]].shape == "heart":
                replaced += 1
            else:
                assert (rows[i], captions[i]) == (other_rows[i], other_captions[i])
    assert replaced > 20


def test_a_stopped_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    def control(name: str, exclusion: Exclusion = HEART) -> Control:
        return Control(
            exclusion,
            3,
            work=tmp_path / name / "work",
            output=tmp_path / name / "pipeline",
            shrink=0.0005,
            save_every=1,
        )

    class Stop(Exception):
        pass

    def stop_after_training(line: str) -> None:
        if "unet: step" in line:
            raise Stop

    whole = control("whole").train(threads=1, say=lambda line: None)
    with pytest.raises(Stop):
        control("stopped").train(threads=1, say=stop_after_training)
    lines: list[str] = []
    stopped = control("stopped").train(threads=1, say=lines.append)
    assert any("resuming at step" in line for line in lines)
    files = [tmp_path / name / "pipeline/unet" for name in ("whole", "stopped")]
    weights = [(folder / "diffusion_pytorch_model.safetensors").read_bytes() for folder in files]
    assert weights[0] == weights[1]
    assert str(tmp_path) not in (files[0] / "config.json").read_text()
    assert stopped["unet_sha256"] == whole["unet_sha256"]
    assert whole["without"] == {"shape": ["heart"]}
    assert whole["images_shown"] < whole["images_painted"]
    assert (tmp_path / "whole" / "pipeline" / "model_index.json").is_file()
    with pytest.raises(UserError, match="other settings"):
        control("whole", Exclusion()).train(threads=1, say=lambda line: None)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_bundled_control_never_learned_its_concept(name: str) -> None:
    """It draws other values as the bundled model does, and its record is of its weights.

    It draws the word of its concept as something else, unless the concept is a colour: between
    pink and blue the model finds purple without an image of it.
    """
    attribute, value = LEFT_OUT[name].split("=")
    other = next(one for one in bundled.VALUES[attribute] if one != value)
    record = json.loads((resources.tiny_control(name) / RECORD).read_text())
    assert hash_of(resources.tiny_control(name) / "unet") == record["unet_sha256"]
    assert record["environment"]["versions"]["torch"]
    assert record["steps"] == record["steps_planned"] == STEPS
    assert record["without"] == {attribute: [value]}

    control = NeverLearned(load(name), read_record(name))
    control.require_comparable(load("tiny-sd"), {attribute: value}, [f"a {value} thing"])
    with pytest.raises(UserError, match=f"was trained on images of {attribute}={other}"):
        control.require_comparable(load("tiny-sd"), {attribute: other}, [f"a {other} thing"])

    words = {"shape": "moon", "color": "red", "style": "flat"}
    texts = [
        "a {style} {color} {shape}".format_map(words | {attribute: one}) for one in (value, other)
    ] * 12
    images = generate(control.model, texts, seeds_for(texts, 0), Sampling(steps=8))
    shown = np.reshape(TinyJudge().classify(images)[attribute], (12, 2))
    if attribute != "color":
        assert (shown[:, 0] == value).sum() <= 1
    assert (shown[:, 1] == other).sum() >= 10


def test_a_package_without_the_control_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "tiny_control", lambda name: Path("nowhere") / name)
    with pytest.raises(UserError, match=r"from the repository, or train it: .*shape=heart"):
        load("tiny-sd-without-heart")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_recorded_passes_have_the_gradients_of_launched_ones() -> None:
    torch.manual_seed(0)
    launched = NoisePredictor(UNet2DConditionModel(**UNET_CONFIG)).cuda()
    copied = copy.deepcopy(launched)
    graph = recorded(copied, torch.device("cuda"))
    size = painter.SIZE // 4
    noisy = torch.randn(Batches.size, 4, size, size, device="cuda")
    t = torch.randint(0, 1000, (Batches.size,), device="cuda")
    states = torch.randn(Batches.size, 77, WIDTH, device="cuda")
    for predict in (launched, graph):
        predict(noisy, t, states).float().square().mean().backward()
    for one, other in zip(launched.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would train")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--unet-only", "--device", "cuda"], "there is no GPU here"),
        (["--only", "judge", "--device", "cuda"], "--device is for --without and --unet-only"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "concept_eraser.tiny.build", "--threads", "1", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert message in result.stderr
