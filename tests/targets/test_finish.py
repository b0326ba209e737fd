"""`finish`: training and then a closed form in one run equal the closed form on the
trained model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import concept_eraser
from concept_eraser import UserError
from concept_eraser.exporting import model_card
from concept_eraser.recipes import recipe
from concept_eraser.targets import cross_attention_edit
from concept_eraser.utils.errors import Interrupted

FORGET = {
    "prompts": ["a red star", "a blue star"],
    "loss": "anchor",
    "anchor": {"shape": "circle"},
    "n": 4,
}
RETAIN = {"prompts": ["a red heart", "a blue house"], "loss": "distill", "n": 4}
QUICK = {
    "training": {"steps": 2, "batch_size": 2, "lr": 1e-3, "save_every": 1, "device": "cpu"},
    "generation": {"steps": 2, "batch_size": 4},
}
EDIT = {
    "forget": {"prompts": FORGET["prompts"], "anchor": "a green circle"},
    "retain": RETAIN["prompts"],
    "method": "uce",
    "trainable": "cross_attention_kv",
}


def finish_recipe(**changes: Any) -> dict[str, Any]:
    forget = {**FORGET, "anchor": "a green circle"}
    return {
        "model": "tiny-sd",
        "forget": forget,
        "retain": RETAIN,
        "method": "munba",
        "trainable": "cross_attention",
        **QUICK,
        **changes,
    }


def test_the_closed_form_edits_the_concepts_and_no_other_objective() -> None:
    """A training before it may have prompts of other roles, such as those of a fine-tuning."""
    content = finish_recipe(
        finish="uce",
        method="resalign",
        relearn={"prompts": ["a star"], "loss": "data", "n": 4},
    )
    pairs, preserved = cross_attention_edit.paired_prompts(recipe.load(content))
    assert pairs == [(text, "a green circle") for text in FORGET["prompts"]]
    assert preserved == ["", *RETAIN["prompts"]]


def test_it_is_the_closed_form_on_the_trained_model(tmp_path: Path) -> None:
    plain = concept_eraser.erase(finish_recipe(), output=tmp_path / "plain")
    by_hand = concept_eraser.erase({**EDIT, "model": str(plain.folder)}, output=tmp_path / "edit")
    both = concept_eraser.erase(finish_recipe(finish="uce"), output=tmp_path / "both")
    both_weights, plain_weights = (
        load_file(both.folder / "weights.safetensors"),
        load_file(plain.folder / "weights.safetensors"),
    )
    assert both_weights.keys() == plain_weights.keys()
    edit_weights = load_file(by_hand.folder / "weights.safetensors")
    assert 0 < len(edit_weights) < len(both_weights)
    for name, value in both_weights.items():
        torch.testing.assert_close(
            value, edit_weights.get(name, plain_weights[name]), rtol=1e-6, atol=1e-7
        )
    assert any(
        (both_weights[name] - plain_weights[name]).abs().max() > 1e-3 for name in edit_weights
    ), "the closed form moved something"
    report = json.loads((both.folder / "done.json").read_text())
    assert report["steps"] == 2
    assert report["finish"]["moved"] > 0
    card = model_card.card(both.folder)
    assert "with munba, then uce," in card
    assert "Then, in closed form" in card


def test_a_lora_is_merged_before_it(tmp_path: Path) -> None:
    lora = {"trainable": {"select": "all", "lora": {"rank": 2, "conv": True}}}
    plain = concept_eraser.erase(finish_recipe(**lora, save="changed"), output=tmp_path / "plain")
    by_hand = concept_eraser.erase({**EDIT, "model": str(plain.folder)}, output=tmp_path / "edit")
    both = concept_eraser.erase(finish_recipe(finish="uce", **lora), output=tmp_path / "both")
    both_weights, plain_weights, edit_weights = (
        load_file(run.folder / "weights.safetensors") for run in (both, plain, by_hand)
    )
    assert both_weights.keys() == plain_weights.keys()
    assert 0 < len(edit_weights) < len(both_weights)
    for name, value in both_weights.items():
        torch.testing.assert_close(
            value, edit_weights.get(name, plain_weights[name]), rtol=1e-6, atol=1e-7
        )
    assert (plain.folder / "lora").is_dir()
    assert not (both.folder / "lora").exists(), "what is written is more than the factors"
    assert "- lora" in model_card.card(plain.folder)
    assert "- lora" not in model_card.card(both.folder)


def test_a_merged_lora_can_be_undone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A closed form that fails leaves a model in memory as it was."""
    model = concept_eraser.load("tiny-sd")
    before = {name: value.clone() for name, value in model.denoiser.state_dict().items()}

    def fail(*_: Any) -> None:
        raise UserError("the edit failed")

    monkeypatch.setattr("concept_eraser.targets.cross_attention_edit.edit", fail)
    with pytest.raises(UserError, match="the edit failed"):
        concept_eraser.erase(
            finish_recipe(finish="uce", trainable={"select": "all", "lora": 2}),
            model=model,
            output=tmp_path / "run",
        )
    after = model.denoiser.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_resumed_run_is_finished_once(tmp_path: Path) -> None:
    whole = concept_eraser.erase(finish_recipe(finish="uce"), output=tmp_path / "whole")

    def stop(step: int, seconds: float) -> None:
        if step == 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        concept_eraser.erase(finish_recipe(finish="uce"), output=tmp_path / "part", on_step=stop)
    part = concept_eraser.erase(finish_recipe(finish="uce"), output=tmp_path / "part", resume=True)
    one, other = (load_file(run.folder / "weights.safetensors") for run in (whole, part))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"finish": "munba"},
            "finish: unknown closed form 'munba'.*mace-cfr.*rece.*uce.*finish: none leaves it out",
        ),
        (
            {"finish": "uce", "trainable": {"select": "all", "saliency": 0.5}},
            "also those that trainable.saliency keeps",
        ),
        ({"finish": {"name": "uce", "lamda": 1}}, "lamda"),
        ({"finish": "uce", "target": "text_encoder"}, "found target: text_encoder"),
        ({"finish": "rece", "method": "uce"}, "'uce', which trains nothing"),
    ],
)
def test_what_cannot_be_finished_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        recipe.load(finish_recipe(**changes))


def test_weights_that_are_not_trained_are_found_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"leaves out .*to_k.weight; select all, cross_attention or"
    ):
        concept_eraser.erase(
            finish_recipe(finish="uce", trainable="re:conv_in"), output=tmp_path / "run"
        )
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_a_recipe_without_it_keeps_its_fingerprint() -> None:
    assert "finish" not in recipe.load(finish_recipe()).resolved()
    assert recipe.load(finish_recipe(finish="uce")).resolved()["finish"]["preserve_scale"] == 1.0
