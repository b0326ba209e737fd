"""What a model cannot train is refused before the images of the objectives are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import concept_eraser
from concept_eraser import UserError
from concept_eraser.erasers.base import Part
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs.job import Job, Outcome
from concept_eraser.targets import adapter, denoiser, text_encoder
from concept_eraser.tiny import families
from concept_eraser.utils.progress import silent
from tests.conftest import short

ATTACK = {"method": {"name": "adversarial"}, "attack": {"n": 2}}
HISTOGRAM = {
    "method": {"name": "uno", "rule": "none", "histogram": 1.0},
    "histogram": {"concept": {"shape": "star"}},
}


@pytest.fixture(autouse=True)
def no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> NoReturn:
        raise AssertionError("the images are made before the error")

    for target in (denoiser, text_encoder):
        monkeypatch.setattr(target, "make_latents", fail)


@pytest.mark.parametrize("target", ["denoiser", "text_encoder"])
def test_a_lora_that_does_not_fit(target: str, tiny: Any, tmp_path: Path) -> None:
    embeddings = {"forget__loss": "anchor", "retain__loss": "distill", "target": "text_encoder"}
    changes = embeddings if target == "text_encoder" else {}
    trainable = {"select": r"re:.*conv.*|.*norm.*", "lora": 4}
    with pytest.raises(UserError, match="a LoRA changes linear layers"):
        concept_eraser.erase(
            short(**changes, trainable=trainable), model=tiny, output=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("dit", ATTACK, "an adversary on the text's embedding needs a model"),
        (
            "sd3",
            {
                "forget__loss": "balance",
                "forget__images": "free",
                "method": {"name": "weighted"},
            },
            "is trained by flow matching",
        ),
        ("sd3", {"forget__loss": "resteer"}, "the loss 'resteer' needs a UNet's"),
        (
            "flux",
            {"trainable": {"select": "all", "start_token": "frozen"}},
            "start_token: frozen needs a UNet's",
        ),
    ],
)
def test_what_a_family_lacks(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = str(families.build(family, tmp_path / family))
    rows: dict[str, Any] = {"trainable": {"select": "all"}}
    if family == "dit":
        rows |= {"forget": {"prompts": ["goldie"]}, "retain": {"prompts": ["281"]}}
    with pytest.raises(UserError, match=message):
        concept_eraser.erase(short(model=source, **rows | changes), output=tmp_path / "run")


def test_a_projection_without_a_layer(tiny: Any, tmp_path: Path) -> None:
    trainable = {"select": r"re:norm1\.bias$", "project": 0.9}
    with pytest.raises(UserError, match=r"trainable\.project: no trained parameter"):
        concept_eraser.erase(short(trainable=trainable), model=tiny, output=tmp_path / "run")


def test_attacked_prompts_without_room(tiny: Any, tmp_path: Path) -> None:
    changes = {
        "target": "text_encoder",
        "trainable__select": "all",
        "forget__loss": "esd",
        "method": {"name": "adversarial"},
        "attack": {"n": 2, "tokens": 75, "loss": "prediction"},
    }
    with pytest.raises(UserError, match=r"attack\.tokens: 75 do not fit before the prompts"):
        concept_eraser.erase(short(**changes), model=tiny, output=tmp_path / "run")


@pytest.mark.parametrize(
    ("histogram", "message"),
    [
        ({"judge": "no-such-judge"}, "no-such-judge"),
        ({"concept": {"shape": "unicorn"}}, "unicorn"),
    ],
)
def test_a_judge_of_another_concept(
    histogram: dict[str, Any], message: str, tiny: Any, tmp_path: Path
) -> None:
    changes = HISTOGRAM | {"histogram": HISTOGRAM["histogram"] | histogram}
    with pytest.raises(UserError, match=message):
        concept_eraser.erase(short(**changes), model=tiny, output=tmp_path / "run")


def test_a_group_that_the_watched_suite_lacks(tiny: Any, tmp_path: Path) -> None:
    watch = {"suite": "tiny_star", "group": "no-such-group"}
    with pytest.raises(UserError, match="no-such-group"):
        concept_eraser.erase(short(watch=watch), model=tiny, output=tmp_path / "run")


def test_a_lora_that_is_not_finite_leaves_the_weights(tiny: Any, tmp_path: Path) -> None:
    recipe = recipes.load(short(trainable={"select": "cross_attention", "lora": 2}))
    before = {name: value.clone() for name, value in tiny.denoiser.state_dict().items()}
    names = [name for name in before if ".attn2.to_k.weight" in name]
    lora = adapter.add_adapter(recipe, tiny.denoiser, names)
    assert lora is not None
    part = Part(tiny.denoiser, lora.tensors, ["forget"], adapter=lora)
    with torch.no_grad():
        tiny.denoiser.get_parameter(lora.tensors[-1]).fill_(torch.inf)
    with pytest.raises(UserError, match="the erased weights are not finite"):
        Job(recipe, tiny, tmp_path, silent).write(Outcome(part, 0.0, {}))
    after = tiny.denoiser.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_weights_of_a_lora_before_its_merge(tiny: Any) -> None:
    recipe = recipes.load(short(trainable={"select": "cross_attention", "lora": 2}))
    names = [name for name, _ in tiny.denoiser.named_parameters() if ".attn2.to_k.weight" in name]
    lora = adapter.add_adapter(recipe, tiny.denoiser, names)
    assert lora is not None
    with torch.no_grad():
        for name in lora.tensors:
            tiny.denoiser.get_parameter(name).normal_()
    expected = dict(lora.sums())
    merged = lora.merge()
    assert expected.keys() == merged.keys()
    assert all(torch.equal(expected[name], weight) for name, weight in merged.items())
