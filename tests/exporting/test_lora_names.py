"""LoRA files of Z-Image, Qwen-Image and Flux.2 in the namings of kohya, musubi and ComfyUI.

diffusers' own `load_lora_weights` is the witness: its images are those of the merged weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from concept_eraser.models.lora_readers import find_ignored
from concept_eraser.models.single_file import transformers
from concept_eraser.recipes.selections import select
from concept_eraser.utils.errors import UserError
from tests import families
from tests.exporting.test_kohya import RANK, factors, merge

OpenFamily = Callable[[str], tuple[Path, Any]]
NAMES = ("zimage", "qwenimage", "flux2")
# layers that have no name
UNNAMED = {"flux2": {"norm_out.linear"}}
# the layers that each program ignores: (family, naming) -> program -> the beginnings of their names
_ATTENTION = ("layers.0.attention.", "layers.1.attention.", "noise_refiner.0.attention.")
IGNORED: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("zimage", "kohya"): {
        "diffusers": ("all_",),
        "musubi-tuner": ("all_", *_ATTENTION, "context_refiner.0.attention."),
    },
    ("zimage", "musubi"): {"ComfyUI": ("all_", *_ATTENTION, "context_refiner.0.attention.")},
    ("flux2", "kohya"): {"diffusers": ("single_stream_modulation.", "double_stream_modulation_")},
    ("flux2", "musubi"): {"diffusers": ("single_stream_modulation.", "double_stream_modulation_")},
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


def all_factors(model: Any) -> Factors:
    """Random factors for every linear layer of the denoiser that has a name."""
    without = UNNAMED.get(model.family, set())
    return factors(model.parts["denoiser"], "denoiser", lambda name: name not in without)


@pytest.mark.parametrize("naming", ["kohya", "musubi", "comfyui"])
@pytest.mark.parametrize("name", NAMES)
def test_diffusers_generates_the_image(
    name: str, naming: str, open_family: OpenFamily, tmp_path: Path
) -> None:
    """It reads the layers that the table says, and ignores the others. The file is read back."""
    folder, model = open_family(name)
    one = all_factors(model)
    ignored = {i.program: set(i.layers) for i in find_ignored(name, [one], naming)}
    assert ignored == {
        program: {layer for layer in one.layers if layer.startswith(starts)}
        for program, starts in IGNORED.get((name, naming), {}).items()
    }
    missed = ignored.get("diffusers", set())
    layers = {layer: pair for layer, pair in one.layers.items() if layer not in missed}
    expected = image(merge(model, [replace(one, layers=layers)]))
    assert (expected - image(model)).abs().max() > 3, "the factors show"
    if missed:
        assert (expected - image(merge(model, [one]))).abs().max() > 3, "and the missed ones"
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
        ("zimage", "musubi"): "lora_unet_layers_1_attention_to_out_0.lora_up.weight",
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
        tensors, header = lora_files.build(model, [all_factors(model)], naming=naming)
        assert tensor in tensors
        if naming in lora_names.KOHYA_FORMAT:
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
        places = list(transformers.flux2_layers(model.denoiser))
        convert = single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers
    else:
        places = list(transformers.zimage_layers(model.denoiser))
        convert = single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers
    converted = convert({place.name: place.join(own) for place in places})
    layers = {n for n, one in model.denoiser.named_modules() if isinstance(one, torch.nn.Linear)}
    assert {key.rpartition(".")[0] for key in converted} == layers - UNNAMED.get(name, set())
    assert all(torch.equal(value, own[key]) for key, value in converted.items())


@pytest.mark.parametrize(
    ("name", "stem", "layers"),
    [
        ("zimage", "lora_unet_layers_0_attention_qkv", "layers.0.attention.to_{}"),
        ("flux2", "lora_unet_double_blocks_0_img_attn_qkv", "transformer_blocks.0.attn.to_{}"),
        (
            "flux2",
            "lora_unet_double_blocks_0_txt_attn_qkv",
            "transformer_blocks.0.attn.add_{}_proj",
        ),
    ],
)
def test_fused_factors_are_exact(
    name: str, stem: str, layers: str, open_family: OpenFamily
) -> None:
    """Their product is that of q, above that of k, above that of v, with three times the rank.

    The entries are small integers, so that float32 rounds nothing.
    """
    _, model = open_family(name)
    places = [layers.format(letter) for letter in "qkv"]
    drawn = factors(model.denoiser, "denoiser", places.__contains__)
    pairs = {
        layer: ((10 * down).round(), (10 * up).round())
        for layer, (down, up) in drawn.layers.items()
    }
    one = replace(drawn, layers=pairs, alpha=2.0 * RANK)
    tensors, header = lora_files.build(model, [one], naming="kohya")
    down, up = tensors[f"{stem}.lora_down.weight"], tensors[f"{stem}.lora_up.weight"]
    assert len(down) == 3 * RANK
    product = up @ down * (float(tensors[f"{stem}.alpha"]) / len(down))
    assert torch.equal(product, torch.cat([one.change(layer) for layer in places]))
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == (str(RANK), f"{2.0 * RANK}")
    file_in_musubis_names = lora_files.build(model, [one], naming="musubi")[0]
    assert all(len(value) == RANK for n, value in file_in_musubis_names.items() if "down" in n) is (
        name == "zimage"
    )


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


@pytest.mark.parametrize("naming", ["kohya", "musubi", "comfyui"])
def test_what_a_naming_has_no_name_for(naming: str, open_family: OpenFamily) -> None:
    """It is an error that names the layer; nothing is left out silently."""
    for name, layers in UNNAMED.items():
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
        ("sd", "musubi", "export --to kohya, which ComfyUI reads"),
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
    """Between the namings no number changes; fp8 has no place for its scale."""
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
    with pytest.raises(UserError, match=r"fp8 needs a scale \(alpha\), which comfyui's naming"):
        formats.export(
            source, "comfyui", before=folder, dtype="fp8", output=tmp_path / "c.safetensors"
        )


@pytest.mark.parametrize(
    ("strength", "usage"),
    [(1.0, "weight 1 erases"), (-0.5, "weight 1 is strength -0.5 of the erasure")],
)
def test_the_header_says_what_weight_1_is(
    strength: float, usage: str, open_family: OpenFamily, tmp_path: Path
) -> None:
    folder, model = open_family("zimage")
    one = factors(model.denoiser, "denoiser", lambda n: "attention" in n)
    source, file = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    lora_files.save(model, [one], source)
    formats.export(source, "kohya", before=folder, strength=strength, output=file)
    with safe_open(file, "pt") as content:
        header = content.metadata()
    assert header["modelspec.usage_hint"] == f"{usage}; weight 0 is the original"
    comment = "strength -0.5 of the erasure" in header["ss_training_comment"]
    assert comment is (strength != 1)


@pytest.mark.parametrize("name", NAMES)
def test_diffusers_cannot_read_fp8_of_the_newer_families(
    name: str, open_family: OpenFamily, tmp_path: Path
) -> None:
    """Its converters multiply fp8. The export says so, and `load` reads the file."""
    folder, model = open_family(name)
    one = factors(model.denoiser, "denoiser", lambda n: "attn" in n or "attention" in n)
    source, file = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    lora_files.save(model, [one], source)
    result = formats.export(source, "musubi", before=folder, dtype="fp8", output=file)
    finding = next(i for i in result.ignored if i.program == "diffusers")
    assert set(finding.layers) == set(one.layers)
    assert finding.sentence().startswith("diffusers cannot read ")
    assert finding.sentence().endswith("export --dtype fp16 for diffusers")
    with pytest.raises(NotImplementedError, match="Float8"):
        families.plain(name, folder).load_lora_weights(str(tmp_path), weight_name=file.name)
    read = lora_files.read(model, load_file(file), {}, "b")
    loaded = load(file, base=folder)
    loaded.configure(families.options(name))
    assert (image(loaded) - image(merge(model, read))).abs().max() <= 1


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
