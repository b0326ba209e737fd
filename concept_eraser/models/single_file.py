"""Stable Diffusion checkpoints of one file, in the layout of the original code (CompVis), as A1111, ComfyUI, Forge take them.

Read by diffusers' own `from_single_file`; written by the names below, since diffusers converts in that direction only.
A file holds weights alone: the architecture, scheduler and tokenizer come from a diffusers folder.

    diffusers                          original
    unet.*                             model.diffusion_model.*
    vae.*                              first_stage_model.*
    text_encoder.*                     cond_stage_model.transformer.text_model.*

A UNet's blocks are numbered through there: with L resnets a level, level i's resnet j is input_blocks.{1 + i (L + 1) + j}
and the downsampler follows; on the way up, with L + 1 resnets, it is output_blocks.{i (L + 1) + j}, and the upsampler is a
further member of its level's last block. A VAE's decoder counts its levels from the other end, and its attention is
made of 1x1 convolutions.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from concept_eraser.errors import UserError
from concept_eraser.models.base import Model

PREFIXES = {"denoiser": "model.diffusion_model.", "vae": "first_stage_model.", "text_encoder": "cond_stage_model.transformer."}  # fmt: skip
_TOP = {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2", "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2", "mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1", "mid_block.resnets.1": "middle_block.2"}  # fmt: skip
_RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"}  # fmt: skip
_VAE = {"mid_block.resnets.0": "mid.block_1", "mid_block.resnets.1": "mid.block_2", "mid_block.attentions.0": "mid.attn_1", "conv_norm_out": "norm_out", "conv_shortcut": "nin_shortcut", "group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}  # fmt: skip


def unet_name(name: str, layers: int, attends: Mapping[int, bool]) -> str:
    """A UNet tensor's original name. layers: resnets a level; attends: whether level i on the way up has attention.

    Raises KeyError for a name that the original code has no place for.
    """
    top = next((key for key in _TOP if name.startswith(key + ".")), None)
    if top:
        return _TOP[top] + _inner(name[len(top) :], ".resnets." in top)
    found = re.fullmatch(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)(\..+)", name)
    if not found:
        raise KeyError(name)
    way, i, kind, j, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    if kind == "downsamplers":
        return f"input_blocks.{1 + i * (layers + 1) + layers}.0" + rest.replace(".conv.", ".op.")
    if kind == "upsamplers":
        return f"output_blocks.{i * (layers + 1) + layers}.{2 if attends[i] else 1}{rest}"
    block = f"input_blocks.{1 + i * (layers + 1) + j}" if way == "down" else f"output_blocks.{i * (layers + 1) + j}"
    return f"{block}.{1 if kind == 'attentions' else 0}" + _inner(rest, kind == "resnets")


def _inner(rest: str, resnet: bool) -> str:
    """`.conv1.weight` of a resnet; attention blocks are named alike in both."""
    if not resnet:
        return rest
    _, layer, tensor = rest.split(".")
    return f".{_RESNET[layer]}.{tensor}"


def vae_name(name: str, levels: int) -> str:
    """A VAE tensor's original name."""
    name = re.sub(r"down_blocks\.(\d+)\.resnets\.", r"down.\1.block.", name)
    name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0\.", r"down.\1.downsample.", name)
    name = re.sub(r"up_blocks\.(\d+)\.resnets\.", lambda m: f"up.{levels - 1 - int(m[1])}.block.", name)
    name = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0\.", lambda m: f"up.{levels - 1 - int(m[1])}.upsample.", name)
    for ours, theirs in _VAE.items():
        name = re.sub(rf"(?<![\w]){re.escape(ours)}(?=\.)", theirs, name)
    return name


def original_layout(model: Model) -> dict[str, Tensor]:
    """All tensors of a pipeline under their original names.

    Raises UserError for a pipeline whose parts the original code does not have: other families, and Stable Diffusion 2,
    whose text encoder has OpenCLIP's layout there.
    """
    if model.family != "sd":
        raise UserError(f"{model.source}: the layout of single files is written for Stable Diffusion 1.x, not for the family {model.family!r}; export --to diffusers")  # fmt: skip
    text: Any = model.parts["text_encoder"]
    if text.config.hidden_act == "gelu":
        raise UserError(f"{model.source} has Stable Diffusion 2's text encoder, which single files keep in OpenCLIP's layout; that is not written yet, export --to diffusers")  # fmt: skip
    unet: Any = model.parts["denoiser"]
    vae: Any = model.parts["vae"]
    attends = {i: hasattr(block, "attentions") for i, block in enumerate(unet.up_blocks)}
    found: dict[str, Tensor] = {}
    try:
        for name, value in unet.state_dict().items():
            found[PREFIXES["denoiser"] + unet_name(name, unet.config.layers_per_block, attends)] = value
    except (KeyError, ValueError, TypeError):
        raise UserError(f"{model.source}: the original code has no place for the UNet's {name!r}; export --to diffusers") from None  # fmt: skip
    for name, value in vae.state_dict().items():
        as_conv = value[:, :, None, None] if ".attentions." in name and value.dim() == 2 else value
        found[PREFIXES["vae"] + vae_name(name, len(vae.config.block_out_channels))] = as_conv
    for name, value in text.state_dict().items():
        found[f"{PREFIXES['text_encoder']}text_model.{name.removeprefix('text_model.')}"] = value
    return found


def write(model: Model, file: Path) -> None:
    """Write a pipeline as one file in the original layout. Raises UserError, see `original_layout`."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in original_layout(model).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def read(file: Path, config: str) -> Any:
    """The `StableDiffusionPipeline` of a single file. config: a diffusers folder (or hub id) of the same architecture.

    Raises UserError where the two do not fit.
    """
    from diffusers import StableDiffusionPipeline

    index = Path(config) / "model_index.json"
    if index.is_file() and (named := json.loads(index.read_text()).get("_class_name")) != "StableDiffusionPipeline":
        raise UserError(f"{file} is read as a StableDiffusionPipeline, but {config} is a {named}")
    try:
        pipeline = StableDiffusionPipeline.from_single_file(str(file), config=config, safety_checker=None, feature_extractor=None)  # fmt: skip
        pipeline.register_to_config(requires_safety_checker=False)
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise UserError(f"{file} does not fit the configuration in {config}: {str(error).strip().splitlines()[0][:200]}") from error  # fmt: skip
    missing = [f"{name}.{key}" for name in ("unet", "vae", "text_encoder") for key, value in getattr(pipeline, name).named_parameters() if value.is_meta]  # fmt: skip
    if missing:
        raise UserError(f"{file} does not fit the configuration in {config}: it has nothing for {missing[0]}")
    return pipeline


def read_as(file: Path, model: Any) -> Any:
    """`read`, with the configuration of a pipeline in memory."""
    with tempfile.TemporaryDirectory() as folder:
        where, pipeline = Path(folder), model.pipeline
        pipeline.save_config(where)
        pipeline.scheduler.save_pretrained(where / "scheduler")
        pipeline.tokenizer.save_pretrained(where / "tokenizer")
        pipeline.unet.save_config(where / "unet")
        pipeline.vae.save_config(where / "vae")
        pipeline.text_encoder.config.save_pretrained(where / "text_encoder")
        return read(file, folder)
