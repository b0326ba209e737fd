"""Plain diffusers generates the run's image from every format of an erasure.

Where a format cannot hold the change, an error gives the reason.
"""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError
from concept_eraser.cli import concept_result
from concept_eraser.cli.main import app
from concept_eraser.exporting import formats, hub, merge
from concept_eraser.models import single_file
from concept_eraser.models.loading import load
from concept_eraser.utils import resources
from tests.models.test_lora import SAMPLING, apart, one_step_recipe, plain, rendered_image

FOLDER = resources.tiny_weights() / "tiny-sd"
KINDS = {
    "weights": {"trainable": {"select": "cross_attention_kv"}},
    "lora": {"trainable": {"select": "cross_attention", "lora": {"rank": 2, "alpha": 4}}},
    "conv": {
        "trainable": {"select": "all", "lora": {"rank": 2, "conv": True}},
        "training__lr": 0.01,
    },
    "text_encoder": {
        "target": "text_encoder",
        "trainable": {"select": "text_attention", "lora": 2},
    },
}
LORAS = ("lora", "conv", "text_encoder")


@pytest.fixture(scope="module")
def runs(tiny_fp32: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on a checkpoint in fp32. The LoRA runs have no pipeline."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: concept_eraser.erase(
            one_step_recipe(
                training__steps=2,
                model=str(tiny_fp32),
                save="changed" if name in LORAS else "pipeline",
                **changes,
            ),
            output=folder / name,
        ).folder
        for name, changes in KINDS.items()
    }


def generate_image(source: Any, base: Any = None) -> torch.Tensor:
    return load(source, base=base).sample(["a red star"], **SAMPLING)[0]


@pytest.fixture(scope="module")
def pipe() -> Any:
    """The pipeline of plain diffusers, shared by tests that unload their adapters."""
    return plain(FOLDER)


def errors_of(to: str) -> dict[str, Any]:
    """The setting of a format with which nothing is left out."""
    return {"max_error": 1e-4} if to in ("lora", "kohya") else {}


def in_diffusers(path: Path, to: str, pipe: Any = None) -> torch.Tensor:
    """The image that plain diffusers generates with an exported file."""
    from diffusers import StableDiffusionPipeline

    if to == "diffusers":
        pipe = StableDiffusionPipeline.from_pretrained(path, torch_dtype=torch.float32)
    elif to == "single-file":
        pipe = StableDiffusionPipeline.from_single_file(str(path), config=str(FOLDER))
    elif to == "tensors":
        pipe = plain(FOLDER)
        assert not pipe.unet.load_state_dict(load_file(path), strict=False).unexpected_keys
    else:
        pipe.load_lora_weights(str(path.parent), weight_name=path.name)
        image = rendered_image(pipe)
        pipe.unload_lora_weights()
        return image
    pipe.set_progress_bar_config(disable=True)
    return rendered_image(pipe)


CASES = [
    # Stable Diffusion has no names of musubi-tuner and AI Toolkit
    *((to, "weights") for to in formats.FORMATS if to not in ("musubi", "comfyui")),
    *((to, kind) for kind in LORAS for to in ("lora", "kohya")),
]


@pytest.mark.parametrize(("to", "kind"), CASES)
def test_plain_diffusers_generates_the_runs_image(
    to: str, kind: str, runs, tmp_path: Path, shared_tiny, pipe
) -> None:
    """The images are equal bit by bit where the weights are written.

    Where a LoRA is added to the weights, they agree within one level of 255.
    """
    expected = generate_image(runs[kind])
    assert apart(expected, shared_tiny.sample(["a red star"], **SAMPLING)[0]) > 5, (
        "the erasure shows"
    )
    export = formats.export(
        runs[kind],
        to,
        before=shared_tiny,
        **errors_of(to),
        output=tmp_path / ("out" if to == "diffusers" else "out.safetensors"),
    )
    limit = 1 if to in ("lora", "kohya") else 0
    assert apart(in_diffusers(export.path, to, pipe), expected) <= limit
    assert apart(generate_image(export.path, base=shared_tiny), expected) <= limit, (
        "and load reads it too"
    )
    if limit and kind in LORAS:
        assert (export.rank, export.error) == (2, 0.0)


@pytest.mark.parametrize("to", ["lora", "kohya"])
def test_one_file_holds_the_loras_of_the_denoiser_and_of_the_text_encoder(
    to: str, runs, tiny_fp32: Path, tmp_path: Path, shared_tiny, pipe
) -> None:
    """Two runs are merged, and plain diffusers generates the merged pipeline's image."""
    both = merge.merge(runs["lora"], runs["text_encoder"], output=tmp_path / "both").path
    expected = generate_image(both)
    for alone in ("lora", "text_encoder"):
        assert apart(expected, generate_image(runs[alone])) > 5, "both erasures show"
    export = formats.export(
        both, to, before=str(tiny_fp32), max_error=1e-4, output=tmp_path / "both.safetensors"
    )
    assert export.rank == 2
    prefixes = {"lora": ("unet.", "text_encoder."), "kohya": ("lora_unet_", "lora_te_")}[to]
    names = list(load_file(export.path))
    assert all(any(name.startswith(prefix) for name in names) for prefix in prefixes)
    assert all(name.startswith(prefixes) for name in names)
    assert apart(in_diffusers(export.path, to, pipe), expected) <= 1


@pytest.mark.parametrize(
    ("kind", "to"),
    [("weights", to) for to in ("diffusers", "tensors", "single-file", "lora")]
    + [("lora", "kohya")],
)
def test_strength_0_is_the_original_and_half_is_between(
    kind: str, to: str, runs, tmp_path: Path, shared_tiny, pipe
) -> None:
    name = "{}" if to == "diffusers" else "{}.safetensors"
    original = shared_tiny.sample(["a red star"], **SAMPLING)[0]
    none = formats.export(
        runs[kind],
        to,
        strength=0.0,
        before=shared_tiny,
        output=tmp_path / name.format("none"),
        **errors_of(to),
    )
    assert apart(in_diffusers(none.path, to, pipe), original) == 0
    half = formats.export(
        runs[kind],
        to,
        strength=0.5,
        before=shared_tiny,
        output=tmp_path / name.format("half"),
        **errors_of(to),
    )
    expected = copy.deepcopy(shared_tiny)
    with torch.no_grad():
        for tensor, value in load_file(runs[kind] / "weights.safetensors").items():
            weight = expected.denoiser.get_parameter(tensor)
            weight += 0.5 * (value - weight)
    assert (
        apart(in_diffusers(half.path, to, pipe), expected.sample(["a red star"], **SAMPLING)[0])
        <= 1
    )


@pytest.mark.parametrize("to", ["lora", "kohya"])
def test_a_lora_of_strength_0_is_read_back(to: str, runs, tmp_path: Path, shared_tiny) -> None:
    """The file states that it changes nothing.

    A LoRA of another model changes nothing either and is refused.
    """
    file = formats.export(
        runs["lora"], to, strength=0.0, before=shared_tiny, output=tmp_path / "none.safetensors"
    ).path
    original = shared_tiny.sample(["a red star"], **SAMPLING)[0]
    assert apart(generate_image(file, base=shared_tiny), original) == 0
    whole = formats.export(file, "diffusers", before=shared_tiny, output=tmp_path / "whole").path
    assert apart(generate_image(whole), original) == 0
    tensors = load_file(
        formats.export(
            runs["lora"], to, before=shared_tiny, output=tmp_path / "full.safetensors"
        ).path
    )
    save_file(
        {
            name: torch.zeros_like(v) if "lora_A" in name or "down" in name else v
            for name, v in tensors.items()
        },
        tmp_path / "odd.safetensors",
    )
    with pytest.raises(UserError, match="changes nothing in"):
        load(tmp_path / "odd.safetensors", base=shared_tiny)


def test_a_pickle_of_more_than_tensors_has_its_own_error(tmp_path: Path) -> None:
    torch.save({"weights": Path("x")}, tmp_path / "code.pt")
    (tmp_path / "cut.pt").write_bytes(b"garbage")
    for name, message in (
        ("code.pt", "it holds more than tensors, .* so it is refused"),
        ("cut.pt", "it is damaged"),
    ):
        with pytest.raises(UserError, match=message) as error_info:
            load(tmp_path / name, base="tiny-sd", allow_pickle=True)
        assert "two options" not in str(error_info.value)
        assert "Weights only" not in str(error_info.value)


def test_the_strength_slider_of_diffusers(runs, shared_tiny, pipe) -> None:
    pipe.load_lora_weights(str(runs["lora"] / "lora"), adapter_name="erase")
    for strength, expected in ((0.0, shared_tiny), (1.0, load(runs["lora"]))):
        pipe.set_adapters("erase", strength)
        assert apart(rendered_image(pipe), expected.sample(["a red star"], **SAMPLING)[0]) <= 1
    pipe.unload_lora_weights()


def test_the_stated_error_of_a_rank_is_the_residual(runs, tmp_path: Path, shared_tiny) -> None:
    before, after = (
        shared_tiny.denoiser.state_dict(),
        load_file(runs["weights"] / "weights.safetensors"),
    )
    total = sum(float((value - before[name]).square().sum()) for name, value in after.items())
    errors = []
    for rank in (1, 8, 32):
        file = tmp_path / f"{rank}.safetensors"
        export = formats.export(
            runs["weights"], "lora", rank=rank, max_error=1.0, before=shared_tiny, output=file
        )
        # diffusers merges the LoRA, as an outside reference
        tensors = load(file, base=shared_tiny).denoiser.state_dict()
        residual = sum(
            float((tensors[name] - value).square().sum()) for name, value in after.items()
        )
        assert export.error == pytest.approx((residual / total) ** 0.5, rel=1e-3)
        errors.append(export.error)
    assert 1 > errors[0] > errors[1] > errors[2] > 0
    smallest_export = formats.export(
        runs["weights"], "kohya", max_error=errors[1], output=tmp_path / "chosen.safetensors"
    )
    assert smallest_export.rank == 8, "the smallest rank that keeps the bound"


def test_a_lora_that_would_be_wrong_is_refused(runs, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"of rank 1 leaves 0\.\d+ of the change, more than --max-error 0.2; rank \d+ leaves",
    ):
        formats.export(runs["weights"], "lora", rank=1, output=tmp_path / "a.safetensors")
    pipe = plain(FOLDER)
    with torch.no_grad():
        pipe.unet.conv_norm_out.weight += 1
    pipe.save_pretrained(tmp_path / "norms")
    with pytest.raises(
        UserError, match=r"cannot hold this change.*no rank leaves less than 1.000 \(biases, norms"
    ):
        formats.export(
            tmp_path / "norms", "lora", before="tiny-sd", output=tmp_path / "a.safetensors"
        )
    with torch.no_grad():
        pipe.vae.quant_conv.weight += 1
    pipe.save_pretrained(tmp_path / "vae")
    with pytest.raises(UserError, match="cannot hold changes of the VAE"):
        formats.export(
            tmp_path / "vae", "kohya", before="tiny-sd", output=tmp_path / "a.safetensors"
        )
    with pytest.raises(UserError, match="changed denoiser and vae"):
        formats.export(
            tmp_path / "vae", "tensors", before="tiny-sd", output=tmp_path / "a.safetensors"
        )
    assert not (tmp_path / "a.safetensors").exists()


def test_a_lora_on_another_base_is_approximated(runs, tmp_path: Path) -> None:
    """On another base the change differs: it is approximated, and the error is reported.

    The source is the whole model, because a run itself is compared with its own original only.
    """
    whole = formats.export(runs["lora"], "diffusers", output=tmp_path / "whole").path
    export = formats.export(
        whole, "lora", before=runs["weights"], output=tmp_path / "a.safetensors"
    )
    assert export.rank
    assert export.rank > 2
    assert export.error
    assert export.error > 0


def _folder_with_other_weights(folder: Path, factor: float, place: Path) -> Path:
    shutil.copytree(folder, place)
    file = place / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = {name: value * factor for name, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return place


def test_a_run_is_exported_from_its_own_original_alone(
    runs, tiny_fp32: Path, tmp_path: Path
) -> None:
    """Its LoRA alone, and changed tensors whose names another original has too."""
    other = _folder_with_other_weights(tiny_fp32, 1.05, tmp_path / "other")
    moved = _folder_with_other_weights(tiny_fp32, 1.0, tmp_path / "moved")
    alone = tmp_path / "alone"
    shutil.copytree(runs["conv"], alone)
    (alone / "weights.safetensors").unlink()
    for run in (alone, runs["conv"]):
        for to, strength in (("tensors", 1.0), ("diffusers", 0.5), ("lora", 1.0)):
            output = tmp_path / f"{run.name}-{to}{'' if to == 'diffusers' else '.safetensors'}"
            with pytest.raises(UserError, match=r"other weights in denoiser than .* --before"):
                formats.export(run, to, before=other, strength=strength, output=output)
            assert not output.exists()
    expected = load(alone).denoiser.state_dict()
    file = formats.export(alone, "tensors", before=moved, output=tmp_path / "a.safetensors").path
    assert all(torch.equal(expected[name], value) for name, value in load_file(file).items())


def test_one_naming_into_the_other_and_back(runs, tmp_path: Path) -> None:
    """The matrices of any LoRA file are copied and not approximated."""
    own = runs["text_encoder"] / "lora" / "pytorch_lora_weights.safetensors"
    there = formats.export(own, "kohya", before="tiny-sd", output=tmp_path / "there.safetensors")
    back = formats.export(
        there.path, "lora", before="tiny-sd", output=tmp_path / "back.safetensors"
    )
    assert (there.error, back.error) == (0.0, 0.0)
    first, last = load_file(own), load_file(back.path)
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)
    names = sorted(load_file(there.path))
    assert names[0] == "lora_te_text_model_encoder_layers_0_self_attn_k_proj.alpha"
    assert all(
        re.fullmatch(r"lora_te_\w+\.(lora_down\.weight|lora_up\.weight|alpha)", name)
        for name in names
    )
    file = tmp_path / "loha.safetensors"
    save_file(
        {"lora_te_text_model_encoder_layers_0_self_attn_k_proj.lora_mid.weight": torch.zeros(2, 2)},
        file,
    )
    with pytest.raises(UserError):
        formats.export(file, "lora", before="tiny-sd", output=tmp_path / "x.safetensors")


def test_the_original_layout_of_stable_diffusion_1(shared_tiny, tmp_path: Path) -> None:
    """A model of four levels with two layers each, as in SD 1.x.

    The reader of diffusers restores every tensor. The names are those by which diffusers detects
    version 1.
    """
    from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
    from diffusers.loaders.single_file_utils import CHECKPOINT_KEY_NAMES

    from concept_eraser.models.families.sd import StableDiffusion

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(8, 16, 24, 24),
        norm_num_groups=8,
        cross_attention_dim=64,
        attention_head_dim=2,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        norm_num_groups=8,
    )
    pipe = StableDiffusionPipeline(
        **{**shared_tiny.pipeline.components, "unet": unet, "vae": vae},
        requires_safety_checker=False,
    )
    model = StableDiffusion(pipe, "an SD 1 of few channels")
    single_file.write(model, tmp_path / "sd1.safetensors")
    names = set(load_file(tmp_path / "sd1.safetensors"))
    assert names >= {
        CHECKPOINT_KEY_NAMES["v1"],
        CHECKPOINT_KEY_NAMES["v2"],
        CHECKPOINT_KEY_NAMES["clip"],
        "model.diffusion_model.output_blocks.5.2.conv.weight",
        "model.diffusion_model.output_blocks.2.1.conv.weight",
        "first_stage_model.decoder.up.3.upsample.conv.weight",
        "first_stage_model.encoder.mid.attn_1.proj_out.weight",
    }
    loaded_model = load(tmp_path / "sd1.safetensors", base=model)
    for part, module in model.parts.items():
        ours, theirs = module.state_dict(), loaded_model.parts[part].state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), part
    assert len(names) == sum(len(part.state_dict()) for part in model.parts.values())


def test_a_single_file_comes_in(runs, tmp_path: Path, shared_tiny) -> None:
    file = formats.export("tiny-sd", "single-file", output=tmp_path / "tiny.safetensors").path
    expected = shared_tiny.sample(["a red star"], **SAMPLING)[0]
    for base in ("tiny-sd", runs["lora"], shared_tiny):
        model = load(file, base=base)
        assert apart(model.sample(["a red star"], **SAMPLING)[0], expected) == 0
        assert model.source == str(file)
    back = formats.export(file, "diffusers", before="tiny-sd", output=tmp_path / "back").path
    assert apart(in_diffusers(back, "diffusers"), expected) == 0
    erased_file = formats.export(
        runs["lora"], "single-file", output=tmp_path / "erased.safetensors"
    ).path
    assert apart(generate_image(erased_file, base="tiny-sd"), generate_image(runs["lora"])) == 0


def test_single_files_that_cannot_be_read(tmp_path: Path, shared_tiny) -> None:
    file = tmp_path / "tiny.safetensors"
    single_file.write(shared_tiny, file)
    with pytest.raises(
        UserError,
        match="weights without configuration, scheduler and tokenizer; give a diffusers folder",
    ):
        load(file)
    with pytest.raises(UserError, match=r"holds no configuration \(model_index.json\)"):
        load(file, base=tmp_path)
    tensors = load_file(file)
    name = "model.diffusion_model.input_blocks.0.0.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(UserError, match="does not fit the configuration"):
        load(file, base="tiny-sd")
    save_file({**tensors, name: torch.zeros(8, 4, 3, 3)}, file)
    with pytest.raises(UserError, match="does not fit the configuration"):
        load(file, base="tiny-sd")


def test_wrong_requests(runs, tmp_path: Path, shared_tiny) -> None:
    run = runs["weights"]
    for wrong, message in (
        ({"to": "lor"}, "did you mean 'lora'"),
        ({"to": "lora", "output": tmp_path / "folder"}, "writes a .safetensors file"),
        ({"to": "diffusers", "output": tmp_path / "a.safetensors"}, "writes a folder"),
        ({"to": "diffusers", "output": run}, "exists already"),
        ({"to": "diffusers", "rank": 2}, "--rank is for LoRA files .* found --to diffusers"),
        ({"to": "tensors", "rank": 2, "output": tmp_path / "a.safetensors"}, "leave it out"),
        ({"to": "single-file", "max_error": 0.2}, "--max-error is for LoRA files"),
        ({"to": "diffusers", "dtype": "fp16"}, "--dtype is for LoRA files"),
        (
            {"to": "tensors", "source": FOLDER, "output": tmp_path / "a.safetensors"},
            "give it with --before",
        ),
        (
            {
                "to": "tensors",
                "source": FOLDER,
                "before": "tiny-sd",
                "output": tmp_path / "a.safetensors",
            },
            "has the same weights as",
        ),
    ):
        with pytest.raises(UserError, match=message):
            formats.export(**{"source": run, **wrong})
    job = tmp_path / "unfinished"
    job.mkdir()
    (job / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    with pytest.raises(UserError, match="is not finished"):
        formats.export(job, "diffusers")


def test_the_command(runs) -> None:
    command = ["export", str(runs["lora"]), "--to", "kohya", "--strength", "0.5"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "(rank 2; its own factors)" in result.output
    assert (runs["lora"] / "exports" / "lora-strength-0.5-kohya.safetensors").is_file()
    assert "ignores" not in result.output, "every program reads the cross-attention"
    refusal = CliRunner().invoke(app, command)
    assert "exists already" in str(refusal.exception)


@pytest.mark.parametrize("to", ["diffusers", "single-file"])
def test_the_rounding_of_a_whole_model_is_stated(to: str, tmp_path: Path) -> None:
    """The checkpoint is in fp16, and so is what is written."""
    recipe = one_step_recipe(model=str(FOLDER), training__lr=1e-3)
    run = concept_eraser.erase(recipe, output=tmp_path / "run").folder
    erased, original = load(run).denoiser, load("tiny-sd").denoiser
    for strength in (1.0, 0.5):
        name = "whole" if strength == 1 else "half"
        place = tmp_path / (name if to == "diffusers" else f"{name}.safetensors")
        result = formats.export(run, to, strength=strength, output=place)
        written = load(place, base=None if to == "diffusers" else FOLDER).denoiser
        lost = total = 0.0
        for tensor, before in original.state_dict().items():
            change = strength * (erased.state_dict()[tensor] - before)
            total += float(change.square().sum())
            if change.any():
                rest = written.state_dict()[tensor] - before - change
                lost += float(rest.square().sum())
        assert result.rounding == pytest.approx((lost / total) ** 0.5, rel=1e-2)
        assert result.rounding > 0.01
    result = CliRunner().invoke(
        app, ["export", str(run), "--to", to, "-o", str(place.with_stem("again"))]
    )
    assert "rounding to the precision of the checkpoint: relative error 0." in result.output


def test_only_the_pipeline_at_strength_1_is_that_of_the_run(runs, tmp_path: Path) -> None:
    run = tmp_path / "star"
    shutil.copytree(runs["lora"], run, ignore=shutil.ignore_patterns("exports"))

    def pushed() -> set[str]:
        return {upload.name for upload in hub.push_to_hub(run, "me/star", dry_run=True).uploads}

    for strength in (0.5, 0.0, -1.0):
        place = formats.export(run, "diffusers", strength=strength).path
        assert place == run / "exports" / f"star-strength-{strength:g}-diffusers"
        assert "model_index.json" not in pushed(), "the LoRA alone"
    with pytest.raises(UserError, match=r"at strength 1.*found strength 0\.5.*another"):
        formats.export(run, "diffusers", strength=0.5, output=run / "exports" / "star-diffusers")
    place = formats.export(run, "diffusers").path
    assert place == run / "exports" / "star-diffusers"
    assert "model_index.json" in pushed()


def test_a_run_given_as_the_working_folder_has_the_same_places(
    runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "star"
    shutil.copytree(runs["lora"], run, ignore=shutil.ignore_patterns("exports"))
    monkeypatch.chdir(run)
    for to, name in (("diffusers", "star-diffusers"), ("kohya", "star-kohya.safetensors")):
        assert formats.export(".", to).path.resolve() == run / "exports" / name
    for source in (".", run):
        uploads = hub.push_to_hub(source, "me/star", dry_run=True).uploads
        assert "model_index.json" in {upload.name for upload in uploads}
    assert "exports/star-kohya.safetensors" in concept_result._kohya(Path(), allow_pickle=False)


def test_the_command_warns_of_layers_that_a_program_ignores(runs, tmp_path: Path) -> None:
    output = str(tmp_path / "a.safetensors")
    result = CliRunner().invoke(app, ["export", str(runs["conv"]), "--to", "kohya", "-o", output])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "warning: sd-scripts ignores 4 of the 83 layers (conv_in, " in text
    assert "--select blocks --lora RANK" in text
