"""Merged erasures: laws of the sum, refused inputs, and the same sum by two LoRAs in plain
diffusers.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError
from concept_eraser.cli.main import app
from concept_eraser.exporting import merge
from concept_eraser.models.loading import load
from concept_eraser.utils import resources
from tests.conftest import short
from tests.models.test_lora import apart, rendered_image
from tests.models.test_lora import plain as pipeline_of

FOLDER = resources.tiny_weights() / "tiny-sd"
KINDS: dict[str, dict[str, Any]] = {
    "star": {"training__lr": 2e-3},
    "moon": {
        "forget__prompts": "tiny_moon",
        "retain__prompts": "tiny_five_rest",
        "training__lr": 2e-3,
    },
    "words": {
        "target": "text_encoder",
        "trainable": {"select": "text_attention"},
        "training__lr": 1e-3,
    },
    "lora_star": {
        "trainable": {"select": "cross_attention", "lora": 2},
        "training__lr": 0.02,
        "save": "pipeline",
    },
    "lora_moon": {
        "forget__prompts": "tiny_moon",
        "retain__prompts": "tiny_five_rest",
        "trainable": {"select": "cross_attention", "lora": 3},
        "training__lr": 0.02,
    },
}


def plain(folder: Path = FOLDER) -> Any:
    """A folder, or the bundled pipeline, as plain diffusers loads it."""
    return pipeline_of(folder)


@pytest.fixture(scope="module")
def runs(tiny_fp32: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on a checkpoint in fp32. One of the two LoRA runs has its LoRA alone."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: concept_eraser.erase(
            short(training__steps=2, model=str(tiny_fp32), **changes), output=folder / name
        ).folder
        for name, changes in KINDS.items()
    }


def tensors(source: Any) -> dict[tuple[str, str], torch.Tensor]:
    model = load(source)
    return {
        (part, name): value
        for part, module in model.parts.items()
        for name, value in module.state_dict().items()
    }


def same(a: Any, b: Any) -> bool:
    one, other = tensors(a), tensors(b)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_one_erasure_is_itself_and_weight_0_the_original(runs, tmp_path: Path) -> None:
    assert same(merge.merge(runs["star"], output=tmp_path / "one").path, runs["star"])
    assert same(
        merge.merge(runs["star"], runs["moon"], output=tmp_path / "none", weights=[0, 0]).path,
        "tiny-sd",
    )
    assert same(
        merge.merge(runs["star"], runs["moon"], output=tmp_path / "first", weights=[1, 0]).path,
        runs["star"],
    )
    assert not same(runs["star"], "tiny-sd")


def test_the_order_does_not_matter_and_the_sum_is_the_sum(runs, tmp_path: Path) -> None:
    names = ("star", "moon", "words")
    there = merge.merge(*(runs[n] for n in names), output=tmp_path / "there", weights=[1, 0.5, -2])
    back = merge.merge(
        *(runs[n] for n in reversed(names)), output=tmp_path / "back", weights=[-2, 0.5, 1]
    )
    assert same(there.path, back.path)
    base, each, merged_tensors = (
        tensors("tiny-sd"),
        [tensors(runs[n]) for n in names],
        tensors(there.path),
    )
    for key, value in base.items():
        expected = value + sum(
            w * (one[key] - value) for w, one in zip((1, 0.5, -2), each, strict=True)
        )
        torch.testing.assert_close(merged_tensors[key], expected, rtol=1e-5, atol=1e-6)
    assert {
        part
        for part, _ in merged_tensors
        if not torch.equal(merged_tensors[part, _], base[part, _])
    } == {
        "denoiser",
        "text_encoder",
    }
    length = (
        sum(float((merged_tensors[k].double() - base[k].double()).square().sum()) for k in base)
        ** 0.5
    )
    assert there.length == pytest.approx(length, rel=1e-4)
    assert there.apart == pytest.approx(sum(one**2 for one in there.lengths) ** 0.5)


def test_a_model_in_memory_is_not_changed(runs, tmp_path: Path, tiny) -> None:
    result = merge.merge(runs["star"], runs["moon"], output=tmp_path / "sum", before=tiny)
    assert same(tiny, "tiny-sd")
    assert not same(result.path, "tiny-sd")


def test_two_loras_stacked_in_plain_diffusers_are_the_weighted_merge(runs, tmp_path: Path) -> None:
    """The images agree within one level of 255.

    diffusers adds the factors in the forward pass, and the merge adds them to the weights.
    """
    pipe = plain()
    original = rendered_image(pipe)
    for name in ("star", "moon"):
        pipe.load_lora_weights(str(runs[f"lora_{name}"] / "lora"), adapter_name=name)
    for weights in ((1.0, 1.0), (1.0, -0.5)):
        pipe.set_adapters(["star", "moon"], adapter_weights=list(weights))
        stacked_image = rendered_image(pipe)
        result = merge.merge(
            runs["lora_star"], runs["lora_moon"], output=tmp_path / f"{weights[1]}", weights=weights
        )
        assert apart(rendered_image(plain(result.path)), stacked_image) <= 1
        assert apart(stacked_image, original) > 5, "both show"
    alone = rendered_image(plain(runs["lora_star"] / "pipeline"))
    assert apart(stacked_image, alone) > 1, "and the second counts"


def test_bad_merges_are_refused(runs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for sources, options, message in [
        (("star", "star"), {}, "the same erasure"),
        (("star", "moon"), {"weights": [1]}, "found 1 weights for 2 runs"),
        (("star",), {"weights": [float("nan")]}, "finite"),
        ((), {}, "nothing to merge"),
        (("star", "moon"), {"before": runs["words"]}, "did not train"),
    ]:
        with pytest.raises(UserError, match=message):
            merge.merge(*(runs[name] for name in sources), output=out, **options)
    with pytest.raises(UserError, match="--before"):
        merge.merge(runs["star"] / "pipeline", output=out)
    with pytest.raises(UserError, match="nowhere is no run folder of this machine"):
        merge.merge(tmp_path / "nowhere", output=out)
    assert not out.exists()
    with pytest.raises(UserError, match="exists already"):
        merge.merge(runs["star"], output=tmp_path)


def test_runs_of_other_models_are_refused_by_name_and_by_weights(
    runs, tiny_fp32: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "renamed"
    shutil.copytree(runs["moon"], copy)
    text = (copy / "recipe.yaml").read_text()
    (copy / "recipe.yaml").write_text(
        text.replace(f"model: {tiny_fp32}", f"model: {runs['star'] / 'pipeline'}")
    )
    with pytest.raises(UserError, match="erasures of different models"):
        merge.merge(runs["star"], copy, output=tmp_path / "out")
    second = concept_eraser.erase(
        short(model=str(runs["words"] / "pipeline"), training__steps=1), output=tmp_path / "second"
    ).folder
    with pytest.raises(
        UserError, match="second was not made from tiny-sd: they differ in text_encoder"
    ):
        merge.merge(runs["star"], second, output=tmp_path / "out", before="tiny-sd")
    with pytest.raises(UserError, match=r"star was not made from .*: they differ in text_encoder"):
        concept_eraser.export(
            runs["star"], "diffusers", strength=0.5, before=runs["words"], output=tmp_path / "half"
        )


def test_a_lora_run_of_another_original_is_not_merged(
    runs, tiny_fp32: Path, tmp_path: Path
) -> None:
    """The second run was trained on the first, so it has the change of the first already."""
    other = tmp_path / "other"
    pipe = plain(tiny_fp32)
    with torch.no_grad():
        for value in pipe.unet.parameters():
            value *= 1.05
    pipe.save_pretrained(other)
    second = concept_eraser.erase(
        short(training__steps=1, **{**KINDS["lora_moon"], "model": str(runs["lora_moon"])}),
        output=tmp_path / "second",
    ).folder
    assert not (second / "weights.safetensors").exists()
    for sources, before in (
        ((runs["lora_moon"],), other),
        ((runs["lora_moon"], second), tiny_fp32),
    ):
        with pytest.raises(UserError, match=r"other weights in denoiser than .* --before"):
            merge.merge(*sources, output=tmp_path / "out", before=before)
    assert not (tmp_path / "out").exists()
    moved = tmp_path / "moved"
    shutil.copytree(tiny_fp32, moved)
    merged = merge.merge(runs["lora_moon"], output=tmp_path / "moon", before=moved)
    assert same(merged.path, runs["lora_moon"])


def test_the_verb_writes_a_folder_that_says_what_it_is(
    runs, tiny_fp32: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "both"
    result = CliRunner().invoke(
        app,
        ["merge", str(runs["star"]), str(runs["moon"]), "--weights", "1,0.5", "-o", str(folder)],
    )
    assert result.exit_code == 0, result.output
    command = shlex.split(result.output.split("next: ")[1].split("    (")[0])
    suite = ["--suite", "SUITE", "--output", f"{folder}-SUITE"]  # one folder for each suite
    assert command[1:] == ["evaluate", str(folder), "--before", str(tiny_fp32), *suite]
    note = json.loads((folder / merge.NOTE).read_text())
    assert note["sources"] == [str(runs["star"]), str(runs["moon"])]
    assert note["weights"] == [1.0, 0.5]
    assert note["before"] == str(tiny_fp32)
    assert apart(rendered_image(plain(folder)), rendered_image(plain())) > 0
    wrong = CliRunner().invoke(
        app, ["merge", str(runs["star"]), "--weights", "one", "-o", str(tmp_path / "x")]
    )
    assert "cannot read --weights" in str(wrong.exception)
