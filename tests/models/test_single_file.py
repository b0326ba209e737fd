"""Checkpoints of one file, for every family that has an original layout. diffusers' own reader gets
the same tensors and the same image from the files that we write. Files of single parts are put on
their base, or an error gives the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_utils as theirs
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from concept_eraser.models import single_file
from concept_eraser.models.loading import load
from concept_eraser.models.single_file import transformers
from concept_eraser.utils.errors import UserError
from tests import families

GetModel = Callable[[str], Any]


def _sd2(folder: Path, tiny: Any) -> Path:
    """The bundled pipeline with a text encoder like Stable Diffusion 2's."""
    own = tiny.pipeline.text_encoder.config
    config = CLIPTextConfig(
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=2 * own.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=own.max_position_embeddings,
        hidden_act="gelu",
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
    )
    torch.manual_seed(0)
    parts = {**tiny.pipeline.components, "text_encoder": CLIPTextModel(config)}
    diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False).save_pretrained(
        folder
    )
    return folder


def _sd3(folder: Path) -> Path:
    """SD 3 with CLIPs of two widths, which readers distinguish by them, and the identity as the
    first one's projection.
    """
    pipe = families.plain("sd3", families.build("sd3", folder))
    torch.manual_seed(1)
    second, t5 = families._clip(32, True), families._t5()[0]
    for module in (second, t5):
        for p in module.parameters():
            p.data.normal_(0, 0.1)
    transformer = diffusers.SD3Transformer2DModel.from_config(
        {**pipe.transformer.config, "joint_attention_dim": 48, "pooled_projection_dim": 48}
    )
    wide = t5.config.to_dict() | {"d_model": 48}
    t5 = type(t5)(type(t5.config)(**wide))
    pipe = type(pipe)(
        **{
            **pipe.components,
            "text_encoder_2": second,
            "text_encoder_3": t5,
            "transformer": transformer,
        }
    )
    pipe.text_encoder.text_projection.weight.data = torch.eye(16)
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def get_model(
    tmp_path_factory: pytest.TempPathFactory, shared_tiny: Any
) -> Callable[[str], tuple[Path, Any]]:
    """The folder and the model of a name, built once."""
    root, models = tmp_path_factory.mktemp("single"), {}

    def of(name: str) -> tuple[Path, Any]:
        if name not in models:
            folder = root / name
            builders = {"sd2": lambda: _sd2(folder, shared_tiny), "sd3": lambda: _sd3(folder)}
            path = builders.get(name, lambda: families.build(name, folder))()
            models[name] = path, load(path)
        return models[name]

    return of


def sample(model: Any) -> torch.Tensor:
    size = {"size": 16} if model.family == "flux" else {}
    other = copy.copy(model)
    other.configure(size)
    return other.sample(["a red star"], seeds=[5], steps=2, guidance=3.0)[0]


def same(expected_model: Any, model: Any) -> None:
    for part, module in expected_model.parts.items():
        expected, state = module.state_dict(), model.parts[part].state_dict()
        assert expected.keys() == state.keys()
        assert all(torch.equal(expected[name], state[name]) for name in expected), part


PIPELINES = {
    "sd2": "StableDiffusionPipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "sd3": "StableDiffusion3Pipeline",
}


@pytest.mark.parametrize("name", PIPELINES)
def test_diffusers_reads_what_we_write(name: str, get_model, tmp_path: Path) -> None:
    """Every tensor and the image by diffusers alone; then by `load`, with a folder and with an
    object as the base.
    """
    folder, model = get_model(name)
    file = tmp_path / "whole.safetensors"
    single_file.write(model, file)
    pipe = getattr(diffusers, PIPELINES[name]).from_single_file(
        str(file), config=str(folder), local_files_only=True
    )
    expected = sample(model)
    assert torch.equal(sample(load(pipe)), expected)
    same(model, load(pipe))
    for base in (folder, model):
        model_of_file = load(file, base=base)
        same(model, model_of_file)
        assert model_of_file.source == str(file)
    names = set(load_file(file))
    markers = {
        "sd2": {
            theirs.CHECKPOINT_KEY_NAMES["open_clip"],
            "cond_stage_model.model.transformer.resblocks.1.attn.in_proj_weight",
        },
        "sdxl": {
            theirs.CHECKPOINT_KEY_NAMES["clip_sdxl"],
            theirs.CHECKPOINT_KEY_NAMES["open_clip_sdxl"],
            "conditioner.embedders.1.model.text_projection",
            "model.diffusion_model.label_emb.0.2.weight",
        },
        "sd3": {
            theirs.CHECKPOINT_KEY_NAMES["clip_sd3"],
            theirs.CHECKPOINT_KEY_NAMES["open_clip_sd3"],
            "model.diffusion_model.joint_blocks.0.context_block.attn.proj.weight",
        },
    }
    assert names >= markers[name]


@pytest.mark.parametrize("name", ["sd2", "sdxl", "sd3", "flux", "flux-schnell"])
def test_a_file_is_put_on_its_base(name: str, get_model, tmp_path: Path) -> None:
    """Our own reader, for any size of model: a base with other weights gets all weights of the
    file.
    """
    folder, model = get_model(name)
    file = tmp_path / "some.safetensors"
    single_file.write(model, file)
    other = copy.deepcopy(model)
    parts = single_file.written_parts(model)
    with torch.no_grad():
        for part in parts:
            for p in other.parts[part].parameters():
                p.add_(0.1)
    assert not torch.equal(sample(other), sample(model))
    if name == "sd3":
        other.parts["text_encoder"].text_projection.weight.data = torch.eye(16)  # in no file
    names = single_file.place_on(other, load_file(file), "the file")
    assert names == sorted(parts)
    same(model, other)
    if name.startswith("flux"):
        model_of_file = load(file, base=folder)
        assert torch.equal(sample(model_of_file), sample(model))
        assert model_of_file.source == f"{file} on {folder}"


def test_a_file_says_what_it_predicts(get_model, tmp_path: Path) -> None:
    """By the marks of ComfyUI and of the specification of headers."""
    folder, model = get_model("sdxl-v")
    noise_folder, noise_model = get_model("sdxl")
    file, part = tmp_path / "v.safetensors", tmp_path / "part.safetensors"
    single_file.write(noise_model, file)
    assert not {"v_pred", "ztsnr"} & load_file(file).keys()
    single_file.write(model, file)
    tensors = load_file(file)
    assert "v_pred" in tensors
    assert "ztsnr" not in tensors
    pipe = diffusers.StableDiffusionXLPipeline.from_single_file(
        str(file), config=str(folder), local_files_only=True
    )
    same(model, load(pipe))
    for base in (folder, model):
        same(model, load(file, base=base))
    unet = {k: v for k, v in tensors.items() if k.startswith("model.diffusion_model.")}
    save_file(unet, part, metadata={"modelspec.prediction_type": "v"})
    same(model, load(part, base=folder))
    for path in (file, part):
        with pytest.raises(UserError, match="marked as a model with prediction_type v_prediction"):
            load(path, base=noise_folder)
    rescaled = copy.deepcopy(model)
    rescaled.pipeline.scheduler = diffusers.EulerDiscreteScheduler.from_config(
        model.pipeline.scheduler.config, rescale_betas_zero_snr=True
    )
    single_file.write(rescaled, file)
    same(model, load(file, base=rescaled))
    with pytest.raises(UserError, match=r"rescale_betas_zero_snr True, and .* False"):
        load(file, base=folder)
    save_file({**unet, "edm_mean": torch.zeros(4)}, part)
    with pytest.raises(UserError, match=r"another diffusion than DDPM's \(EDM\)"):
        load(part, base=noise_folder)


def test_a_part_alone_and_in_other_spellings(get_model, tmp_path: Path) -> None:
    """A UNet of SDXL alone, a transformer of SD 3 and Flux with or without prefix, `vae.` for the
    VAE, SD 3 without T5.
    """
    for name in ("sdxl", "sd3", "flux"):
        folder, model = get_model(name)
        whole = single_file.original_layout(model)
        alone = {
            k.removeprefix(single_file.UNET): v.clone() + 0.01
            for k, v in whole.items()
            if not k.startswith((single_file.VAE, "cond", "text_enc"))
        }
        if name == "sdxl":
            alone = {
                k: v.clone() + 0.01 for k, v in whole.items() if k.startswith(single_file.UNET)
            }
        for prefix in ("",) if name == "sdxl" else ("", single_file.UNET):
            save_file(
                {prefix + k: v.contiguous() for k, v in alone.items()},
                tmp_path / "alone.safetensors",
            )
            model_of_file = load(tmp_path / "alone.safetensors", base=folder)
            mean = sum(
                float((v - model.parts["denoiser"].state_dict()[k]).mean())
                for k, v in model_of_file.parts["denoiser"].state_dict().items()
            )
            assert mean / len(model.parts["denoiser"].state_dict()) == pytest.approx(0.01, rel=1e-3)
            assert all(
                torch.equal(v, model.parts["vae"].state_dict()[k])
                for k, v in model_of_file.parts["vae"].state_dict().items()
            )
    folder, model = get_model("sd3")
    some = {
        k.replace(single_file.VAE, "vae."): v.clone()
        for k, v in single_file.original_layout(model).items()
        if "t5xxl" not in k
    }
    save_file({k: v.contiguous() for k, v in some.items()}, tmp_path / "no_t5.safetensors")
    same(model, load(tmp_path / "no_t5.safetensors", base=folder))


def test_full_size_transformers_by_name_and_shape() -> None:
    """SD 3 and 3.5, Flux dev and schnell as published, on the meta device: diffusers' converter
    gives back each name and shape."""
    sd3 = {
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "num_layers": 24,
        "attention_head_dim": 64,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "out_channels": 16,
        "pos_embed_max_size": 192,
    }
    medium = {
        **sd3,
        "pos_embed_max_size": 384,
        "dual_attention_layers": tuple(range(13)),
        "qk_norm": "rms_norm",
    }
    flux = {
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
    }
    cases: list[tuple[Any, dict, Any, Any]] = [
        (
            diffusers.SD3Transformer2DModel,
            sd3,
            transformers.sd3,
            theirs.convert_sd3_transformer_checkpoint_to_diffusers,
        ),
        (
            diffusers.SD3Transformer2DModel,
            medium,
            transformers.sd3,
            theirs.convert_sd3_transformer_checkpoint_to_diffusers,
        ),
        *(
            (
                diffusers.FluxTransformer2DModel,
                {**flux, "guidance_embeds": dev},
                transformers.flux,
                theirs.convert_flux_transformer_checkpoint_to_diffusers,
            )
            for dev in (True, False)
        ),
    ]
    for kind, config, layout, convert in cases:
        with torch.device("meta"):
            module = kind(**config)
        own = module.state_dict()
        back = convert({place.name: place.join(own) for place in layout(module)})
        assert {k: v.shape for k, v in back.items()} == {k: v.shape for k, v in own.items()}


def test_fluxs_rows_go_where_diffusers_expects_them() -> None:
    """At full height, which diffusers' converter needs, and a width of one: every value comes back
    to its position.
    """
    with torch.device("meta"):
        module = diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=4096,
            pooled_projection_dim=768,
            guidance_embeds=True,
        )
    torch.manual_seed(0)
    own = {
        name: torch.randn(len(value), *([1] if value.dim() == 2 else []))
        for name, value in module.state_dict().items()
    }
    tensors = {place.name: place.join(own) for place in transformers.flux(module)}
    back = theirs.convert_flux_transformer_checkpoint_to_diffusers(dict(tensors))
    assert back.keys() == own.keys()
    assert all(torch.equal(back[name], own[name]) for name in own)
    split_tensors: dict[str, torch.Tensor] = {}
    for place in transformers.flux(module):
        split_tensors |= place.split(tensors[place.name], own)
    assert all(torch.equal(split_tensors[name], own[name]) for name in own)


def test_full_size_sdxl_by_name_and_shape() -> None:
    """Stable Diffusion XL base as published: three levels, 0, 2 and 10 transformer layers."""
    config = {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (5, 10, 20),
        "transformer_layers_per_block": (1, 2, 10),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "cross_attention_dim": 2048,
    }
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(**config)
    own = unet.state_dict()
    tensors = {
        place.name: place.join(own) for place in single_file.ldm.unet(unet, single_file.UNET)
    }
    assert theirs.CHECKPOINT_KEY_NAMES["v2"].replace("2.1.trans", "4.1.trans") in tensors
    assert (
        "model.diffusion_model.input_blocks.8.1.transformer_blocks.9.attn2.to_v.weight" in tensors
    )
    assert "model.diffusion_model.output_blocks.2.2.conv.weight" in tensors
    back = theirs.convert_ldm_unet_checkpoint(tensors, dict(unet.config))
    assert {k: v.shape for k, v in back.items()} == {k: v.shape for k, v in own.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_file_has_the_precision_of_its_checkpoint(
    dtype: torch.dtype, get_model: GetModel, tmp_path: Path
) -> None:
    """A part that its checkpoint has in another precision keeps that one."""
    folder, _ = get_model("sdxl")
    pipe = diffusers.StableDiffusionXLPipeline.from_pretrained(folder, torch_dtype=dtype)
    pipe.vae.float()
    pipe.save_pretrained(tmp_path / "checkpoint")
    model = load(tmp_path / "checkpoint")
    single_file.write(model, tmp_path / "whole.safetensors")
    tensors = load_file(tmp_path / "whole.safetensors")
    is_vae = {name: name.startswith(single_file.VAE) for name in tensors}
    assert {value.dtype for name, value in tensors.items() if not is_vae[name]} == {dtype}
    assert {value.dtype for name, value in tensors.items() if is_vae[name]} == {torch.float32}
    same(model, load(tmp_path / "whole.safetensors", base=folder))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"prediction_type": "epsilon"}, set()),
        ({"prediction_type": "v_prediction"}, {"v_pred"}),
        (
            {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
            {"v_pred", "ztsnr"},
        ),
    ],
)
def test_a_file_of_sdxl_says_what_its_model_predicts(
    settings: dict[str, Any], names: set[str], get_model: GetModel, tmp_path: Path
) -> None:
    """ComfyUI takes a file without these names for a model that predicts noise."""
    folder, model = get_model("sdxl")
    pipe = families.plain("sdxl", folder)
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config, **settings)
    pipe.save_pretrained(tmp_path / "other")
    file = tmp_path / "whole.safetensors"
    single_file.write(load(tmp_path / "other"), file)
    assert load_file(file).keys() - single_file.original_layout(model).keys() == names
    same(model, load(file, base=tmp_path / "other"))
    part = {name: v for name, v in load_file(file).items() if not name.startswith("cond")}
    save_file(part, tmp_path / "part.safetensors")
    for one in (file, tmp_path / "part.safetensors"):
        if not names:
            assert load(one, base=folder).family == "sdxl"
            continue
        with pytest.raises(UserError, match="marked as a model with prediction_type v_prediction"):
            load(one, base=folder)


def test_what_cannot_be_written_or_read(get_model, tmp_path: Path, shared_tiny) -> None:
    _, dit = get_model("dit")
    with pytest.raises(
        UserError, match="no layout of single files for the family 'dit'; export --to diffusers"
    ):
        single_file.write(dit, tmp_path / "x.safetensors")
    _, sd3 = get_model("sd3")
    other = copy.deepcopy(sd3)
    other.parts["text_encoder"].text_projection.weight.data[0, 0] = 2
    with pytest.raises(UserError, match="the first text encoder is not the identity"):
        single_file.write(other, tmp_path / "x.safetensors")
    folder, flux = get_model("flux")
    whole = single_file.original_layout(flux)
    for wrong, message in (
        (
            {k: v for k, v in whole.items() if k != "img_in.weight"},
            r"it has nothing for img_in.weight",
        ),
        (
            {**whole, "double_blocks.7.img_mod.lin.bias": torch.zeros(1)},
            "has no place for double_blocks.7",
        ),
        (
            {**whole, "img_in.weight": torch.zeros(2, 2)},
            r"img_in.weight is \[2, 2\], \[32, 16\] is needed",
        ),
        ({**whole, "single_blocks.0.linear1.bias": torch.zeros(5)}, "does not fit"),
    ):
        save_file({k: v.contiguous() for k, v in wrong.items()}, tmp_path / "wrong.safetensors")
        with pytest.raises(UserError, match=message):
            load(tmp_path / "wrong.safetensors", base=folder)
    with pytest.raises(UserError, match="does not fit"):
        load(tmp_path / "wrong.safetensors", base=shared_tiny)
    with pytest.raises(
        UserError, match="give a diffusers folder or hub id of the same architecture with --base"
    ):
        load(tmp_path / "wrong.safetensors")


def test_a_pickled_checkpoint_only_when_allowed(get_model, tmp_path: Path) -> None:
    folder, model = get_model("sdxl")
    torch.save({"state_dict": dict(single_file.original_layout(model))}, tmp_path / "old.ckpt")
    with pytest.raises(UserError, match="is a pickle, which can execute code"):
        load(tmp_path / "old.ckpt", base=folder)
    same(model, load(tmp_path / "old.ckpt", base=folder, allow_pickle=True))
