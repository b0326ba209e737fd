"""One contract for every family of text-to-image models, on the real classes at tiny random
sizes.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

import concept_eraser
from concept_eraser import registry
from concept_eraser.data import batches, generate
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import runner
from concept_eraser.evaluation.attacks.base import Scene
from concept_eraser.evaluation.attacks.trajectory import Trajectory, noise_for
from concept_eraser.models import lora_files
from concept_eraser.models.base import Condition
from concept_eraser.models.flow import Flow
from concept_eraser.models.loading import load
from concept_eraser.models.lora import Factors
from concept_eraser.recipes.selections import select
from concept_eraser.training import log as logs
from concept_eraser.utils.errors import Interrupted, UserError
from tests import families
from tests.families import by_hand, options, plain, sample_images, texts

every = pytest.mark.parametrize("name", families.NAMES)
every_variant = pytest.mark.parametrize("name", [*families.NAMES, *families.VARIANTS])
GetModel = Callable[[str], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the tiny pipeline of a name."""
    root, paths = tmp_path_factory.mktemp("families"), {}

    def of(name: str) -> Path:
        if name not in paths:
            paths[name] = families.build(name, root / name)
        return paths[name]

    return of


@pytest.fixture(scope="module")
def get_model(folder: Callable[[str], Path]) -> GetModel:
    """The model of a name for tests that only read it, loaded once."""
    models: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in models:
            models[name] = load(folder(name))
            models[name].configure(options(name))
        return models[name]

    return of


@every
def test_examples_without_their_prompts(name: str, get_model: GetModel) -> None:
    """Some examples get the unconditional prompt in the form of their family, the
    others their own.
    """
    model, prompts = get_model(name), texts(name)[:2]
    examples = batches.make_examples(
        model, prompts, latents=torch.zeros(2, *model.latent_shape()), anchors=prompts[::-1]
    )
    null, count = model.null().tensors, 40

    def draw_batch(share: float) -> batches.Batch:
        generators = [torch.Generator().manual_seed(i) for i in range(count)]
        return replace(examples, empty=share).draw(generators, torch.device("cpu"))

    plain, some = draw_batch(0.0), draw_batch(0.25)
    for key, value in null.items():
        nothing = value.to(plain.condition.tensors[key])[0]
        for before, after in ((plain.condition, some.condition), (plain.anchor, some.anchor)):
            blank = [bool((after.tensors[key][i] == nothing).all()) for i in range(count)]
            same = [
                torch.equal(after.tensors[key][i], before.tensors[key][i]) for i in range(count)
            ]
            assert all(a or b for a, b in zip(blank, same, strict=True)), key
            assert 3 <= sum(
                a and not b for a, b in zip(blank, same, strict=True)
            ) <= 17 or torch.equal(nothing, before.tensors[key][0]), key
    bare = replace(batches.make_examples(model, prompts, latents=None), empty=0.5).draw(
        [torch.Generator()] * 4, torch.device("cpu")
    )
    assert bare.anchor is None


@every_variant
def test_same_seed_same_image_as_diffusers(name: str, get_model: GetModel, folder: Any) -> None:
    model, pipe = get_model(name), plain(name, folder(name))
    for guidance in (3.0, 1.0):
        assert (
            sample_images(name, model, guidance=guidance) == by_hand(name, pipe, guidance=guidance)
        ).all()
    assert (sample_images(name, model)[0] != sample_images(name, model)[1]).any()
    assert model.family == name.split("-")[0]


@every
def test_a_batch_is_a_loop_and_a_prompt_is_its_condition(name: str, get_model: GetModel) -> None:
    model = get_model(name)
    batch = torch.from_numpy(sample_images(name, model)).int()
    loop = torch.cat(
        [
            model.sample([t], seeds=[s], steps=3, guidance=3.0)
            for t, s in zip(texts(name), (5, 6), strict=True)
        ]
    )
    assert (batch - loop.int()).abs().max() <= 1  # rounding of a last bit
    from_states = model.sample(model.encode(texts(name)), seeds=[5, 6], steps=3, guidance=3.0)
    assert (batch - from_states.int()).abs().max() <= 1
    assert (
        batch - model.sample(texts(name)[::-1], seeds=[5, 6], steps=3, guidance=3.0).int()
    ).abs().max() > 1


@every_variant
def test_corrupt_target_and_clean_agree_with_the_scheduler(name: str, get_model: GetModel) -> None:
    model = get_model(name)
    latents, noise = torch.randn(
        2, 3, *model.latent_shape(), generator=torch.Generator().manual_seed(0)
    )
    t = torch.tensor([1, 500, 990])
    noisy, target = model.corrupt(latents, noise, t), model.target(latents, noise, t)
    torch.testing.assert_close(model.clean(noisy, t, target), latents, rtol=1e-3, atol=1e-3)
    if name == "sana":
        for i in range(3):
            scheduler = diffusers.DPMSolverMultistepScheduler.from_config(
                model.pipeline.scheduler.config
            )
            scheduler.set_timesteps(1000)
            assert len(scheduler.timesteps) == 1000
            scheduler.set_begin_index(999 - int(t[i]))
            at = scheduler.timesteps[999 - t[i]]
            noised = scheduler.add_noise(latents[i : i + 1], noise[i : i + 1], at[None])
            torch.testing.assert_close(noisy[i : i + 1], noised)
            after = scheduler.step(target[i], at, noisy[i]).prev_sample
            below = model.corrupt(latents[i : i + 1], noise[i : i + 1], t[i : i + 1] - 1)[0]
            torch.testing.assert_close(after, below, rtol=1e-4, atol=1e-4)
        return
    if isinstance(model, Flow):
        config = model.pipeline.scheduler.config
        if name == "flux2":
            mu = compute_empirical_mu(64, 50)  # latents of 8 x 8
        else:
            mu = diffusers.pipelines.flux.pipeline_flux.calculate_shift(
                16,  # tokens of 8 x 8 latents
                config.base_image_seq_len,
                config.max_image_seq_len,
                config.base_shift,
                config.max_shift,
            )
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config)
        scheduler.set_timesteps(1000, sigmas=np.linspace(1, 1e-3, 1000), mu=mu)
        at = scheduler.timesteps.flip(0)[t]
        torch.testing.assert_close(
            noisy, scheduler.scale_noise(latents, at, noise), rtol=1e-4, atol=1e-4
        )
        # the path is straight: the true velocity leads from x_t to its other points
        for i in range(3):
            scheduler.set_begin_index(999 - int(t[i]))
            scheduler._step_index = None
            after = scheduler.step(target[i], at[i], noisy[i]).prev_sample
            below = model.corrupt(latents[i : i + 1], noise[i : i + 1], t[i : i + 1] - 1)[0]
            torch.testing.assert_close(after, below, rtol=1e-4, atol=1e-4)
        return
    scheduler = diffusers.DDIMScheduler.from_config(
        model.pipeline.scheduler.config, clip_sample=False
    )
    torch.testing.assert_close(noisy, scheduler.add_noise(latents, noise, t))
    scheduler.set_timesteps(1000)
    for i in range(3):
        back = scheduler.step(target[i], int(t[i]), noisy[i]).pred_original_sample
        torch.testing.assert_close(back, latents[i], rtol=1e-3, atol=1e-3)


def ddpm_alpha(t: int) -> float:
    """The share of the signal's variance with 1,000 betas from 0.0001 to 0.02."""
    return float(np.prod(1 - np.linspace(0.0001, 0.02, 1000)[: t + 1]))


def sdxl_alpha(t: int) -> float:
    """The same with betas whose roots are evenly spaced, from 0.00085 to 0.012."""
    return float(np.prod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000)[: t + 1] ** 2))


# signal and noise level of x_t, the target's factors of x_0 and of the noise, the denoiser's time
Formula = Callable[[int], tuple[float, float, float, float, float]]


def epsilon_formula(alpha: Callable[[int], float]) -> Formula:
    return lambda t: (alpha(t) ** 0.5, (1 - alpha(t)) ** 0.5, 0, 1, t)


def v_formula(alpha: Callable[[int], float]) -> Formula:
    return lambda t: (
        alpha(t) ** 0.5,
        (1 - alpha(t)) ** 0.5,
        -((1 - alpha(t)) ** 0.5),
        alpha(t) ** 0.5,
        t,
    )


def flow_formula(
    shift: float, *, largest: float = 1.0, time: Callable[[float], float] = lambda sigma: sigma
) -> Formula:
    """Evenly spaced sigmas up to the largest, shifted towards noise."""

    def at(t: int) -> tuple[float, float, float, float, float]:
        plain = largest * (t + 1) / 1000
        sigma = shift * plain / (1 + (shift - 1) * plain)
        return 1 - sigma, sigma, -1, 1, time(sigma)

    return at


# written by hand, from the tiny pipelines' settings
BY_HAND: dict[str, Formula] = {
    **dict.fromkeys(("dit", "pixart"), epsilon_formula(ddpm_alpha)),
    "sdxl": epsilon_formula(sdxl_alpha),
    "sdxl-v": v_formula(sdxl_alpha),
    "sd3": flow_formula(3.0, time=lambda sigma: 1000 * sigma),
    # linear in the 16 tokens: 0.5 at 256, 1.15 at 4,096
    "flux": flow_formula(math.exp(0.5 + (16 - 256) / (4096 - 256) * 0.65)),
    "flux-schnell": flow_formula(1.0),
    "sana": flow_formula(3.0, largest=0.999, time=lambda sigma: int(1000 * sigma)),
    "sana-euler": flow_formula(3.0, time=lambda sigma: 1000 * sigma),
    "zimage": flow_formula(3.0, time=lambda sigma: 1 - sigma),
    # linear in the 16 tokens: 0.5 at 256, 0.9 at 8,192
    "qwenimage": flow_formula(math.exp(0.5 + (16 - 256) / (8192 - 256) * 0.4)),
    # of 64 tokens, at 50 steps on the line from 10 to 200 steps
    "flux2": flow_formula(
        math.exp(
            (150 * (64 * 8.73809524e-05 + 1.89833333) + 40 * (64 * 0.00016927 + 0.45666666)) / 190
        )
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_training_objective_by_hand(name: str, get_model: GetModel) -> None:
    model = get_model(name)
    latents, noise = torch.randn(2, 1, *model.latent_shape())
    condition = model.encode(texts(name)[:1])
    for t in (0, 412, 990):
        time = torch.tensor([t])
        signal, level, of_latents, of_noise, denoiser_time = BY_HAND[name](t)
        noisy = model.corrupt(latents, noise, time)
        torch.testing.assert_close(noisy, signal * latents + level * noise, rtol=1e-4, atol=1e-5)
        target = of_latents * latents + of_noise * noise
        torch.testing.assert_close(model.target(latents, noise, time), target)
        with torch.no_grad():
            _, (inputs,) = record_inputs(
                model, lambda n=noisy, t=time: model.denoise(n, t, condition)
            )
        own_time = inputs["t" if name == "zimage" else "timestep"]
        assert float(own_time) == pytest.approx(denoiser_time, rel=1e-5, abs=1e-6)


Inputs = dict[str, torch.Tensor]


def record_inputs(model: Any, draw: Callable[[], Any]) -> tuple[Any, list[Inputs]]:
    """The result of `draw`, and the tensors of each call of the denoiser by name."""
    calls, signature = [], inspect.signature(model.denoiser.forward)
    hook = model.denoiser.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(signature.bind(*args, **kwargs).arguments),
        with_kwargs=True,
    )
    try:
        result = draw()
    finally:
        hook.remove()
    recorded = []
    for call in calls:
        inputs = {**call, **(call.get("added_cond_kwargs") or {})}
        for name, value in inputs.items():
            if isinstance(value, list) and isinstance(value[0], torch.Tensor):  # one for each image
                inputs[name] = pad_sequence(value, batch_first=True)
        recorded.append({k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)})
    return result, recorded


@every_variant
def test_the_denoiser_gets_the_inputs_of_the_pipeline(name: str, get_model: GetModel) -> None:
    """The last step of the pipeline's sampling with the methods of our models: time, packing,
    conditions, guidance, decoding.
    """
    model, text = get_model(name), texts(name)[:1]
    condition, null = model.encode(text), model.null()
    x, t = (
        torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(5)),
        model.timesteps - 1,
    )
    steps = 1 if isinstance(model, Flow) else 2
    if steps == 2:
        x, t = model.partial(x, condition, null, stop=1, steps=2, guidance=3.0)
    with torch.no_grad():
        prediction, own_calls = record_inputs(
            model, lambda: model.guide(x, torch.tensor(t), condition, null, 3.0, None)
        )
        image = model.decode(model.clean(x, torch.tensor([t]), prediction))
    images, calls = record_inputs(
        model, lambda: model.sample(text, seeds=[5], steps=steps, guidance=3.0)
    )
    calls = calls[-1:] if steps == 2 else calls
    if name == "flux2":  # the pipeline predicts for the prompt, then for the empty prompt
        (both,) = own_calls
        own_calls = [{key: value[i : i + 1] for key, value in both.items()} for i in (1, 0)]
    assert len(own_calls) == len(calls)
    for own_inputs, pipeline_inputs in zip(own_calls, calls, strict=True):
        assert own_inputs.keys() == pipeline_inputs.keys() - {"return_dict"}
        for key, value in own_inputs.items():
            if name in ("dit", "zimage") and key != "timestep":
                value = value.flip(0)  # these pipelines have the unconditional prediction last
            torch.testing.assert_close(
                value,
                pipeline_inputs[key].expand_as(value),
                rtol=1e-4,
                atol=1e-4,
                check_dtype=False,
            )
    pixels = ((image[0] / 2 + 0.5).clamp(0, 1) * 255).round()
    expected = images[0].permute(2, 0, 1).float()
    assert (pixels - expected).abs().max() <= 1
    assert expected.std() > 5


@every
def test_guidance_of_one_or_less_is_the_prompt_alone(name: str, get_model: GetModel) -> None:
    """For the pipeline and for our own sampling. Flux takes the number as an input."""
    model, text = get_model(name), texts(name)[:1]
    condition, null = model.encode(text), model.null()
    noise = torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(5))
    by_guidance = []
    for guidance in (1.0, 0.5, 0.0):
        x, _ = model.partial(noise, condition, null, stop=2, steps=3, guidance=guidance)
        images = model.sample(text, seeds=[5], steps=2, guidance=guidance)
        by_guidance.append((x, images.float()))
    for one in by_guidance[1:]:
        for own, other in zip(by_guidance[0], one, strict=True):
            assert torch.equal(own, other) == (name != "flux")


@every
def test_partial_sampling_stops_at_its_timestep(
    name: str, get_model: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = get_model(name)
    condition, null = model.encode(texts(name)[:1]), model.null()
    latents, noise = torch.randn(2, 1, *model.latent_shape())
    x, t = model.partial(noise, condition, null, stop=0, steps=10, guidance=2.0)
    torch.testing.assert_close(x, noise)
    assert t > 850
    assert model.partial(noise, condition, null, stop=9, steps=10, guidance=2.0)[1] < 150
    if isinstance(model, Flow):  # with the true velocity
        monkeypatch.setattr(
            model, "denoise", lambda x, t, condition, weights=None: (noise - latents).expand_as(x)
        )
        # the first sigma of Sana's scheduler is just below 1
        start = model.corrupt(latents, noise, torch.tensor([model.timesteps - 1]))
        x, t = model.partial(start, condition, null, stop=4, steps=10, guidance=2.0)
        torch.testing.assert_close(x, model.corrupt(latents, noise, torch.tensor([t])))


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize("name", ["sdxl", "sdxl-v", "pixart"])
def test_partial_sampling_follows_the_time_steps_of_any_spacing(
    name: str, spacing: str, get_model: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the true prediction, x_t is at the level of its time step."""
    pipeline = copy.deepcopy(get_model(name).pipeline)
    pipeline.scheduler = type(pipeline.scheduler).from_config(
        pipeline.scheduler.config, timestep_spacing=spacing
    )
    model: Any = load(pipeline)
    model.configure(options(name))
    latents, noise = torch.randn(2, 1, *model.latent_shape())
    monkeypatch.setattr(model, "guide", lambda x, t, **_: model.target(latents, noise, t[None]))
    condition, null = model.encode(texts(name)[:1]), model.null()
    first = torch.tensor(model.time_grid(7)[:1])
    for stop in (1, 6):
        x, t = model.partial(
            model.corrupt(latents, noise, first),
            condition,
            null,
            stop=stop,
            steps=7,
            guidance=2.0,
        )
        assert t == model.time_grid(7)[stop]
        expected = model.corrupt(latents, noise, torch.tensor([t]))
        torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)


@every_variant
def test_encoding_matches_the_pipelines_own_and_vae_round_trip(
    name: str, get_model: GetModel
) -> None:
    model = get_model(name)
    condition = model.encode(texts(name))
    assert len(condition) == 2
    assert len(model.null()) == 1
    if name == "dit":
        assert condition.tensors["classes"].tolist() == [207, 281]
        assert model.null().tensors["classes"].tolist() == [1000]
    elif name in ("flux", "flux-schnell"):
        states, pooled, _ = model.pipeline.encode_prompt(texts(name))
        torch.testing.assert_close(condition.tensors["states"], states)
        torch.testing.assert_close(condition.tensors["pooled"], pooled)
    elif name == "flux2":
        for one, prompts in ((condition, texts(name)), (model.null(), [""])):
            states, _ = model.pipeline.encode_prompt(prompts, max_sequence_length=model.length)
            torch.testing.assert_close(one.tensors["states"], states, rtol=1e-4, atol=1e-5)
    elif name in ("zimage", "qwenimage"):
        empty = "" if name == "zimage" else " "
        for one, prompts in ((condition, texts(name)), (model.null(), [empty])):
            states, mask = model.pipeline.encode_prompt(list(prompts))
            for i, own in enumerate(one.tensors["mask"].bool()):
                whole = states[i]
                if name == "qwenimage" and mask is not None:
                    whole = whole[mask[i].bool()]
                torch.testing.assert_close(
                    one.tensors["states"][i][own], whole, rtol=1e-4, atol=1e-5
                )
    elif "mask" in condition.tensors:
        keys = ("states", "mask")
        # diffusers' encode_prompt has no instruction by default, its call has
        option = "complex_human_instruction"
        asked = inspect.signature(model.pipeline.__call__).parameters.get(option)
        states, mask, null, null_mask = model.pipeline.encode_prompt(
            texts(name), clean_caption=False, **({option: asked.default} if asked else {})
        )
        for key, own, none in zip(keys, (states, mask), (null, null_mask), strict=True):
            torch.testing.assert_close(condition.tensors[key], own)
            torch.testing.assert_close(model.null().tensors[key], none[:1])
    else:
        more = [None, None] if name.startswith("sd3") else []
        states, null, pooled, null_pooled = model.pipeline.encode_prompt(texts(name), *more)
        for part, whole in (("states", states), ("pooled", pooled)):
            torch.testing.assert_close(condition.tensors[part], whole)
        torch.testing.assert_close(model.null().tensors["states"], null[:1])
        torch.testing.assert_close(model.null().tensors["pooled"], null_pooled[:1])
    images = torch.rand(2, 3, model.image_width(), model.image_width()) * 2 - 1
    latents = model.encode_images(images)
    assert latents.shape == (2, *model.latent_shape())
    vae = model.pipeline.vae
    with torch.no_grad():
        frames = images[:, :, None] if name == "qwenimage" else images  # a video of one frame
        code = vae.encode(frames)
        mean = code.latent if name.startswith("sana") else code.latent_dist.mean
        decoded = vae.decode(mean).sample
        torch.testing.assert_close(
            model.decode(latents),
            decoded[:, :, 0] if name == "qwenimage" else decoded,
            rtol=1e-4,
            atol=1e-5,
        )
        if name == "flux2":
            own_code = model.pipeline._encode_vae_image(images, generator=None)
            torch.testing.assert_close(latents, own_code)


@every
def test_denoise_with_replaced_weights(name: str, get_model: GetModel) -> None:
    model = get_model(name)
    condition = model.encode(texts(name))
    x, t = torch.randn(2, *model.latent_shape()), torch.tensor([500, 10])
    own = dict(model.denoiser.named_parameters())
    lasts = {
        "pixart": "proj_out.bias",
        "zimage": "all_final_layer.2-1.linear.bias",
        "flux2": "proj_out.weight",  # has no bias
    }
    last = lasts.get(name) or next(k for k in reversed(own) if k.endswith("bias"))
    shift = -1 if name == "zimage" else 1  # whose output is the negative prediction
    with torch.no_grad():
        before = model.denoise(x, t, condition)
        assert before.shape == x.shape
        if last.endswith("weight"):  # without a bias the prediction is linear in the last weight
            doubled = model.denoise(x, t, condition, {last: own[last] * 2})
            torch.testing.assert_close(doubled, before * 2)
        else:
            changed_prediction = model.denoise(x, t, condition, {last: own[last] + 1})
            torch.testing.assert_close(changed_prediction, before + shift)
        each = torch.cat(
            [model.denoise(x[i : i + 1], t[i : i + 1], condition[i : i + 1]) for i in range(2)]
        )
    torch.testing.assert_close(before, each, rtol=1e-4, atol=1e-5)


@every
def test_saved_weights_make_the_same_image_in_plain_diffusers(
    name: str, get_model: GetModel, tmp_path: Path
) -> None:
    model = copy.deepcopy(get_model(name))
    with torch.no_grad():
        for p in model.denoiser.parameters():
            p.mul_(1.1)
    model.save(tmp_path / "saved")
    images = by_hand(name, plain(name, tmp_path / "saved"))
    assert (images == sample_images(name, model)).all()
    assert (images != sample_images(name, get_model(name))).any()
    assert not [p for p in (tmp_path / "saved").rglob("*") if p.suffix in (".bin", ".ckpt", ".pt")]


OBJECTIVES = {
    "all": ({"loss": "anchor"}, {"loss": "data"}),
    "cross_attention": ({"loss": "esd", "images": "free"}, {"loss": "distill"}),
}


# the others of these families have the same steps, and take a second each
LONG_RUNS = (("sana", "all"), ("zimage", "cross_attention"), ("flux2", "cross_attention"))


@pytest.mark.parametrize(
    ("name", "selection"),
    [
        pytest.param(name, one, marks=pytest.mark.slow if (name, one) in LONG_RUNS else ())
        for name in families.NAMES
        for one in OBJECTIVES
    ],
)
def test_a_run_from_loading_to_sampling(
    name: str, selection: str, get_model: GetModel, folder: Any, tmp_path: Path
) -> None:
    """Load, generate, erase (interrupted and resumed), save, reload, sample."""
    prompt, other = texts(name)
    if name in ("dit", "zimage") and selection == "cross_attention":
        selection = "self_attention"
    forget, retain = OBJECTIVES.get(selection, OBJECTIVES["cross_attention"])
    anchor = {"anchor": other} if forget["loss"] == "anchor" else {}
    job = {
        "model": str(folder(name)),
        "model_options": options(name),
        "forget": {"prompts": [prompt], "n": 2, **forget, **anchor},
        "retain": {"prompts": [other], "n": 2, **retain},
        "method": "munba",
        "trainable": selection,
        "training": {"steps": 2, "batch_size": 2, "lr": 1e-2, "save_every": 1, "device": "cpu"},
        "generation": {"steps": 2, "guidance": 2.0},
    }

    def stop(step: int, seconds: float) -> None:
        if step == 1:
            raise KeyboardInterrupt

    whole = concept_eraser.erase(job, output=tmp_path / "whole")
    with pytest.raises(Interrupted):
        concept_eraser.erase(job, output=tmp_path / "run", on_step=stop)
    run = concept_eraser.erase(job, output=tmp_path / "run", resume=True)
    weights, once = (load_file(r.folder / "weights.safetensors") for r in (run, whole))
    assert all(torch.equal(weights[k], once[k]) for k in once)
    before = dict(get_model(name).denoiser.named_parameters())
    assert set(weights) == set(select(before, selection))
    assert sum(not torch.equal(weights[k], before[k]) for k in weights) > len(weights) / 2
    again = concept_eraser.load(run.folder)  # with the options of its recipe
    for k, p in again.denoiser.named_parameters():
        torch.testing.assert_close(p, weights[k] if k in weights else before[k], rtol=0, atol=0)
    assert (sample_images(name, again) == sample_images(name, run.load())).all()
    assert (sample_images(name, again) != sample_images(name, get_model(name))).any()
    # the changed tensors alone, on the original
    overlay = load(run.folder / "weights.safetensors", base=get_model(name))
    assert (sample_images(name, overlay) == sample_images(name, again)).all()


def test_uno_with_its_anchor_term_on_classes(folder: Any, tmp_path: Path) -> None:
    """UNO's experiment on DiT: images of another class for the forgotten one, its code's factor."""
    prompt, other = texts("dit")
    run = concept_eraser.erase(
        model=str(folder("dit")),
        forget={"prompts": [prompt], "n": 2, "loss": "data"},
        retain={"prompts": [other], "n": 2, "loss": "data"},
        replace={"prompts": [prompt], "n": 2, "loss": "relabel", "anchor": other},
        method={"name": "uno", "strength": 0.02, "reduction": "mean"},
        trainable="all",
        training={"steps": 2, "batch_size": 2, "lr": 1e-4, "device": "cpu"},
        generation={"steps": 2, "guidance": 2.0},
        output=tmp_path / "run",
    )
    first, second = logs.read(run.folder / "log.jsonl")
    assert set(first["losses"]) == {"retain", "forget", "replace"}
    assert (first["beta"], first["exact_products"]) == (0.02, 1)
    assert first["slope_norm"] > 0
    assert first["difference_error"] < 1e-3
    assert second["losses"] != first["losses"]


@every
def test_generated_images_are_cached_by_all_weights(
    name: str, get_model: GetModel, tmp_path: Path
) -> None:
    """Every part counts, the second and third text encoder too."""
    model = get_model(name)
    rendered_images = generate.generate(
        model, texts(name), [1, 2], generate.Sampling(2, 2.0), cache=tmp_path
    )
    assert rendered_images.shape == (2, model.image_width(), model.image_width(), 3)
    own = generate.model_fingerprint(model)
    for part in model.parts:
        other = copy.deepcopy(model)
        with torch.no_grad():
            next(other.parts[part].parameters()).add_(1)
        assert generate.model_fingerprint(other) != own


def test_selections_of_families_with_joint_attention(get_model: GetModel) -> None:
    for name in ("pixart", "sana"):  # their cross-attention is as in a UNet
        names = [k for k, _ in get_model(name).denoiser.named_parameters()]
        cross, rest = (set(select(names, key)) for key in ("cross_attention", "noxattn"))
        assert {k.split(".")[2] for k in cross} == {"attn2"}
        ends = {k.split(".")[0] for k in set(names) - cross - rest}
        time = "adaln_single" if name == "pixart" else "time_embed"
        assert ends == {"proj_out", "scale_shift_table", time}
        assert {k.split(".")[0] for k in select(names, "blocks")} == {"transformer_blocks"}
    names = [k for k, _ in get_model("zimage").denoiser.named_parameters()]
    own = set(select(names, "self_attention"))
    assert own == {k for k in names if ".attention." in k}
    assert set(select(names, "blocks")) == {k for k in names if "layers." in k or "refiner." in k}
    ends = {k.split(".")[0] for k in set(names) - set(select(names, "noxattn"))}
    assert ends == {"all_final_layer", "t_embedder"}
    for name in ("sd3", "flux", "qwenimage", "flux2"):
        names = [k for k, _ in get_model(name).denoiser.named_parameters()]
        selections = {
            key: set(select(names, key))
            for key in (
                "all",
                "cross_attention",
                "cross_attention_kv",
                "self_attention",
                "all_but_cross_attention",
            )
        }
        assert (
            selections["cross_attention"] | selections["all_but_cross_attention"]
            == selections["all"]
        )
        assert not selections["cross_attention"] & selections["all_but_cross_attention"]
        assert selections["cross_attention_kv"] < selections["cross_attention"]
        assert not selections["self_attention"] & selections["cross_attention"]
        assert selections["self_attention"] < selections["all_but_cross_attention"]
        ends = selections["all_but_cross_attention"] - set(select(names, "noxattn"))
        time = "time_guidance_embed" if name == "flux2" else "time_text_embed"
        assert {k.split(".")[0] for k in ends} == {"norm_out", "proj_out", time}
        attention = {k for k in names if ".attn." in k or ".attn2." in k}
        assert selections["self_attention"] | selections["cross_attention"] == attention
        assert all("add" in k for k in selections["cross_attention"])
    for name in ("dit", "zimage"):
        with pytest.raises(UserError, match="matches none of"):
            select([k for k, _ in get_model(name).denoiser.named_parameters()], "cross_attention")


def test_what_several_encoders_or_none_cannot_do(
    get_model: GetModel, folder: Any, tmp_path: Path
) -> None:
    for name, message in (
        ("pixart", "reads texts with a T5EncoderModel"),
        ("sdxl", "has text_encoder and text_encoder_2"),
        ("dit", "is conditioned on classes"),
    ):
        model = get_model(name)
        tokens = model.tokenize(texts(name))
        for ask in (
            lambda m=model: m.words,
            lambda m=model: m.table,
            lambda m=model: m.take_text_tower({}),
            lambda m=model, t=tokens: m.embed(t, rows=torch.zeros(1)),
            lambda m=model, t=tokens: m.embed(t, weights={}),
        ):
            with pytest.raises(UserError, match=message):
                ask()
        with pytest.raises(UserError, match=f"the target 'text_encoder' needs .*{message}"):
            concept_eraser.erase(
                model=str(folder(name)),
                target="text_encoder",
                forget={"prompts": ["281"], "loss": "anchor", "anchor": "7"},
                retain={"prompts": ["7"], "loss": "distill"},
                method="munba",
                training={"device": "cpu"},
                output=tmp_path / name,
            )
        protocol = runner.Protocol(suites.load("tiny_star"), "unlearn_diff", n=2)
        with pytest.raises(UserError, match=f"the attack 'unlearn_diff'.* needs .*{message}"):
            runner.run(protocol, model, model)


@pytest.mark.parametrize("attack", ["relearning", "seed_search"])
@every
def test_attacks_that_write_no_tokens(name: str, attack: str, get_model: GetModel) -> None:
    """They search on every family. The images are noise, which no judge can classify."""
    model, settings = (
        get_model(name),
        {"relearning": {"steps": 1, "images": 2}, "seed_search": {"tries": 1}}[attack],
    )
    protocol = runner.Protocol(suites.load("tiny_star"), attack, settings, n=2)
    runner.require_possible(protocol, registry.load("judge", protocol.suite.judge)(), model, model)
    scene = Scene(
        model,
        model,
        texts(name),
        texts(name),
        "star",
        [1, 2],
        torch.randn(2, *model.latent_shape()),
    )
    before = generate.model_fingerprint(model)
    rounds = list(protocol.build().search(scene))
    assert len(rounds) == 1
    assert rounds[0].texts == texts(name)
    assert generate.model_fingerprint(model) == before


@every
def test_attacks_that_sample_by_themselves_follow_the_family(
    name: str, get_model: GetModel
) -> None:
    """Their first of two steps is that of the model, and they end with images of its size."""
    model = get_model(name)
    scene = Scene(
        model,
        model,
        texts(name),
        texts(name),
        "star",
        [1, 2],
        torch.randn(2, *model.latent_shape()),
        sampling=generate.Sampling(steps=2, guidance=3.0),
    )
    sampler = Trajectory(scene)
    noise, condition = noise_for(scene, scene.live), model.encode(texts(name))
    null = model.null().repeat(2)
    rows: list[int] = []
    hook = model.denoiser.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(next(iter(kwargs.values())))),
        with_kwargs=True,
    )
    x = sampler.run(noise, condition, stop=1)
    hook.remove()
    assert scene.cost == {"denoiser calls": sum(rows)}
    expected, t = model.partial(noise, condition, null, stop=1, steps=2, guidance=3.0)
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)
    assert sampler.times[1] == t
    offer = next(registry.build("attack", "completion", {"strengths": 0.5}).search(scene))
    assert offer.images is not None
    assert (
        offer.images.shape == model.sample(texts(name), seeds=[1, 2], steps=1, guidance=3.0).shape
    )


def test_an_adversary_shifts_the_states_only_where_there_are_some(
    get_model: GetModel, folder: Any, tmp_path: Path
) -> None:
    job: dict[str, Any] = {
        "method": "adversarial",
        "attack": {"n": 2},
        "training": {"steps": 1, "batch_size": 2, "device": "cpu"},
        "generation": {"steps": 1},
    }
    for name in ("sdxl", "dit"):
        objectives = {
            "forget": {"prompts": texts(name)[:1], "n": 2, "loss": "ascent"},
            "retain": {"prompts": texts(name)[1:], "n": 2},
        }
        settings = {**job, **objectives, "model": str(folder(name)), "output": tmp_path / name}
        if name == "dit":
            with pytest.raises(UserError, match="an adversary on the text's embedding needs"):
                concept_eraser.erase(**settings)
        else:
            assert concept_eraser.erase(**settings).folder.exists()


def test_options_of_a_family(get_model: GetModel) -> None:
    flux = copy.deepcopy(get_model("flux"))
    assert flux.encode(["a star"]).tensors["guidance"].tolist() == [1.0]
    flux.configure({"guidance": 3.5, "size": 32})
    assert flux.encode(["a star"]).tensors["guidance"].tolist() == [3.5]
    assert flux.latent_shape() == (4, 16, 16)
    assert flux.sample(["a star"], seeds=[0], steps=1, guidance=1.0).shape == (1, 32, 32, 3)
    assert float(flux.sigma(torch.tensor(500))) > float(
        get_model("flux").sigma(torch.tensor(500))
    )  # more tokens, more noise
    x, t = torch.randn(1, 4, 8, 8), torch.tensor([500])
    conditions = [
        Condition({**flux.encode(["a star"]).tensors, "guidance": torch.tensor([g])})
        for g in (1.0, 5.0)
    ]
    with torch.no_grad():
        assert not torch.equal(flux.denoise(x, t, conditions[0]), flux.denoise(x, t, conditions[1]))
    sdxl = copy.deepcopy(get_model("sdxl"))
    sdxl.configure({"size": 32})
    assert sdxl.encode(["a star"]).tensors["time_ids"].tolist() == [[32, 32, 0, 0, 32, 32]]
    assert sdxl.sample(["a star"], seeds=[0], steps=1, guidance=1.0).shape == (1, 32, 32, 3)
    for model, settings, message in (
        (flux, {"guidence": 1.0}, "did you mean 'guidance'"),
        (flux, {"guidance": 2.0, "size": 18}, "multiple of 4"),
        (flux, {"guidance": float("nan")}, "expected a number"),
        (flux, {"size": "big"}, "expected a number"),
        (copy.deepcopy(get_model("sd3")), {"size": 64}, "at most 32 pixels"),
        (get_model("dit"), {"size": 64}, "option of the model family 'dit'"),
        (copy.deepcopy(get_model("sana")), {"size": 48}, "multiple of 32"),
        (copy.deepcopy(get_model("flux2")), {"size": 34}, "multiple of 4"),
    ):
        with pytest.raises(UserError, match=message):
            model.configure(settings)
    assert (flux.guidance, flux.size) == (3.5, 32)  # a refused request changes nothing


@pytest.mark.parametrize(
    "name", ["sdxl", "sd3", "flux", "pixart", "sana", "zimage", "qwenimage", "flux2"]
)
def test_a_lora_in_plain_diffusers(
    name: str, get_model: GetModel, folder: Any, tmp_path: Path
) -> None:
    """The file is read by the pipeline's own `load_lora_weights`, and by ours."""
    model = copy.deepcopy(get_model(name))
    generator = torch.Generator().manual_seed(0)
    layers = {}
    for key, layer in model.denoiser.named_modules():
        if "att" in key and isinstance(layer, torch.nn.Linear):
            down = torch.randn(2, layer.in_features, generator=generator)
            up = torch.randn(layer.out_features, 2, generator=generator)
            layers[key] = (0.3 * down, 0.3 * up)
            with torch.no_grad():
                layer.weight += 0.09 * up @ down
    file = tmp_path / "lora.safetensors"
    lora_files.save(model, [Factors("denoiser", layers, 2, 2.0)], file)
    if name == "pixart":
        with pytest.raises(UserError, match="cannot take: its pipeline reads none"):
            load(file, base=get_model(name))
        return
    merged = sample_images(name, model).astype(int)
    assert abs(merged - sample_images(name, get_model(name))).max() > 1
    pipe = plain(name, folder(name))
    pipe.load_lora_weights(str(tmp_path), weight_name=file.name)
    assert abs(by_hand(name, pipe) - merged).max() <= 1
    ours = load(file, base=get_model(name))
    assert abs(sample_images(name, ours) - merged).max() <= 1


def test_classes_by_name_or_number(get_model: GetModel) -> None:
    dit = get_model("dit")
    assert dit.encode(["tabby", "golden retriever", "207", ""]).tensors["classes"].tolist() == [
        281,
        207,
        207,
        1000,
    ]
    for wrong in ("taby", "1000", "-1"):
        with pytest.raises(UserError, match=f"unknown class '{wrong}'"):
            dit.encode([wrong])


def test_what_a_family_refuses(get_model: GetModel) -> None:
    sdxl = copy.deepcopy(get_model("sdxl").pipeline)
    sdxl.scheduler = diffusers.EDMEulerScheduler()
    with pytest.raises(UserError, match="of another diffusion"):
        load(sdxl)
    sd3 = copy.deepcopy(get_model("sd3").pipeline)
    sd3.scheduler = diffusers.DDIMScheduler()
    with pytest.raises(UserError, match="not one of flow matching"):
        load(sd3)
    sd3 = copy.deepcopy(get_model("sd3").pipeline)
    sd3.text_encoder = None
    with pytest.raises(UserError, match="needs both of its CLIP text encoders"):
        load(sd3)
    for name, scheduler, message in (
        ("sana", diffusers.DPMSolverMultistepScheduler(), "not one of flow matching"),
        ("pixart", diffusers.FlowMatchEulerDiscreteScheduler(), "prediction type"),
    ):
        pipeline = copy.deepcopy(get_model(name).pipeline)
        pipeline.scheduler = scheduler
        with pytest.raises(UserError, match=message):
            load(pipeline)
    assert "DDIMScheduler" not in get_model("sana").samplers()
    for name, option, message in (
        ("sana", {"guidance_embeds": True}, "Sana-Sprint"),
        ("qwenimage", {"guidance_embeds": True}, "further inputs"),
        ("zimage", {"siglip_feat_dim": 8}, "also takes images"),
    ):
        pipeline = copy.deepcopy(get_model(name).pipeline)
        pipeline.transformer.register_to_config(**option)
        with pytest.raises(UserError, match=message):
            load(pipeline)
    distilled = copy.deepcopy(get_model("flux2").pipeline)
    distilled.register_to_config(is_distilled=True)
    klein = load(distilled)
    klein.configure(options("flux2"))
    assert klein.readings(3.0) == klein.branches(3.0) == 1
    condition, x, t = klein.encode(["a star"]), torch.randn(1, 16, 8, 8), torch.tensor(500)
    with torch.no_grad():
        guided = klein.guide(x, t, condition, klein.null(), 3.0, None)
        assert torch.equal(guided, klein.denoise(x, t[None], condition))
    for scheduler in (
        diffusers.FlowMatchLCMScheduler(),
        diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
    ):
        for name in ("sd3", "flux", "zimage", "qwenimage", "flux2"):
            pipeline = copy.deepcopy(get_model(name).pipeline)
            pipeline.scheduler = scheduler
            with pytest.raises(UserError, match="a seed names no image"):
                load(pipeline)
        sana = copy.deepcopy(get_model("sana").pipeline)  # gives its generator to the scheduler
        sana.scheduler = scheduler
        images = [load(sana).sample(["a star"], seeds=[0], steps=2, guidance=1.0) for _ in range(2)]
        assert torch.equal(*images)
    dit = copy.deepcopy(get_model("dit").pipeline)
    for scheduler in (
        diffusers.DDPMScheduler(),
        diffusers.EulerDiscreteScheduler(),
        diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
    ):
        dit.scheduler = scheduler
        with pytest.raises(UserError, match="a seed names no image"):
            load(dit)
    dit.scheduler = diffusers.DDIMScheduler()
    small = load(dit)
    small.classes = 10
    with pytest.raises(UserError, match="guides models of 1000 classes only"):
        small.sample(["1"], seeds=[0], steps=1, guidance=2.0)


DETERMINISTIC = {
    "DDIMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
}


@pytest.mark.parametrize("name", ["pixart-sigma", "dit"])
def test_every_sampler_solves_the_equation_of_the_model(name: str, get_model: GetModel) -> None:
    """With many steps all samplers without noise draw nearly the same image, the others by seed."""
    model: Any = get_model(name)

    def draw(sampler: str) -> torch.Tensor:
        with model.sampler(sampler):
            images = model.sample(texts(name)[:1], seeds=[5], steps=40, guidance=2.0)
        return images.float()

    own, samplers = draw(""), model.samplers()
    assert {"DDIMScheduler", "PNDMScheduler"} <= set(samplers)
    assert not {"EDMEulerScheduler", "DPMSolverSDEScheduler"} & set(samplers)
    assert ("EulerDiscreteScheduler" in samplers) == (name != "dit")
    for sampler in samplers:
        if sampler in DETERMINISTIC:
            assert (draw(sampler) - own).abs().mean() < 3, sampler
        else:
            assert torch.equal(draw(sampler), draw(sampler)), sampler


def test_samplers_have_the_rescaled_betas_of_a_model(get_model: GetModel) -> None:
    pipeline = copy.deepcopy(get_model("sdxl-v").pipeline)
    pipeline.scheduler = diffusers.DDIMScheduler.from_config(
        pipeline.scheduler.config, rescale_betas_zero_snr=True, clip_sample=False
    )
    model: Any = load(pipeline)
    assert {"DDIMScheduler", "EulerDiscreteScheduler"} <= set(model.samplers())
    # these would sample with betas that are not rescaled
    assert not {"PNDMScheduler", "HeunDiscreteScheduler"} & set(model.samplers())
    for name in model.samplers():
        with model.sampler(name):
            torch.testing.assert_close(
                model.pipeline.scheduler.alphas_cumprod[:-1], model._alphas[:-1]
            )


@pytest.mark.parametrize("kind", ["StableDiffusionPipeline", "StableDiffusionXLPipeline"])
def test_a_unet_with_further_inputs_is_refused(
    kind: str, get_model: GetModel, shared_tiny: Any
) -> None:
    """Of an inpainting model (9 channels), and of a latent consistency model."""
    model = get_model("sdxl") if kind == "StableDiffusionXLPipeline" else shared_tiny
    for option, message in (
        ({"in_channels": 9}, "takes 9 channels and its VAE has latents of 4"),
        ({"time_cond_proj_dim": 8}, "guidance as an input"),
    ):
        parts = dict(model.pipeline.components)
        config = {**parts["unet"].config, **option}
        parts["unet"] = diffusers.UNet2DConditionModel.from_config(config)
        if kind == "StableDiffusionPipeline":
            parts["requires_safety_checker"] = False
        with pytest.raises(UserError, match=message):
            load(getattr(diffusers, kind)(**parts))


def test_weights_are_checked_by_the_model_index(folder: Any, tmp_path: Path) -> None:
    model_folder = Path(shutil.copytree(folder("sd3"), tmp_path / "model"))
    path = next((model_folder / "text_encoder_3").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UserError, match=r"text_encoder_3.*damaged or truncated"):
        load(model_folder)
    path.unlink()
    (model_folder / "text_encoder_3" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="--allow-pickle"):
        load(model_folder)
    index = model_folder / "model_index.json"
    absent = {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    index.write_text(json.dumps({**json.loads(index.read_text()), **absent}))
    assert load(model_folder).readers == ("text_encoder", "text_encoder_2")


@pytest.mark.parametrize("writing", [{}, {"max_shard_size": "40KB"}])
def test_weights_of_a_variant_are_named(
    writing: dict[str, str], get_model: GetModel, tmp_path: Path
) -> None:
    pipeline = get_model("sd3").pipeline
    pipeline.save_pretrained(tmp_path, variant="fp16", **writing)
    with pytest.raises(UserError, match=r"text_encoder.* only as the variant 'fp16' \(model\.fp16"):
        load(tmp_path)
    pipeline.save_pretrained(tmp_path, **writing)  # beside them
    assert load(tmp_path).family == "sd3"


def test_a_strangers_chat_template_is_not_run(folder: Any, tmp_path: Path) -> None:
    place = Path(shutil.copytree(folder("zimage"), tmp_path / "model"))
    template = place / "tokenizer" / "chat_template.jinja"
    own = template.read_text()
    template.write_text("{{ cycler.__init__ }}")
    model: Any = load(place)
    assert model.pipeline.tokenizer.chat_template == own
    template.rename(place / "tokenizer" / "other.jinja")
    with pytest.raises(UserError, match=r"other.jinja is code beside"):
        load(place)


def test_a_hub_id_is_of_the_family_its_index_names(folder: Any, tmp_path: Path) -> None:
    base = tmp_path / "hub" / "models--someone--dit"
    shutil.copytree(folder("dit"), base / "snapshots" / ("0" * 40))
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("0" * 40)
    code = (
        "from concept_eraser.models.loading import load; m = load('someone/dit'); "
        "print(m.family, m.source)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout.strip() == "dit someone/dit", process.stderr[-2000:]
