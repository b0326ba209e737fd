"""Families x what is trained x methods, through the whole road: erase, save, and the same images
in plain diffusers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import concept_eraser
from concept_eraser.models.loading import load
from concept_eraser.recipes.selections import select
from concept_eraser.utils.errors import UserError
from tests import families

NAMES = ("sd", "sdxl", "sd3", "flux", "dit")
TRAINED: dict[str, dict[str, Any]] = {
    "full": {"select": "all"},
    "cross-attention": {"select": "cross_attention"},
    "lora": {"select": "all", "lora": 2},
}
METHODS: dict[str, dict[str, Any]] = {
    "munba": {"forget": {"loss": "anchor"}, "method": "munba"},
    "uno": {"forget": {"loss": "data"}, "method": "uno"},
    "esd": {
        "forget": {"loss": "esd", "images": "free"},
        "method": {"name": "weighted", "retain": 0.0},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where the tiny pipeline of a family is saved; of Stable Diffusion it is the bundled one."""
    root, made = tmp_path_factory.mktemp("matrix"), {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = families.build(name, root / name) if name != "sd" else root / name
            if name == "sd":
                load("tiny-sd").save(made[name])
        return made[name]

    return of


def job(name: str, model: Path, trained: str, method: str) -> dict[str, Any]:
    wanted, other = families.texts(name)
    asked = METHODS[method]
    anchor = {"anchor": other} if asked["forget"]["loss"] == "anchor" else {}
    content = {
        "model": str(model),
        "model_options": families.options(name),
        "forget": {"prompts": [wanted], "n": 2, **asked["forget"], **anchor},
        "retain": {"prompts": [other], "n": 2},
        "method": asked["method"],
        "trainable": TRAINED[trained],
        "training": {"steps": 2, "batch_size": 2, "lr": 2e-2, "device": "cpu"},
        "generation": {"steps": 2, "guidance": 2.0},
    }
    if method == "esd":
        del content["retain"]
    return content


def plain(name: str, folder: Path) -> Any:
    if name != "sd":
        return families.plain(name, folder)
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def alike(one: np.ndarray, other: np.ndarray) -> bool:
    """To one of 255 levels: W + up down rounds otherwise than what diffusers adds to the layer's
    output.
    """
    return bool(abs(one.astype(int) - other.astype(int)).max() <= 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_trains_everything_by_every_method(
    name: str, trained: str, method: str, folder: Any, tmp_path: Path
) -> None:
    asked = job(name, folder(name), trained, method)
    # it knows classes, and attends to nothing but the image
    if (name, trained) == ("dit", "cross-attention"):
        with pytest.raises(UserError, match="cross_attention"):
            concept_eraser.erase(asked, output=tmp_path / "run")
        return
    original = load(folder(name))
    original.configure(families.options(name))
    before = {key: value.detach().clone() for key, value in original.denoiser.named_parameters()}
    run = concept_eraser.erase(asked, output=tmp_path / "run")
    changed = load_file(run.folder / "weights.safetensors")
    moved = [key for key, value in changed.items() if not torch.equal(value, before[key])]
    assert len(moved) > len(changed) / 2
    if trained != "lora":
        assert set(changed) == set(select(before, asked["trainable"]["select"]))
    after = families.drawn(name, run.load())
    assert (after != families.drawn(name, original)).any()
    whole = plain(name, run.folder / "pipeline")
    assert (families.by_hand(name, whole) == after).all()
    if trained == "lora" and name != "dit":  # DiT's pipeline takes no LoRA
        pipe = plain(name, folder(name))
        pipe.load_lora_weights(str(run.folder / "lora"))
        assert alike(families.by_hand(name, pipe), after)
        assert not alike(families.drawn(name, original), after)
