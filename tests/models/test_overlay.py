"""Files of other tools on the pipeline that they belong to: the same images as with plain
diffusers, or an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

import concept_eraser
from concept_eraser.models.loading import load
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError

FOLDER = resources.tiny_weights() / "tiny-sd"
SAMPLING = {"seeds": [5], "steps": 3, "guidance": 5.0}


def pipeline() -> Any:
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(
        FOLDER, safety_checker=None, feature_extractor=None
    ).to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def rendered_image(pipe: Any) -> torch.Tensor:
    image = pipe(
        "a red star",
        generator=torch.Generator().manual_seed(5),
        num_inference_steps=3,
        guidance_scale=5.0,
        output_type="np",
    ).images[0]
    return torch.from_numpy((image * 255).round().astype("uint8"))


def move_weights(part: torch.nn.Module, having: str, by: float = 0.05) -> dict[str, torch.Tensor]:
    """Change the tensors of a part whose names contain a word, in place, and return
    copies of them.
    """
    torch.manual_seed(0)
    tensors = {name: p for name, p in part.named_parameters() if having in name}
    with torch.no_grad():
        for p in tensors.values():
            p += by * torch.randn_like(p)
    return {name: p.detach().clone() for name, p in tensors.items()}


@pytest.fixture
def lora(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A LoRA as diffusers saves it, and the image that plain diffusers generates with it."""
    from diffusers import StableDiffusionPipeline

    pipe = pipeline()
    torch.manual_seed(1)
    pipe.unet.add_adapter(
        LoraConfig(r=2, lora_alpha=4, init_lora_weights="gaussian", target_modules=["to_k", "to_v"])
    )
    with torch.no_grad():
        for name, p in pipe.unet.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    StableDiffusionPipeline.save_lora_weights(
        tmp_path / "lora",
        unet_lora_layers=get_peft_model_state_dict(pipe.unet),
        unet_lora_adapter_metadata={"r": 2, "lora_alpha": 4, "target_modules": ["to_k", "to_v"]},
    )
    return tmp_path / "lora", rendered_image(pipe)


def test_a_lora_gives_the_images_it_gives_in_diffusers(lora, shared_tiny) -> None:
    folder, expected = lora
    for source in (folder, folder / "pytorch_lora_weights.safetensors"):
        model = load(source, base="tiny-sd")
        assert (model.sample(["a red star"], **SAMPLING)[0].int() - expected.int()).abs().max() <= 1
        assert not [name for name, _ in model.denoiser.named_parameters() if "lora" in name]
        assert "lora" in model.source
        assert "tiny-sd" in model.source
    # it does something
    assert (
        expected.int() - shared_tiny.sample(["a red star"], **SAMPLING)[0].int()
    ).abs().max() > 10


def test_a_lora_in_kohya_naming(lora, tmp_path: Path) -> None:
    """lora_unet_..., with lora_down, lora_up and alpha, as A1111 and ComfyUI read it."""
    from safetensors.torch import load_file

    folder, expected = lora
    kohya_tensors = {}
    for name, value in load_file(folder / "pytorch_lora_weights.safetensors").items():
        module, kind = name.removeprefix("unet.").split(".lora_")
        stem = "lora_unet_" + module.replace(".", "_")
        kohya_tensors[f"{stem}.lora_{'down' if kind.startswith('A') else 'up'}.weight"] = value
        kohya_tensors[f"{stem}.alpha"] = torch.tensor(4.0)
    save_file(kohya_tensors, tmp_path / "kohya.safetensors")
    model = load(tmp_path / "kohya.safetensors", base="tiny-sd")
    assert (model.sample(["a red star"], **SAMPLING)[0].int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("prefix", "having"), [("", "attn2.to_v"), ("unet.", ""), ("module.unet.", "attn2")]
)
def test_a_denoisers_tensors_whole_or_in_part(prefix: str, having: str, tmp_path: Path) -> None:
    pipe = pipeline()
    tensors = move_weights(pipe.unet, having)
    save_file(
        {prefix + name: value for name, value in tensors.items()}, tmp_path / "esd.safetensors"
    )
    model = load(tmp_path / "esd.safetensors", base="tiny-sd")
    assert torch.equal(model.sample(["a red star"], **SAMPLING)[0], rendered_image(pipe))


@pytest.mark.parametrize("prefix", ["", "text_encoder.", "text_encoder.text_model.", "text_model."])
def test_a_text_encoders_tensors(prefix: str, tmp_path: Path) -> None:
    pipe = pipeline()
    tensors = move_weights(pipe.text_encoder, "mlp")
    tensors["embeddings.position_ids"] = torch.arange(77)  # older transformers saved this buffer
    save_file(
        {prefix + name.removeprefix("text_model."): v for name, v in tensors.items()},
        tmp_path / "t.safetensors",
    )
    model = load(tmp_path / "t.safetensors", base="tiny-sd")
    assert torch.equal(model.sample(["a red star"], **SAMPLING)[0], rendered_image(pipe))


@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_a_folder_of_one_part(part: str, tmp_path: Path) -> None:
    pipe = pipeline()
    move_weights(getattr(pipe, part), "weight")
    getattr(pipe, part).save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs", base="tiny-sd")
    assert torch.equal(model.sample(["a red star"], **SAMPLING)[0], rendered_image(pipe))


def test_a_pickle_only_when_allowed_and_only_of_tensors(tmp_path: Path) -> None:
    pipe = pipeline()
    torch.save({"state_dict": move_weights(pipe.unet, "attn2")}, tmp_path / "unet.pt")
    with pytest.raises(UserError, match="is a pickle, which can execute code"):
        load(tmp_path / "unet.pt", base="tiny-sd")
    model = load(tmp_path / "unet.pt", base="tiny-sd", allow_pickle=True)
    assert torch.equal(model.sample(["a red star"], **SAMPLING)[0], rendered_image(pipe))
    torch.save({"weights": Path}, tmp_path / "code.pt")
    with pytest.raises(UserError, match="cannot be read as plain tensors"):
        load(tmp_path / "code.pt", base="tiny-sd", allow_pickle=True)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(UserError, match="is no state dict"):
        load(tmp_path / "list.pt", base="tiny-sd", allow_pickle=True)


def test_what_does_not_fit(tmp_path: Path, shared_tiny) -> None:
    def get_error(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, tmp_path / "x.safetensors")
        with pytest.raises(UserError) as error:
            load(tmp_path / "x.safetensors", base="tiny-sd")
        return str(error.value)

    name = "down_blocks.0.resnets.0.conv1.weight"
    assert "nothing there is called 'a.b'" in get_error({"a.b": torch.zeros(1)})
    assert f"{name} is [1, 2]" in get_error({name: torch.zeros(1, 2)})
    both = {
        name: shared_tiny.denoiser.state_dict()[name],
        **dict(list(shared_tiny.parts["text_encoder"].state_dict().items())[:1]),
    }
    assert "several parts" in get_error({k: v.clone() for k, v in both.items()})
    assert "does not fit" in get_error(
        {
            "unet.nowhere.to_k.lora_A.weight": torch.zeros(2, 8),
            "unet.nowhere.to_k.lora_B.weight": torch.zeros(8, 2),
        }
    )
    assert "it has nothing for model.diffusion_model." in get_error(
        {"model.diffusion_model.out.weight": torch.zeros(1)}
    )
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:20])
    with pytest.raises(UserError, match="damaged or truncated"):
        load(tmp_path / "cut.safetensors", base="tiny-sd")
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    save_file({"a": torch.zeros(1)}, tmp_path / "vae" / "model.safetensors")
    with pytest.raises(UserError, match="holds a 'AutoencoderKL', which is no part"):
        load(tmp_path / "vae", base="tiny-sd")


def test_a_part_needs_its_base_which_stays_as_it_was(lora, shared_tiny) -> None:
    folder, _ = lora
    with pytest.raises(UserError, match="give the model it was made for with --before"):
        load(folder)
    before = shared_tiny.sample(["a red star"], **SAMPLING)
    load(folder, base=shared_tiny)
    load(folder, base=shared_tiny.pipeline)
    assert torch.equal(shared_tiny.sample(["a red star"], **SAMPLING), before)


def test_a_lora_of_another_tool_is_evaluated_and_attacked(
    lora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands, which write nothing into the folder of the LoRA."""
    from typer.testing import CliRunner

    from concept_eraser.cli.main import app

    monkeypatch.chdir(tmp_path)
    folder, _ = lora
    command = [str(folder), "--before", "tiny-sd", "--suite", "tiny_star", "-q"]
    result = CliRunner().invoke(app, ["evaluate", *command, "-n", "4"])
    assert result.exit_code == 0, result.output
    evaluation = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert evaluation["models"]["after"].startswith(str(folder))
    assert evaluation["models"]["after"] != evaluation["models"]["before"]
    # no model lies there
    result = CliRunner().invoke(app, ["report", "evaluation", "-q", "-o", "page.html"])
    assert result.exit_code == 0, result.output
    assert "lora" in (tmp_path / "page.html").read_text()
    result = CliRunner().invoke(
        app, ["attack", *command, "-n", "2", "-a", "seed_search", "--set", "tries=1"]
    )
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in folder.iterdir()) == ["pytorch_lora_weights.safetensors"]
    assert concept_eraser.load(folder, base="tiny-sd").family == "sd"


def test_a_lora_of_one_part_is_read_in_silence(lora, caplog: pytest.LogCaptureFixture) -> None:
    """diffusers' warning that there are no keys for the text encoder is hidden while we load, and
    only then.
    """
    import logging

    import diffusers

    folder, _ = lora
    root = logging.getLogger("diffusers")
    root.addHandler(caplog.handler)  # diffusers' root does not propagate
    try:
        load(folder, base="tiny-sd")
        assert "No LoRA keys" not in caplog.text
        diffusers.StableDiffusionPipeline.load_lora_weights(pipeline(), str(folder))
        assert "No LoRA keys" in caplog.text
    finally:
        root.removeHandler(caplog.handler)
