"""The command for zero-shot accuracies of a CLIP run on other labels."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import open_clip
import pytest
import torch

from concept_eraser import api, registry
from concept_eraser.models.families.clip import Clip
from studies import zero_shot
from tests.data.test_datasets import imagenet_files


def tiny_open_clip() -> Clip:
    torch.manual_seed(0)
    vision = open_clip.CLIPVisionCfg(
        layers=1, width=32, head_width=16, patch_size=16, image_size=32
    )
    text = open_clip.CLIPTextCfg(context_length=77, vocab_size=49408, width=32, heads=2, layers=1)
    return Clip.from_object(open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text))


def test_an_open_clip_model_on_a_stand_in_of_imagenet(tmp_path: Path) -> None:
    """The accuracy is that of all 1,000 logits, which the model gives in one call."""
    clip = tiny_open_clip()
    tones = {f"n{1440764 + i:08}": tone for i, tone in ((0, 0), (3, 90), (400, 180), (999, 255))}
    imagenet_files(tmp_path, tones)
    data = registry.build("dataset", "imagenet", {"root": str(tmp_path), "size": 32}).load("test")
    with torch.no_grad():
        logits = clip.zero_shot(data.names, [zero_shot.TEMPLATE])(data.inputs(range(4)))
        texts = zero_shot.FixedTexts(clip.zero_shot(data.names, [zero_shot.TEMPLATE]))
        assert torch.allclose(texts(data.inputs(range(4))), logits, atol=1e-5)
    assert logits.shape == (4, 1000)
    right = zero_shot.accuracy(clip, data, [zero_shot.TEMPLATE])
    expected = float((logits.argmax(1) == data.labels).float().mean())
    assert (right["value"], right["n"]) == (expected, 4)
    # with the predictions as labels every image is right
    data.labels[:] = logits.argmax(1)
    assert zero_shot.accuracy(clip, data, [zero_shot.TEMPLATE])["value"] == 1.0


def test_the_command_measures_both_models_of_a_run(
    shared_tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = api.erase(
        model="tiny-sd",
        target="clip",
        forget={"data": "painted", "options": {"n": 40}, "classes": ["star"], "loss": "ascent"},
        retain="rest",
        trainable="text_attention",
        training={"steps": 2, "batch_size": 8, "lr": 0.03, "device": "cpu"},
        output=tmp_path / "run",
    )
    arguments = ["painted", "--set", "n=60", "label=color", "--template", "a {} circle"]
    output = tmp_path / "numbers.json"
    monkeypatch.setattr(sys, "argv", ["zero_shot", str(run.folder), *arguments, "-o", str(output)])
    zero_shot.main()
    result = json.loads(output.read_text())
    before, after = (result["accuracy"][when] for when in ("before", "after"))
    assert before["value"] > after["value"]  # colours were never trained; these steps are long
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["before", "after"]
    assert f"n = {before['n']}" in lines[0]
    for changed, message in (
        (["imagenet", "--set", f"root={tmp_path}"], "ImageNet is not at"),
        (["painted", "--template", "a circle"], "a template needs {}"),
    ):
        monkeypatch.setattr(sys, "argv", ["zero_shot", str(run.folder), *changed])
        with pytest.raises(SystemExit):
            zero_shot.main()
        assert message in capsys.readouterr().err
