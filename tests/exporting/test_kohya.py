"""LoRA files of the larger families, in the namings of kohya and of diffusers.

Plain diffusers generates the image of the merged weights, and each naming converts to the other
without loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from concept_eraser.exporting import formats
from concept_eraser.models import lora_files
from concept_eraser.models.loading import load
from concept_eraser.models.lora import Factors, can_adapt
from concept_eraser.models.lora_readers import find_ignored
from concept_eraser.utils.errors import UserError
from tests import families

RANK, ALPHA = 2, 3.0


@pytest.fixture(scope="module")
def open_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A function that builds a family once and returns its folder and its model."""
    root, models = tmp_path_factory.mktemp("kohya"), {}

    def of(name: str) -> tuple[Path, Any]:
        if name not in models:
            folder = families.build(name, root / name)
            models[name] = folder, load(folder)
        return models[name]

    return of


def factors(
    module: Any, part: str, matches: Callable[[str], bool], *, conv: bool = False
) -> Factors:
    """Random factors for all layers whose names match."""
    torch.manual_seed(3)
    layers = {}
    for name, layer in module.named_modules():
        if matches(name) and can_adapt(layer, conv=conv):
            out, into, *kernel = layer.weight.shape
            layers[name] = (
                torch.randn(RANK, into, *kernel) * 0.2,
                torch.randn(out, RANK, *[1] * len(kernel)) * 0.2,
            )
    return Factors(part, layers, RANK, ALPHA)


def merge(model: Any, loras: list[Factors]) -> Any:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for one in loras:
            for layer in one.layers:
                model.parts[one.part].get_parameter(f"{layer}.weight").add_(one.change(layer))
    return model


def image(model: Any) -> torch.Tensor:
    model.configure({"size": 16} if model.family == "flux" else {})
    return model.sample(["a red star"], seeds=[5], steps=2, guidance=3.0)[0].int()


def in_diffusers(name: str, folder: Path, file: Path) -> torch.Tensor:
    pipe = families.plain(name, folder)
    pipe.load_lora_weights(str(file.parent), weight_name=file.name)
    return image(load(pipe))


CASES = {
    "attention": (
        "sdxl",
        lambda model: [factors(model.parts["denoiser"], "denoiser", lambda n: "attn" in n)],
    ),
    "all layers": (
        "sdxl",
        lambda model: [
            factors(model.parts["denoiser"], "denoiser", lambda n: "conv_in" not in n, conv=True)
        ],
    ),
    "text encoders": (
        "sdxl",
        lambda model: [
            factors(model.parts[part], part, lambda n: "self_attn" in n or "fc" in n)
            for part in ("text_encoder", "text_encoder_2")
        ],
    ),
    "denoiser and text encoders in one file": (
        "sdxl",
        lambda model: [
            factors(model.parts["denoiser"], "denoiser", lambda n: "attn" in n),
            *(
                factors(model.parts[part], part, lambda n: "self_attn" in n)
                for part in ("text_encoder", "text_encoder_2")
            ),
        ],
    ),
    "double blocks": (
        "flux",
        lambda model: [
            factors(
                model.parts["denoiser"], "denoiser", lambda n: n.startswith("transformer_blocks")
            )
        ],
    ),
    "some of q, k, v": (
        "flux",
        lambda model: [
            factors(
                model.parts["denoiser"],
                "denoiser",
                lambda n: (
                    n
                    in (
                        "transformer_blocks.0.attn.to_k",
                        "transformer_blocks.0.attn.add_v_proj",
                        "transformer_blocks.0.ff.net.2",
                    )
                ),
            )
        ],
    ),
    "CLIP": (
        "flux",
        lambda model: [
            factors(model.parts["text_encoder"], "text_encoder", lambda n: "self_attn" in n)
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_diffusers_generates_the_image(case: str, open_family, tmp_path: Path) -> None:
    name, make = CASES[case]
    folder, model = open_family(name)
    loras = make(model)
    expected = image(merge(model, loras))
    assert (expected - image(model)).abs().max() > 3, "the factors show"
    for naming in ("kohya", "diffusers"):
        file = tmp_path / f"{naming}.safetensors"
        lora_files.save(model, loras, file, naming=naming)
        assert (in_diffusers(name, folder, file) - expected).abs().max() <= 1, naming
        assert (image(load(file, base=folder)) - expected).abs().max() <= 1, "and load reads it too"


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str, open_family, tmp_path: Path) -> None:
    """Factors in kohya's naming are read back: the change of each layer is the same."""
    name, make = CASES[case]
    _, model = open_family(name)
    loras = make(model)
    lora_files.save(model, loras, tmp_path / "a.safetensors", naming="kohya")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        header = file.metadata()
    back = lora_files.read(model, load_file(tmp_path / "a.safetensors"), header, "a")
    assert {one.part: set(one.layers) for one in back} == {
        one.part: set(one.layers) for one in loras
    }
    for one in loras:
        other = next(b for b in back if b.part == one.part)
        assert all(
            torch.allclose(one.change(layer), other.change(layer), atol=1e-6)
            for layer in one.layers
        )


def test_the_names_are_those_that_sd_scripts_writes(open_family, tmp_path: Path) -> None:
    _, model = open_family("sdxl")
    lora_files.save(
        model, CASES["all layers"][1](model), tmp_path / "a.safetensors", naming="kohya"
    )
    names = set(load_file(tmp_path / "a.safetensors"))
    assert {
        "lora_unet_middle_block_1_transformer_blocks_1_attn2_to_k.lora_down.weight",
        "lora_unet_input_blocks_3_1_transformer_blocks_0_ff_net_0_proj.alpha",
        "lora_unet_label_emb_0_2.lora_up.weight",
        "lora_unet_input_blocks_3_0_in_layers_2.alpha",
    } <= names
    lora_files.save(
        model, CASES["text encoders"][1](model), tmp_path / "b.safetensors", naming="kohya"
    )
    names = set(load_file(tmp_path / "b.safetensors"))
    assert {
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha",
        "lora_te2_text_model_encoder_layers_1_self_attn_out_proj.alpha",
    } <= names
    _, model = open_family("flux")
    lora_files.save(
        model, CASES["double blocks"][1](model), tmp_path / "c.safetensors", naming="kohya"
    )
    tensors = load_file(tmp_path / "c.safetensors")
    assert tensors["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"].shape == (
        3 * RANK,
        32,
    )
    assert float(tensors["lora_unet_double_blocks_0_img_attn_qkv.alpha"]) == 3 * ALPHA


def test_fluxs_single_blocks_at_full_height() -> None:
    """The converter of diffusers accepts 3072 + 3072 + 3072 + 12288 rows only.

    The layers have that height and a small width.
    """

    class Block(torch.nn.Module):
        """The names and rows of a Flux transformer, at width 2."""

        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                whole = diffusers.FluxTransformer2DModel(
                    num_layers=1, num_single_layers=1, in_channels=64, guidance_embeds=True
                )
            self.state = {
                k: torch.zeros(len(v), 2) if v.dim() == 2 else torch.zeros(len(v))
                for k, v in whole.state_dict().items()
            }
            self.config = whole.config

        def state_dict(self) -> Any:
            return self.state

        def get_parameter(self, name: str) -> Any:
            return self.state[name]

    class Narrow:
        family, source = "flux", "a narrow Flux"

        def __init__(self) -> None:
            self.parts = {"denoiser": Block()}

    torch.manual_seed(0)
    layers = {
        f"single_transformer_blocks.0.{name}": (torch.randn(RANK, 2), torch.randn(rows, RANK))
        for name, rows in (
            ("attn.to_q", 3072),
            ("attn.to_k", 3072),
            ("attn.to_v", 3072),
            ("proj_mlp", 12288),
            ("proj_out", 3072),
            ("norm.linear", 9216),
        )
    }
    one = Factors("denoiser", layers, RANK, ALPHA)
    narrow: Any = Narrow()
    back = _convert_kohya_flux_lora_to_diffusers(lora_files._kohya(narrow, one))
    assert len(back) == 2 * len(layers)
    for name in layers:
        down, up = (
            back[f"transformer.{name}.lora_A.weight"],
            back[f"transformer.{name}.lora_B.weight"],
        )
        assert torch.allclose(up @ down, one.change(name), atol=1e-4)


def test_a_kohya_lora_of_a_flux_of_other_widths_is_refused(open_family, tmp_path: Path) -> None:
    """The converter of diffusers asserts the widths of Flux.1."""
    _, model = open_family("flux")
    attention = "single_transformer_blocks.0.attn."
    one = factors(model.parts["denoiser"], "denoiser", lambda n: n.startswith(attention))
    lora_files.save(model, [one], tmp_path / "a.safetensors", naming="kohya")
    with pytest.raises(UserError, match=r"is a LoRA that does not fit .*of other sizes"):
        load(tmp_path / "a.safetensors", base=model)


def test_what_kohya_has_no_name_for(open_family, tmp_path: Path) -> None:
    for name, part, layer, message in (
        ("flux", "denoiser", "x_embedder", "kohya has no name for the layer x_embedder"),
        ("sd3", "denoiser", "transformer_blocks.0.attn.to_q", "kohya's names for the family 'sd3'"),
    ):
        _, model = open_family(name)
        one = factors(model.parts[part], part, lambda n, layer=layer: n == layer)
        with pytest.raises(UserError, match=message):
            lora_files.save(model, [one], tmp_path / "x.safetensors", naming="kohya")


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_export_between_the_namings(name: str, open_family, tmp_path: Path) -> None:
    """`export` turns a diffusers LoRA into kohya's naming and into tensors, without
    approximation.
    """
    folder, model = open_family(name)
    loras = CASES["attention" if name == "sdxl" else "double blocks"][1](model)
    lora_files.save(model, loras, tmp_path / "a.safetensors")
    export = formats.export(
        tmp_path / "a.safetensors", "kohya", before=folder, output=tmp_path / "b.safetensors"
    )
    assert export.error == 0.0
    tensors = formats.export(
        export.path, "tensors", before=folder, output=tmp_path / "c.safetensors"
    ).path
    with safe_open(tensors, "pt") as file:
        assert file.metadata()["part"] == ("unet" if name == "sdxl" else "transformer")
    assert (image(load(tensors, base=folder)) - image(merge(model, loras))).abs().max() <= 1


def test_fluxs_single_file_holds_no_change_of_a_text_encoder(open_family, tmp_path: Path) -> None:
    folder, model = open_family("flux")
    lora_files.save(model, CASES["CLIP"][1](model), tmp_path / "a.safetensors")
    with pytest.raises(
        UserError, match="holds only the denoiser, and this erasure changed text_encoder"
    ):
        formats.export(
            tmp_path / "a.safetensors",
            "single-file",
            before=folder,
            output=tmp_path / "b.safetensors",
        )
    loras = CASES["double blocks"][1](model)
    lora_files.save(model, loras, tmp_path / "c.safetensors")
    export = formats.export(
        tmp_path / "c.safetensors", "single-file", before=folder, output=tmp_path / "b.safetensors"
    )
    assert (image(load(export.path, base=folder)) - image(merge(model, loras))).abs().max() <= 1


@pytest.mark.parametrize(("name", "part"), [("sd3", "text_encoder_3"), ("flux", "text_encoder_2")])
def test_no_change_of_a_t5_is_lost_in_silence(
    name: str, part: str, open_family, tmp_path: Path
) -> None:
    """diffusers reads a LoRA into the transformer and CLIP only, and ignores the T5's matrices."""
    folder, model = open_family(name)
    t5 = factors(model.parts[part], part, lambda n: n.endswith("SelfAttention.q"))
    loras = [factors(model.parts["denoiser"], "denoiser", lambda n: n.endswith("to_q")), t5]
    file = tmp_path / "a.safetensors"
    lora_files.save(model, loras, file)
    pipe = families.plain(name, folder)
    pipe.load_lora_weights(str(tmp_path), weight_name=file.name)
    (layer,) = t5.layers
    own = model.parts[part].get_parameter(f"{layer}.weight")
    assert torch.equal(getattr(pipe, part).get_parameter(f"{layer}.weight"), own)
    findings = find_ignored(name, loras, "diffusers")
    assert {one.program: one.layers for one in findings} == dict.fromkeys(
        ("ComfyUI", "diffusers"), (f"{part}.{layer}",)
    )
    assert all("a whole model" in one.sentence() for one in findings)
    with pytest.raises(UserError, match=rf"a LoRA that changes {part}\.{layer}, and diffusers"):
        load(file, base=folder)
    tensors = load_file(file)
    comfyui = {
        key.replace(f"{part}.", "text_encoders.t5xxl.transformer."): value
        for key, value in tensors.items()
    }
    save_file(comfyui, tmp_path / "b.safetensors")
    with pytest.raises(UserError, match=r"a LoRA that changes text_encoders\.t5xxl\."):
        load(tmp_path / "b.safetensors", base=folder)
    for key in tensors:
        if key.startswith(part):
            tensors[key].zero_()
    save_file(tensors, tmp_path / "c.safetensors")
    zeros = load(tmp_path / "c.safetensors", base=folder)
    pairs = zip(zeros.denoiser.parameters(), model.denoiser.parameters(), strict=True)
    assert any(not torch.equal(*pair) for pair in pairs)


def test_tensors_go_to_the_part_that_their_file_names(open_family, tmp_path: Path) -> None:
    """Both CLIP encoders of the tiny Stable Diffusion 3 have tensors of one name and shape."""
    folder, model = open_family("sd3")
    changed, name = copy.deepcopy(model), "text_model.encoder.layers.0.self_attn.q_proj.weight"
    with torch.no_grad():
        changed.parts["text_encoder_2"].get_parameter(name).add_(1)
    changed.save(tmp_path / "changed")
    file = formats.export(
        tmp_path / "changed", "tensors", before=folder, output=tmp_path / "a.safetensors"
    ).path
    again = load(file, base=folder)
    for part in model.readers:
        own, other = (m.parts[part].state_dict() for m in (changed, again))
        assert all(torch.equal(own[key], other[key]) for key in own), part


def test_a_tied_tensor_gets_the_strength_once(open_family, tmp_path: Path) -> None:
    """T5's table of words has two names, and a file of tensors has one of them."""
    folder, model = open_family("flux")
    encoder = model.parts["text_encoder_2"]
    table = encoder.shared.weight
    assert encoder.encoder.embed_tokens.weight is table
    tensors = {
        name: value + 1.0 if name == "shared.weight" else value.clone()
        for name, value in encoder.state_dict().items()
        if name != "encoder.embed_tokens.weight"
    }
    source = tmp_path / "t5.safetensors"
    save_file(tensors, source)
    for to, place in (("diffusers", tmp_path / "half"), ("tensors", tmp_path / "half.safetensors")):
        formats.export(source, to, before=folder, strength=0.5, output=place)
        half = load(place, base=folder).parts["text_encoder_2"].shared.weight
        torch.testing.assert_close(half, table + 0.5)
    assert list(load_file(tmp_path / "half.safetensors")) == ["shared.weight"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_fused_lora_of_strength_0_is_written_and_read(
    dtype: str, open_family, tmp_path: Path
) -> None:
    """q, k and v are one layer in kohya's names of Flux, and none of them changes."""
    folder, model = open_family("flux")
    one = factors(model.denoiser, "denoiser", lambda name: name.endswith(".0.attn.to_q"))
    source, file = tmp_path / "q.safetensors", tmp_path / "none.safetensors"
    lora_files.save(model, [one], source)
    result = formats.export(source, "kohya", before=folder, strength=0.0, dtype=dtype, output=file)
    assert (result.error, result.rounding) == (0.0, 0.0)
    with safe_open(file, "pt") as content:
        assert content.metadata()["strength"] == "0"
    assert lora_files.read(model, load_file(file), {}, "none") == []
