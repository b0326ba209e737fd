"""Where a concept is after an erasure: exchanges with a known result, and probes that can fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from concept_eraser.data import generate
from concept_eraser.evaluation import suite as suites
from concept_eraser.models.loading import load
from concept_eraser.utils.errors import UserError
from studies import exchange, location, render_results
from studies import probe as probes
from studies.rendering import figures
from studies.rendering import location as rendering
from studies.result_tables import Results
from studies.runs import recipe_of
from tests.conftest import ROOT

CONFIG = ROOT / "studies" / "configs" / "location.yaml"
PROMPTS = ["a red star", "a green house"]
STUDY: dict[str, Any] = {
    "concepts": {
        "star": {
            "suite": {
                "concept": {"shape": "star"},
                "seed": 3,
                "sampling": {"steps": 2, "batch_size": 32, "precision": "bf16"},
                "groups": {
                    "direct": {"prompts": "tiny_star", "role": "forget", "n": 9},
                    "retained": {"prompts": "tiny_rest", "role": "retain", "n": 9},
                    "synonyms": {"prompts": "tiny_star", "role": "forget", "n": 9},
                },
            },
            "prompt": "a star",
            "erasures": {},
        }
    },
    "seed": 0,
    "images": {"direct": 4, "retained": 4},
    "ranges": 2,
    "probe": {"levels": [0.25, 0.75], "folds": 2, "shuffles": 2, "seed": 5},
}


@pytest.fixture(scope="module")
def other() -> Any:
    """The bundled model with noise in each tensor of its denoiser."""
    model = load("tiny-sd")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * noise)
    return model


def images_of(model: Any) -> Tensor:
    images: Tensor = model.sample(PROMPTS, seeds=[0, 1], steps=2, guidance=5.0)
    return images


@pytest.fixture(scope="module")
def own_images(shared_tiny: Any, other: Any) -> tuple[Tensor, Tensor]:
    images = images_of(shared_tiny), images_of(other)
    assert not torch.equal(*images)
    return images


def test_each_tensor_is_in_one_block_and_in_one_kind_of_layer(shared_tiny: Any) -> None:
    network = shared_tiny.denoiser
    names = list(network.state_dict())
    blocks, layers = exchange.block_groups(network), exchange.layer_groups(network)
    assert list(blocks) == ["down_0", "down_1", "mid", "up_0", "up_1", "ends"]
    for groups in (blocks, layers):
        assert sorted(name for group in groups.values() for name in group) == sorted(names)
        assert all(groups.values())
    assert all(".attn2." in name for name in layers["cross_attention"])
    assert not any(".attn2." in name for name in layers["others"])
    assert {name.split(".")[0] for name in blocks["ends"]} == {
        "conv_in",
        "conv_norm_out",
        "conv_out",
        "time_embedding",
    }
    with pytest.raises(UserError, match="a Linear without down_blocks"):
        exchange.weight_groups(torch.nn.Linear(2, 2))


def test_exchanging_all_weights_gives_the_other_model_and_none_gives_its_own(
    shared_tiny: Any, other: Any, own_images: tuple[Tensor, Tensor]
) -> None:
    for groups in (
        exchange.block_groups(shared_tiny.denoiser),
        exchange.layer_groups(shared_tiny.denoiser),
    ):
        every = [name for group in groups.values() for name in group]
        with exchange.exchange_weights(shared_tiny, other, every):
            assert torch.equal(images_of(shared_tiny), own_images[1])
    with exchange.exchange_weights(shared_tiny, other, []):
        assert torch.equal(images_of(shared_tiny), own_images[0])


def test_one_group_gives_a_model_between_the_two(
    shared_tiny: Any, other: Any, own_images: tuple[Tensor, Tensor]
) -> None:
    """The cross-attention of A in B is the rest of B in A: both are one model."""
    groups = exchange.layer_groups(shared_tiny.denoiser)
    with exchange.exchange_weights(shared_tiny, other, groups["cross_attention"]):
        one = images_of(shared_tiny)
    with exchange.exchange_weights(other, shared_tiny, groups["others"]):
        assert torch.equal(images_of(other), one)
    assert not torch.equal(one, own_images[0])
    assert not torch.equal(one, own_images[1])


def test_both_models_have_their_weights_after_an_exchange_and_after_an_error(
    shared_tiny: Any, other: Any
) -> None:
    before = [generate.model_fingerprint(model) for model in (shared_tiny, other)]
    groups = exchange.weight_groups(shared_tiny.denoiser)
    with exchange.exchange_weights(shared_tiny, other, groups["mid"]):
        during = generate.model_fingerprint(shared_tiny)
    with (
        pytest.raises(KeyboardInterrupt),
        exchange.exchange_weights(shared_tiny, other, groups["up_0"]),
    ):
        raise KeyboardInterrupt
    with (
        pytest.raises(UserError, match="differ in no_tensor"),
        exchange.exchange_weights(shared_tiny, other, ["conv_in.weight", "no_tensor"]),
    ):
        pass
    assert during not in before
    assert [generate.model_fingerprint(model) for model in (shared_tiny, other)] == before


def test_a_range_of_all_time_steps_gives_the_other_models_images(
    shared_tiny: Any, other: Any, own_images: tuple[Tensor, Tensor]
) -> None:
    images = []
    for low, high, donor_steps in ((0, 1000, 2), (0, 0, 0), (0, 500, 1), (500, 1000, 1)):
        with exchange.exchange_time_steps(shared_tiny, other, low, high) as calls:
            images.append(images_of(shared_tiny))
        assert len(calls.donor) == donor_steps
        assert len(calls.recipient) == 2 - donor_steps
        assert all(low <= t < high for t in calls.donor)
        assert not any(low <= t < high for t in calls.recipient)
    assert torch.equal(images[0], own_images[1])
    assert torch.equal(images[1], own_images[0])
    assert not any(torch.equal(one, own) for one in images[2:] for own in own_images)
    with (
        pytest.raises(KeyboardInterrupt),
        exchange.exchange_time_steps(shared_tiny, other, 0, 1000),
    ):
        raise KeyboardInterrupt
    assert "forward" not in vars(shared_tiny.denoiser)
    assert torch.equal(images_of(shared_tiny), own_images[0])


def test_a_context_inside_another_restores_the_outer_one(
    shared_tiny: Any, other: Any, own_images: tuple[Tensor, Tensor]
) -> None:
    with exchange.exchange_time_steps(shared_tiny, other, 0, 1000):
        with exchange.exchange_time_steps(shared_tiny, other, 0, 0):
            pass
        assert torch.equal(images_of(shared_tiny), own_images[1])


def test_a_probe_finds_what_is_separable_and_nothing_in_noise() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(200) < 100
    noise = rng.normal(size=(200, 32)).astype(np.float32)
    separable = noise + 3 * labels[:, None] * (np.arange(32) < 4)
    result = probes.probe(separable, labels, folds=5, shuffles=10, seed=1)
    assert result["accuracy"]["value"] > 0.97
    assert result["p"] == pytest.approx(1 / 11)
    assert np.mean(result["shuffled"]) == pytest.approx(0.5, abs=0.06)
    assert max(result["shuffled"]) < 0.65
    nothing = probes.probe(noise, labels, folds=5, shuffles=10, seed=1)
    assert nothing["accuracy"]["low"] < 0.5 < nothing["accuracy"]["high"]
    assert nothing["p"] > 0.05
    assert result == probes.probe(separable, labels, folds=5, shuffles=10, seed=1)
    # without cross-validation a probe fits any labels, and these tests would not see it
    wide = rng.normal(size=(60, 200))
    assert probes.correct_predictions(wide, np.arange(60) < 30, folds=5, seed=0) < 45
    with pytest.raises(UserError, match="found 3 and 197"):
        probes.probe(noise, np.arange(200) < 3, folds=5, shuffles=1, seed=1)


def test_activations_are_the_means_of_the_mid_block(shared_tiny: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(3, 4, 16, 16, generator=generator) for _ in range(2))
    condition = shared_tiny.encode(["a star"])
    features = probes.activations(shared_tiny, latents, noise, 500, condition)
    assert features.shape == (3, 128)
    outputs = []
    block = shared_tiny.denoiser.mid_block
    hook = block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    times = torch.full((3,), 500)
    with torch.no_grad():
        shared_tiny.denoise(shared_tiny.corrupt(latents, noise, times), times, condition.repeat(3))
    hook.remove()
    np.testing.assert_allclose(features, outputs[0].mean((2, 3)).numpy(), rtol=1e-5, atol=1e-5)
    assert not block._forward_hooks
    unconditional = probes.activations(shared_tiny, latents, noise, 500, shared_tiny.null())
    assert np.abs(unconditional - features).max() > 1e-3


def test_permuted_weights_keep_their_values_only(tiny: Any, shared_tiny: Any) -> None:
    probes.permute_weights(tiny, 0)
    for name, value in tiny.denoiser.state_dict().items():
        own = shared_tiny.denoiser.state_dict()[name]
        assert torch.equal(value.flatten().sort().values, own.flatten().sort().values)
    assert not torch.equal(tiny.denoiser.conv_in.weight, shared_tiny.denoiser.conv_in.weight)


def bench_of(original: Any, erased_model: Any, images: dict[str, int]) -> location.Bench:
    suite = suites.load(STUDY["concepts"]["star"]["suite"])
    return location.Bench(
        location.suite_with(suite, images),
        {"original": original, "noisy": erased_model},
        {"original": {}, "noisy": {"run": "noisy"}},
        {"original": "original", "noisy": "noisy model"},
    )


def test_the_study_measures_continues_and_renders(
    shared_tiny: Any, other: Any, no_results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["mid", "up_0", "cross_attention", "others"]
    groups = exchange.weight_groups(shared_tiny.denoiser)
    assert len(groups) == 8
    monkeypatch.setattr(exchange, "weight_groups", lambda _: {name: groups[name] for name in names})
    bench = bench_of(shared_tiny, other, STUDY["images"])
    lines: list[str] = []

    def measure() -> list[str]:
        lines.clear()
        location.measure(bench, STUDY, "star", ["noisy"], lines.append)
        return list(lines)

    fingerprints = dict(bench.fingerprints)
    keys = measure()
    # 2 models; 4 groups and 2 ranges in both directions; the probe of 2 models and 1 control
    assert len(keys) == 2 + 2 * (4 + 2) + 3
    results = Results("location")
    assert sorted(results) == sorted(keys)
    assert measure() == []
    del results["star_blocks_original_noisy_mid"]
    older = results["star_steps_noisy_original_0"]
    for name in ("models", "images", "suite_hash"):  # a result of another model or protocol
        results["star_steps_noisy_original_0"] = {
            **older,
            "settings": {**older["settings"], name: "another"},
        }
        assert "star_steps_noisy_original_0" in measure()
    assert results["star_steps_noisy_original_0"]["results"] == older["results"]
    assert results["star_blocks_original_noisy_mid"]["kind"] == "blocks"
    assert measure() == []
    probe_settings = [
        location.settings_of(
            bench, {"probe": how}, {"prompt": prompt}, {"kind": "probe", "model": "noisy"}
        )
        for how in (STUDY["probe"], {**STUDY["probe"], "seed": 6})
        for prompt in ("a star", "a heart")
    ]
    assert probe_settings[0] == results["star_probe_noisy"]["settings"]
    assert all(settings != probe_settings[0] for settings in probe_settings[1:])
    assert {n: generate.model_fingerprint(m) for n, m in bench.models.items()} == fingerprints

    own = results["star_whole_original"]
    assert rendering.rate(own, "concept_rate", "direct") is not None
    # the weights of no tensor are equal, and the rest of one is the other's cross-attention
    for one, same in (
        ("original_noisy_others", "noisy_original_cross_attention"),
        ("noisy_original_others", "original_noisy_cross_attention"),
    ):
        pair = [results[f"star_blocks_{name}"] for name in (one, same)]
        assert all(cell["tensors"] == cell["different_tensors"] > 0 for cell in pair)
        rates = [rendering.rate(cell, rendering.STATED, "retained") for cell in pair]
        assert rates[0] == rates[1]
    steps = [results[f"star_steps_original_noisy_{low}"]["time_steps"] for low in (0, 500)]
    assert [one["donor"] for one in steps] == [[1], [501]]
    assert [one["recipient"] for one in steps] == [[501], [1]]
    assert len(results["star_probe_original"]["rows"]) == 4
    for content in results.values():
        assert content["environment"]["commit"]
        assert content["settings"]["seed"] == 3

    up = len(groups["up_0"])
    page = rendering.page()
    assert f"| noisy model | up 0 | original | {up} of {up} |" in page
    assert "| noisy model | 0 to 500 | original | 1 of 2 |" in page
    assert "| permuted weights | unconditional |" in page
    assert "![exchanges and probe](location.plots.svg)" in page
    ((path, figure),) = rendering.figures().items()
    assert path.name == "location.plots.svg"
    drawing = figure.draw()
    rows = [one.axes for one in drawing.subfigs[0].subfigs]
    assert [len(axes) for axes in rows] == [1, 1, 2]
    assert [text.get_text() for text in rows[0][0].get_xticklabels()] == [
        "mid",
        "up 0",
        "cross-att.",
        "others",
    ]
    assert rows[2][0].get_legend().get_texts()[-1].get_text() == "permuted weights"
    assert {path.name for path in render_results.pages()} >= {"location.md"}
    (written,) = location.write_figures(no_results / "figures")
    assert written.name == "star_noisy.svg"
    assert figures.is_current(written, rendering.figures_by_erasure(results)["star_noisy"])


def test_the_probe_has_as_many_images_with_the_concept_as_without(
    shared_tiny: Any, other: Any
) -> None:
    """The judge sees a star in two of three direct images, and in one of three others."""
    bench = bench_of(shared_tiny, other, {"direct": 3, "retained": 3})
    generator = torch.Generator().manual_seed(0)
    size = (3, 64, 64, 3)
    images = {
        name: torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        for name in ("direct", "retained")
    }
    answers = {"direct": ["circle", "star", "star"], "retained": ["star", "house", "circle"]}

    class Judge:
        def classify(self, some: Tensor) -> dict[str, np.ndarray]:
            name = next(name for name, own in images.items() if torch.equal(own, some))
            return {"shape": np.array(answers[name])}

    bench.judge = Judge()
    bench._images["original"] = images
    latents, labels = location.probe_images(bench)
    assert labels.tolist() == [True, True, False, False]
    pixels = torch.cat([images["direct"][1:], images["retained"][1:]])
    expected = shared_tiny.encode_images(pixels.permute(0, 3, 1, 2).float() / 127.5 - 1)
    assert torch.equal(latents, expected)
    answers["direct"] = ["circle"] * 3
    with pytest.raises(UserError, match="generates no image with the concept"):
        location.probe_images(bench)


def test_without_results_there_is_no_page_and_no_figure(no_results: Path) -> None:
    assert rendering.figures() == {}
    assert not any(path.name == "location.md" for path in render_results.pages())


def test_pairs_exchange_across_kinds_only() -> None:
    names = ["original", "a", "b", "control_1", "control_2"]
    pairs = location.pairs(names, ["a", "b"])
    assert ("a", "b") not in pairs
    assert ("control_1", "control_2") not in pairs
    assert len(pairs) == 20 - 4
    assert all((other, one) in pairs for one, other in pairs)


def test_the_command_loads_runs_and_the_controls_of_the_concept(
    other: Any, no_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folders = {}
    for name, record in (
        ("run-1", None),
        ("star", {"without": {"shape": ["star"]}, "seed": 1}),
        ("heart", {"without": {"shape": ["heart"]}, "seed": 1}),
    ):
        folders[name] = tmp_path / name
        other.save(folders[name])
        if record is not None:
            (folders[name] / "control.json").write_text(json.dumps(record))
    config = tmp_path / "location.yaml"
    config.write_text(yaml.safe_dump(STUDY))
    benches: list[tuple[location.Bench, list[str]]] = []
    monkeypatch.setattr(
        location,
        "measure",
        lambda bench, study, name, erasures, report: benches.append((bench, erasures)),
    )
    controls = f"{folders['heart']},{folders['star']}"
    arguments = ["location", str(config), "--erased", str(folders["run-1"])]
    monkeypatch.setattr(sys, "argv", [*arguments, "--controls", controls])
    location.main()
    ((bench, erasures),) = benches
    assert erasures == ["run_1"]
    assert list(bench.models) == ["original", "run_1", "control_1"]
    assert bench.origins["control_1"]["without"] == {"shape": ["star"]}
    assert bench.protocol["images"] == {"direct": 4, "retained": 4}

    encoder = load(str(folders["run-1"]))
    with torch.no_grad():
        next(encoder.part("text_encoder").parameters()).add_(1.0)
    encoder.save(tmp_path / "encoder")
    for words, changed in (
        ("its text_encoder differs", [*arguments[:-1], str(tmp_path / "encoder")]),
        ("has no 'house'", [*arguments, "--concepts", "house"]),
    ):
        monkeypatch.setattr(sys, "argv", changed)
        with pytest.raises(SystemExit):
            location.main()
        assert words in capsys.readouterr().err
    with pytest.raises(UserError, match="no group 'unseen'"):
        location.suite_with(bench.suite, {"unseen": 2})


def test_the_configuration_has_recipes_and_groups() -> None:
    study = yaml.safe_load(CONFIG.read_text())
    for name, concept in study["concepts"].items():
        suite = location.suite_with(suites.load(concept["suite"]), study["images"])
        assert list(suite.concept.values()) == [name]
        for entry in concept["erasures"].values():
            recipe = recipe_of(entry, {}, study["seed"])
            assert recipe.target == "denoiser"
            assert recipe.forgotten[0].prompts == f"protocol2_{name}"
