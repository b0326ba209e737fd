"""Tiny pipelines of every family: the real classes with random weights, saved like diffusers.

Nothing is downloaded: the tokenizers have letters only. They replace unavailable models in a dry
run, which finds the mistakes in a recipe, and in tests.
"""

from __future__ import annotations

import inspect
import string
from pathlib import Path
from typing import Any

import diffusers
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from concept_eraser.models import chat

NAMES = (
    "sdxl",
    "sdxl-v",
    "sd3",
    "sd3-no-t5",
    "flux",
    "flux-schnell",
    "dit",
    "pixart",
    "sana",
    "zimage",
    "qwenimage",
    "flux2",
)
VARIANTS = ("pixart-sigma", "sana-euler")  # for which a part of the tests is enough
# in pixels; without it these would have the size of the published models
SIZE = {
    **dict.fromkeys(("flux", "flux-schnell", "pixart", "zimage"), 16),
    **dict.fromkeys(("qwenimage", "flux2"), 32),
}
LABELS = {7: "cock", 207: "golden retriever, goldie", 281: "tabby"}


def build(name: str, folder: Path) -> Path:
    """Save the pipeline of that name into a folder.

    It is the same each time. The state of the caller's generator does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = _make(name)
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def _make(name: str) -> Any:
    family, _, variant = name.partition("-")
    makers = {
        "sdxl": _sdxl,
        "sd3": _sd3,
        "flux": _flux,
        "dit": _dit,
        "pixart": _pixart,
        "sana": _sana,
        "zimage": _zimage,
        "qwenimage": _qwenimage,
        "flux2": _flux2,
    }
    pipeline = makers[family](variant)
    # DiT and Flux begin with zeros in their last layers, which would hide mistakes
    with torch.no_grad():
        for part in pipeline.components.values():
            for p in part.parameters() if isinstance(part, torch.nn.Module) else ():
                if not p.any():
                    p.normal_(0, 0.1)
    return pipeline


def clip_tokenizer() -> Any:
    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=77
    )


def clip_text(width: int, with_projection: bool) -> Any:
    tokenizer = clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return (CLIPTextModelWithProjection if with_projection else CLIPTextModel)(config)


def t5_text() -> tuple[Any, Any]:
    vocabulary = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *((c, -3.0) for c in "\u2581" + string.printable[:-6]),
    ]
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    return T5EncoderModel(config), tokenizer


def _vae(**options: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        **options,
    )


def _sdxl(variant: str) -> Any:
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32,
        cross_attention_dim=16 + 32,
        norm_num_groups=4,
    )
    prediction = "v_prediction" if variant == "v" else "epsilon"
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=prediction,
        steps_offset=1,
        timestep_spacing="leading",
    )
    zeros = variant != "v"
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=clip_text(16, False),
        text_encoder_2=clip_text(32, True),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        unet=unet,
        scheduler=scheduler,
        force_zeros_for_empty_prompt=zeros,
    )


def _sd3(variant: str) -> Any:
    encoder, tokenizer = t5_text() if variant != "no-t5" else (None, None)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(scaling_factor=1.5, shift_factor=0.06),
        text_encoder=clip_text(16, True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_text(16, True),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=encoder,
        tokenizer_3=tokenizer,
    )


def _flux(variant: str) -> Any:
    dev = variant != "schnell"
    encoder, tokenizer = t5_text()
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=dev,
        axes_dims_rope=(4, 4, 8),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        shift=3.0 if dev else 1.0, use_dynamic_shifting=dev
    )
    return diffusers.FluxPipeline(
        scheduler=scheduler,
        vae=_vae(scaling_factor=0.4, shift_factor=0.1),
        text_encoder=clip_text(16, False),
        tokenizer=clip_tokenizer(),
        text_encoder_2=encoder,
        tokenizer_2=tokenizer,
        transformer=transformer,
    )


def _dit(variant: str) -> Any:
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )
    pipeline = diffusers.DiTPipeline(
        transformer=transformer, vae=_vae(), scheduler=diffusers.DDIMScheduler(clip_sample=False)
    )
    # as facebook/DiT-XL-2-256 has it
    pipeline.register_to_config(id2label={str(k): v for k, v in LABELS.items()})
    return pipeline


def _pixart(variant: str) -> Any:
    """PixArt-alpha of 1,024 pixels, which is conditioned on the image's size, or PixArt-Sigma."""
    alpha = variant != "sigma"
    encoder, tokenizer = t5_text()
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=24,
        sample_size=128 if alpha else 8,
        caption_channels=32,
        use_additional_conditions=alpha,
    )
    kind = diffusers.PixArtAlphaPipeline if alpha else diffusers.PixArtSigmaPipeline
    return kind(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=_vae(),
        transformer=transformer,
        # with this spacing two steps are at the time steps of DDIM's two
        scheduler=diffusers.DPMSolverMultistepScheduler(
            beta_start=0.0001, beta_end=0.02, timestep_spacing="trailing"
        ),
    )


def gemma_tokenizer() -> Any:
    """Return a tokenizer of letters, and of the words of Sana's instruction.

    So this text has about as many tokens as in the published tokenizer.
    """
    call = inspect.signature(diffusers.SanaPipeline.__call__).parameters
    words = " ".join(call["complex_human_instruction"].default).split()
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    vocabulary = [*special, "\n", "\u2581", *string.printable[:-6]]
    tokenizer = GemmaTokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], add_bos_token=True
    )
    tokenizer.add_tokens(sorted({word for word in words if len(word) > 3}))
    return tokenizer


def gemma_text() -> tuple[Any, Any]:
    tokenizer = gemma_tokenizer()
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        head_dim=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Gemma2Model(config), tokenizer


def _sana(variant: str) -> Any:
    encoder, tokenizer = gemma_text()
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
    )
    blocks, channels = ("ResBlock", "ResBlock", "EfficientViTBlock"), (8, 8, 16)
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    )
    scheduler = (
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
        if variant == "euler"
        else diffusers.DPMSolverMultistepScheduler(
            flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction"
        )
    )
    return diffusers.SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=vae,
        transformer=transformer,
        scheduler=scheduler,
    )


def qwen_tokenizer() -> Any:
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", *letters])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.add_tokens(["<think>", "</think>"])
    chat.use_own_template(tokenizer)
    return tokenizer


def _qwen3(tokenizer: Any, layers: int) -> Any:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        head_dim=8,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )


def _zimage(variant: str) -> Any:
    tokenizer = qwen_tokenizer()
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=16,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=8,
        axes_dims=[4, 2, 2],
        axes_lens=[1024, 16, 16],
    )
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(scaling_factor=0.4, shift_factor=0.1),
        text_encoder=Qwen3Model(_qwen3(tokenizer, 2)),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _qwenimage(variant: str) -> Any:
    tokenizer = qwen_tokenizer()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
        },
    )
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 2, 2),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[-0.2, 0.1, 0.0, 0.3],
        latents_std=[0.5, 0.8, 1.0, 1.5],
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192
    )
    return diffusers.QwenImagePipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _flux2(variant: str) -> Any:
    tokenizer = qwen_tokenizer()
    tokenizer.model_max_length = 96
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(2, 2, 2, 2),
        guidance_embeds=False,
    )
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        latent_channels=4,
        norm_num_groups=4,
    )
    vae.bn.running_mean.normal_(0, 0.5)
    vae.bn.running_var.uniform_(0.5, 2)
    with torch.no_grad():  # so that prompts change pixels: the mean of many tokens is small
        transformer.transformer_blocks[0].attn.to_out[0].weight.mul_(10)
        transformer.proj_out.weight.mul_(5)
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=vae,
        text_encoder=Qwen3ForCausalLM(_qwen3(tokenizer, 27)),  # whose state 27 is read
        tokenizer=tokenizer,
        transformer=transformer,
    )


def options(name: str) -> dict[str, float]:
    """Return the model options for tiny images."""
    return {"size": SIZE[name]} if name in SIZE else {}
