"""The published architectures with random weights: for time, memory and names, where no checkpoint can be had.

The numbers are those of the models' own config.json; the parameter counts, which a test compares, those of their cards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from concept_eraser.models.loading import load

# parameters of the denoiser alone; of sd3 beside the 56,623,104 numbers of its position table, a buffer
COUNTS = {"sd14": 859_520_964, "sd21": 865_910_724, "sdxl": 2_567_463_684, "sd3": 2_028_328_000, "flux": 11_901_408_320}


def sd14_denoiser() -> Any:
    return diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)


def sd21_denoiser() -> Any:
    return diffusers.UNet2DConditionModel(sample_size=96, cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True)  # fmt: skip


def sdxl_denoiser() -> Any:
    return diffusers.UNet2DConditionModel(sample_size=128, block_out_channels=(320, 640, 1280), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20), cross_attention_dim=2048, use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816)  # fmt: skip


def sd3_denoiser() -> Any:
    return diffusers.SD3Transformer2DModel(sample_size=128, patch_size=2, in_channels=16, num_layers=24, attention_head_dim=64, num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048, out_channels=16, pos_embed_max_size=192)  # fmt: skip


def flux_denoiser() -> Any:
    return diffusers.FluxTransformer2DModel(patch_size=1, in_channels=64, num_layers=19, num_single_layers=38, attention_head_dim=128, num_attention_heads=24, joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=True)  # fmt: skip


DENOISERS: dict[str, Callable[[], Any]] = {"sd14": sd14_denoiser, "sd21": sd21_denoiser, "sdxl": sdxl_denoiser, "sd3": sd3_denoiser, "flux": flux_denoiser}  # fmt: skip


def _vae(scale: float, size: int) -> Any:
    return diffusers.AutoencoderKL(block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2, latent_channels=4, sample_size=size, scaling_factor=scale)  # fmt: skip


def _clip_l() -> Any:
    return CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768))  # fmt: skip


def _clip_g() -> Any:
    return CLIPTextModelWithProjection(CLIPTextConfig(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280, hidden_act="gelu"))  # fmt: skip


def sd14() -> Any:
    """A StableDiffusionPipeline of Stable Diffusion 1.4's architecture, for 512 x 512."""
    bundled = load("tiny-sd").pipeline  # type: ignore[attr-defined]  # its tokenizer has CLIP's vocabulary, its schedule is that of 1.4
    scheduler = diffusers.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False, steps_offset=1)  # fmt: skip
    return diffusers.StableDiffusionPipeline(vae=_vae(0.18215, 512), text_encoder=_clip_l(), tokenizer=bundled.tokenizer, unet=sd14_denoiser(), scheduler=scheduler, safety_checker=None, feature_extractor=None, requires_safety_checker=False)  # fmt: skip


def sdxl() -> Any:
    """A StableDiffusionXLPipeline of the base model's architecture."""
    bundled = load("tiny-sd").pipeline  # type: ignore[attr-defined]
    scheduler = diffusers.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1, timestep_spacing="leading")  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(vae=_vae(0.13025, 1024), text_encoder=_clip_l(), text_encoder_2=_clip_g(), tokenizer=bundled.tokenizer, tokenizer_2=bundled.tokenizer, unet=sdxl_denoiser(), scheduler=scheduler)  # fmt: skip


def tiny() -> Any:
    """The bundled pipeline: to try a benchmark out on a CPU."""
    return load("tiny-sd").pipeline  # type: ignore[attr-defined]


PIPELINES: dict[str, Callable[[], Any]] = {"sd14": sd14, "sdxl": sdxl, "tiny": tiny}
SIZES = {"sd14": 512, "sdxl": 512, "tiny": 64}  # pixels, of the benchmark; SDXL is made for 1024


def parameters(name: str) -> int:
    """How many weights a denoiser has, counted on the meta device: nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in DENOISERS[name]().parameters())
