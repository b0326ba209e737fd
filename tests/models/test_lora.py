"""LoRAs: every method trains them, no other weight changes, and plain diffusers loads them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError, registry
from concept_eraser.cli.main import app
from concept_eraser.models import lora_files
from concept_eraser.models.lora import Adapter, is_sum_better, layers_of
from concept_eraser.recipes.trainable_fields import LoraSpec
from concept_eraser.targets.adapter import check_lora
from tests.conftest import short
from tests.processes import Command, run_command
from tests.small_model import small_sd

SAMPLING: dict[str, Any] = {"seeds": [5], "steps": 3, "guidance": 5.0}
LORA = {"select": "cross_attention", "lora": {"rank": 2, "alpha": 4}}


def one_step_recipe(**changes: Any) -> dict[str, Any]:
    """A recipe of one step with a learning rate that changes the images."""
    return short(**{"trainable": LORA, "training__steps": 1, "training__lr": 0.05, **changes})


def plain(folder: str | Path) -> Any:
    """A pipeline as plain diffusers loads it."""
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(
        folder, safety_checker=None, feature_extractor=None
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(torch.float32)


def rendered_image(pipe: Any) -> torch.Tensor:
    image = pipe(
        "a red star",
        generator=torch.Generator().manual_seed(5),
        num_inference_steps=3,
        guidance_scale=5.0,
        output_type="np",
    ).images[0]
    return torch.from_numpy((image * 255).round().astype("uint8")).int()


def apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest difference of two images, in levels of 255."""
    return int((a.int() - b.int()).abs().max())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> concept_eraser.Run:
    return concept_eraser.erase(
        one_step_recipe(training__steps=3, save="changed"),
        output=tmp_path_factory.mktemp("run") / "run",
    )


def test_plain_diffusers_with_the_lora_generates_the_images_of_the_merged_pipeline(run) -> None:
    image = run.load().sample(["a red star"], **SAMPLING)[0]
    assert torch.equal(concept_eraser.load(run.folder).sample(["a red star"], **SAMPLING)[0], image)
    pipe = plain(small_sd())
    before = rendered_image(pipe)
    pipe.load_lora_weights(str(run.folder / "lora"), adapter_name="erase")
    assert apart(rendered_image(pipe), image) <= 1
    assert apart(before, image) > 10, "it does something"
    pipe.set_adapters("erase", 0.0)  # the strength slider of diffusers
    assert apart(rendered_image(pipe), before) == 0


def test_the_run_folder_records_the_trained_weights(run) -> None:
    report = json.loads((run.folder / "done.json").read_text())
    factors = load_file(run.folder / "lora" / "pytorch_lora_weights.safetensors")
    assert (
        report["trained_tensors"]
        == len(factors)
        == 2 * len(load_file(run.folder / "weights.safetensors"))
    )
    assert report["trained_parameters"] == sum(value.numel() for value in factors.values())
    assert yaml.safe_load((run.folder / "recipe.yaml").read_text())["trainable"]["lora"] == {
        "rank": 2,
        "alpha": 4.0,
        "conv": False,
    }


def test_only_the_adapted_weights_changed_and_by_the_rank_of_the_lora(run, shared_small) -> None:
    tensors, before = (
        load_file(run.folder / "weights.safetensors"),
        shared_small.denoiser.state_dict(),
    )
    after = run.load().denoiser.state_dict()
    assert list(after) == list(before), "no trace of an adapter"
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(tensors)
    assert all(".attn2." in name and name.endswith(".weight") for name in tensors)
    for name, value in tensors.items():
        assert torch.linalg.matrix_rank(value - before[name], rtol=1e-4) <= 2


def test_a_mask_holds_entries_of_up_and_leaves_down_whole(tmp_path: Path) -> None:
    """At the start up is 0. So down has no gradient, neither for a mask nor for the first step."""
    tensors = {}
    for steps in (1, 3):
        trainable = {**LORA, "saliency": 0.25}
        content = one_step_recipe(trainable=trainable, training__steps=steps)
        run = concept_eraser.erase(content, output=tmp_path / str(steps))
        tensors[steps] = load_file(run.folder / "lora" / lora_files.FILE)
    start, after = tensors[1], tensors[3]
    for name, value in after.items():
        if "lora_A" in name and start[name.replace("lora_A", "lora_B")].any():
            assert (value != start[name]).any(0).all(), name
    up = torch.cat([value.flatten() for name, value in after.items() if "lora_B" in name])
    assert float((up != 0).float().mean()) == pytest.approx(0.25, abs=0.01)


METHODS = [
    name for name in registry.names("method") if not hasattr(registry.load("method", name), "edit")
]
ATTACKED = ("forum", "adversarial", "bome", "moml", "moco", "race", "stereo")
OTHERS: dict[str, dict[str, Any]] = {name: {"attack": {"n": 4}} for name in ATTACKED}
for hardening in ("meta_unlearning", "resalign"):
    OTHERS[hardening] = {"relearn": {"prompts": "tiny_star", "loss": "data", "n": 4}}
# a step of each kind
STEREO: dict[str, Any] = {
    "method": {"name": "stereo", "rounds": 1, "erase_steps": 1, "inner_steps": 1},
    "forget__loss": "stereo",
    "training__steps": 3,
}


@pytest.mark.parametrize("method", METHODS)
def test_every_rule_trains_a_lora(method: str, tmp_path: Path, tiny) -> None:
    """After one step `up` is no longer 0, and no other weight has changed."""
    before = {k: v.clone() for part in tiny.parts.values() for k, v in part.state_dict().items()}
    recipe = {
        **one_step_recipe(
            **{
                "method": {"name": method},
                "training__batch_size": 2,
                **(STEREO if method == "stereo" else {}),
            }
        ),
        **OTHERS.get(method, {}),
    }
    result = concept_eraser.erase(recipe, model=tiny, output=tmp_path / "run")
    after = {k: v for part in tiny.parts.values() for k, v in part.state_dict().items()}
    names = {name for name in before if not torch.equal(before[name], after[name])}
    assert names == set(load_file(result.folder / "weights.safetensors"))
    assert names
    assert all(".attn2." in name for name in names)


@pytest.mark.parametrize(
    "change",
    [
        {"trainable__saliency": 0.2},
        {"forget__loss": "esd", "forget__images": "free"},
        {"training__precision": "bf16"},
        {"trainable__select": "all", "trainable__lora": {"rank": 2, "conv": True}},
        {"target": "text_encoder", "trainable__select": "text_attention"},
    ],
    ids=["saliency", "free", "bf16", "conv", "text_encoder"],
)
def test_other_settings(change: dict, tmp_path: Path, shared_small) -> None:
    recipe = {**one_step_recipe(), "trainable": dict(LORA)}
    for path, value in change.items():
        *parents, last = path.split("__")
        (recipe[parents[0]] if parents else recipe)[last] = value
    result = concept_eraser.erase(recipe, output=tmp_path / "run")
    image = result.load().sample(["a red star"], **SAMPLING)[0]
    pipe = plain(small_sd())
    pipe.load_lora_weights(str(result.folder / "lora"))
    assert apart(rendered_image(pipe), image) <= 1
    assert apart(shared_small.sample(["a red star"], **SAMPLING)[0], image) > 1


@pytest.mark.parametrize(("rank", "adds"), [(2, False), (64, True)])
def test_the_forward_pass_is_that_of_peft(rank: int, adds: bool) -> None:
    """Output and gradients, with two products for each position and with the sum of the weights."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv2d(8, 12, 3, stride=2, padding=1), torch.nn.Flatten())
    module.append(torch.nn.Linear(12 * 4 * 4, 40))
    module.requires_grad_(False)
    adapter = Adapter(module, ["0", "2"], rank=rank, alpha=3, seed=0)
    params = [module.get_parameter(name) for name in adapter.tensors]
    assert len(params) == 4
    with torch.no_grad():
        for value in params:
            value.normal_(0, 0.1)
    x = torch.randn(256, 8, 8, 8, requires_grad=True)
    sizes = {"0": (module[0].base_layer.weight.shape, 256 * 4 * 4), "2": ((40, 192), 256)}
    for shape, positions in sizes.values():
        assert is_sum_better(torch.Size(shape), rank, positions) is adds

    def results(*, bf16: bool = False) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = module(x)
        gradients = torch.autograd.grad(output.square().mean(), [x, *params])
        return [output.detach(), *gradients]

    own, own_bf16 = results(), results(bf16=True)
    with torch.no_grad():
        inference = module(x)
    for layer in adapter.layers.values():
        del vars(layer)["forward"]
    for mine, of_peft in zip(own, results(), strict=True):
        torch.testing.assert_close(mine, of_peft, rtol=1e-4, atol=1e-6)
    for mine, of_peft in zip(own_bf16, results(bf16=True), strict=True):
        assert float((mine - of_peft).norm() / of_peft.norm()) < 2**-7, "a rounding of bf16"
    with torch.no_grad():
        torch.testing.assert_close(inference, module(x))
    adapter.remove()
    assert "forward" not in vars(module[0])


def test_the_teacher_is_the_model_without_the_lora(tiny, shared_tiny) -> None:
    """Also after the adapter has changed: the teacher uses its start, where `up` is 0."""
    from concept_eraser.erasers.denoiser import Denoiser

    adapter = Adapter(
        tiny.denoiser,
        layers_of(tiny.denoiser, ["mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight"]),
        rank=3,
        alpha=3,
        seed=0,
    )
    eraser = Denoiser(tiny, {}, adapter.tensors, adapter=adapter)
    x, t, c = torch.randn(1, 4, 16, 16), torch.tensor([3]), shared_tiny.encode(["a star"])
    original = shared_tiny.denoise(x, t, c)
    assert torch.equal(tiny.denoise(x, t, c), original)
    with torch.no_grad():
        for value in eraser.trainable().values():
            value.normal_()
    assert not torch.equal(tiny.denoise(x, t, c), original)
    assert torch.equal(tiny.denoise(x, t, c, eraser.originals), original)
    for name, layer in adapter.layers.items():  # peft's own product of the factors
        torch.testing.assert_close(
            adapter.factors("denoiser").change(name), layer.get_delta_weight("eraser")
        )
    eraser.restore()
    assert torch.equal(tiny.denoise(x, t, c), original)
    assert list(tiny.denoiser.state_dict()) == list(shared_tiny.denoiser.state_dict())


def test_an_error_leaves_a_model_in_memory_as_it_was(tiny, shared_tiny, tmp_path: Path) -> None:
    def stop(step: int, seconds: float) -> None:
        if step == 1:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        concept_eraser.erase(one_step_recipe(), model=tiny, output=tmp_path / "run", on_step=stop)
    own_state, original_state = tiny.denoiser.state_dict(), shared_tiny.denoiser.state_dict()
    assert list(own_state) == list(original_state)
    assert all(torch.equal(own_state[name], original_state[name]) for name in original_state)


def test_killed_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    path, folder = tmp_path / "recipe.yaml", tmp_path / "killed"
    path.write_text(
        yaml.safe_dump(
            one_step_recipe(
                training__steps=8, training__save_every=2, training__lr=1e-3, save="changed"
            )
        )
    )
    whole = concept_eraser.erase(str(path), output=tmp_path / "whole").folder
    log = folder / "log.jsonl"
    arguments = ("erase", str(path), "-o", str(folder), "-q", "--resume")
    process = Command(*arguments, folder=tmp_path)
    process.wait_until(lambda: log.exists() and log.read_text().count("\n") >= 3)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert run_command(*arguments, folder=tmp_path).returncode == 0
    for name in ("weights.safetensors", "lora/pytorch_lora_weights.safetensors"):
        expected, tensors = load_file(whole / name), load_file(folder / name)
        assert expected.keys() == tensors.keys()
        assert all(torch.equal(expected[k], tensors[k]) for k in expected)


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (
            {"select": "re:norm", "lora": 4},
            "found weights of GroupNorm, LayerNorm",
        ),
        ({"select": "re:conv", "lora": 4}, "trainable.lora.conv: true"),
        (
            {"select": "all", "lora": 4, "reinitialise": 0.1},
            "reinitialise changes weights",
        ),
        (
            {"select": "all", "lora": 0},
            "trainable.lora.rank: input should be greater than or equal to 1",
        ),
        ({"select": "all", "lora": {"ranks": 1}}, "did you mean 'rank'"),
        ({"select": "all", "lora": "big"}, "trainable.lora.rank"),
    ],
)
def test_what_cannot_be(trainable: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        concept_eraser.erase(one_step_recipe(trainable=trainable), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_targets_and_adapted_models_are_refused(tmp_path: Path, run) -> None:
    from concept_eraser.recipes import recipe as recipes

    with pytest.raises(UserError, match="only the targets denoiser and text_encoder train a LoRA"):
        recipes.load(
            {
                "target": "classifier",
                "forget": {"data": "digits", "classes": [3]},
                "retain": "rest",
                "trainable": {"lora": 4},
            }
        )
    model: Any = concept_eraser.load(small_sd())
    model.pipeline.load_lora_weights(str(run.folder / "lora"))
    with pytest.raises(UserError, match="carries adapters"):
        Adapter(model.denoiser, [], rank=1, alpha=1, seed=0)


def test_the_flag_and_the_dry_run() -> None:
    flags = [
        "--forget",
        "tiny_star",
        "--anchor",
        "shape=circle",
        "--retain",
        "tiny_rest",
        "--lora",
        "8",
        "--select",
        "cross_attention",
    ]
    result = CliRunner().invoke(app, ["erase", *flags, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "rank: 8\n    alpha: 8.0" in result.output
    assert "trains a LoRA of" in result.output


def test_a_rank_larger_than_that_of_the_weights_is_a_warning(
    shared_tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    names = [name for name, _ in shared_tiny.denoiser.named_parameters() if "attn2.to_k" in name]
    largest = 64
    check_lora(LoraSpec(rank=largest), shared_tiny.denoiser, names)
    assert not caplog.messages
    check_lora(LoraSpec(rank=largest + 1), shared_tiny.denoiser, names)
    assert caplog.messages == [
        "the LoRA's rank 65 is larger than that of the weights that it changes, at most 64; a LoRA "
        "of rank 64 can make the same change"
    ]
