"""Safeguards at inference against diffusers' own negative prompt and a reference loop of safe
latent diffusion.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from concept_eraser import api
from concept_eraser.models import safeguards
from concept_eraser.models.loading import load
from concept_eraser.models.safeguards import SLD, Guard
from concept_eraser.utils.errors import UserError
from tests import families

PROMPTS = ["a red star", "a blue star"]
SAMPLING: dict[str, Any] = {"seeds": [1, 2], "steps": 6, "guidance": 5.0}


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding. The last bit of a sum, which depends on the CPU, can decide whether a
    value exceeds the threshold of safe latent diffusion. Then single values of 24,576 differ by
    more than one step of 255."""
    return float(((one.int() - other.int()).abs() > 1).float().mean()) < 1e-3


def test_the_negative_prompt_is_diffusers_own(tiny: Any) -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in SAMPLING["seeds"]]
    images = tiny.pipeline(
        prompt=PROMPTS,
        negative_prompt=["a star"] * 2,
        generator=generators,
        num_inference_steps=6,
        guidance_scale=5.0,
        output_type="pt",
    ).images
    plain = tiny.sample(PROMPTS, **SAMPLING)
    tiny.protect(Guard.read("negative:a star"))
    guarded_images = tiny.sample(PROMPTS, **SAMPLING)
    assert close(guarded_images, images.mul(255).round().to(torch.uint8).permute(0, 2, 3, 1))
    assert not close(guarded_images, plain)


@torch.no_grad()
def by_hand(model: Any, kind: str, text: str) -> torch.Tensor:
    """arXiv 2211.05105 as in its code, with the warm-up as a share of the steps."""
    sld, unet, scheduler = SLD[kind], model.denoiser, model.pipeline.scheduler
    x = torch.cat(
        [
            torch.randn((1, *model.latent_shape()), generator=torch.Generator().manual_seed(s))
            for s in SAMPLING["seeds"]
        ]
    )
    scheduler.set_timesteps(SAMPLING["steps"])
    x = x * scheduler.init_noise_sigma
    null, prompt_states, safe = (
        model.encode(texts).tensors["states"] for texts in ([""] * 2, PROMPTS, [text] * 2)
    )
    momentum = torch.zeros_like(x)
    for i, t in enumerate(scheduler.timesteps):
        e_null, e_text, e_safe = (
            unet(x, t, states).sample for states in (null, prompt_states, safe)
        )
        scale = torch.clamp((e_text - e_safe).abs() * sld.scale, max=1.0)
        scale = torch.where((e_text - e_safe) >= sld.threshold, torch.zeros_like(scale), scale)
        safety = (e_safe - e_null) * scale + sld.momentum * momentum
        momentum = sld.keep * momentum + (1 - sld.keep) * safety
        direction = e_text - e_null
        if i / SAMPLING["steps"] >= sld.warmup / 50:
            direction = direction - safety
        x = scheduler.step(e_null + SAMPLING["guidance"] * direction, t, x).prev_sample
    pixels = model.decode(x).clamp(-1, 1).add(1).mul(127.5)
    return pixels.round().to(torch.uint8).permute(0, 2, 3, 1)


@pytest.mark.parametrize("kind", SLD)
def test_safe_latent_diffusion_is_the_papers_loop(tiny: Any, kind: str) -> None:
    plain = tiny.sample(PROMPTS, **SAMPLING)
    expected = by_hand(tiny, kind, "a star")
    tiny.protect(Guard(kind, "a star"))
    guarded_images = tiny.sample(PROMPTS, **SAMPLING)
    assert close(guarded_images, expected)
    assert not close(guarded_images, plain)
    for other in SLD.keys() - {kind}:
        assert not close(by_hand(tiny, other, "a star"), expected), "another setting is told apart"
    assert torch.equal(tiny.sample(PROMPTS, **SAMPLING), guarded_images), (
        "nothing is kept from one sampling to the next"
    )


@pytest.mark.parametrize(
    "name", ["DDIMScheduler", "HeunDiscreteScheduler", "PNDMScheduler", "EulerDiscreteScheduler"]
)
def test_the_warm_up_is_the_same_share_of_the_steps_of_any_sampler(name: str, tiny: Any) -> None:
    """Heun lists each of its time steps but the first twice, and PNDM one of them."""
    tiny.protect(Guard("sld-weak", "a star"))
    warm: dict[float, bool] = {}

    def record(self: Any, sld: Any, *predictions: Any, t: float, **others: Any) -> Any:
        gamma = original(self, sld, *predictions, t=t, **others)
        warm[t] = warm.get(t, False) or bool(gamma.any())
        return gamma

    original = safeguards._Change._gamma
    with pytest.MonkeyPatch.context() as patch, tiny.sampler(name):
        if name == "PNDMScheduler":
            tiny.pipeline.scheduler.register_to_config(skip_prk_steps=True)
        patch.setattr(safeguards._Change, "_gamma", record)
        tiny.sample(PROMPTS, seeds=[1, 2], steps=20, guidance=5.0)
    assert list(warm.values()) == [False] * 6 + [True] * 14  # 15 of 50 steps


def test_a_safeguard_changes_images_only(tiny: Any) -> None:
    before = {name: value.clone() for name, value in tiny.denoiser.state_dict().items()}
    key = tiny.drawing()
    tiny.protect(Guard.read("sld-max:a star"))
    tiny.sample(PROMPTS, **SAMPLING)
    assert all(
        torch.equal(value, before[name]) for name, value in tiny.denoiser.state_dict().items()
    )
    assert not tiny.denoiser._forward_hooks
    assert tiny.drawing() != key, "the cache must not take one for the other"
    assert "sld-max:a star" in tiny.source
    with pytest.raises(UserError, match="guidance above 1"):
        tiny.sample(PROMPTS, **{**SAMPLING, "guidance": 1.0})
    assert not tiny.denoiser._forward_hooks, "also after an error"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("negative", "write kind:text"),
        ("sld-medum:a", "did you mean 'sld-medium'"),
        ("negative: ", "write kind:text"),
    ],
)
def test_a_guard_that_cannot_be_read_is_an_error(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        api.load("tiny-sd", guard=text)


def test_families_with_several_encoders_refuse(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="safeguard 'negative' needs a model with one CLIP text encoder"
    ):
        load(families.build("sdxl", tmp_path / "sdxl")).protect(Guard("negative", "a star"))


def test_a_safeguard_is_measured_beside_the_model_without_it(tmp_path: Path) -> None:
    suite = {
        "concept": {"shape": "star"},
        "judge": "tiny",
        "seed": 1,
        "sampling": {"steps": 6, "guidance": 5.0},
        "groups": {
            "direct": {"prompts": "tiny_star", "role": "forget", "n": 4},
            "retained": {"prompts": "tiny_rest", "role": "retain", "n": 4},
        },
        "metrics": ["concept_rate"],
    }
    evaluation = api.evaluate("tiny-sd", suite, guard="negative:a star", cache=tmp_path)
    assert "under negative:a star" in evaluation.models["after"]
    assert "under" not in evaluation.models["before"]
    rendered_images = evaluation.groups["direct"].images
    assert not torch.equal(rendered_images["before"], rendered_images["after"])
