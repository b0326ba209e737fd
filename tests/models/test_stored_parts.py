"""A written pipeline has the precision of its checkpoint, and unchanged parts byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from concept_eraser.models import loading
from concept_eraser.models.stored_parts import StoredPart, weight_files
from concept_eraser.storage import writers
from concept_eraser.storage.digests import file_digest
from concept_eraser.storage.readers import read_tensor_types
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError

TINY = resources.tiny_weights() / "tiny-sd"
PARTS = ("unet", "vae", "text_encoder")


def digests(folder: Path) -> dict[str, str]:
    return {
        f"{part}/{path.name}": file_digest(path)
        for part in PARTS
        for path in sorted((folder / part).iterdir())
    }


def kinds(folder: Path) -> dict[str, set[str]]:
    return {
        part: {kind for file in weight_files(folder / part) for kind in kinds_of(file)}
        for part in PARTS
    }


def kinds_of(file: Path) -> set[str]:
    return set(read_tensor_types(file).values())


def write(model: Any, folder: Path) -> Path:
    writers.write_folder(folder, model.save, kind="model")
    return folder


def test_unchanged_parts_are_copies_and_the_changed_one_has_the_own_precision(
    tmp_path: Path,
) -> None:
    """The checkpoint is in fp16, the model in memory in fp32."""
    before = digests(TINY)
    model: Any = loading.load("tiny-sd")
    name, weight = next(iter(model.denoiser.named_parameters()))
    with torch.no_grad():
        weight += 1e-3
    own = {key: value.clone() for key, value in model.denoiser.state_dict().items()}
    place = write(model, tmp_path / "out")

    after = digests(place)
    changed = {key for key in before if before[key] != after[key]}
    assert changed <= {"unet/config.json", "unet/diffusion_pytorch_model.safetensors"}
    assert "unet/diffusion_pytorch_model.safetensors" in changed
    assert kinds(place) == {part: {"F16"} for part in PARTS}
    written = load_file(weight_files(place / "unet")[0])
    original = load_file(weight_files(TINY / "unet")[0])
    assert torch.equal(written[name], own[name].half())
    assert {key for key in original if not torch.equal(original[key], written[key])} == {name}
    # nothing is rounded in memory, and nothing is shared on the disk
    state = model.denoiser.state_dict()
    assert all(torch.equal(state[key], value) for key, value in own.items())
    assert digests(TINY) == before
    assert all(path.stat().st_nlink == 1 for path in place.rglob("*") if path.is_file())


def test_a_written_pipeline_is_the_model_again(tmp_path: Path) -> None:
    """An unchanged model gives the same bytes, twice, and loads as the same model."""
    model: Any = loading.load("tiny-sd")
    first = write(model, tmp_path / "first")
    assert digests(first) == {k: v for k, v in digests(TINY).items() if k in digests(first)}
    second = write(loading.load(first), tmp_path / "second")
    assert digests(second) == digests(first)
    for part, module in loading.load(second).parts.items():
        own = model.parts[part].state_dict()
        assert all(torch.equal(own[key], value) for key, value in module.state_dict().items())


def test_shards_and_mixed_precision_stay(tmp_path: Path) -> None:
    """Parts in shards are copied with their index, and each tensor has its own precision."""
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    model: Any = loading.load("tiny-sd")
    shutil.rmtree(source / "unet")
    model.denoiser.to(torch.bfloat16)
    model.denoiser.conv_in.float()
    model.denoiser.save_pretrained(source / "unet", max_shard_size="1MB")
    assert len(weight_files(source / "unet")) > 1

    place = write(loading.load(source), tmp_path / "copy")
    assert digests(place) == {k: v for k, v in digests(source).items() if k in digests(place)}
    assert weight_files(place / "unet") == [
        place / "unet" / file.name for file in weight_files(source / "unet")
    ]
    other: Any = loading.load(source)
    with torch.no_grad():
        other.denoiser.conv_out.weight += 1
    types = {
        key: kind
        for file in weight_files(write(other, tmp_path / "changed") / "unet")
        for key, kind in read_tensor_types(file).items()
    }
    assert {kind for key, kind in types.items() if key.startswith("conv_in.")} == {"F32"}
    assert {kind for key, kind in types.items() if not key.startswith("conv_in.")} == {"BF16"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_pipeline_in_memory_keeps_its_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(TINY, torch_dtype=dtype)
    place = write(loading.load(pipeline), tmp_path / "out")
    kind = {torch.float16: "F16", torch.float32: "F32"}[dtype]
    assert kinds(place) == {part: {kind} for part in PARTS}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        StoredPart.of_folder(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(UserError, match="no such file"):
        read_tensor_types(tmp_path / "other.safetensors")


def test_the_rounding_is_the_lost_share_of_the_change() -> None:
    """Half of a step between two numbers of bfloat16 is lost whole; a checkpoint in fp32 loses 0.

    Near 1, bfloat16 has steps of 2^-7.
    """
    value = {"w": torch.tensor([1 + 2**-9, 1.0])}
    change = {"w": torch.tensor([2**-9, 0.0])}
    in_bf16, in_fp32 = (StoredPart({"w": dtype}) for dtype in (torch.bfloat16, torch.float32))
    assert in_bf16.rounding(value, change.items()) == 1.0
    assert in_fp32.rounding(value, change.items()) == 0.0
    twice = {"w": torch.tensor([1 + 2**-9, 1 + 2**-7])}
    assert in_bf16.rounding(twice, [("w", twice["w"] - 1)]) == pytest.approx((1 / 17) ** 0.5)
    assert in_bf16.rounding(value, []) == 0.0


def test_only_files_that_the_libraries_load_count(tmp_path: Path) -> None:
    """Other variants, pickles and shards with a path for a name are left out."""
    module = torch.nn.Linear(2, 2)
    state = {key: value.half() for key, value in module.state_dict().items()}
    save_file(state, tmp_path / "model.fp16.safetensors")
    assert weight_files(tmp_path) == []
    assert StoredPart.of_folder(module, tmp_path).folder is None
    (tmp_path / "part").mkdir()
    save_file(state, tmp_path / "out.safetensors")
    index = tmp_path / "part" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"weight": "../out.safetensors"}}')
    assert weight_files(tmp_path / "part") == []
    save_file(state, tmp_path / "model.safetensors")
    stored = StoredPart.of_folder(module, tmp_path)
    assert stored.usual == torch.float16
    assert stored.dtype_of("unknown") == torch.float16
    assert not stored.is_same(module)
    module.load_state_dict(state)
    assert stored.is_same(module)
    assert not stored.is_same(torch.nn.Linear(2, 3)), "another shape"
