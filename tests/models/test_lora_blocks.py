"""Block weights of LoRA files, in the convention of the extension LoRA Block Weight."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from concept_eraser.cli.main import app
from concept_eraser.exporting import formats
from concept_eraser.models import lora_blocks, lora_files
from concept_eraser.models.lora import Factors
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError
from tests.models.test_lora import plain

FOLDER = resources.tiny_weights() / "tiny-sd"
MIDDLE = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
FIRST = "down_blocks.0.resnets.0.conv1"  # IN01
TIME = "time_embedding.linear_1"  # in no block
# The attention blocks by diffusers' names, in the order of the 17 and 12 values. They were written
# down from the numbers in the original code's configurations (input_blocks.1 is the first block
# after the first convolution; each level has two blocks and a downsampler).
ATTENTION = {
    "sd": [
        *(f"down_blocks.{i}.attentions.{j}" for i in (0, 1, 2) for j in (0, 1)),
        "mid_block.attentions.0",
        *(f"up_blocks.{i}.attentions.{j}" for i in (1, 2, 3) for j in (0, 1, 2)),
    ],
    "sdxl": [
        *(f"down_blocks.{i}.attentions.{j}" for i in (1, 2) for j in (0, 1)),
        "mid_block.attentions.0",
        *(f"up_blocks.{i}.attentions.{j}" for i in (0, 1) for j in (0, 1, 2)),
    ],
}
CROSS_DOWN, DOWN = "CrossAttnDownBlock2D", "DownBlock2D"
CROSS_UP, UP = "CrossAttnUpBlock2D", "UpBlock2D"
LEVELS = {
    "sd": {
        "down_block_types": [*[CROSS_DOWN] * 3, DOWN],
        "up_block_types": [UP, *[CROSS_UP] * 3],
    },
    "sdxl": {
        "down_block_types": [DOWN, CROSS_DOWN, CROSS_DOWN],
        "up_block_types": [CROSS_UP, CROSS_UP, UP],
    },
}


def full_size(family: str) -> Any:
    """A model with the blocks of Stable Diffusion 1 or XL, and few channels."""
    levels = LEVELS[family]
    unet = UNet2DConditionModel(
        **levels,
        block_out_channels=[8] * len(levels["down_block_types"]),
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=8,
    )
    return SimpleNamespace(family=family, source="a model", parts={"denoiser": unet})


def ones(model: Any, part: str, layers: list[str]) -> Factors:
    """Factors of rank 1 whose changes are 1 everywhere."""
    pairs = {}
    for layer in layers:
        out, *inner = (2, 2)
        if part in model.parts:
            out, *inner = model.parts[part].get_parameter(f"{layer}.weight").shape
        up = torch.ones(out, 1, *[1] * (len(inner) - 1))
        pairs[layer] = torch.ones(1, *inner), up
    return Factors(part, pairs, 1, 1.0)


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_each_value_is_for_its_block(family: str) -> None:
    """The short and the long list, on the UNet of full depth and on a text encoder."""
    model = full_size(family)
    blocks = ATTENTION[family]
    layers = [f"{block}.proj_in" for block in blocks]
    loras = [ones(model, "denoiser", [*layers, TIME]), ones(model, "text_encoder", ["fc1"])]
    values = [float(number) for number in range(2, len(blocks) + 3)]
    unet, text = lora_blocks.weigh(model, loras, values)
    found = [float(unet.change(layer).mean()) for layer in layers]
    assert found == values[1:]
    assert float(text.change("fc1").mean()) == values[0]
    assert float(unet.change(TIME).mean()) == 1.0

    short, long = lora_blocks.CONVENTIONS[family]
    assert (len(short), len(long)) == {"sd": (17, 26), "sdxl": (12, 20)}[family]
    by_name = [values[short.index(name)] if name in short else 1.0 for name in long]
    again, _ = lora_blocks.weigh(model, loras, by_name)
    assert [float(again.change(layer).mean()) for layer in layers] == found


def test_weights_that_do_not_fit_are_refused() -> None:
    model = full_size("sd")
    attention = [ones(model, "denoiser", [f"{ATTENTION['sd'][0]}.proj_in"])]
    first = [ones(model, "denoiser", ["conv_in", "down_blocks.0.downsamplers.0.conv"])]
    flux = SimpleNamespace(family="flux", source="a model", parts={})
    for of, loras, values, message in (
        (flux, attention, [1.0] * 17, "of the family 'flux', for which there is no list"),
        (model, attention, [1.0] * 12, r"found 12 block weights; .* takes 17 \(BASE, IN01"),
        (model, attention, [0.0] * 17, "all layers of the LoRA are in blocks of weight 0"),
        (model, attention, [float("nan")] * 17, "block weights are numbers from"),
        (model, first, [1.0] * 17, r"in the blocks IN00, IN03, .*give 26 weights"),
    ):
        with pytest.raises(UserError, match=message):
            lora_blocks.weigh(of, loras, values)


def test_a_file_with_weights_is_read_by_diffusers(tmp_path: Path, shared_tiny: Any) -> None:
    """Weights of 1 give the same bytes. A weight of 0 drops the block, and the rest is loaded."""
    source = tmp_path / "both.safetensors"
    lora_files.save(shared_tiny, [ones(shared_tiny, "denoiser", [MIDDLE, FIRST])], source)

    names, _ = lora_blocks.CONVENTIONS["sd"]
    bytes_of = [
        formats.export(
            source,
            "kohya",
            before=shared_tiny,
            block_weights=weights,
            output=folder / "x.safetensors",
        ).path.read_bytes()
        for folder, weights in ((tmp_path / "ones", [1.0] * 17), (tmp_path / "without", []))
    ]
    assert bytes_of[0] == bytes_of[1]
    values = [{"M00": "0.5", "IN01": "0"}.get(name, "1") for name in names]
    half = tmp_path / "half" / "x.safetensors"
    command = ["export", str(source), "--to", "kohya", "--before", "tiny-sd", "-o", str(half)]
    result = CliRunner().invoke(app, [*command, "--block-weights", ",".join(values)])
    assert result.exit_code == 0, result.output
    assert not any("resnets" in name for name in load_file(half))
    with safe_open(half, "pt") as content:
        assert content.metadata()["block_weights"] == ",".join(values)

    pipe = plain(FOLDER)
    before = {name: value.clone() for name, value in pipe.unet.state_dict().items()}
    pipe.load_lora_weights(str(half.parent), weight_name=half.name)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    changed = pipe.unet.state_dict()
    differences = {name: changed[name] - value for name, value in before.items()}
    assert [name for name, value in differences.items() if value.any()] == [f"{MIDDLE}.weight"]
    expected = torch.full_like(before[f"{MIDDLE}.weight"], 0.5)
    torch.testing.assert_close(differences[f"{MIDDLE}.weight"], expected)


def test_weights_belong_to_kohyas_naming(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--block-weights is for a LoRA in kohya's naming"):
        formats.export(
            "x.safetensors", "lora", block_weights=[1.0] * 17, output=tmp_path / "x.safetensors"
        )
