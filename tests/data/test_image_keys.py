"""The key of a cached image: everything that changes the image is in it, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from concept_eraser.data import generate
from concept_eraser.models.loading import load
from tests import families
from tests.small_model import small_sd

SAMPLING = generate.Sampling(steps=2, guidance=3.0, batch_size=2)


def key(model: Any) -> str:
    return generate.request_images(model, ["a red star"], [1], SAMPLING).folder.name


def test_two_loads_of_a_folder_have_one_key_also_from_another_place(tmp_path: Path) -> None:
    shutil.copytree(small_sd(), tmp_path / "moved")
    assert key(load(small_sd())) == key(load(small_sd())) == key(load(str(tmp_path / "moved")))


@pytest.mark.parametrize(
    ("file", "entry", "value"),
    [
        ("vae/config.json", "scaling_factor", 0.5),
        ("text_encoder/config.json", "hidden_act", "gelu"),
        ("unet/config.json", "attention_head_dim", 2),
        ("scheduler/scheduler_config.json", "timestep_spacing", "trailing"),
    ],
)
def test_a_repaired_configuration_gives_new_images(
    file: str, entry: str, value: Any, tmp_path: Path
) -> None:
    """The weights are the same, so their hash is, too."""
    shutil.copytree(small_sd(), tmp_path / "model")
    config = tmp_path / "model" / file
    content = json.loads(config.read_text())
    assert content[entry] != value
    config.write_text(json.dumps(content | {entry: value}))
    changed, original = load(str(tmp_path / "model")), load(small_sd())
    assert generate.model_fingerprint(changed) == generate.model_fingerprint(original)
    assert key(changed) != key(original)


def test_the_switches_of_the_pipeline_are_in_the_key(tmp_path: Path) -> None:
    model = load(families.build("sdxl", tmp_path / "sdxl"))
    before = key(model)
    zeros = model.pipeline.config.force_zeros_for_empty_prompt
    model.pipeline.register_to_config(force_zeros_for_empty_prompt=not zeros)
    assert key(model) != before


@pytest.mark.parametrize(
    ("entry", "value"),
    [("_name_or_path", "elsewhere"), ("architectures", ["X"]), ("transformers_version", "0")],
)
def test_where_weights_came_from_is_not_in_the_key(entry: str, value: Any) -> None:
    model = load(small_sd())
    before = key(model)
    setattr(model.parts["text_encoder"].config, entry, value)
    assert key(model) == before
