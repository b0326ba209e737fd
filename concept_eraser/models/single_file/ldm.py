"""The UNet and the VAE under the names of the original code (CompVis, Stability).

They are for Stable Diffusion 1, 2 and XL; the VAE also for SD 3. There the UNet's blocks are
numbered consecutively. With L resnets for each level, level i's resnet j is input_blocks.{1 + i (L
+ 1) + j} and the downsampler follows. On the way up, with L + 1 resnets, it is output_blocks.{i (L
+ 1) + j}, and the upsampler is a further member of its level's last block. A VAE's decoder counts
its levels from the other end, and its attention has 1x1 convolutions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from concept_eraser.models.single_file.places import Place

_TOP = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_VAE = {
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0": "mid.attn_1",
    "conv_norm_out": "norm_out",
    "conv_shortcut": "nin_shortcut",
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}


def unet_name(name: str, layers: int, attends: Mapping[int, bool]) -> str:
    """Return a UNet tensor's original name.

    layers: resnets of a level. attends: whether level i on the way up has attention. Raises
    KeyError for a name without a place in the original code.
    """
    top = next((key for key in _TOP if name.startswith(key + ".")), None)
    if top:
        return _TOP[top] + _inner(name[len(top) :], ".resnets." in top)
    match = re.fullmatch(
        r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)(\..+)", name
    )
    if not match:
        raise KeyError(name)
    way, i, kind, j, suffix = match[1], int(match[2]), match[3], int(match[4]), match[5]
    if kind == "downsamplers":
        return f"input_blocks.{1 + i * (layers + 1) + layers}.0" + suffix.replace(".conv.", ".op.")
    if kind == "upsamplers":
        return f"output_blocks.{i * (layers + 1) + layers}.{2 if attends[i] else 1}{suffix}"
    block = (
        f"input_blocks.{1 + i * (layers + 1) + j}"
        if way == "down"
        else f"output_blocks.{i * (layers + 1) + j}"
    )
    return f"{block}.{1 if kind == 'attentions' else 0}" + _inner(suffix, kind == "resnets")


def _inner(rest: str, resnet: bool) -> str:
    """Return the inner name, such as `.conv1.weight` of a resnet.

    Attention blocks have the same names in both.
    """
    if not resnet:
        return rest
    _, layer, tensor = rest.split(".")
    return f".{_RESNET[layer]}.{tensor}"


def vae_name(name: str, levels: int) -> str:
    """Return a VAE tensor's original name."""
    name = re.sub(r"down_blocks\.(\d+)\.resnets\.", r"down.\1.block.", name)
    name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0\.", r"down.\1.downsample.", name)
    name = re.sub(
        r"up_blocks\.(\d+)\.resnets\.", lambda m: f"up.{levels - 1 - int(m[1])}.block.", name
    )
    name = re.sub(
        r"up_blocks\.(\d+)\.upsamplers\.0\.",
        lambda m: f"up.{levels - 1 - int(m[1])}.upsample.",
        name,
    )
    for diffusers_name, original_name in _VAE.items():
        name = re.sub(rf"(?<![\w]){re.escape(diffusers_name)}(?=\.)", original_name, name)
    return name


def unet(module: Any, prefix: str = "") -> Iterator[Place]:
    """Return the places of a UNet.

    Raises KeyError, ValueError or TypeError for another architecture.
    """
    attends = {i: hasattr(block, "attentions") for i, block in enumerate(module.up_blocks)}
    for name in module.state_dict():
        yield Place(
            "denoiser", prefix + unet_name(name, module.config.layers_per_block, attends), (name,)
        )


def vae(module: Any, prefix: str) -> Iterator[Place]:
    for name, value in module.state_dict().items():
        how: Any = "conv" if ".attentions." in name and value.dim() == 2 else "same"
        yield Place(
            "vae", prefix + vae_name(name, len(module.config.block_out_channels)), (name,), how
        )
