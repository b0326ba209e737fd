"""LoRA files of Z-Image, Qwen-Image and Flux.2 in the namings of kohya and ComfyUI.

diffusers' own `load_lora_weights` is the witness: its images are those of the merged weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from concept_eraser.cli.main import app
from concept_eraser.exporting import formats
from concept_eraser.models import lora_files, lora_names
from concept_eraser.models.loading import load
from concept_eraser.models.lora import Factors
from concept_eraser.models.single_file import transformers
from concept_eraser.recipes.selections import select
from concept_eraser.utils.errors import UserError
from tests import families
from tests.exporting.test_kohya import ALPHA, RANK, factors, merge

OpenFamily = Callable[[str], tuple[Path, Any]]
NAMES = ("zimage", "qwenimage", "flux2")
# layers outside of blocks that a naming has no name for
UNNAMED = {
    ("zimage", "kohya"): {"all_x_embedder.2-1", "all_final_layer.2-1.linear"}
    | {"all_final_layer.2-1.adaLN_modulation.1"},
    ("flux2", "kohya"): {"norm_out.linear", "single_stream_modulation.linear"}
    | {f"double_stream_modulation_{kind}.linear" for kind in ("img", "txt")},
    ("flux2", "comfyui"): {"norm_out.linear"},
}


@pytest.fixture(scope="module")
def open_family(tmp_path_factory: pytest.TempPathFactory) -> OpenFamily:
    """A function that builds a family once and returns its folder and its model."""
    root, models = tmp_path_factory.mktemp("names"), {}

    def of(name: str) -> tuple[Path, Any]:
        if name not in models:
            folder = families.build(name, root / name)
            models[name] = folder, load(folder)
            models[name][1].configure(families.options(name))
        return models[name]

    return of


def image(model: Any) -> torch.Tensor:
    return model.sample(["a red star"], seeds=[5], steps=2, guidance=1.0)[0].int()


def all_factors(model: Any, without: set[str]) -> Factors:
    """Random factors for every linear layer of the denoiser but these."""
    return factors(model.parts["denoiser"], "denoiser", lambda name: name not in without)


@pytest.mark.parametrize("naming", ["kohya", "comfyui"])
@pytest.mark.parametrize("name", NAMES)
def test_diffusers_generates_the_image(
    name: str, naming: str, open_family: OpenFamily, tmp_path: Path
) -> None:
    """It does for all layers that the naming has names for, and the file is read back."""
    folder, model = open_family(name)
    one = all_factors(model, UNNAMED.get((name, naming), set()))
    expected = image(merge(model, [one]))
    assert (expected - image(model)).abs().max() > 3, "the factors show"
    file = tmp_path / "a.safetensors"
    lora_files.save(model, [one], file, naming=naming)
    pipe = families.plain(name, folder)
    pipe.load_lora_weights(str(file.parent), weight_name=file.name)
    from_diffusers = load(pipe)
    from_diffusers.configure(families.options(name))
    assert (image(from_diffusers) - expected).abs().max() <= 1
    with safe_open(file, "pt") as content:
        header = content.metadata()
    (back,) = lora_files.read(model, load_file(file), header, "a")
    assert set(back.layers) == set(one.layers)
    for layer in one.layers:
        torch.testing.assert_close(back.change(layer), one.change(layer), atol=1e-5, rtol=1e-5)


def test_the_names_are_those_that_users_tools_write(open_family: OpenFamily) -> None:
    """musubi-tuner's conversion for ComfyUI and AI Toolkit write these names."""
    expected = {
        ("zimage", "kohya"): "lora_unet_layers_1_attention_qkv.lora_down.weight",
        ("zimage", "comfyui"): "diffusion_model.layers.1.attention.to_q.lora_A.weight",
        ("qwenimage", "kohya"): "lora_unet_transformer_blocks_1_attn_add_k_proj.alpha",
        (
            "qwenimage",
            "comfyui",
        ): "diffusion_model.transformer_blocks.1.attn.to_out.0.lora_B.weight",
        ("flux2", "kohya"): "lora_unet_double_blocks_0_txt_attn_qkv.lora_up.weight",
        ("flux2", "comfyui"): "diffusion_model.single_blocks.0.linear1.lora_A.weight",
    }
    for (name, naming), tensor in expected.items():
        _, model = open_family(name)
        one = all_factors(model, UNNAMED.get((name, naming), set()))
        tensors, header = lora_files.build(model, [one], naming=naming)
        assert tensor in tensors
        if naming == "kohya":
            assert header["ss_network_module"].startswith("networks.lora_")
        else:
            assert header == {"format": "pt"}, "readers scale by 1"
            assert not any(key.endswith("alpha") for key in tensors)


@pytest.mark.parametrize("name", ["zimage", "flux2"])
def test_the_original_names_are_those_of_diffusers_converter(
    name: str, open_family: OpenFamily
) -> None:
    """diffusers reads a checkpoint with our original names as its own state dict."""
    _, model = open_family(name)
    own = model.denoiser.state_dict()
    if name == "flux2":
        places = list(transformers.flux2_layers(model.denoiser, modulation=True))
        convert = single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers
    else:
        places = list(transformers.zimage_layers(model.denoiser))
        convert = single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers
    converted = convert({place.name: place.join(own) for place in places})
    layers = {n for n, one in model.denoiser.named_modules() if isinstance(one, torch.nn.Linear)}
    tops = {"norm_out.linear"} | {n for n in layers if n.startswith("all_")}
    assert {key.rpartition(".")[0] for key in converted} == layers - tops
    assert all(torch.equal(value, own[key]) for key, value in converted.items())


def test_musubi_tuners_own_names_of_zimage_are_read(
    open_family: OpenFamily, tmp_path: Path
) -> None:
    _, model = open_family("zimage")
    one = factors(model.denoiser, "denoiser", lambda n: n.startswith("layers.0.attention.to_"))
    tensors: dict[str, torch.Tensor] = {}
    for layer, (down, up) in one.layers.items():
        stem = "lora_unet_" + layer.replace(".", "_")
        tensors |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
        tensors[f"{stem}.alpha"] = torch.tensor(ALPHA)
    (back,) = lora_files.read(model, tensors, {}, "a")
    assert set(back.layers) == set(one.layers)
    for layer in one.layers:
        torch.testing.assert_close(back.change(layer), one.change(layer), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_default_selection_has_names_in_each_naming(name: str, open_family: OpenFamily) -> None:
    """`erase` adapts blocks, so its LoRA can be exported to each program."""
    _, model = open_family(name)
    blocks = {
        n.removesuffix(".weight") for n in select(dict(model.denoiser.named_parameters()), "blocks")
    }
    one = factors(model.denoiser, "denoiser", blocks.__contains__)
    assert one.layers
    for naming in lora_names.NAMINGS:
        tensors, _ = lora_files.build(model, [one], naming=naming)
        assert tensors


def test_what_a_naming_has_no_name_for(open_family: OpenFamily) -> None:
    for (name, naming), layers in UNNAMED.items():
        _, model = open_family(name)
        for layer in layers:
            one = factors(model.denoiser, "denoiser", {layer}.__contains__)
            with pytest.raises(UserError, match=f"{naming} has no name for the layer {layer}"):
                lora_files.build(model, [one], naming=naming)


@pytest.mark.parametrize(
    ("family", "naming", "message"),
    [
        ("sana", "kohya", "no converter of kohya's names .* export --to lora, which diffusers"),
        ("sana", "comfyui", "ComfyUI has no Sana"),
        ("pixart", "kohya", "diffusers reads no LoRA into its pipelines; export --to lora for"),
        ("dit", "comfyui", "diffusers reads no LoRA into its pipelines; export --to diffusers"),
        ("sd", "comfyui", "export --to kohya, which ComfyUI reads"),
        ("flux", "comfyui", "export --to kohya, which ComfyUI reads"),
        ("sd3", "comfyui", "export --to lora, which diffusers and ComfyUI read"),
    ],
)
def test_a_family_without_a_naming(family: str, naming: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        lora_names.require(family, naming)


def test_the_command_exports_to_comfyui(open_family: OpenFamily, tmp_path: Path) -> None:
    """Between the namings no number changes; fp8 has no place for its scales."""
    folder, model = open_family("flux2")
    one = factors(model.denoiser, "denoiser", lambda n: "transformer_blocks" in n)
    source, comfyui = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    lora_files.save(model, [one], source)
    command = ["export", str(source), "--to", "comfyui", "--before", str(folder)]
    result = CliRunner().invoke(app, [*command, "-o", str(comfyui)])
    assert result.exit_code == 0, result.output
    assert f"(rank {RANK}; its own factors)" in result.output
    (back,) = lora_files.read(model, load_file(comfyui), {}, "b")
    for layer in one.layers:
        torch.testing.assert_close(back.change(layer), one.change(layer), atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="fp8 needs a scale for each layer, which comfyui's naming"):
        formats.export(
            source, "comfyui", before=folder, dtype="fp8", output=tmp_path / "c.safetensors"
        )


def test_comfyui_misses_the_time_of_flux2_in_diffusers_naming(
    open_family: OpenFamily, tmp_path: Path
) -> None:
    folder, model = open_family("flux2")
    layer = "time_guidance_embed.timestep_embedder.linear_1"
    one = factors(model.denoiser, "denoiser", lambda n: n in (layer, "x_embedder"))
    source = tmp_path / "a.safetensors"
    lora_files.save(model, [one], source)
    result = formats.export(source, "lora", before=folder, output=tmp_path / "b.safetensors")
    (finding,) = result.ignored
    assert (finding.program, finding.layers) == ("ComfyUI", (layer,))
    assert finding.sentence().endswith("export --to comfyui")
