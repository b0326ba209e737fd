"""The command for zero-shot accuracies of a CLIP run on other labels."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from concept_eraser import api, registry
from concept_eraser.data.datasets.imagenet import class_names
from concept_eraser.utils.errors import UserError
from studies import zero_shot
from tests.data.test_datasets import imagenet_files, tiny_open_clip


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
    # without the images of the first and the last class; both stay possible answers
    right = zero_shot.accuracy(clip, data, [zero_shot.TEMPLATE], {0, 999})
    expected = float((logits.argmax(1) == data.labels)[1:3].float().mean())
    assert (right["value"], right["n"]) == (expected, 2)
    # with the predictions as labels every image is right
    data.labels[:] = logits.argmax(1)
    assert zero_shot.accuracy(clip, data, [zero_shot.TEMPLATE])["value"] == 1.0
    with pytest.raises(UserError, match="has classes 0 to 999, found 1000"):
        zero_shot.accuracy(clip, data, [zero_shot.TEMPLATE], [3, 1000])
    with pytest.raises(UserError, match="all images are of the classes that are left out"):
        zero_shot.accuracy(clip, data, [zero_shot.TEMPLATE], range(1000))


def test_the_classes_that_the_authors_leave_out() -> None:
    """The dogs from Chihuahua to the hairless one, and the cats, cougar and lynx included."""
    numbers = zero_shot.class_numbers(["281-287", "151-268", "152"])
    names = class_names()
    assert len(numbers) == 125
    assert [names[i] for i in (150, 151, 280, 281, 287, 288)] == [
        "sea lion",
        "Chihuahua",
        "grey fox",
        "tabby cat",
        "lynx",
        "leopard",
    ]
    assert names[268].startswith("Mexican hairless dog")
    assert (numbers[0], numbers[-1]) == (151, 287)
    for text in ("dogs", "7-", "9-3", "-1"):
        with pytest.raises(UserError, match=f"cannot read the classes '{text}'"):
            zero_shot.class_numbers([text])


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
    arguments += ["--without", "0"]
    output = tmp_path / "numbers.json"
    monkeypatch.setattr(sys, "argv", ["zero_shot", str(run.folder), *arguments, "-o", str(output)])
    zero_shot.main()
    result = json.loads(output.read_text())
    before, after = (result["accuracy"][when] for when in ("before", "after"))
    assert before["value"] > after["value"]  # colours were never trained; these steps are long
    data = registry.build("dataset", "painted", {"n": 60, "label": "color"}).load("test")
    assert before["n"] == int((data.labels != 0).sum()) < len(data)
    assert result["without"] == [0]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["before", "after"]
    assert f"n = {before['n']}" in lines[0]
    for changed, message in (
        (["imagenet", "--set", f"root={tmp_path}"], "ImageNet is not at"),
        (["painted", "--template", "a circle"], "a template needs {}"),
        (["painted", "--without", "star"], "cannot read the classes 'star'"),
    ):
        monkeypatch.setattr(sys, "argv", ["zero_shot", str(run.folder), *changed])
        with pytest.raises(SystemExit):
            zero_shot.main()
        assert message in capsys.readouterr().err
