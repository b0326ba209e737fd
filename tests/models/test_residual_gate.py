"""The residual attention gate: its formula by hand, its place in the denoiser, its file, and what
refuses it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError
from concept_eraser.cli.main import app
from concept_eraser.data.generate import model_fingerprint
from concept_eraser.exporting import formats
from concept_eraser.models import residual_gate
from concept_eraser.models.loading import load
from concept_eraser.models.residual_gate import ResidualAttentionGate
from tests import families
from tests.small_model import small_sd

KEYS_VALUES = (".attn2.to_k", ".attn2.to_v")
FEW: dict[str, Any] = {
    "stages": 2,
    "steps": 5,
    "adversary_steps": 3,
    "adversaries": 2,
    "lr": 0.03,
    "retain_scale": 1.0,
    "guidance": 3.0,
}
SAMPLING: dict[str, Any] = {"seeds": [1], "steps": 3, "guidance": 5.0}


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "model": small_sd(),
        "forget": {"prompts": ["a red star"], "anchor": "a red circle"},
        "retain": {"prompts": ["a red heart", "a blue house"]},
        "method": {"name": "cpe", **FEW},
        "trainable": "cross_attention_kv",
        **changes,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return concept_eraser.erase(recipe(), output=tmp_path_factory.mktemp("cpe") / "run").folder


def random_gate(width: int, outputs: dict[str, int], seed: int = 0) -> ResidualAttentionGate:
    gate = ResidualAttentionGate(width, outputs, gate_rank=2, rank=3)
    generator = torch.Generator().manual_seed(seed)
    for parameter in gate.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return gate


def with_gate(model: Any, seed: int = 0) -> ResidualAttentionGate:
    """Give a model a gate of random numbers on all keys and values."""
    outputs = {
        name: len(layer.weight)
        for name, layer in model.denoiser.named_modules()
        if name.endswith(KEYS_VALUES)
    }
    gate = random_gate(model.null().tensors["states"].shape[-1], outputs, seed)
    for parameter in gate.parameters():
        parameter.data *= 0.3
    residual_gate.attach(model.denoiser, gate, outputs)
    return gate


@torch.no_grad()
def prediction(model: Any) -> Tensor:
    """Predict the noise of one latent for a prompt of the concept [1, 4, 8, 8]."""
    noisy = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    predicted: Tensor = model.denoise(noisy, torch.tensor([500]), model.encode(["a red star"]))
    return predicted


def addition_by_hand(gate: Any, key: str, states: Tensor) -> np.ndarray:
    """Return (1 / rank) up(down(sigmoid(s . m_i) m_i)) by loops over the tokens [tokens, out]."""
    tensors = {name: value.detach().double().numpy() for name, value in gate.named_parameters()}
    e, rows = states.double().numpy(), []
    for i in range(len(e)):
        scores = np.array(
            [(e[i] @ tensors["query"]) @ (e[j] @ tensors["query"]) for j in range(len(e))]
        )
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        mixed = sum(share * e[j] for j, share in enumerate(shares))
        gated = mixed / (1 + np.exp(-(mixed @ tensors["scale"])))
        down, up = tensors[f"down.{key}"], tensors[f"up.{key}"]
        rows.append(up @ (down @ gated) / len(down))
    return np.array(rows)


def test_the_gate_is_that_of_the_definition() -> None:
    gate = random_gate(4, {"a.to_k": 5, "a.to_v": 2})
    states = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))
    gated = gate.gated(states)
    for name in ("a.to_k", "a.to_v"):
        values = gate.addition(name, gated).detach().numpy()
        for row, prompt in zip(values, states, strict=True):
            expected = addition_by_hand(gate, name.replace(".", "_"), prompt)
            np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)


def test_the_first_values_are_those_of_the_code_and_change_nothing() -> None:
    """The bounds of torch's kaiming_uniform_ with a = sqrt(5) on the code's shapes."""
    gate = ResidualAttentionGate(64, {"a.to_k": 8}, gate_rank=16, rank=1)
    gate.initialise(torch.Generator().manual_seed(0))
    for own, shape, divisor in (
        (gate.query, (1, 64, 16), 64**2),
        (gate.down["a_to_k"], (1, 64, 1), 1),
    ):
        other = torch.empty(shape)
        torch.nn.init.kaiming_uniform_(other, a=5**0.5)
        assert own.abs().max().item() <= other.abs().max().item() / divisor * 1.1
        assert own.std().item() == pytest.approx(float(other.std()) / divisor, rel=0.2)
    assert not gate.scale.any()
    assert not gate.addition("a.to_k", gate.gated(torch.randn(1, 7, 64))).any()


def test_every_layer_of_keys_and_values_has_the_addition(shared_small) -> None:
    model = load(small_sd())
    gate = with_gate(model)
    states = shared_small.encode(["a red star", ""]).tensors["states"]
    for name, layer in model.denoiser.named_modules():
        if not name.endswith(KEYS_VALUES):
            continue
        original = shared_small.denoiser.get_submodule(name)
        change = (layer(states) - original(states)).detach().numpy()
        for row, prompt in zip(change, states, strict=True):
            expected = addition_by_hand(gate, name.replace(".", "_"), prompt)
            np.testing.assert_allclose(row, expected, rtol=1e-3, atol=1e-3)


def test_a_gradient_passes_through_the_gate(shared_small) -> None:
    """White-box attacks see the gate: the gradient of a prompt is another one with it."""
    model, gradients = load(small_sd()), []
    with_gate(model)
    for victim in (model, shared_small):
        condition = victim.encode(["a red star"])
        states = condition.tensors["states"].requires_grad_(True)
        noisy = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        victim.denoise(noisy, torch.tensor([500]), condition).square().sum().backward()
        gradients.append(states.grad)
    assert not torch.allclose(gradients[0], gradients[1], rtol=0.1)


def test_a_copy_has_its_own_gate_and_a_removed_gate_leaves_nothing(shared_small) -> None:
    model = load(small_sd())
    gate = with_gate(model)
    other = copy.deepcopy(model)
    own = residual_gate.find(other.denoiser)
    assert own is not None
    assert own is not gate
    before = prediction(model)
    torch.testing.assert_close(prediction(other), before)
    with torch.no_grad():
        own.scale.add_(1.0)
    assert float((prediction(other) - before).abs().max()) > 1e-3
    torch.testing.assert_close(prediction(model), before)
    with pytest.raises(UserError, match="has a gate already"):
        with_gate(model)
    residual_gate.detach(model.denoiser)
    torch.testing.assert_close(prediction(model), prediction(shared_small))
    assert model_fingerprint(model) == model_fingerprint(shared_small)
    assert not any(layer._forward_hooks for layer in model.denoiser.modules())


def test_a_run_holds_the_gate_alone_and_gives_the_same_images(
    run: Path, tmp_path: Path, shared_small
) -> None:
    tensors = load_file(run / "weights.safetensors")
    assert all(name.startswith("residual_gate.") for name in tensors)
    assert not (run / "pipeline").exists()
    done = json.loads((run / "done.json").read_text())
    assert done["trained_parameters"] == sum(value.numel() for value in tensors.values())
    assert done["edit"]["adversaries"] == 2
    model = load(small_sd())
    other = concept_eraser.erase(recipe(), model=model, output=tmp_path / "other")
    assert all(
        torch.equal(value, tensors[name])
        for name, value in load_file(other.folder / "weights.safetensors").items()
    )
    loaded = load(str(run))
    assert torch.equal(
        loaded.sample(["a red star"], **SAMPLING), model.sample(["a red star"], **SAMPLING)
    )
    assert float((prediction(loaded) - prediction(shared_small)).abs().max()) > 1e-3
    assert model_fingerprint(loaded) == model_fingerprint(model)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_the_gate_of_xl_gives_the_same_images_again(
    autocast: torch.dtype | None, tmp_path: Path
) -> None:
    """XL has two text encoders, whose states are joined, and prompts with a pooled embedding."""
    families.build("sdxl", folder := tmp_path / "sdxl")
    original, model = load(str(folder)), load(str(folder))
    run = concept_eraser.erase(
        recipe(model=str(folder)), model=model, output=tmp_path / "run"
    ).folder
    sampling = {**SAMPLING, "autocast": autocast}
    images = [one.sample(["a red star"], **sampling) for one in (original, model, load(str(run)))]
    assert not torch.equal(images[0], images[1])
    assert torch.equal(images[1], images[2])


def test_autocast_changes_the_gate_by_rounding_alone() -> None:
    model = load(small_sd())
    with_gate(model)
    exact = prediction(model)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = prediction(model).float()
    residual_gate.detach(model.denoiser)
    by_gate = (exact - prediction(model)).abs().max()
    assert (rounded - exact).abs().max() < 0.1 * by_gate


def test_the_commands_apply_the_gate_of_a_run(run: Path, tmp_path: Path) -> None:
    """An image of `generate`, and the model of `evaluate`. test_closed_forms.py attacks a gate."""
    command = ["generate", str(run), "-p", "a red star", "-n", "1", "--steps", "3", "-q"]
    place = ["--guidance", "5", "-o", str(tmp_path / "images")]
    result = CliRunner().invoke(app, [*command, *place])
    assert result.exit_code == 0, result.output
    loaded, (path,) = load(str(run)), (tmp_path / "images").glob("*.png")
    row = json.loads((tmp_path / "images" / "metadata.jsonl").read_text().splitlines()[0])
    expected = loaded.sample(["a red star"], **{**SAMPLING, "seeds": [row["seed"]]})
    assert np.array_equal(np.asarray(Image.open(path)), expected[0].numpy())
    suite = {
        "concept": {"shape": "star"},
        "judge": "tiny",
        "sampling": {"steps": 2},
        "groups": {"direct": {"prompts": "tiny_star", "role": "forget", "n": 2}},
        "metrics": ["concept_rate"],
    }
    fingerprint = model_fingerprint(loaded)
    evaluation = concept_eraser.evaluate(run, suite)
    assert f"({fingerprint})" in evaluation.models["after"]
    images = evaluation.groups["direct"].images
    assert not torch.equal(images["before"], images["after"])


def test_a_damaged_gate_is_refused(run: Path, tmp_path: Path) -> None:
    tensors = load_file(run / "weights.safetensors")
    first = min(name for name in tensors if ".up." in name)
    wrong = [
        {name: value for name, value in tensors.items() if "query" not in name},
        {**tensors, "residual_gate.up.nowhere_to_k": tensors[first]},
        {**tensors, first: tensors[first].repeat(1, 2)},
    ]
    for changed in wrong:
        file = tmp_path / "weights.safetensors"
        save_file({name: value.clone() for name, value in changed.items()}, file)
        with pytest.raises(UserError, match="its gate does not fit the model"):
            residual_gate.attach_stored(load(small_sd()).denoiser, load_file(file), str(file))


@pytest.mark.parametrize("to", formats.FORMATS)
def test_no_export_takes_a_gate(to: str, run: Path, tmp_path: Path) -> None:
    place = tmp_path / ("whole" if to == "diffusers" else "file.safetensors")
    with pytest.raises(UserError, match=rf"cannot export --to {to}: .* has a gate .* run folder"):
        concept_eraser.export(run, to, output=place)
    assert not place.exists()


def test_merge_push_and_pipelines_refuse_a_gate(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot merge: .* has a gate"):
        concept_eraser.merge(run, run, output=tmp_path / "both")
    with pytest.raises(UserError, match=r"holds a gate .*no model for the hub"):
        concept_eraser.push_to_hub(run, "me/no-star", dry_run=True)
    with pytest.raises(UserError, match=r"cannot write a pipeline of diffusers: .* has a gate"):
        load(str(run)).save(tmp_path / "pipeline")
    with pytest.raises(UserError, match=r"cannot write the pipeline of this run \(--save changed"):
        concept_eraser.erase(recipe(model=str(run), method="uce"), output=tmp_path / "uce")
    with pytest.raises(UserError, match="has a gate already"):
        concept_eraser.erase(recipe(model=str(run)), output=tmp_path / "second")


def test_a_training_continues_from_a_gate(run: Path, tmp_path: Path) -> None:
    """UCE's weights and the gate together; the run is loaded from the run before it."""
    second = concept_eraser.erase(
        recipe(model=str(run), method="uce", save="changed"), output=tmp_path / "uce"
    )
    model = load(str(second.folder))
    assert residual_gate.find(model.denoiser) is not None
    assert not any(
        "residual_gate" in name for name in load_file(tmp_path / "uce/weights.safetensors")
    )
    first = load(str(run))
    assert not torch.equal(prediction(model), prediction(first))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"save": "pipeline"}, "save: pipeline cannot hold the gate of the method 'cpe'"),
        ({"retain": None}, "needs a retain set"),
        ({"trainable": "cross_attention"}, "covers .*attn2.to_q.weight"),
        ({"target": "text_encoder"}, "it adds a gate to the layers of a denoiser"),
        ({"training": {"steps": 7}}, "does not use training.steps"),
        ({"trainable": {"select": "cross_attention_kv", "lora": 2}}, "trainable.lora"),
        ({"forget": {"prompts": ["a star"], "anchor": "a star"}}, "is that prompt itself"),
        (
            {"forget": [{"prompts": ["a star"]}, {"prompts": ["a moon"]}]},
            "needs the objectives forget and retain and no other",
        ),
    ],
)
def test_recipes_without_a_sense_are_refused(changes: dict, words: str, tmp_path: Path) -> None:
    content = {name: value for name, value in recipe(**changes).items() if value is not None}
    with pytest.raises(UserError, match=words):
        concept_eraser.erase(content, output=tmp_path / "run")


@pytest.mark.parametrize("family", ["pixart", "sd3"])
def test_other_families_are_refused(family: str, tmp_path: Path) -> None:
    families.build(family, folder := tmp_path / family)
    with pytest.raises(UserError, match="Stable Diffusion 1, 2 and XL"):
        concept_eraser.erase(recipe(model=str(folder)), output=tmp_path / "run")


def test_a_failed_fit_leaves_no_gate(tmp_path: Path, shared_small) -> None:
    model = load(small_sd())
    method = {"name": "cpe", **FEW, "lr": 1e30}
    with pytest.raises(UserError, match="not finite, so nothing was changed"):
        concept_eraser.erase(recipe(method=method), model=model, output=tmp_path / "run")
    assert residual_gate.find(model.denoiser) is None
    assert model_fingerprint(model) == model_fingerprint(shared_small)


def test_the_dry_run_counts_the_gate_and_removes_it(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["erase", str(run / "recipe.yaml"), "--dry-run", "--output", str(tmp_path / "dry")]
    )
    assert result.exit_code == 0, result.output
    count = sum(value.numel() for value in load_file(run / "weights.safetensors").values())
    assert f"trains a gate of {count:,} numbers on" in " ".join(result.output.split())
    assert "the edit ran on" in result.output


def test_the_card_names_the_gate(run: Path) -> None:
    card = concept_eraser.card(run)
    assert "a gate beside the weights, which stay" in card
    assert "concept_eraser.load(" in card
    assert "DiffusionPipeline" not in card
    assert "library_name" not in card
