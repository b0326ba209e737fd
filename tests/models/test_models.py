"""The methods of a model against diffusers' own pipeline and schedulers, and the errors of
loading.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from concept_eraser.cli.main import app
from concept_eraser.models.loading import load
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError

FOLDER = resources.tiny_weights() / "tiny-sd"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "model"))


def test_same_seed_same_image_as_diffusers(shared_tiny) -> None:
    pipe = shared_tiny.pipeline
    expected = pipe(
        "a red star",
        generator=torch.Generator().manual_seed(5),
        num_inference_steps=3,
        guidance_scale=5.0,
        output_type="np",
    ).images[0]
    image = shared_tiny.sample(["a red star"], seeds=[5], steps=3, guidance=5.0)[0]
    assert image.dtype == torch.uint8
    assert (image.numpy() == (expected * 255).round().astype("uint8")).all()


def test_a_batch_is_a_loop(shared_tiny) -> None:
    texts, seeds = ["a red star", "a blue house on a white background"], [1, 2]
    batch = shared_tiny.sample(texts, seeds=seeds, steps=3, guidance=5.0).int()
    loop = torch.cat(
        [
            shared_tiny.sample([t], seeds=[s], steps=3, guidance=5.0)
            for t, s in zip(texts, seeds, strict=True)
        ]
    ).int()
    assert (batch - loop).abs().max() <= 1  # rounding of a last bit


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_corrupt_and_target_are_the_schedulers(prediction: str) -> None:
    """Against diffusers' scheduler; and the exact target leads back to the clean latents."""
    from diffusers import DDIMScheduler

    model = load("tiny-sd")
    model.prediction = prediction
    scheduler = DDIMScheduler.from_config(
        model.pipeline.scheduler.config, prediction_type=prediction
    )
    clean, noise = torch.randn(2, 3, 4, 16, 16)
    t = torch.tensor([1, 500, 999])
    noisy = model.corrupt(clean, noise, t)
    torch.testing.assert_close(noisy, scheduler.add_noise(clean, noise, t))
    target = model.target(clean, noise, t)
    if prediction == "v_prediction":
        torch.testing.assert_close(target, scheduler.get_velocity(clean, noise, t))
    scheduler.set_timesteps(1000)
    for i in range(2):
        back = scheduler.step(target[i : i + 1], int(t[i]), noisy[i : i + 1]).pred_original_sample
        torch.testing.assert_close(back, clean[i : i + 1], rtol=1e-3, atol=1e-3)


def test_denoise_with_replaced_weights(tiny) -> None:
    condition = tiny.encode(["a red star"])
    x, t = torch.randn(1, 4, 16, 16), torch.tensor([500])
    name = "conv_out.bias"
    plain = tiny.denoise(x, t, condition)
    changed_prediction = tiny.denoise(
        x, t, condition, {name: dict(tiny.denoiser.named_parameters())[name] + 1}
    )
    torch.testing.assert_close(changed_prediction, plain + 1)
    torch.testing.assert_close(tiny.denoise(x, t, condition), plain)


def test_a_replaced_weight_with_two_names_is_replaced_under_both(tiny) -> None:
    block = tiny.denoiser.mid_block.attentions[0].transformer_blocks[0]
    layers = [block.attn1.to_q, block.attn2.to_q]
    layers[1].weight = layers[0].weight  # tied
    noisy, t = torch.randn(1, *tiny.latent_shape()), torch.tensor([500])
    condition = tiny.encode(["a star"])
    name = next(n for n, p in tiny.denoiser.named_parameters() if p is layers[0].weight)
    new = layers[0].weight.detach() * 3
    replaced = tiny.denoise(noisy, t, condition, weights={name: new}).detach()
    with torch.no_grad():
        layers[0].weight.copy_(new)
    torch.testing.assert_close(replaced, tiny.denoise(noisy, t, condition).detach())


def test_partial_sampling_stops_at_its_timestep(shared_tiny) -> None:
    null, condition = shared_tiny.encode([""]), shared_tiny.encode(["a red star"])
    noise = torch.randn(1, 4, 16, 16)
    x, t = shared_tiny.partial(noise, condition, null, stop=0, steps=10, guidance=3.0)
    torch.testing.assert_close(x, noise)
    assert t > 850
    assert shared_tiny.partial(noise, condition, null, stop=9, steps=10, guidance=3.0)[1] < 100


@pytest.mark.parametrize(
    ("prompt", "is_cut"),
    # a letter that is no word is a token for each byte
    [("star " * 200, True), ("赤い星" * 20, True), ("赤い星", False), ("star " * 20, False)],
)
def test_a_long_prompt_is_cut_with_a_warning(
    prompt: str, is_cut: bool, shared_tiny, caplog
) -> None:
    states = shared_tiny.encode([prompt]).tensors["states"]
    assert states.shape[1] == 77
    assert ("longer than the model's 77 tokens" in caplog.text) == is_cut


def test_vae_round_trip(shared_tiny) -> None:
    """Latents have the scale of the schedule, and decode to the encoded images."""
    import numpy as np

    from concept_eraser.tiny import painter
    from concept_eraser.tiny.trainer import as_tensor

    x = as_tensor(painter.paint_batch(64, np.random.default_rng(0))[1])
    latents = shared_tiny.encode_images(x)
    assert 0.8 < float(latents.std()) < 1.2
    vae = shared_tiny.pipeline.vae
    back = vae.decode(latents / vae.config.scaling_factor).sample
    assert float((back - x).square().mean()) < 4 * 10 ** (-27 / 10)  # PSNR above 27 dB


def test_loading_what_is_in_memory(shared_tiny) -> None:
    assert load(shared_tiny) is shared_tiny
    assert load(shared_tiny.pipeline).pipeline is shared_tiny.pipeline
    with pytest.raises(
        UserError, match="is a dict, which is not supported; supported: StableDiffusionPipeline"
    ):
        load({})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny-ds", "did you mean 'tiny-sd'"),
        ("no/such/folder/at all", "unknown model"),
        ("./nowhere", "there is no such folder or file; check the path"),
        ("model.ckpt", "no such model"),
    ],
)
def test_unknown_models(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(name)


def test_a_hub_id_without_network_is_an_error_with_a_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"cannot load nobody/nothing-here: .*give a local folder"):
        load("nobody/nothing-here")


def test_a_hub_cache_on_disk_is_used(tmp_path: Path) -> None:
    """A cache in the layout of huggingface_hub, read by id in a separate process
    without network.
    """
    import os
    import subprocess
    import sys

    base = tmp_path / "hub" / "models--someone--tiny"
    snapshot = base / "snapshots" / ("0" * 40)
    shutil.copytree(FOLDER, snapshot)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("0" * 40)
    code = (
        "from concept_eraser.models.loading import load; m = load('someone/tiny'); "
        "print(m.source, m.latent_shape())"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout.strip() == "someone/tiny (4, 16, 16)", process.stderr[-2000:]


def test_truncated_weights(model_folder: Path) -> None:
    path = next((model_folder / "unet").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match="damaged or truncated"):
        load(str(model_folder))


def test_pickles_are_refused_before_they_are_opened(model_folder: Path, tmp_path: Path) -> None:
    """A pickle that would create a file when loaded must not be opened without --allow-pickle."""
    path = next((model_folder / "unet").glob("*.safetensors"))
    path.unlink()
    trap = tmp_path / "executed"
    (model_folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(
        f"cos\nsystem\n(S'touch {trap}'\ntR.".encode()
    )
    with pytest.raises(UserError, match="--allow-pickle"):
        load(str(model_folder))
    assert not trap.exists()


def test_pickled_weights_load_when_allowed(model_folder: Path) -> None:
    from safetensors.torch import load_file

    path = next((model_folder / "unet").glob("*.safetensors"))
    torch.save(load_file(path), model_folder / "unet" / "diffusion_pytorch_model.bin")
    path.unlink()
    assert load(str(model_folder), allow_pickle=True).latent_shape() == (4, 16, 16)
    words = ["generate", str(model_folder), "-p", "a star", "-n", "1", "--steps", "1"]
    images = ["-o", str(model_folder.parent / "images")]
    refused = CliRunner().invoke(app, [*words, *images])
    assert "--allow-pickle" in str(refused.exception)
    result = CliRunner().invoke(app, [*words, *images, "--allow-pickle"])
    assert result.exit_code == 0, result.output


def test_incomplete_and_foreign_folders(model_folder: Path, tmp_path: Path) -> None:
    index = model_folder / "model_index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "_class_name": "AuraFlowPipeline"}))
    with pytest.raises(UserError, match="is a AuraFlowPipeline, which is not supported"):
        load(str(model_folder))
    index.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        load(str(model_folder))
    index.write_text(json.dumps(content))
    vocabulary = model_folder / "tokenizer" / "tokenizer.json"
    words = vocabulary.read_bytes()
    vocabulary.unlink()  # transformers would build a tokenizer of two words
    with pytest.raises(UserError, match="tokenizer holds no vocabulary"):
        load(str(model_folder))
    vocabulary.write_bytes(words)
    shutil.rmtree(model_folder / "vae")
    with pytest.raises(UserError, match="has no vae/"):
        load(str(model_folder))
    with pytest.raises(UserError, match="no diffusers pipeline"):
        load(str(tmp_path))
    torn = tmp_path / "torn.safetensors"
    torn.write_text("no tensors")
    with pytest.raises(UserError, match="damaged or truncated"):
        load(str(torn))


@pytest.mark.parametrize("part", ["unet", "text_encoder", "vae"])
def test_a_checkpoint_without_a_weight_is_refused(part: str, tmp_path: Path) -> None:
    """The libraries would initialise the weight at random, with no more than a log message."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(resources.tiny_weights() / "tiny-sd", tmp_path / "lossy"))
    file = next((folder / part).glob("*.safetensors"))
    tensors = load_file(file)
    weight_name = [name for name in tensors if name.endswith("weight")][3]
    del tensors[weight_name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        UserError,
        match=f"{part} lacks weights: (text_model.)?{weight_name}.*copy the checkpoint again",
    ):
        load(str(folder))


def test_weights_under_their_older_names_are_all_there() -> None:
    from concept_eraser.models.completeness import names_in_files

    assert "mid_block.attentions.0.query.weight" in names_in_files(
        "mid_block.attentions.0.to_q.weight"
    )
    assert "text_model.encoder.x" in names_in_files("encoder.x")
    assert "encoder.x" in names_in_files("text_model.encoder.x")
