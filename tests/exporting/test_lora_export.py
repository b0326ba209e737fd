"""LoRA files of lower rank, of fewer bits, and with the header that sd-scripts writes."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from concept_eraser.cli import dry_run
from concept_eraser.cli.main import app
from concept_eraser.exporting import formats
from concept_eraser.models import lora_files, lora_metadata
from concept_eraser.models.loading import load
from concept_eraser.models.lora import Factors
from concept_eraser.recipes import recipe as recipes
from concept_eraser.targets.adapter import add_adapter
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError
from tests.models.test_lora import one_step_recipe, plain

RANK, ALPHA = 6, 3.0
FOLDER = resources.tiny_weights() / "tiny-sd"
LAYERS = (
    "mid_block.attentions.0.transformer_blocks.0.attn2.to_k",
    "mid_block.attentions.0.transformer_blocks.0.ff.net.2",
    "down_blocks.0.resnets.0.conv1",
)


@pytest.fixture(scope="module")
def factors(shared_tiny: Any) -> Factors:
    """Random factors of falling size: the last ones can be left out."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.logspace(0, -2, RANK)
    layers = {}
    for name in LAYERS:
        out, *inner = shared_tiny.denoiser.get_parameter(f"{name}.weight").shape
        down = torch.randn(RANK, *inner, generator=generator) / math.prod(inner) ** 0.5
        up = torch.randn(out, RANK, generator=generator) * sizes * 0.05
        layers[name] = down, up.view(out, RANK, *[1] * (len(inner) - 1))
    return Factors("denoiser", layers, RANK, ALPHA)


@pytest.fixture(scope="module")
def lora(factors: Factors, shared_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same factors as a file in diffusers' naming."""
    file = tmp_path_factory.mktemp("lora") / "star.safetensors"
    lora_files.save(shared_tiny, [factors], file)
    return file


def header_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as content:
        return dict(content.metadata())


def changes_in(model: Any, file: Path) -> dict[str, torch.Tensor]:
    (one,) = lora_files.read(model, load_file(file), header_of(file), str(file))
    return {layer: one.change(layer) for layer in one.layers}


def kohya_changes(file: Path) -> dict[str, torch.Tensor]:
    """The changes as sd-scripts, ComfyUI and A1111 compute them: alpha / rank x up @ down.

    sd-scripts 48d368f, networks/lora.py, lines 69-72 and 199-216; ComfyUI 0323d87,
    comfy/weight_adapter/lora.py, calculate_weight; A1111 f2844bd, network.py, calc_scale.
    """
    tensors = load_file(file)
    changes = {}
    for layer in LAYERS:
        stem = "lora_unet_" + layer.replace(".", "_")
        down, up = (tensors[f"{stem}.lora_{key}.weight"].float() for key in ("down", "up"))
        product = torch.mm(up.flatten(1), down.flatten(1)).view(len(up), *down.shape[1:])
        changes[layer] = float(tensors[f"{stem}.alpha"]) / len(down) * product
    return changes


@pytest.mark.parametrize("to", ["kohya", "lora"])
def test_a_lower_rank_is_the_svd_of_the_product(
    to: str, factors: Factors, lora: Path, tmp_path: Path, shared_tiny: Any
) -> None:
    file = tmp_path / "small.safetensors"
    result = formats.export(lora, to, before=shared_tiny, rank=2, max_error=0.9, output=file)
    written, tails, totals = changes_in(shared_tiny, file), {}, {}
    for layer in LAYERS:
        change = factors.change(layer)
        left, values, right = torch.linalg.svd(change.flatten(1).double(), full_matrices=False)
        best = (left[:, :2] * values[:2]) @ right[:2]
        torch.testing.assert_close(
            written[layer], best.view(change.shape).float(), atol=1e-6, rtol=0
        )
        tails[layer], totals[layer] = values[2:].square().sum(), values.square().sum()
    shares = {layer: float(tails[layer] / totals[layer]) ** 0.5 for layer in LAYERS}
    expected = float(sum(tails.values()) / sum(totals.values())) ** 0.5
    assert result.error == pytest.approx(expected, rel=1e-4)
    assert result.layer_errors is not None
    assert result.layer_errors.mean == pytest.approx(sum(shares.values()) / 3, rel=1e-4)
    assert result.layer_errors.worst == pytest.approx(max(shares.values()), rel=1e-4)
    assert result.layer_errors.worst_layer == max(shares, key=lambda layer: shares[layer])
    assert result.rank == 2
    header = header_of(file)
    assert header["layer_error_worst"] == f"{result.layer_errors.worst:.3g}"
    assert header["layer_error_mean"] == f"{result.layer_errors.mean:.3g}"
    assert header["relative_error"] == f"{result.error:.3g}"
    if to == "kohya":
        assert header["ss_network_dim"] == "2"
        assert header["ss_training_comment"].startswith("dimension is resized from 6 to 2; ")


def test_the_error_of_a_rank_states_what_is_possible(
    lora: Path, tmp_path: Path, shared_tiny: Any
) -> None:
    """Both the rank and the largest error that the message names are accepted."""

    def export(name: str, **options: Any) -> Any:
        place = tmp_path / f"{name}.safetensors"
        return formats.export(lora, "kohya", before=shared_tiny, output=place, **options)

    with pytest.raises(UserError, match=r"of rank 1 leaves 0\.\d{3} of the change") as error:
        export("a", rank=1)
    advice = re.search(
        r"Give --rank (\d+) or --max-error (0\.\d+) or export --to diffusers$", str(error.value)
    )
    assert advice is not None, error.value
    rank, max_error = int(advice[1]), float(advice[2])
    assert export("b", rank=rank).error <= 0.2
    with pytest.raises(UserError):
        export("c", rank=rank - 1)
    allowed = export("d", rank=1, max_error=max_error)
    assert max_error - 0.01 <= allowed.error <= max_error


def test_a_rank_that_suffices_keeps_the_factors(
    factors: Factors, lora: Path, tmp_path: Path, shared_tiny: Any
) -> None:
    file = tmp_path / "same.safetensors"
    result = formats.export(lora, "kohya", before=shared_tiny, rank=RANK + 2, output=file)
    assert (result.rank, result.error, result.layer_errors) == (RANK, 0.0, None)
    with pytest.raises(
        UserError, match=r"of rank 1 leaves 0\.\d+ of the change.*rank [2-5] leaves"
    ):
        formats.export(
            lora, "kohya", before=shared_tiny, rank=1, output=tmp_path / "no.safetensors"
        )


def test_the_same_change_comes_out_of_each_file(
    factors: Factors, lora: Path, tmp_path: Path, shared_tiny: Any
) -> None:
    """By the formula of kohya's readers, by our reader, and by PEFT's layers in diffusers."""
    kohya = tmp_path / "kohya.safetensors"
    lora_files.save(shared_tiny, [factors], kohya, naming="kohya")
    assert {float(v) for k, v in load_file(kohya).items() if k.endswith("alpha")} == {ALPHA}
    by_formula = kohya_changes(kohya)
    pipe = plain(FOLDER)
    for file in (lora, kohya):
        read = changes_in(shared_tiny, file)
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name="x")
        for layer in LAYERS:
            expected = factors.change(layer)
            by_peft = pipe.unet.get_submodule(layer).get_delta_weight("x")
            for found in (read[layer], by_formula[layer], by_peft):
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        pipe.unload_lora_weights()


def test_a_reader_without_the_headers_alpha_scales_by_1(
    factors: Factors, lora: Path, tmp_path: Path, shared_tiny: Any
) -> None:
    """As ComfyUI (6f98b15, comfy/weight_adapter/lora.py, calculate_weight) and musubi-tuner
    (30c658c, src/musubi_tuner/convert_lora.py, convert_from_diffusers) do with diffusers' names.
    """
    file = tmp_path / "exported.safetensors"
    formats.export(lora, "lora", before=shared_tiny, output=file)
    tensors = load_file(file)
    for layer in LAYERS:
        down, up = (tensors[f"unet.{layer}.lora_{kind}.weight"] for kind in "AB")
        product = (up.flatten(1) @ down.flatten(1)).view(len(up), *down.shape[1:])
        torch.testing.assert_close(product, factors.change(layer), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("fp16", 1e-5, 1e-3), ("bf16", 5e-4, 5e-3), ("fp8", 0.01, 0.06)]
)
def test_fewer_bits_with_the_measured_error(
    dtype: str,
    least: float,
    most: float,
    factors: Factors,
    lora: Path,
    tmp_path: Path,
    shared_tiny: Any,
) -> None:
    file = tmp_path / "small.safetensors"
    result = formats.export(lora, "kohya", before=shared_tiny, dtype=dtype, output=file)
    written, wanted = kohya_changes(file), {layer: factors.change(layer) for layer in LAYERS}
    error = sum(float((written[k] - wanted[k]).square().sum()) for k in LAYERS)
    total = sum(float(wanted[k].square().sum()) for k in LAYERS)
    assert result.rounding == pytest.approx((error / total) ** 0.5, rel=1e-3)
    assert least < result.rounding < most
    matrices = {v.dtype for k, v in load_file(file).items() if not k.endswith("alpha")}
    assert matrices == {lora_files.DTYPES[dtype]}
    assert header_of(file)["rounding_error"] == f"{result.rounding:.3g}"
    if dtype != "fp8":
        names = formats.export(
            lora, "lora", before=shared_tiny, dtype=dtype, output=tmp_path / "names.safetensors"
        )
        assert names.rounding == pytest.approx(result.rounding, rel=1e-3)


def test_fp8_holds_small_changes_too(lora: Path, tmp_path: Path, shared_tiny: Any) -> None:
    """Numbers below 2^-9 are zeros in e4m3. The scale goes into alpha."""
    result = formats.export(
        lora,
        "kohya",
        before=shared_tiny,
        strength=1e-3,
        dtype="fp8",
        output=tmp_path / "small.safetensors",
    )
    assert result.rounding < 0.06
    assert float(header_of(result.path)["ss_network_alpha"]) < ALPHA
    with pytest.raises(UserError, match="fp8 needs a scale"):
        formats.export(
            lora, "lora", before=shared_tiny, dtype="fp8", output=tmp_path / "no.safetensors"
        )
    with pytest.raises(UserError, match="--dtype is for LoRA files"):
        formats.export(lora, "single-file", dtype="fp16", output=tmp_path / "no.safetensors")
    with pytest.raises(UserError, match="did you mean 'fp16'"):
        formats.export(lora, "kohya", dtype="fp61", output=tmp_path / "no.safetensors")


def test_diffusers_reads_fp8_of_layers_of_other_sizes(
    factors: Factors, tmp_path: Path, shared_tiny: Any
) -> None:
    """diffusers confuses alphas that differ among the layers, so all have the same."""
    sizes = dict(zip(LAYERS, (1.0, 0.02, 0.0), strict=True))
    layers = {name: (down, up * sizes[name]) for name, (down, up) in factors.layers.items()}
    file = tmp_path / "fp8.safetensors"
    one = Factors("denoiser", layers, RANK, ALPHA)
    lora_files.save(shared_tiny, [one], file, naming="kohya", dtype="fp8")
    tensors = load_file(file)
    assert len({float(v) for k, v in tensors.items() if k.endswith("alpha")}) == 1
    assert max(float(v.float().abs().max()) for k, v in tensors.items() if "alpha" not in k) <= 2
    pipe = plain(FOLDER)
    pipe.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="x")
    read = changes_in(shared_tiny, file)
    for layer in LAYERS:
        by_peft = pipe.unet.get_submodule(layer).get_delta_weight("x").detach()
        torch.testing.assert_close(by_peft, kohya_changes(file)[layer], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(read[layer], by_peft, atol=1e-6, rtol=1e-5)
        error = float((by_peft - one.change(layer)).norm())
        assert error <= 0.06 * float(one.change(layer).norm())


def test_each_layer_of_a_kohya_file_keeps_its_own_alpha(
    factors: Factors, tmp_path: Path, shared_tiny: Any
) -> None:
    """As in files of LyCORIS, whose convolutions have another rank and alpha.

    One layer has no alpha, so its scale is 1.
    """
    lora_files.save(shared_tiny, [factors], tmp_path / "same.safetensors", naming="kohya")
    tensors = load_file(tmp_path / "same.safetensors")
    attention, feed_forward, conv = ("lora_unet_" + name.replace(".", "_") for name in LAYERS)
    del tensors[f"{feed_forward}.alpha"]
    tensors[f"{attention}.alpha"] = torch.tensor(1.0)
    for kind, dim in (("down", 0), ("up", 1)):
        name = f"{conv}.lora_{kind}.weight"
        tensors[name] = tensors[name].narrow(dim, 0, 2).contiguous()
    file = tmp_path / "own.safetensors"
    save_file(tensors, file)
    ranks = {name: len(tensors[f"{name}.lora_down.weight"]) for name in (attention, conv)}
    assert ranks == {attention: RANK, conv: 2}
    scales = dict(zip(LAYERS, (1.0 / RANK, 1.0, ALPHA / 2), strict=True))
    loaded = load(file, base=shared_tiny)
    for layer, scale in scales.items():
        stem = "lora_unet_" + layer.replace(".", "_")
        down, up = (tensors[f"{stem}.lora_{kind}.weight"].flatten(1) for kind in ("down", "up"))
        before = shared_tiny.denoiser.get_parameter(f"{layer}.weight")
        change = loaded.denoiser.get_parameter(f"{layer}.weight") - before
        torch.testing.assert_close(change.flatten(1), scale * up @ down, atol=1e-5, rtol=1e-4)
    result = formats.export(
        file, "kohya", before=shared_tiny, output=tmp_path / "exported.safetensors"
    )
    assert (result.rank, result.error) == (RANK, 0.0), "the matrices are copied"


@pytest.mark.parametrize("alpha", [torch.ones(2), torch.zeros(0)])
def test_an_alpha_that_is_no_number_is_refused(
    alpha: torch.Tensor, factors: Factors, tmp_path: Path, shared_tiny: Any
) -> None:
    lora_files.save(shared_tiny, [factors], tmp_path / "a.safetensors", naming="kohya")
    tensors = load_file(tmp_path / "a.safetensors")
    name = next(name for name in tensors if name.endswith(".alpha"))
    save_file({**tensors, name: alpha}, tmp_path / "b.safetensors")
    with pytest.raises(UserError, match="is a LoRA that does not fit"):
        load(tmp_path / "b.safetensors", base=shared_tiny)


@pytest.mark.parametrize(
    "header", ["{", "[1]", '{"unet.lora_alpha": "x"}', '{"unet.alpha_pattern": 3}']
)
def test_a_damaged_header_is_an_error(header: str, lora: Path, shared_tiny: Any) -> None:
    metadata = {"lora_adapter_metadata": header}
    with pytest.raises(UserError, match=r"header of star\.safetensors is damaged: "):
        lora_files.read(shared_tiny, load_file(lora), metadata, lora.name)


@pytest.mark.parametrize("matrix", [torch.zeros(0, 4), torch.zeros(4), torch.tensor(1.0)])
def test_an_entry_that_is_no_matrix_is_an_error(
    matrix: torch.Tensor, lora: Path, shared_tiny: Any
) -> None:
    tensors = load_file(lora)
    name = next(name for name in tensors if name.endswith("lora_A.weight"))
    with pytest.raises(UserError, match=r"star\.safetensors is damaged: .* is no matrix"):
        lora_files.read(shared_tiny, {**tensors, name: matrix}, header_of(lora), lora.name)


def test_half_a_pair_and_other_tensors_are_no_lora(lora: Path, shared_tiny: Any) -> None:
    tensors = load_file(lora)
    down = next(name for name in tensors if name.endswith("lora_A.weight"))
    up = down.replace("lora_A", "lora_B")
    without = {name: value for name, value in tensors.items() if name != up}
    with pytest.raises(UserError, match=r"is incomplete: it has .*lora_A\.weight but no .*lora_B"):
        lora_files.read(shared_tiny, without, header_of(lora), lora.name)
    with pytest.raises(UserError, match=r"is no plain LoRA: the tensor '.*' is unknown"):
        lora_files.read(
            shared_tiny, {**tensors, "a.diff": torch.ones(1)}, header_of(lora), lora.name
        )


def test_matrices_of_another_size_are_an_error(lora: Path, shared_tiny: Any) -> None:
    tensors = load_file(lora)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    tensors[name] = torch.cat([tensors[name]] * 2)
    with pytest.raises(UserError, match="was it made for another model"):
        lora_files.read(shared_tiny, tensors, header_of(lora), lora.name)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"alpha_pattern": {"attn2.to_k": 16.0}},
        {"rank_pattern": {"attn2.to_k": 2}, "alpha_pattern": {"attn2.to_k": 5.0}},
    ],
)
def test_pefts_scales_in_the_header_are_read(
    settings: dict[str, Any], tmp_path: Path, shared_tiny: Any
) -> None:
    """diffusers writes a LoRA of peft, with settings that scale layers in other ways."""
    pipe = plain(FOLDER)
    names = ["attn2.to_k", "attn2.to_v"]
    pipe.unet.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=names, **settings))
    torch.manual_seed(0)
    for name, value in pipe.unet.named_parameters():
        if "lora_" in name:
            value.data.normal_(0, 0.1)
    matrices = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.unet))
    header = pipe.unet.peft_config["default"].to_dict()
    pipe.save_lora_weights(tmp_path, unet_lora_layers=matrices, unet_lora_adapter_metadata=header)
    file = tmp_path / lora_files.FILE
    for layer, change in changes_in(shared_tiny, file).items():
        by_peft = pipe.unet.get_submodule(layer).get_delta_weight("default")
        torch.testing.assert_close(change, by_peft, atol=1e-6, rtol=1e-5)
    result = formats.export(file, "kohya", before=shared_tiny, output=tmp_path / "k.safetensors")
    assert (result.rank, result.error) == (4, 0.0), "the matrices are copied"


def test_the_header_of_a_file_in_kohyas_naming(
    lora: Path, tmp_path: Path, shared_tiny: Any
) -> None:
    files = [tmp_path / name / "no_star.safetensors" for name in ("a", "b")]
    for file in files:
        formats.export(lora, "kohya", before=shared_tiny, output=file)
    content = files[0].read_bytes()
    assert content == files[1].read_bytes(), "the same export gives the same bytes"
    header = header_of(files[0])
    start = 8 + int.from_bytes(content[:8], "little")
    assert header["sshs_model_hash"] == hashlib.sha256(content[start:]).hexdigest()
    assert header["ss_network_module"] == "networks.lora"
    assert header["ss_output_name"] == "no_star"
    assert json.loads(header["ss_network_args"]) == {
        "conv_dim": header["ss_network_dim"],
        "conv_alpha": header["ss_network_alpha"],
    }
    assert header["ss_network_dim"] == str(RANK)
    assert "/" not in header["ss_sd_model_name"]
    specified = {"title", "description", "tags", "usage_hint"}
    assert {name.partition(".")[2] for name in header if name.startswith("modelspec.")} == specified
    assert header["modelspec.title"] == "no_star", "the bundled model has no known architecture"


def test_other_namings_have_the_specification(lora: Path, tmp_path: Path, shared_tiny: Any) -> None:
    """Title, comment and tags are beside peft's settings, and no key of kohya's naming."""
    files = [tmp_path / name / "no_star.safetensors" for name in ("a", "b")]
    for file in files:
        formats.export(lora, "lora", before=shared_tiny, output=file)
    assert files[0].read_bytes() == files[1].read_bytes(), "the same export gives the same bytes"
    header = header_of(files[0])
    assert header["modelspec.title"] == "no_star"
    assert header["modelspec.tags"] == "concept erasure"
    assert header["modelspec.description"].startswith("concept_eraser ")
    assert "unet.lora_alpha" in json.loads(header["lora_adapter_metadata"])
    assert not any(name.startswith(("ss_", "sshs_")) for name in header)


def test_the_header_has_no_path_of_a_file_on_its_base(
    lora: Path, tiny_fp32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = tmp_path / "models" / "unet.safetensors"
    unet.parent.mkdir()
    shutil.copy(tiny_fp32 / "unet" / "diffusion_pytorch_model.safetensors", unet)
    monkeypatch.chdir(tmp_path)
    for name, file in ((str(unet), "a.safetensors"), ("models/unet.safetensors", "b.safetensors")):
        formats.export(lora, "kohya", before=f"{name}@{tiny_fp32}", output=file)
        header = header_of(Path(file))
        assert header["ss_sd_model_name"] == f"unet.safetensors on {tiny_fp32.name}"
        assert not any(str(tmp_path) in value for value in header.values())


def model_of(
    family: str, width: Any = None, prediction: str = "epsilon", guided: bool = False
) -> Any:
    """What the header needs of a model."""
    config = SimpleNamespace(cross_attention_dim=width, guidance_embeds=guided)
    scheduler = SimpleNamespace(config=SimpleNamespace(prediction_type=prediction))
    return SimpleNamespace(
        family=family,
        source="owner/name",
        parts={"denoiser": SimpleNamespace(config=config)},
        pipeline=SimpleNamespace(scheduler=scheduler),
    )


@pytest.mark.parametrize(
    ("model", "version", "v2", "architecture", "resolution"),
    [
        (model_of("sd", 768), "sd_v1", "False", "stable-diffusion-v1/lora", "512x512"),
        (model_of("sd", 1024), "sd_v2", "True", "stable-diffusion-v2-512/lora", "512x512"),
        (
            model_of("sd", 1024, "v_prediction"),
            "sd_v2_v",
            "True",
            "stable-diffusion-v2-768-v/lora",
            "768x768",
        ),
        (
            model_of("sdxl", 2048),
            "sdxl_base_v1-0",
            "False",
            "stable-diffusion-xl-v1-base/lora",
            "1024x1024",
        ),
        (
            model_of("sdxl", 2048, "v_prediction"),
            "sdxl_base_v1-0",
            "False",
            "stable-diffusion-xl-v1-base/lora",
            "1024x1024",
        ),
        (model_of("flux", guided=True), "flux1", "False", "flux-1-dev/lora", "1024x1024"),
        (model_of("flux"), "flux1", "False", "flux-1-schnell/lora", "1024x1024"),
    ],
)
def test_managers_see_the_version_of_the_base_model(
    model: Any, version: str, v2: str, architecture: str, resolution: str
) -> None:
    tensors = {"a.lora_down.weight": torch.ones(2, 3), "a.alpha": torch.tensor(2.0)}
    header = lora_metadata.network(model, tensors, [Factors("denoiser", {}, 2, 2.0)])
    assert (header["ss_base_model_version"], header["ss_v2"]) == (version, v2)
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("2", "2.0")
    assert header["ss_sd_model_name"] == "owner/name"
    flux = model.family == "flux"
    assert header["ss_network_module"] == ("networks.lora_flux" if flux else "networks.lora")
    shown = lora_metadata.description(model, "no_star", "forgets star", tags="a, b", usage="1")
    assert shown["modelspec.architecture"] == architecture
    assert shown["modelspec.resolution"] == resolution
    assert shown["modelspec.title"] == shown["ss_output_name"] == "no_star"
    assert shown["modelspec.sai_model_spec"] == "1.0.1"
    prediction = model.pipeline.scheduler.config.prediction_type
    kind = None if flux else {"epsilon": "epsilon", "v_prediction": "v"}[prediction]
    assert shown.get("modelspec.prediction_type") == kind


@pytest.mark.parametrize(
    ("norm", "dual_layers", "architecture"),
    [
        (None, (), "stable-diffusion-3-medium/lora"),
        ("rms_norm", (0, 1), "stable-diffusion-3-5-medium/lora"),
        ("rms_norm", (), "stable-diffusion-3-5-large/lora"),
    ],
)
def test_managers_see_the_version_of_stable_diffusion_3(
    norm: str | None, dual_layers: tuple[int, ...], architecture: str
) -> None:
    """The words are those of sd-scripts. It has no file in kohya's naming here."""
    model = model_of("sd3")
    config = model.parts["denoiser"].config
    config.qk_norm, config.dual_attention_layers = norm, dual_layers
    shown = lora_metadata.specification(model, "no_star", "forgets star", tags="a", usage="1")
    assert shown["modelspec.architecture"] == architecture
    assert shown["modelspec.resolution"] == "1024x1024"
    assert shown["modelspec.implementation"] == "diffusers"
    assert "modelspec.prediction_type" not in shown, "it is a flow"


@pytest.mark.parametrize("family", ["pixart", "sana"])
def test_families_without_a_known_architecture_have_a_title(family: str) -> None:
    shown = lora_metadata.specification(model_of(family), "no_star", "c", tags="a", usage="1")
    assert shown == {
        "modelspec.title": "no_star",
        "modelspec.description": "c",
        "modelspec.tags": "a",
        "modelspec.usage_hint": "1",
    }


@pytest.mark.parametrize(
    ("family", "module", "version", "architecture", "resolution"),
    [
        ("zimage", "networks.lora_zimage", "z_image", "Z-Image/lora", "1024x1024"),
        ("qwenimage", "networks.lora_qwen_image", "qwen_image", "Qwen-Image/lora", "1328x1328"),
        ("flux2", "networks.lora_flux_2", "flux_2_klein_4b", "Flux.2-klein-4b/lora", "1024x1024"),
    ],
)
def test_managers_see_the_version_of_the_newer_families(
    family: str, module: str, version: str, architecture: str, resolution: str
) -> None:
    """The words are those of musubi-tuner. A Flux.2 of another size has none."""
    model = model_of(family)
    config = model.parts["denoiser"].config
    config.num_layers, config.num_single_layers = 5, 20
    tensors = {"a.lora_down.weight": torch.ones(2, 3), "a.alpha": torch.tensor(2.0)}
    header = lora_metadata.network(model, tensors, [Factors("denoiser", {}, 2, 2.0)])
    assert header["ss_network_module"] == module
    assert header["ss_base_model_version"] == version
    assert "ss_v2" not in header, "it is a key of sd-scripts"
    shown = lora_metadata.description(model, "no_star", "forgets star", tags="a", usage="1")
    assert shown["modelspec.architecture"] == architecture
    assert shown["modelspec.resolution"] == resolution
    assert shown["modelspec.sai_model_spec"] == "1.0.0"
    assert "modelspec.prediction_type" not in shown
    if family == "flux2":
        config.num_layers, config.num_single_layers = 8, 24
        assert lora_metadata.base_version(model) == "flux_2_klein_9b"
        config.num_single_layers = 1
        assert lora_metadata.base_version(model) is None


def test_the_dry_run_states_the_size_of_the_file(tmp_path: Path, tiny: Any) -> None:
    settings = {"select": "all", "lora": {"rank": 8, "conv": True}}
    recipe = recipes.load(one_step_recipe(trainable=settings))
    line = dry_run._weights(recipe, tiny)
    names = [name for name, _ in tiny.denoiser.named_parameters()]
    adapter = add_adapter(recipe, tiny.denoiser, names)
    assert adapter is not None
    factors = adapter.factors("denoiser")
    adapter.remove()
    sizes = {}
    for dtype in ("fp32", "fp16"):
        file = tmp_path / f"{dtype}.safetensors"
        lora_files.save(tiny, [factors], file, dtype=dtype)
        sizes[dtype] = file.stat().st_size / 1e6
    words = line.split("its file has about ")[1].split()
    assert float(words[0]) == pytest.approx(sizes["fp32"], rel=0.03)
    assert float(words[3]) == pytest.approx(sizes["fp16"], rel=0.03)


def test_the_command_prints_what_rank_and_dtype_cost(lora: Path, tmp_path: Path) -> None:
    command = ["export", str(lora), "--to", "kohya", "--before", "tiny-sd", "--rank", "2"]
    output = ["--dtype", "bf16", "--max-error", "0.9", "-o", str(tmp_path / "a.safetensors")]
    result = CliRunner().invoke(app, [*command, *output])
    assert result.exit_code == 0, result.output
    assert "(rank 2; it leaves 0." in result.output
    assert "relative error of a layer: mean 0." in result.output
    assert "rounding to bf16: relative error 0.0" in result.output
