"""STEREO: its rounds, its attack against torch's Adam, its target against the weights of the loss
`slider` and against the published guidance written anew, and a short run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import concept_eraser
from concept_eraser.data import batches, prompts
from concept_eraser.erasers.base import AttackTerms
from concept_eraser.erasers.denoiser import Denoiser, DenoiserObjective
from concept_eraser.losses import LossSettings
from concept_eraser.methods.checks import closure, pair
from concept_eraser.methods.stereo import Stereo
from concept_eraser.models.base import Condition
from concept_eraser.models.loading import load
from concept_eraser.recipes import recipe
from concept_eraser.recipes.selections import select
from concept_eraser.training.closure import LossClosure
from concept_eraser.utils.errors import UserError
from tests.small_model import small_sd

FLOAT = torch.float64


def problem(step: int) -> tuple[Tensor, Tensor, LossClosure]:
    """f = (omega - 3)^4 / 4 + omega theta; forget = theta^2 / 2, retain = 5 theta."""
    t = torch.tensor(2.0, dtype=FLOAT, requires_grad=True)
    w = torch.tensor([1.0, -1.0], dtype=FLOAT, requires_grad=True)
    losses = {
        "retain": [lambda: 5 * t],
        "attack": [lambda: ((w - 3) ** 4).sum() / 4 + t * w.sum()],
        "forget": [lambda: t**2 / 2],
    }
    return t, w, LossClosure((t, w), losses, inner=[1], step=step)


def test_the_rounds_erase_and_attack_in_turns_and_the_rest_erases() -> None:
    method = Stereo(rounds=2, erase_steps=3, inner_steps=2, forget=2.0, retain=0.1)
    kinds = []
    for step in range(14):
        theta, omega, losses = problem(step)
        direction = method.direction(losses)
        is_attack = direction.hold_trained
        kinds.append("a" if is_attack else "e")
        if is_attack:
            assert float(direction.vec[0]) == 0
            assert float(direction.vec[1].abs().min()) > 0
        else:
            assert float(direction.vec[0]) == pytest.approx(2 * 2 + 0.1 * 5)
            assert direction.vec[1].tolist() == [0, 0]
        assert (theta.item(), omega.tolist()) == (2, [1, -1])
    assert "".join(kinds) == "eeeaa" * 2 + "eeee"
    terms = AttackTerms(search=method.search)
    assert [terms.round_of(step) for step in range(12)] == [0] * 5 + [1] * 5 + [2] * 2
    assert [step for step in range(14) if terms.begins_anew(step)] == [10]
    assert (terms.kept, AttackTerms().kept, AttackTerms().round_of(7)) == (2, 0, 0)


def test_the_attack_is_torchs_adam_and_starts_anew_in_each_round() -> None:
    method = Stereo(rounds=2, erase_steps=1, inner_steps=4, inner_lr=0.1)
    for first in (1, 6):
        _, omega, _ = problem(0)
        by_hand = omega.detach().clone().requires_grad_()
        adam = torch.optim.Adam([by_hand], lr=0.1)
        for step in range(first, first + 4):
            _, other, losses = problem(step)
            with torch.no_grad():
                other.copy_(omega)
            move = method.direction(losses).vec[1]
            with torch.no_grad():
                omega -= move
            adam.zero_grad()
            (((by_hand - 3) ** 4).sum() / 4 + 2 * by_hand.sum()).backward()
            adam.step()
            torch.testing.assert_close(omega.detach(), by_hand.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", [1, 6])
def test_a_skipped_first_step_of_an_attack_is_taken_by_the_next(first: int) -> None:
    """The engine restores the state after a step that is not finite. Adam then begins later."""
    method = Stereo(rounds=2, erase_steps=1, inner_steps=4, inner_lr=0.1)
    for step in range(first):
        method.direction(problem(step)[2])
    state = dict(method._state)
    method.direction(problem(first)[2])
    method._state.clear()
    method._state.update(state)
    move = method.direction(problem(first + 1)[2]).vec[1]
    torch.testing.assert_close(move.abs(), torch.full_like(move, 0.1), rtol=1e-6, atol=0)


def test_it_needs_an_attack_and_a_retain_set_for_its_weight() -> None:
    assert (Stereo().needs_retain, Stereo(retain=0.1).needs_retain) == (False, True)
    Stereo().check_objectives(("forget", "attack"))
    with pytest.raises(ValueError, match="needs an attack, the objective 'attack'; found forget"):
        Stereo().check_objectives(("forget",))
    with pytest.raises(ValueError, match="needs an attack"):
        Stereo().direction(closure(*pair(0.1, 1.0, 1.0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["training.steps=100"], r"in the first 100 steps \(2 rounds of 25 and 25\)"),
        (["method={name: race}"], "use both or none, found the method 'race'"),
        (["forget.loss=anchor", "forget.eta=1.0"], "use both or none, found the method 'stereo'"),
        (["training.ema=0.9"], "training.ema averages over all steps"),
        (["attack=null"], "needs an attack"),
        (["attack.warmup=3"], r"takes no attack\.warmup and no attack\.forget"),
        (["attack.forget=attacked"], r"takes no attack\.warmup and no attack\.forget"),
        (["forget.images=free"], "images: generate or a folder in place of free"),
    ],
)
def test_recipes_that_contradict_the_search_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe.load("tiny_star_stereo", changes)


# --- on a small Stable Diffusion -------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return load(small_sd())


def searching(model: Any) -> Denoiser:
    rows = prompts.load("tiny_star").take(4).prompts
    generator = torch.Generator().manual_seed(0)
    examples = batches.make_examples(
        model,
        [r.text for r in rows],
        latents=torch.randn(4, *model.latent_shape(), generator=generator),
        anchors=[r.anchor_prompt({"shape": "circle"}) for r in rows],
    )
    names = [name for name, _ in model.denoiser.named_parameters()]
    settings = LossSettings(eta=1.7)
    eraser = Denoiser(
        model,
        {
            "forget": DenoiserObjective(examples, "stereo", settings, scale=0.5),
            "attack": DenoiserObjective(examples, "data", decay=0.3),
        },
        select(names, "cross_attention"),
        attack=AttackTerms(search=(2, 1, 1)),
    )
    assert eraser.delta is not None
    with torch.no_grad():
        eraser.delta.copy_(torch.randn(eraser.delta.shape, generator=generator))
        for parameter in eraser.trainable().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return eraser


def shifted(condition: Condition, offset: Tensor) -> Condition:
    return Condition({**condition.tensors, "states": condition.tensors["states"] + offset})


def test_the_losses_are_those_of_the_published_guidance(model: Any) -> None:
    eraser = searching(model)
    delta = eraser.delta
    assert delta is not None
    assert delta.shape[0] == 2
    for step, row in ((0, None), (1, None), (2, 0), (3, 0)):  # the search
        eraser.turn(step)
        draw = eraser.draw("forget", [1, 2])
        own = draw.condition if row is None else shifted(draw.condition, delta[row])
        with torch.no_grad():
            free = eraser._teach(draw.noisy, draw.t, draw.null, "frozen")
            expected = (model.denoise(draw.noisy, draw.t, own) - free).square().mean()
            assert float(eraser.loss("forget", draw)) == pytest.approx(0.5 * float(expected))
        (slope,) = torch.autograd.grad(
            eraser.loss("attack", eraser.draw("attack", [1, 2])) - 0.15 * delta.square().sum(),
            [delta],
        )
        moved = slope.flatten(1).abs().amax(1) > 1e-7
        assert moved.tolist() == [row is None, row is not None], "the attack of this round alone"

    eraser.turn(5)  # after the search
    draw = eraser.draw("forget", list(range(12)))
    assert draw.attacks is not None
    assert set(draw.attacks.tolist()) == {0, 1, 2}
    offsets = [torch.zeros_like(delta[0]), *delta.detach()]
    with torch.no_grad():

        def teach(condition: Condition) -> Tensor:
            return eraser._teach(draw.noisy, draw.t, condition, "frozen")

        free, towards = teach(draw.null), teach(draw.anchor)
        target = free + (1.7 - 1) * (towards - free)
        for offset in offsets:
            target += (-1.7 - 1) * (teach(shifted(draw.condition, offset)) - free) / 3
        # the same as a mixture of the loss slider, whose weights sum to 1
        mixture = (1 - 0.7 + 2.7) * free + 0.7 * towards
        mixture -= sum(2.7 / 3 * teach(shifted(draw.condition, offset)) for offset in offsets)
        torch.testing.assert_close(target, mixture, rtol=1e-4, atol=1e-4)
        own = shifted(draw.condition, torch.stack([offsets[k] for k in draw.attacks.tolist()]))
        expected = (model.denoise(draw.noisy, draw.t, own) - target).square().mean()
        assert float(eraser.loss("forget", draw)) == pytest.approx(0.5 * float(expected), rel=1e-4)

    eraser.turn(4)  # the first step after the search
    assert eraser.begins_anew
    for name, parameter in eraser.trainable().items():
        assert torch.equal(parameter, eraser.originals[name])


def test_a_run_searches_starts_anew_and_erases(tmp_path: Path) -> None:
    """Attacks leave the weights; the first step after the search is Adam's first from the original
    ones, so that each weight moves by at most the learning rate.
    """
    model = load(small_sd())
    name, part = next(
        (n, p) for n, p in model.denoiser.named_parameters() if n.endswith("attn2.to_k.weight")
    )
    seen: list[Tensor] = []
    concept_eraser.erase(
        model=model.pipeline,
        forget={"prompts": "tiny_star", "loss": "stereo", "anchor": {"shape": "circle"}, "n": 2},
        attack={"n": 2, "decay": 0.0},
        method={"name": "stereo", "rounds": 1, "erase_steps": 2, "inner_steps": 2},
        trainable={"select": "cross_attention"},
        training={"steps": 6, "batch_size": 2, "lr": 1e-3, "device": "cpu", "precision": "fp32"},
        generation={"steps": 1},
        output=tmp_path / "run",
        on_step=lambda steps, seconds: seen.append(
            dict(model.pipeline.unet.named_parameters())[name].detach().clone()
        ),
    )
    assert part.shape == seen[0].shape
    moved = [float((one - seen[0]).abs().max()) for one in seen]
    assert moved[1] == pytest.approx(1e-3, rel=1e-2)
    assert moved[2] > 1.1e-3
    assert torch.equal(seen[3], seen[2])
    assert torch.equal(seen[4], seen[2])
    assert moved[5] == pytest.approx(1e-3, rel=1e-2)
    assert moved[6] > moved[5]
