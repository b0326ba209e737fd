"""Which layers each program reads of a LoRA file, and the selection that all of them read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel

from concept_eraser.models.lora import Factors, can_adapt
from concept_eraser.models.lora_readers import READERS, find_ignored, is_loaded_by_diffusers
from concept_eraser.recipes.selections import select

# the classes that sd-scripts looks for, networks/lora.py, lines 867-868
SD_SCRIPTS = ("Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D")
FOUR = {"conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"}


def layers_inside(module: Any, classes: tuple[str, ...]) -> set[str]:
    """The layers that can have a LoRA inside modules of these classes, as sd-scripts finds them."""
    return {
        f"{name}.{inner}"
        for name, child in module.named_modules()
        if type(child).__name__ in classes
        for inner, layer in child.named_modules()
        if can_adapt(layer, conv=True)
    }


def all_layers(module: Any) -> set[str]:
    return {name for name, layer in module.named_modules() if can_adapt(layer, conv=True)}


@pytest.fixture(scope="module")
def unet() -> Any:
    """A UNet of Stable Diffusion 1.4's size, without numbers."""
    with torch.device("meta"):
        return UNet2DConditionModel(cross_attention_dim=768)


def test_sd_scripts_reads_278_of_the_282_layers_of_stable_diffusion_1(unet: Any) -> None:
    sd_scripts = next(one for one in READERS if one.program == "sd-scripts")
    layers = all_layers(unet)
    inside = layers_inside(unet, SD_SCRIPTS)
    assert (len(layers), len(inside)) == (282, 278)
    assert {name for name in layers if sd_scripts.reads("denoiser", name)} == inside
    assert layers - inside == FOUR


def test_blocks_selects_what_sd_scripts_reads(unet: Any) -> None:
    weights = [name for name, _ in unet.named_parameters()]
    selected = {name.removesuffix(".weight") for name in select(weights, "blocks")}
    assert selected & all_layers(unet) == layers_inside(unet, SD_SCRIPTS)


def test_blocks_of_flux_and_of_a_text_encoder(shared_tiny: Any) -> None:
    with torch.device("meta"):
        flux = FluxTransformer2DModel(num_layers=1, num_single_layers=1)
    layers = [f"{name}.weight" for name in sorted(all_layers(flux))]
    left_out = set(layers) - set(select(layers, "blocks"))
    assert {name.split(".")[0] for name in left_out} == {
        "context_embedder",
        "norm_out",
        "proj_out",
        "time_text_embed",
        "x_embedder",
    }
    encoder = shared_tiny.parts["text_encoder"]
    layers = [f"{name}.weight" for name in sorted(all_layers(encoder))]
    assert select(layers, "blocks") == layers
    clip_readers = [one for one in READERS if {"sd", "sdxl", "sd3", "flux"} & {*one.families}]
    assert len(clip_readers) > 8
    for reader in clip_readers:
        assert all(reader.reads("text_encoder", name[:-7]) for name in layers), reader.program


def random_factors(names: list[str]) -> Factors:
    generator = torch.Generator().manual_seed(0)
    layers = {
        name: (
            torch.randn(2, 3, 3, 3, generator=generator),
            torch.randn(4, 2, 1, 1, generator=generator),
        )
        for name in names
    }
    return Factors("denoiser", layers, 2, 3.0)


def test_the_share_of_the_ignored_layers() -> None:
    names = ["conv_in", "down_blocks.0.resnets.0.conv1", "mid_block.attentions.0.proj_in"]
    factors = random_factors(names)
    squares = [float(factors.change(name).square().sum()) for name in names]
    assert factors.squared_length("conv_in") == pytest.approx(squares[0], rel=1e-5)
    (finding,) = find_ignored("sd", [factors], "kohya")
    assert (finding.program, finding.layers, finding.of) == ("sd-scripts", ("conv_in",), 3)
    assert finding.share == pytest.approx(squares[0] / sum(squares), rel=1e-5)
    assert "sd-scripts ignores 1 of the 3 layers (conv_in)" in finding.sentence()
    assert find_ignored("sd", [random_factors(names[1:])], "kohya") == ()
    assert find_ignored("dit", [factors], "kohya") == ()


def test_comfyui_misses_the_attention_of_a_unet_in_diffusers_naming() -> None:
    attention = "mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0"
    factors = random_factors([attention, "conv_in", "mid_block.attentions.0.proj_in"])
    (finding,) = find_ignored("sdxl", [factors], "diffusers")
    assert (finding.program, finding.layers) == ("ComfyUI", (attention,))
    assert "export --to kohya" in finding.sentence()


def test_pipelines_that_read_no_lora_read_none_of_a_text_encoder() -> None:
    for family, part in itertools.product(("pixart", "dit"), ("denoiser", "text_encoder")):
        assert not is_loaded_by_diffusers(family, part)
    assert is_loaded_by_diffusers("flux", "text_encoder")


def test_each_entry_names_its_source() -> None:
    """A repository with a commit or a version, and a file."""
    for reader in READERS:
        assert Path(reader.source.split(", ")[1].split()[0]).suffix == ".py", reader.source


# the page's words for the families and the files
FAMILIES = {
    "Stable Diffusion 1, 2": "sd",
    "SDXL": "sdxl",
    "Stable Diffusion 3": "sd3",
    "Flux": "flux",
    "Flux.2": "flux2",
    "Qwen-Image": "qwenimage",
    "Z-Image": "zimage",
    "Sana": "sana",
    "PixArt": "pixart",
    "DiT": "dit",
}


def test_the_pages_table_has_every_entry() -> None:
    """One row for each program, naming and family. Only of diffusers it says that it was run."""
    page = Path(__file__).parents[2] / "docs" / "how_to" / "lora.md"
    table = page.read_text().split("<!-- lora-readers -->")[1].split("<!-- /lora-readers -->")[0]
    read: dict[tuple[str, str, str], bool] = {}  # whether the program reads all layers
    for row in table.strip().splitlines()[2:]:
        models, files, programs, ignored, evidence = row.strip("| ").split(" | ")
        for program in programs.split(", "):
            assert ("test" in evidence) is (program == "diffusers" and "all layers" not in ignored)
            for file in files.replace("`", "").split(", "):
                naming = "diffusers" if file == "lora" else file
                for model in models.split("; "):
                    key = program, naming, FAMILIES[model]
                    assert key not in read, key
                    read[key] = ignored.startswith("nothing")
    in_code = {(one.program, one.naming, family): one for one in READERS for family in one.families}
    untold = {key for key in read if key not in in_code}
    assert {(program, naming) for program, naming, _ in untold} == {("diffusers", "diffusers")}
    assert all(read[key] for key in untold), "without an entry nothing is ignored"
    for key, reader in in_code.items():
        if key[2] != "flux":  # its rows are about what the file holds
            assert read[key] is (reader.denoiser == ""), key
