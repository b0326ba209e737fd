"""Attacks without text, adaptive attacks and revival: parts against outside references, successes.

The outside references are diffusers' pipelines and formulas written out anew. Each attack also runs
on the unprotected bundled model, where it must lead to the concept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from concept_eraser import registry
from concept_eraser.data import generate
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import (
    classifier_guidance,
    completion,
    inpainting,
    noise_gradient,
    noise_search,
    other_sampling,
    revival,
    runner,
    soft_prompt_both,
    training_images,
)
from concept_eraser.evaluation.attacks.base import FAMILIES, Attack, Round, Scene
from concept_eraser.evaluation.attacks.trajectory import Trajectory, concept_latents, noise_for
from concept_eraser.models.loading import load
from concept_eraser.utils.errors import UserError
from tests import families

STARS = ["a red star", "a blue star"]
SAMPLING = generate.Sampling(steps=4, guidance=5.0)
MakeScene = Callable[..., Scene]


@pytest.fixture(scope="module")
def stars(shared_tiny: Any) -> tuple[Tensor, Tensor]:
    """Two images of stars by the bundled model, [2, h, w, 3], and their latents."""
    images = shared_tiny.sample(STARS, seeds=[1, 2], steps=8, guidance=5.0)
    return images, runner.encode(shared_tiny, images)


@pytest.fixture
def make_scene(shared_tiny: Any, stars: tuple[Tensor, Tensor]) -> MakeScene:
    """Make a scene of two prompts on the bundled model as victim and original."""

    def make(prompts: list[str] = STARS, **changes: Any) -> Scene:
        values = {
            "victim": shared_tiny,
            "original": shared_tiny,
            "prompts": prompts,
            "concept_prompts": STARS,
            "concept": "star",
            "seeds": [1, 2],
            "targets": stars[1],
            "sampling": SAMPLING,
            "others": ["a red house", "a blue tree"],
            **changes,
        }
        return Scene(**values)

    return make


def distance(images: Tensor, others: Tensor) -> int:
    return int((images.int() - others.int()).abs().max())


def labels(images: Tensor) -> list[str]:
    return registry.load("judge", "tiny")().classify(images)["shape"].tolist()


def first_round(name: str, scene: Scene, **options: Any) -> Round:
    return next(registry.build("attack", name, options).search(scene))


# --- families -------------------------------------------------------------------------------------


def test_every_attack_states_its_family() -> None:
    families = {name: registry.load("attack", name).family for name in registry.builtin("attack")}
    assert set(families.values()) == {*FAMILIES} - {"other"}
    assert {name: registry.family(name) for name in families} == families
    assert registry.family("revival-full") == "fine-tuning on unrelated data"
    assert {name for name, family in families.items() if family == "control"} == {
        "seed_search",
        "random_tokens",
        "classifier_alone",
    }


# --- the sampler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [5.0, 1.0, 0.5, 0.0])
def test_the_trajectory_is_the_pipelines_own(
    guidance: float, shared_tiny: Any, make_scene: MakeScene
) -> None:
    scene = make_scene(sampling=generate.Sampling(steps=3, guidance=guidance))
    sampler = Trajectory(scene)
    x = sampler.run(noise_for(scene, scene.live), shared_tiny.encode(STARS))
    images = shared_tiny.sample(STARS, seeds=scene.seeds, steps=3, guidance=guidance)
    assert distance(sampler.images(x), images) <= 1
    assert scene.cost == {"denoiser calls": 12 if guidance > 1 else 6}


def test_guidance_zero_is_the_empty_prompt(shared_tiny: Any, make_scene: MakeScene) -> None:
    scene = make_scene()
    noise = noise_for(scene, scene.live)
    x = Trajectory(scene, 2, guidance=0).run(noise, shared_tiny.encode(STARS))
    empty = Trajectory(scene, 2, guidance=1).run(noise, shared_tiny.encode(["", ""]))
    torch.testing.assert_close(x, empty, atol=1e-5, rtol=1e-5)


class ConstantNoise:
    """A model whose predicted noise does not depend on its input."""

    def __init__(self, model: Any, noise: Tensor) -> None:
        self.model, self.noise = model, noise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def denoise(self, noisy: Tensor, t: Tensor, condition: Any, weights: Any = None) -> Tensor:
        return self.noise


def test_an_inversion_of_a_constant_prediction_is_exact(
    shared_tiny: Any, make_scene: MakeScene, stars: tuple[Tensor, Tensor]
) -> None:
    """A step back undoes a step forth exactly where the prediction is the same at both ends."""
    scene = make_scene(victim=ConstantNoise(shared_tiny, torch.randn_like(stars[1])))
    sampler = Trajectory(scene, 5, guidance=1)
    condition = shared_tiny.encode(STARS)
    path = sampler.invert(stars[1], condition)
    assert len(path) == 6
    torch.testing.assert_close(sampler.run(path[0], condition), stars[1], atol=1e-4, rtol=1e-4)
    middle = sampler.run(path[0], condition, stop=2)
    torch.testing.assert_close(middle, path[2], atol=1e-4, rtol=1e-4)


def test_images_of_a_folder_take_the_place_of_the_originals(
    shared_tiny: Any, make_scene: MakeScene, stars: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    from PIL import Image

    Image.fromarray(stars[0][1].numpy()).save(tmp_path / "star.png")
    latents = concept_latents(make_scene(), str(tmp_path))
    torch.testing.assert_close(latents, stars[1][[1, 1]], atol=1e-3, rtol=1e-3)
    attack = completion.Completion(images=str(tmp_path))
    before = attack.lists()
    Image.fromarray(stars[0][0].numpy()).save(tmp_path / "other.png")
    assert attack.lists() != before
    assert completion.Completion().lists() == {}


# --- completion and inpainting --------------------------------------------------------------------


def test_a_completion_is_that_of_diffusers(
    shared_tiny: Any, make_scene: MakeScene, stars: tuple[Tensor, Tensor]
) -> None:
    from diffusers import StableDiffusionImg2ImgPipeline

    from concept_eraser.utils.provenance import derive_seed

    scene = make_scene()
    offer = first_round("completion", scene, strengths="0.5")
    pipeline = StableDiffusionImg2ImgPipeline(
        **shared_tiny.pipeline.components, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    seeds = [derive_seed(seed, "completion", 2, 0) for seed in scene.seeds]
    latents = pipeline(
        prompt=STARS,
        image=stars[1],
        strength=0.5,
        num_inference_steps=4,
        guidance_scale=5.0,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="latent",
    ).images
    assert offer.images is not None
    assert distance(offer.images, Trajectory(scene).images(latents)) <= 1


@pytest.mark.parametrize(("strength", "start"), [(1.0, 0), (0.5, 2), (0.25, 3)])
def test_a_strength_leaves_its_share_of_the_steps(
    strength: float, start: int, make_scene: MakeScene
) -> None:
    trajectory = Trajectory(make_scene())
    assert trajectory.start_of(strength) == start
    message = r"strength 0\.24 of 4 steps leaves no step.*at least 0\.25"
    with pytest.raises(UserError, match=message):
        trajectory.start_of(0.24)


def test_an_inpainting_is_that_of_diffusers(
    shared_tiny: Any, make_scene: MakeScene, stars: tuple[Tensor, Tensor]
) -> None:
    from diffusers import StableDiffusionInpaintPipeline

    scene = make_scene()
    offer = first_round("inpainting", scene, shares="0.5")
    pipeline = StableDiffusionInpaintPipeline(
        **shared_tiny.pipeline.components, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    side = 64 // stars[1].shape[-1]
    mask = inpainting.hidden_part(stars[1].shape[-2:], "centre", 0.5)
    latents = pipeline(
        prompt=STARS,
        image=stars[1],
        mask_image=mask.repeat_interleave(side, 0).repeat_interleave(side, 1)[None, None],
        masked_image_latents=torch.zeros_like(stars[1]),
        height=64,
        width=64,
        strength=1.0,
        num_inference_steps=4,
        guidance_scale=5.0,
        latents=noise_for(scene, scene.live, ("inpainting", 0)),
        output_type="latent",
    ).images
    assert offer.images is not None
    assert distance(offer.images, Trajectory(scene).images(latents)) <= 1


def test_a_jump_back_in_time_is_the_forward_process(
    shared_tiny: Any, make_scene: MakeScene
) -> None:
    """From x_s = signal_s x_0 + sigma_s noise to signal_t x_0 with the variance sigma_t^2."""
    sampler = Trajectory(make_scene())
    x = torch.full((1, 1, 1, 1), 3.0)
    clean = sampler.mix(x, torch.zeros_like(x), 2)
    jumped = inpainting.noise_again(sampler, clean, 1, torch.zeros_like(x))
    torch.testing.assert_close(jumped, sampler.mix(x, torch.zeros_like(x), 1))
    nothing = torch.zeros_like(x)
    own = inpainting.noise_again(sampler, sampler.mix(nothing, torch.ones_like(x), 2), 1, nothing)
    new = inpainting.noise_again(sampler, nothing, 1, torch.ones_like(x))
    sigma = sampler.mix(nothing, torch.ones_like(x), 1)
    torch.testing.assert_close(own**2 + new**2, sigma**2)


def test_hidden_parts() -> None:
    def shown(part: Any, share: float) -> list[list[int]]:
        return inpainting.hidden_part((4, 4), part, share).int().tolist()

    assert shown("centre", 0.5) == [[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert shown("left", 0.25) == [[1, 0, 0, 0]] * 4
    assert shown("right", 0.5) == [[0, 0, 1, 1]] * 4
    assert shown("top", 0.1) == [[1] * 4, [0] * 4, [0] * 4, [0] * 4]
    assert shown("bottom", 1.0) == [[1] * 4] * 4


# --- inversion and search -------------------------------------------------------------------------


def test_null_text_inversion_follows_the_inverted_path_better_than_the_empty_prompt(
    make_scene: MakeScene,
) -> None:
    """Without steps of Adam that matter, the loss of the last step is that of the empty prompt."""
    options = {"steps": 3, "iterations": 3}
    still = first_round("null_text_inversion", make_scene(), lr=1e-9, **options)
    found = first_round("null_text_inversion", make_scene(), lr=0.05, **options)
    assert found.loss is not None
    assert still.loss is not None
    assert found.loss < 0.8 * still.loss


def test_null_text_inversion_ends_each_step_at_the_tolerance(make_scene: MakeScene) -> None:
    """A tolerance above every loss leaves one step of Adam for each image and step."""
    scene = make_scene()
    first_round("null_text_inversion", scene, steps=2, iterations=5, tolerance=1e3)
    assert scene.cost["gradient steps"] == 2 * 2


class IdentitySampler:
    """A sampler that returns its noise, so that a search is a search in the latents themselves."""

    steps = 1

    def run(self, x: Tensor, condition: Any, **_: Any) -> Tensor:
        return x

    def advance(self, x: Tensor, step: int, condition: Any, null: Any) -> Tensor:
        return x

    def images(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("module", "attack", "bound"),
    [
        (noise_search, noise_search.NoiseSearch(rounds=60, every=1, radius=0.2), 0.95),
        (noise_gradient, noise_gradient.NoiseGradient(iterations=60, every=1, lr=0.1), 0.3),
    ],
    ids=["zero-order", "gradient"],
)
def test_a_search_of_the_noise_approaches_the_image(
    module: Any, attack: Attack, bound: float, make_scene: MakeScene, monkeypatch: Any
) -> None:
    """The distance never grows in the search without gradients. The noise keeps its length."""
    monkeypatch.setattr(module, "sampler_for", lambda *_: IdentitySampler())
    generator = torch.Generator().manual_seed(0)
    goal = torch.randn(2, *make_scene().targets.shape[1:], generator=generator)
    scene = make_scene(targets=goal)
    rounds = list(attack.search(scene))
    losses = [offer.loss for offer in rounds if offer.loss is not None]
    assert losses[-1] < bound * losses[0]
    if module is noise_search:
        assert losses == sorted(losses, reverse=True)
    final = rounds[-1].images
    assert final is not None
    lengths = final.flatten(1).norm(dim=1) / noise_for(scene, scene.live).flatten(1).norm(dim=1)
    assert all(0.9 < float(length) < 1.1 for length in lengths)


def test_a_search_by_rewards_keeps_the_best_noise(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_search, "sampler_for", lambda *_: IdentitySampler())
    scene = make_scene()
    search = noise_search.NoiseSearch(objective="reward", rounds=3, radius=0.5).search(scene)
    start = next(search).images
    scene.rewards = torch.tensor([1.0, 1.0])
    second = next(search).images
    scene.rewards = torch.tensor([2.0, 0.0])  # better for the first prompt alone
    third = next(search).images
    fresh = noise_for(scene, scene.live, ("noise search", 2))
    assert start is not None
    assert second is not None
    assert third is not None
    pivot = torch.stack([second[0], start[1]])
    torch.testing.assert_close(third, math.sqrt(0.75) * pivot + 0.5 * fresh)


# --- classifier guidance --------------------------------------------------------------------------


def test_the_gradient_changes_the_noise_as_in_the_paper(
    shared_tiny: Any, make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDIM with eps - sqrt(1 - a_t) scale gradient, written out with the scheduler's a_t.

    Scale 0 is the pipeline's image.
    """
    gradient = 0.1 * torch.randn(
        2, *shared_tiny.latent_shape(), generator=torch.Generator().manual_seed(0)
    )
    monkeypatch.setattr(
        classifier_guidance.SteeredSampling, "gradient_of", lambda *_: lambda *_: gradient
    )
    scene = make_scene(sampling=generate.Sampling(steps=2, guidance=5.0))
    attack = classifier_guidance.ClassifierGuidance(scales=(0.0, 2.0))
    plain, steered = (offer.images for offer in attack.search(scene))
    assert plain is not None
    assert steered is not None
    images = shared_tiny.sample(STARS, seeds=scene.seeds, steps=2, guidance=5.0)
    assert distance(plain, images) <= 1
    scheduler = shared_tiny.pipeline.scheduler
    times = scheduler.timesteps.tolist()
    alphas = [*scheduler.alphas_cumprod[times], scheduler.final_alpha_cumprod]
    x = noise_for(scene, scene.live)
    sampler = Trajectory(scene)
    for step, (alpha, after) in enumerate(pairwise(alphas)):
        with torch.no_grad():
            noise = sampler.predict(x, step, shared_tiny.encode(STARS))
        noise = noise - (1 - alpha).sqrt() * 2.0 * gradient
        clean = (x - (1 - alpha).sqrt() * noise) / alpha.sqrt()
        x = after.sqrt() * clean + (1 - after).sqrt() * noise
    assert distance(steered, sampler.images(x)) <= 1
    assert distance(steered, plain) > 3


@pytest.mark.parametrize("name", ["classifier_guidance", "classifier_alone"])
def test_noise_alone_is_not_steered(
    name: str, make_scene: MakeScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flow matching begins without a signal, by which the clean latents would be divided."""
    model = load(families.build("sd3", tmp_path / "sd3"))
    shape = model.latent_shape()
    monkeypatch.setattr(
        classifier_guidance.SteeredSampling,
        "gradient_of",
        lambda *_: lambda sampler, x, step: torch.full_like(x, 0.1),
    )
    scene = make_scene(victim=model, original=model, targets=torch.zeros(2, *shape))
    assert not Trajectory(scene).level(scene.targets, 0)[0].any()
    seen: list[Tensor] = []
    monkeypatch.setattr(Trajectory, "images", lambda self, x: seen.append(x) or x)
    attack = registry.build("attack", name, {"scales": (0.0, 2.0)})
    list(attack.search(scene))
    plain, steered = seen
    assert plain.isfinite().all()
    assert steered.isfinite().all()
    assert not torch.equal(plain, steered)
    if name == "classifier_guidance":
        sampler = Trajectory(scene)
        expected = sampler.run(noise_for(scene, scene.live), model.encode(STARS))
        torch.testing.assert_close(plain, expected, rtol=1e-3, atol=1e-3)


def test_a_classifier_is_trained_stored_and_read(
    make_scene: MakeScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It separates the two images of its training. A second run reads its weights."""
    attack = classifier_guidance.ClassifierGuidance(images=2, training_steps=30, lr=3e-3)
    scene = make_scene(memory=tmp_path, corpus=STARS)
    network = attack._classifier(scene)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    stars_again = training_images.original_latents(scene, STARS, "classifier: concept")
    unrelated = training_images.unrelated_prompts(scene, "", 2)
    houses = training_images.original_latents(scene, unrelated, "classifier: unrelated")
    level = torch.tensor([[1.0, 0.0]] * 2)
    with torch.no_grad():
        assert float(network(stars_again, level).min()) > float(network(houses, level).max())

    def fail(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(classifier_guidance.ClassifierGuidance, "_train", fail)
    again = attack._classifier(make_scene(memory=tmp_path, corpus=STARS))
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in network.state_dict().items()
    )
    with monkeypatch.context() as patch:
        patch.setattr(type(scene.original), "drawing", lambda self: {"another": "noise schedule"})
        with pytest.raises(AssertionError, match="trained again"):
            attack._classifier(make_scene(memory=tmp_path, corpus=STARS))
    file = tmp_path / "own.safetensors"
    save_file({k: v.clone() for k, v in network.state_dict().items()}, file)
    given = classifier_guidance.ClassifierGuidance(classifier=str(file))
    assert torch.equal(given._classifier(scene)(houses, level), network(houses, level))
    save_file({"head.weight": torch.zeros(1, 3)}, file)
    with pytest.raises(UserError, match="is no classifier of latents"):
        given._classifier(scene)


def test_a_judge_that_does_not_know_the_concept_cannot_steer(make_scene: MakeScene) -> None:
    with pytest.raises(UserError, match="the judge 'tiny' does not know 'comet'"):
        first_round("classifier_guidance", make_scene(concept="comet"), judge="tiny")


def test_the_classifier_alone_asks_no_victim(make_scene: MakeScene, tmp_path: Path) -> None:
    file = tmp_path / "classifier.safetensors"
    shape = make_scene().victim.latent_shape()
    save_file(classifier_guidance.LatentClassifier(shape).state_dict(), file)
    scene = make_scene()
    offer = first_round("classifier_alone", scene, classifier=str(file), scales="1")
    assert offer.images is not None
    assert offer.images.shape == (2, 64, 64, 3)
    assert scene.cost == {}


# --- adaptive attacks -----------------------------------------------------------------------------


def test_other_settings_are_tried_one_at_a_time_or_all(make_scene: MakeScene) -> None:
    scene = make_scene()
    attack = other_sampling.OtherSampling(
        guidances=(1.0, 9.0),
        steps=(2,),
        samplers=("DDPMScheduler", "FlowMatchHeunDiscreteScheduler"),
    )
    assert list(attack.settings(scene)) == [
        (1.0, 4, ""),
        (9.0, 4, ""),
        (5.0, 2, ""),
        (5.0, 4, "DDPMScheduler"),
    ]
    # as in the pipelines a suite's guidance 0 is the prompt alone, not the empty one
    turbo = make_scene(sampling=generate.Sampling(steps=4, guidance=0.0))
    assert list(attack.settings(turbo))[2:] == [(1.0, 2, ""), (1.0, 4, "DDPMScheduler")]
    every = other_sampling.OtherSampling(attack.guidances, attack.steps, attack.samplers, True)
    assert list(every.settings(scene)) == [(1.0, 2, "DDPMScheduler"), (9.0, 2, "DDPMScheduler")]


def test_another_sampler_ends_with_its_context(shared_tiny: Any) -> None:
    own = shared_tiny.pipeline.scheduler
    with shared_tiny.sampler("EulerDiscreteScheduler"):
        scheduler = shared_tiny.pipeline.scheduler
        assert type(scheduler).__name__ == "EulerDiscreteScheduler"
        assert scheduler.config.beta_schedule == own.config.beta_schedule
    with shared_tiny.sampler("DDPMScheduler"):
        assert shared_tiny.pipeline.scheduler.config.clip_sample is False
    assert shared_tiny.pipeline.scheduler is own
    with (
        pytest.raises(UserError, match=r"unknown sampler .*'EulerDiscreteSchedule'; did you mean"),
        shared_tiny.sampler("EulerDiscreteSchedule"),
    ):
        pass


def test_other_samplers_still_draw_the_concept(make_scene: MakeScene) -> None:
    """On the unprotected model each setting leads to the star for a prompt that names it."""
    attack = other_sampling.OtherSampling(
        guidances=(3.0,), steps=(6,), samplers=("EulerAncestralDiscreteScheduler",)
    )
    scene = make_scene(sampling=generate.Sampling(steps=8, guidance=5.0))
    counts = [
        labels(offer.images).count("star")
        for offer in attack.search(scene)
        if offer.images is not None
    ]
    assert len(counts) == 3
    assert all(count >= 1 for count in counts), counts


def test_both_embeddings_get_an_offset(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler gets both, and the offsets are bounded by their own embeddings."""
    scene = make_scene()
    calls: list[tuple[Tensor, Tensor]] = []

    def run(self: Any, x: Tensor, condition: Any, *, null: Any) -> Tensor:
        calls.append((condition.tensors["states"], null.tensors["states"]))
        return x

    monkeypatch.setattr(Trajectory, "run", run)
    attack = soft_prompt_both.SoftPromptBoth(steps=2, every=2, lr=10.0, radius=0.1)
    next(attack.search(scene))
    ((states, null),) = calls
    for found, base in (
        (states, scene.victim.encode(STARS).tensors["states"]),
        (null, scene.victim.null().repeat(2).tensors["states"]),
    ):
        shares = (found - base).flatten(1).norm(dim=1) / base.flatten(1).norm(dim=1)
        torch.testing.assert_close(shares, torch.full((2,), 0.1), atol=1e-4, rtol=1e-3)
    assert scene.cost["gradient steps"] == 2 * 2 * 2


# --- successes ------------------------------------------------------------------------------------

# Budgets that suffice on the bundled model, from prompts that do not name the star.
BUDGETS: dict[str, dict[str, Any]] = {
    "completion": {"strengths": "0.7,0.5"},
    "inpainting": {"shares": "0.5,0.25"},
    "ddim_inversion": {"steps": 10, "guidances": "1"},
    "null_text_inversion": {"steps": 8, "iterations": 5, "lr": 0.05},
    "soft_prompt_both": {"steps": 20, "every": 20, "lr": 0.1},
}
# proved by tests of their own below or above
OTHERS = (
    "classifier_alone",
    "classifier_guidance",
    "noise_gradient",
    "noise_search",
    "other_sampling",
    "revival",
)


@pytest.mark.parametrize("name", BUDGETS)
def test_an_attack_succeeds_on_the_original_model(name: str, shared_tiny: Any) -> None:
    """If an attack fails here, its failures on other models prove nothing.

    These prompts show a star in about 1 of 100 images without an attack.
    """
    protocol = runner.Protocol(
        suites.load("tiny_star"), name, BUDGETS[name], n=3, batch=3, hide="shape"
    )
    fingerprint = generate.model_fingerprint(shared_tiny)
    result = runner.run(protocol, shared_tiny, shared_tiny)
    rates = result.rates()
    assert rates["pre"]["value"] == 0
    assert rates["asr"]["value"] >= 0.5, result.curves
    assert result.as_dict()["family"] == registry.family(name)
    assert generate.model_fingerprint(shared_tiny) == fingerprint


def test_a_judge_steers_the_original_model_to_the_concept(make_scene: MakeScene) -> None:
    """The victim gets the empty prompt. Scale 0 leaves its images as they are."""
    scene = make_scene(prompts=2 * STARS, concept_prompts=2 * STARS, seeds=[1, 2, 3, 4])
    scene.sampling = generate.Sampling(steps=8, guidance=5.0)
    attack = classifier_guidance.ClassifierGuidance(judge="tiny", text="empty", scales=(0.0, 2.0))
    plain, steered = (
        labels(offer.images).count("star")
        for offer in attack.search(scene)
        if offer.images is not None
    )
    assert plain == 0
    assert steered >= 2


@pytest.mark.parametrize(
    ("name", "options", "share"),
    [
        ("noise_search", {"rounds": 8, "every": 1, "steps": 2}, 0.9),
        ("noise_gradient", {"iterations": 12, "every": 4, "steps": 2, "lr": 0.2}, 0.8),
    ],
)
def test_a_search_through_the_original_model_approaches_the_image(
    name: str, options: dict[str, Any], share: float, make_scene: MakeScene
) -> None:
    """The prompt names no star. The latents come nearer to the star."""
    scene = make_scene(prompts=["a red shape"], concept_prompts=STARS[:1], seeds=[1])
    losses = [offer.loss for offer in registry.build("attack", name, options).search(scene)]
    assert losses[-1] < share * losses[0]


# --- revival --------------------------------------------------------------------------------------


def test_unrelated_prompts_leave_out_the_concept(make_scene: MakeScene) -> None:
    suite = suites.load("tiny_star")
    others = runner.retain_prompts(suite)
    assert others
    assert not any("star" in text for text in others)
    assert sorted(training_images.unrelated_prompts(make_scene(), "", 4)) == sorted(
        2 * ["a red house", "a blue tree"]
    )
    with pytest.raises(UserError, match="states 'star', so that its image is not unrelated"):
        training_images.unrelated_prompts(make_scene(), "tiny_star", 4)
    with pytest.raises(UserError, match="give unrelated prompts with --set prompts=NAME"):
        training_images.unrelated_prompts(make_scene(others=[]), "", 4)


@pytest.mark.parametrize("rank", [2, 0], ids=["LoRA", "all weights"])
def test_revival_records_the_concept_rate_and_restores_the_victim(
    rank: int, tiny: Any, shared_tiny: Any
) -> None:
    """Nothing is erased here. The rate of all prompts stays, and none of them is a success."""
    before = {key: value.clone() for key, value in tiny.denoiser.state_dict().items()}
    options = {"images": 2, "steps": 2, "every": 1, "batch": 2, "lr": 1e-5, "rank": rank}
    protocol = runner.Protocol(suites.load("tiny_star"), "revival", options, n=3, batch=3)
    result = runner.run(protocol, tiny, shared_tiny)
    assert result.rates()["pre"]["value"] == 1
    assert result.concept_rates() == [1.0, 1.0]
    assert [row["fell"] for row in result.curves[0]] == [0, 0]
    assert result.rates()["asr"]["value"] == 1
    assert [row["stage"] for row in result.outcomes] == ["original"] * 3 + ["clean"] * 3
    after = tiny.denoiser.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_revival_has_rows_of_the_prompts_that_it_attacked_only() -> None:
    """The first prompt shows the concept without the attack, and is in the batch all the same."""
    start = runner.AttackStart(
        ["a red star", "a blue star"],
        ["a red star", "a blue star"],
        seeds=[5, 6],
        concept_images=torch.empty(0),
        clean_images=torch.empty(0),
        pre=np.array([True, False]),
        left_out=0,
        positions=[0, 1],
        outcomes=[
            {"stage": "clean", "position": i, "prompt": text, "shows_concept": i == 0}
            for i, text in enumerate(["a red star", "a blue star"])
        ],
    )
    pre = runner.Attempt("a red star", 5, pre=True, success=True)
    broken = runner.Attempt("a blue star", 6, pre=False, success=True, round=2, by_seed=6)
    batch = {
        "attempts": [dataclasses.asdict(pre), dataclasses.asdict(broken)],
        "outcomes": [{}, {"predicted_shape": "star", "rounds": 2}],
    }
    protocol = runner.Protocol(suites.load("tiny_star"), "revival")
    models = {"victim": "v", "original": "o"}
    rows = runner.outcomes_of(protocol, start, [batch], rows=[[0, 1]], models=models)
    (attacked,) = [row for row in rows if row["stage"] == "attack"]
    assert (attacked["position"], attacked["round"], attacked["rounds"]) == (1, 2, 2)


def test_unrelated_data_revive_a_concept_that_is_only_covered(
    tiny: Any, make_scene: MakeScene
) -> None:
    """The last layer is scaled down, so that no image shows a star. Houses and trees repair it."""
    with torch.no_grad():
        tiny.denoiser.conv_out.weight.mul_(0.7)
        tiny.denoiser.conv_out.bias.mul_(0.7)
    scene = make_scene(victim=tiny, sampling=generate.Sampling(steps=8, guidance=5.0))
    sampling: dict[str, Any] = {"seeds": scene.seeds, "steps": 8, "guidance": 5.0}
    assert labels(tiny.sample(STARS, **sampling)).count("star") == 0
    attack = revival.Revival(images=4, rank=0, steps=20, every=20, batch=4, lr=3e-4)
    search = attack.search(scene)
    offer = next(search)
    assert offer.texts == STARS
    assert labels(tiny.sample(STARS, **sampling)).count("star") == 2
    search.close()


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("completion", {"strengths": "0.5,1.5"}, "strengths must be above 0 and at most 1"),
        ("completion", {"strengths": ""}, "strengths must be above 0"),
        ("completion", {"strengths": "half"}, "strengths: expected a finite number, found 'half'"),
        ("completion", {"begin": "original", "images": "x"}, "leave out images"),
        ("inpainting", {"shares": "0"}, "shares must be above 0"),
        ("inpainting", {"repeats": 0}, "repeats must be positive"),
        ("ddim_inversion", {"guidances": "-1"}, "guidances must be from 0"),
        ("ddim_inversion", {"guidances": ""}, "guidances must have at least one value"),
        ("ddim_inversion", {"steps": 10**6}, "steps must be from 1 to"),
        ("null_text_inversion", {"guidance": 1}, "guidance must be above 1"),
        ("null_text_inversion", {"tolerance": -1}, "tolerance must be at least 0"),
        ("noise_search", {"radius": 1.1}, "radius must be above 0 and at most 1"),
        ("noise_gradient", {"iterations": 0}, "iterations must be positive"),
        ("classifier_guidance", {"scales": "-1"}, "scales must be at least 0"),
        ("classifier_guidance", {"judge": "tiny", "prompts": "tiny_rest"}, "a judge replaces"),
        ("classifier_alone", {"prompts": "tiny_rest", "classifier": "x"}, "not both"),
        ("classifier_alone", {"judge": "tiny"}, "unknown option"),
        ("other_sampling", {"guidances": "", "steps": "", "samplers": ""}, "at least one"),
        ("other_sampling", {"steps": "0"}, "steps must be from 1 to"),
        ("soft_prompt_both", {"guidance": 0.5}, "guidance must be above 1"),
        ("revival", {"rank": -1}, r"rank must be at least 0 \(all weights\)"),
        ("revival", {"prompts": "tiny_rest", "folder": "x"}, "not both"),
        ("revival-full", {"rank": 4}, "use name: revival to set it"),
    ],
)
def test_bad_options_are_refused_with_the_reason(
    name: str, option: dict[str, Any], message: str
) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        registry.build("attack", name, option)


def test_a_safeguard_stops_attacks_that_sample_by_themselves(tiny: Any) -> None:
    """Such an attack would leave the safeguard out without saying so."""
    tiny.guard = object()
    protocol = runner.Protocol(suites.load("tiny_star"), "completion", n=2)
    with pytest.raises(UserError, match=r"the safeguard of .* has no effect"):
        runner.require_possible(protocol, protocol.suite.build_judge(), tiny, tiny)


def test_lists_of_numbers_come_from_texts_and_from_yaml() -> None:
    for value in ("0.9, 0.5", [0.9, 0.5], (0.9, 0.5)):
        assert registry.build("attack", "completion", {"strengths": value}).strengths == (0.9, 0.5)
    assert registry.build("attack", "completion", {"strengths": 0.5}).strengths == (0.5,)
    assert registry.build("attack", "other_sampling", {"samplers": ""}).samplers == ()
