"""The loss `balance`: its densities against diffusers and Bayes' rule, its value and gradient
against autograd through the whole sum, its memory, the loss `anchor` as a limit, and short runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from safetensors.torch import load_file
from torch import Tensor
from torch.distributions import Normal

import concept_eraser
from concept_eraser.data import batches, prompts
from concept_eraser.erasers.denoiser import Denoiser, DenoiserObjective
from concept_eraser.erasers.trajectories import steps_of
from concept_eraser.losses import LossSettings
from concept_eraser.losses.base import TrajectoryTerms, each
from concept_eraser.losses.denoiser import LOSSES, DenoiserDraw
from concept_eraser.losses.trajectory import TrajectorySteps, step_terms
from concept_eraser.models.loading import load
from concept_eraser.recipes import recipe
from concept_eraser.recipes.selections import select
from concept_eraser.runs import memory_estimate
from concept_eraser.tiny import families
from concept_eraser.training import checkpoint, log
from concept_eraser.training.memory import Peak
from concept_eraser.utils.errors import Interrupted, UserError
from tests.conftest import short
from tests.small_model import small_sd

TERMS = TrajectoryTerms(steps=6, guidance=3.0, early=2, late=2, log_beta=1.0, log_z=0.5)


def eraser(
    terms: TrajectoryTerms = TERMS, *, loss: str = "balance", settings: Any = None
) -> Denoiser:
    """An eraser whose weights have moved, so that model and frozen teacher differ."""
    model: Any = load(small_sd())
    rows = prompts.load("tiny_star").take(6).prompts
    examples = batches.make_examples(
        model,
        [row.text for row in rows],
        latents=None,
        anchors=[row.anchor_prompt({"shape": "circle"}) for row in rows],
    )
    names = select([name for name, _ in model.denoiser.named_parameters()], "cross_attention")
    objective = DenoiserObjective(examples, loss, settings or LossSettings(trajectory=terms))
    denoiser = Denoiser(model, {"forget": objective}, names)
    move(denoiser)
    return denoiser


def move(denoiser: Denoiser) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in denoiser.trainable().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def weights_of(denoiser: Denoiser) -> list[Tensor]:
    return [*denoiser.trainable().values(), *denoiser.scratch().values()]


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
@pytest.mark.parametrize(("t", "previous"), [(981, 961), (501, 481), (21, 1), (1, 0)])
def test_a_step_is_diffusers_and_reverses_the_diffusion(
    shared_small: Any, monkeypatch: pytest.MonkeyPatch, kind: str, t: int, previous: int
) -> None:
    """Bayes: p(x_s | x_t) / q(x_t | x_s) is q(x_s | x_0) / q(x_t | x_0) for the predicted x_0."""
    monkeypatch.setattr(shared_small, "prediction", kind)
    generator = torch.Generator().manual_seed(t)
    x, f, z, following = torch.randn((4, 3, 4, 8, 8), generator=generator)
    times = torch.full((3,), t)
    step = shared_small.ancestral(times, torch.full((3,), previous))
    scheduler = DDIMScheduler.from_config(
        shared_small.pipeline.scheduler.config, prediction_type=kind
    )
    scheduler.set_timesteps(50)
    expected = scheduler.step(f, t, x, eta=1.0, variance_noise=z)
    mean = step.state * x + step.prediction * f
    torch.testing.assert_close(mean + step.sigma * z, expected.prev_sample, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step_terms(step, x, mean)[0], f, rtol=1e-3, atol=1e-3)

    target, weight, offset = step_terms(step, x, following)
    actual = offset - weight * each(f, target)
    clean = expected.pred_original_sample
    now, before = scheduler.alphas_cumprod[[t, previous]]
    log_before = Normal(before.sqrt() * clean, (1 - before).sqrt()).log_prob(following)
    log_now = Normal(now.sqrt() * clean, (1 - now).sqrt()).log_prob(x)
    torch.testing.assert_close(
        actual, (log_before - log_now).flatten(1).mean(1), rtol=2e-3, atol=2e-3
    )


def plain_loss(denoiser: Denoiser, draw: DenoiserDraw, terms: TrajectoryTerms) -> Tensor:
    """The loss as in the authors' code: densities summed over the steps, in one graph."""
    model, path = denoiser.model, draw.trajectory
    assert path is not None
    ends = dict(steps_of(model, terms.steps))
    total = torch.zeros(len(draw.noisy))
    for k in range(len(path.t)):
        previous = torch.tensor([ends[int(t)] for t in path.t[k]])
        step = model.ancestral(path.t[k], previous)
        x = path.noisy[k]
        following = step.state * x + step.prediction * path.target[k]
        free, own = (model.denoise(x, path.t[k], c) for c in (draw.null, draw.condition))
        mean = step.state * x + step.prediction * (free + terms.guidance * (own - free))
        forward = Normal(mean, step.sigma).log_prob(following).flatten(1).mean(1)
        backward = Normal(step.signal * following, step.noise).log_prob(x).flatten(1).mean(1)
        total = total + forward - backward
    return (total + denoiser.log_z["forget"] - terms.log_beta).square().mean()


def test_value_and_gradient_are_those_of_autograd_through_the_whole_sum() -> None:
    denoiser = eraser()
    draw = denoiser.draw("forget", [3, 4])
    assert draw.trajectory is not None
    assert draw.trajectory.t.shape == (4, 2)
    assert draw.terms == 2
    plain, actual = plain_loss(denoiser, draw, TERMS), denoiser.loss("forget", draw)
    assert actual.item() == pytest.approx(plain.item(), rel=1e-4)
    expected = torch.autograd.grad(plain, weights_of(denoiser))
    gradient = torch.autograd.grad(actual, weights_of(denoiser))
    assert float(gradient[-1]) != 0
    for one, other in zip(gradient, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_memory_holds_the_graph_of_one_step() -> None:
    peaks = {}
    for count in (2, 6):
        terms = replace(TERMS, early=0, late=count)
        denoiser = eraser(terms)
        draw = denoiser.draw("forget", [3, 4])
        for kind in ("loss", "plain"):
            with Peak() as counter:
                loss = (
                    denoiser.loss("forget", draw)
                    if kind == "loss"
                    else plain_loss(denoiser, draw, terms)
                )
                torch.autograd.grad(loss, weights_of(denoiser))
            peaks[kind, count] = counter.peak
    assert peaks["loss", 6] < 1.05 * peaks["loss", 2]
    assert peaks["plain", 6] > 2 * peaks["plain", 2]


def test_without_noise_and_guidance_a_term_is_the_loss_anchor() -> None:
    """f* is then the teacher's prediction for the anchor, and the square the chain rule."""
    terms = replace(TERMS, guidance=1.0)
    denoiser = eraser(terms)
    draw = denoiser.draw("forget", [5])
    noisy, t = draw.noisy, draw.t
    anchor = denoiser.predict(draw, draw.anchor, teacher="frozen")
    weight, offset = torch.tensor([[0.7]]), torch.tensor([[0.2]])
    path = TrajectorySteps(noisy[None], t[None], target=anchor[None], weight=weight, offset=offset)
    loss = denoiser.loss("forget", replace(draw, trajectory=path))
    plain = LOSSES["anchor"].compute(denoiser, replace(draw, trajectory=None), LossSettings())
    root = 0.2 - 0.7 * plain.item() + 0.5 - 1.0
    assert loss.item() == pytest.approx(root**2, rel=1e-5)
    weights = list(denoiser.trainable().values())
    for one, other in zip(
        torch.autograd.grad(loss, weights), torch.autograd.grad(plain, weights), strict=True
    ):
        torch.testing.assert_close(one, -2 * root * 0.7 * other, rtol=1e-4, atol=1e-7)


def test_trajectories_are_of_the_teacher_and_of_each_examples_seed() -> None:
    denoiser = eraser()
    whole = denoiser.draw("forget", [5, 6])
    parts = [denoiser.draw("forget", [seed]) for seed in (5, 6)]
    path = whole.trajectory
    assert path is not None
    for k, part in enumerate(parts):
        one = part.trajectory
        assert one is not None
        assert one.t[:, 0].tolist() == path.t[:, k].tolist()
        torch.testing.assert_close(path.noisy[:, k], one.noisy[:, 0], rtol=1e-4, atol=1e-4)
    late = [t for t, _ in steps_of(denoiser.model, TERMS.steps)][-2:]
    assert path.t[-2:].tolist() == [[t, t] for t in late]
    assert not torch.equal(path.noisy[0, 0], path.noisy[0, 1])

    current = eraser(settings=LossSettings("current", trajectory=TERMS)).draw("forget", [5, 6])
    assert current.trajectory is not None
    assert not torch.allclose(current.trajectory.noisy[-1], path.noisy[-1], atol=1e-3)
    denoiser.restore()
    again = denoiser.draw("forget", [5, 6]).trajectory
    assert again is not None
    torch.testing.assert_close(again.noisy, path.noisy, rtol=0, atol=0)


def test_flow_matching_is_refused(tmp_path: Path) -> None:
    flux: Any = load(str(families.build("flux", tmp_path / "flux")))
    one = flux.encode(["a"])
    rows = torch.zeros(1, dtype=torch.long)
    none = batches.Examples(None, one, rows=rows, anchors=one, anchor_rows=rows, null=one)
    names = [name for name, _ in flux.denoiser.named_parameters()][:1]
    with pytest.raises(UserError, match=r"flow matching.*needs a diffusion model"):
        Denoiser(flux, {"forget": DenoiserObjective(none, "balance")}, names)


def flow(**changes: Any) -> dict[str, Any]:
    """A short recipe with the loss."""
    forget = {
        "prompts": "tiny_star",
        "loss": "balance",
        "anchor": {"shape": "circle"},
        "images": "free",
        "trajectory": {"steps": 4, "early": 1, "late": 1},
    }
    training = {"steps": 3, "batch_size": 1, "lr": 1e-3, "save_every": 1, "device": "cpu"}
    method = {"name": "weighted", "retain": 0.0}
    return short(forget=forget, retain=None, method=method, training=training, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forget__images": "generate"}, "samples its own latents.*set images: free"),
        ({"forget__timesteps": [0, 500]}, "leave timesteps and noised out"),
        ({"forget__noised": "own"}, "leave timesteps and noised out"),
        ({"forget__anchor": None}, "needs an anchor"),
        ({"forget__loss": "esd"}, "trajectory is a setting of the loss 'balance'"),
        ({"forget__trajectory": {"steps": 4}}, "found 10 \\+ 10 of 4"),
        ({"forget__trajectory": {"late": 0, "early": 0}}, "between 1 and steps"),
        ({"forget__empty_prompts": 0.2}, "empty_prompts needs a loss"),
        ({"target": "text_encoder"}, "unknown loss of target 'text_encoder' 'balance'"),
        (
            {"training__shard": "weights", "trainable__lora": 2},
            "the loss 'balance' computes whole passes again",
        ),
    ],
)
def test_recipes_that_cannot_have_it_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe.load(flow(**changes))


@pytest.mark.parametrize("trainable", [{}, {"lora": 2}])
def test_a_resumed_run_is_the_same_with_its_log_z(trainable: dict, tmp_path: Path) -> None:
    content = flow(trainable={"select": "cross_attention", **trainable}, save="changed")
    whole = concept_eraser.erase(content, output=tmp_path / "whole").folder

    def stop(step: int, seconds: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        concept_eraser.erase(content, output=tmp_path / "cut", on_step=stop)
    state = checkpoint.load(tmp_path / "cut" / "state.ckpt")
    log_z = state["params"]["log_z.forget"]
    assert abs(float(log_z) + 0.1953) == pytest.approx(2e-3, rel=0.1)  # two steps of Adam
    again = concept_eraser.erase(content, output=tmp_path / "cut", resume=True).folder
    one, other = (load_file(folder / "weights.safetensors") for folder in (whole, again))
    assert one
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not any("log_z" in key for key in one)
    original = load(small_sd()).denoiser.state_dict()
    assert any(not torch.equal(value, original[key]) for key, value in one.items())


def test_another_method_combines_it_with_a_retain_loss(tmp_path: Path) -> None:
    content = {**flow(training__steps=1), "retain": short()["retain"], "method": "munba"}
    run = concept_eraser.erase(content, output=tmp_path / "run")
    (row,) = log.read(run.folder / "log.jsonl")
    assert row["losses"].keys() == {"retain", "forget"}
    assert not row.get("skipped")


def test_the_memory_estimate_has_one_step_of_a_trajectory() -> None:
    model: Any = load(small_sd())
    few, many = (
        memory_estimate.estimate(
            recipe.load(flow(forget__trajectory={"early": 0, "late": late})), model
        )
        for late in (1, 20)
    )
    plain = memory_estimate.estimate(
        recipe.load(flow(forget__loss="anchor", forget__trajectory=None)), model
    )
    assert few.training == many.training
    passes = [one.moments["last gradient"]["forward and backward pass"] for one in (few, plain)]
    assert 1.5 * passes[1] < passes[0] < 2.5 * passes[1]
