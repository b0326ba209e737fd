"""The architectures of published models without weights, on the meta device.

They allow a memory estimate before anything is downloaded (runs/memory_estimate.py). The numbers
are those of the models' own config.json; of PixArt, Sana, Z-Image, Qwen-Image and Flux.2 Klein
those of diffusers' conversion scripts and default arguments. A test compares the counts of
parameters with the model cards. The tokenizers have letters only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)

from concept_eraser.models.base import Model
from concept_eraser.tiny.families import (
    clip_tokenizer,
    gemma_tokenizer,
    qwen_tokenizer,
    t5_text,
)
from concept_eraser.utils.path_redaction import base_of


def _clip_l(*, with_projection: bool = False) -> Any:
    config = CLIPTextConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        projection_dim=768,
    )
    return (CLIPTextModelWithProjection if with_projection else CLIPTextModel)(config)


def _clip_g() -> Any:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            hidden_size=1280,
            intermediate_size=5120,
            num_hidden_layers=32,
            num_attention_heads=20,
            projection_dim=1280,
            hidden_act="gelu",
        )
    )


def _t5_xxl() -> Any:
    return T5EncoderModel(
        T5Config(
            d_model=4096,
            d_ff=10240,
            d_kv=64,
            num_heads=64,
            num_layers=24,
            vocab_size=32128,
            feed_forward_proj="gated-gelu",
        )
    )


def _vae(channels: int, **options: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=channels,
        **options,
    )


def _schedule(kind: str, **options: Any) -> Any:
    """Build a scheduler with its numbers, which are small and needed."""
    with torch.device("cpu"):
        return getattr(diffusers, kind)(**options)


def _sd14() -> Any:
    unet = diffusers.UNet2DConditionModel(
        sample_size=64, cross_attention_dim=768, attention_head_dim=8
    )
    scheduler = _schedule(
        "PNDMScheduler",
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        skip_prk_steps=True,
        steps_offset=1,
    )
    return diffusers.StableDiffusionPipeline(
        vae=_vae(4),
        text_encoder=_clip_l(),
        tokenizer=clip_tokenizer(),
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl() -> Any:
    unet = diffusers.UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    scheduler = _schedule(
        "EulerDiscreteScheduler",
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        timestep_spacing="leading",
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(4, scaling_factor=0.13025),
        text_encoder=_clip_l(),
        text_encoder_2=_clip_g(),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        unet=unet,
        scheduler=scheduler,
    )


def _sd3(**options: Any) -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=128,
        patch_size=2,
        in_channels=16,
        num_layers=24,
        attention_head_dim=64,
        num_attention_heads=24,
        joint_attention_dim=4096,
        caption_projection_dim=1536,
        pooled_projection_dim=2048,
        out_channels=16,
        **options,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=_schedule("FlowMatchEulerDiscreteScheduler", shift=3.0),
        vae=_vae(16, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=_clip_l(with_projection=True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=_clip_g(),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=_t5_xxl(),
        tokenizer_3=t5_text()[1],
    )


def _sd3_medium() -> Any:
    return _sd3(pos_embed_max_size=192)


def _sd35_medium() -> Any:
    return _sd3(pos_embed_max_size=384, dual_attention_layers=tuple(range(13)), qk_norm="rms_norm")


def _flux(*, dev: bool = True) -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=19,
        num_single_layers=38,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
        guidance_embeds=dev,
    )
    scheduler = _schedule(
        "FlowMatchEulerDiscreteScheduler", shift=3.0 if dev else 1.0, use_dynamic_shifting=dev
    )
    return diffusers.FluxPipeline(
        scheduler=scheduler,
        vae=_vae(16, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=_clip_l(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=_t5_xxl(),
        tokenizer_2=t5_text()[1],
        transformer=transformer,
    )


def _pixart(side: int, *, alpha: bool) -> Any:
    """PixArt with latents of that side, by diffusers' scripts that convert the original weights."""
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=side,
        caption_channels=4096,
        interpolation_scale=side // 64,
        use_additional_conditions=alpha and side == 128,
    )
    kind = diffusers.PixArtAlphaPipeline if alpha else diffusers.PixArtSigmaPipeline
    return kind(
        tokenizer=t5_text()[1],
        text_encoder=_t5_xxl(),
        vae=_vae(4, scaling_factor=0.18215 if alpha else 0.13025),
        transformer=transformer,
        scheduler=_schedule("DPMSolverMultistepScheduler"),
    )


def _sana(**options: Any) -> Any:
    """Sana of 1,024 pixels, by diffusers' scripts that convert the original weights."""
    blocks = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    scales = ((),) * 3 + ((5,),) * 3
    vae = diffusers.AutoencoderDC(
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_qkv_multiscales=scales,
        decoder_qkv_multiscales=scales,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    )
    return diffusers.SanaPipeline(
        tokenizer=gemma_tokenizer(),
        text_encoder=Gemma2Model(Gemma2Config()),  # the defaults are those of Gemma 2 2B
        vae=vae,
        transformer=diffusers.SanaTransformer2DModel(**options),
        scheduler=_schedule(
            "DPMSolverMultistepScheduler",
            flow_shift=3.0,
            use_flow_sigmas=True,
            prediction_type="flow_prediction",
        ),
    )


def _sana_600m() -> Any:
    return _sana(
        num_attention_heads=36,
        num_layers=28,
        num_cross_attention_heads=16,
        cross_attention_head_dim=72,
        cross_attention_dim=1152,
    )


def _qwen3_4b() -> Any:
    """Return the configuration of Qwen 3 4B."""
    return Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    )


def _zimage() -> Any:
    return diffusers.ZImagePipeline(
        scheduler=_schedule("FlowMatchEulerDiscreteScheduler", shift=3.0),
        vae=_vae(16, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=Qwen3Model(_qwen3_4b()),
        tokenizer=qwen_tokenizer(),
        transformer=diffusers.ZImageTransformer2DModel(),  # the defaults are those of Z-Image
    )


def _qwenimage() -> Any:
    """Qwen-Image, whose transformer and VAE are the defaults, with Qwen 2.5 VL 7B."""
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [16, 24, 24],
            },
        },
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
        },
    )
    return diffusers.QwenImagePipeline(
        scheduler=_schedule(
            "FlowMatchEulerDiscreteScheduler",
            use_dynamic_shifting=True,
            max_shift=0.9,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=diffusers.AutoencoderKLQwenImage(),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=qwen_tokenizer(),
        transformer=diffusers.QwenImageTransformer2DModel(),
    )


def _klein_4b() -> Any:
    """Flux.2 Klein 4B, by diffusers' script that converts the original weights."""
    transformer = diffusers.Flux2Transformer2DModel(
        num_layers=5,
        num_single_layers=20,
        num_attention_heads=24,
        joint_attention_dim=3 * 2560,
        guidance_embeds=False,
    )
    return diffusers.Flux2KleinPipeline(
        scheduler=_schedule(
            "FlowMatchEulerDiscreteScheduler", shift=3.0, use_dynamic_shifting=True
        ),
        vae=diffusers.AutoencoderKLFlux2(),
        text_encoder=Qwen3ForCausalLM(_qwen3_4b()),
        tokenizer=qwen_tokenizer(),
        transformer=transformer,
        is_distilled=True,
    )


MADE: dict[str, tuple[str, Callable[[], Any]]] = {  # short name -> (family, its pipeline)
    "sd14": ("sd", _sd14),
    "sdxl": ("sdxl", _sdxl),
    "sd3": ("sd3", _sd3_medium),
    "sd35": ("sd3", _sd35_medium),
    "flux": ("flux", _flux),
    "flux-schnell": ("flux", lambda: _flux(dev=False)),
    "pixart-512": ("pixart", lambda: _pixart(64, alpha=True)),
    "pixart": ("pixart", lambda: _pixart(128, alpha=True)),
    "pixart-sigma-512": ("pixart", lambda: _pixart(64, alpha=False)),
    "pixart-sigma": ("pixart", lambda: _pixart(128, alpha=False)),
    "sana": ("sana", _sana),
    "sana-600m": ("sana", _sana_600m),
    "zimage": ("zimage", _zimage),
    "qwenimage": ("qwenimage", _qwenimage),
    "klein": ("flux2", _klein_4b),
}
KNOWN = {  # hub id -> short name
    "CompVis/stable-diffusion-v1-4": "sd14",
    "stable-diffusion-v1-5/stable-diffusion-v1-5": "sd14",
    "runwayml/stable-diffusion-v1-5": "sd14",
    "stabilityai/stable-diffusion-xl-base-1.0": "sdxl",
    "stabilityai/stable-diffusion-3-medium-diffusers": "sd3",
    "stabilityai/stable-diffusion-3.5-medium": "sd35",
    "black-forest-labs/FLUX.1-dev": "flux",
    "black-forest-labs/FLUX.1-schnell": "flux-schnell",
    "PixArt-alpha/PixArt-XL-2-512x512": "pixart-512",
    "PixArt-alpha/PixArt-XL-2-1024-MS": "pixart",
    "PixArt-alpha/PixArt-Sigma-XL-2-512-MS": "pixart-sigma-512",
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": "pixart-sigma",
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": "sana",
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": "sana-600m",
    "Tongyi-MAI/Z-Image-Turbo": "zimage",
    "Tongyi-MAI/Z-Image": "zimage",
    "Qwen/Qwen-Image": "qwenimage",
    "black-forest-labs/FLUX.2-klein-4B": "klein",
}


def _id(source: str) -> str:
    """Return a hub id without its revision; of a checkpoint of one file, that of its base."""
    return base_of(source).partition("@")[0]


def family_of(source: str) -> str | None:
    """Return the family of a published model by its hub id, with or without a revision.

    Returns None for an unknown model.
    """
    name = KNOWN.get(_id(source))
    return MADE[name][0] if name else None


def hollow(source: str) -> Model:
    """Build a published model without weights, by hub id or short name."""
    family, make = MADE[KNOWN.get(_id(source), source)]
    plugin = importlib.import_module(f"concept_eraser.models.families.{family}").PLUGIN
    with torch.device("meta"):
        pipeline = make()
    return plugin(pipeline, source)
