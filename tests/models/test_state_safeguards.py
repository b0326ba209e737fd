"""AdaVD, SAFREE and Semantic Surgery against loops in numpy, and on images of the bundled model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from concept_eraser import registry
from concept_eraser.data import prompts
from concept_eraser.models import cross_attention
from concept_eraser.models import state_safeguards as safeguards
from concept_eraser.models.safeguards import STATE_KINDS, Guard
from concept_eraser.utils.errors import UserError

PROMPTS = ["a flat red star on a white background", "a flat blue house on a black background"]
SAMPLING: dict[str, Any] = {"seeds": [1, 2], "steps": 2, "guidance": 5.0}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def share(model: Any, group: str, shape: str | None = None) -> float:
    """The share of 6 images in which the judge detects that shape, or the shape of each prompt."""
    judge, rows = registry.build("judge", "tiny", {}), prompts.load(group).take(6, 3).prompts
    images = model.sample([row.text for row in rows], seeds=list(range(6)), steps=8, guidance=5.0)
    pixels = images.permute(0, 3, 1, 2).float() / 127.5 - 1
    return sum(
        float(judge.probability(pixels[i : i + 1], "shape", shape or row.fields["shape"])) > 0.5
        for i, row in enumerate(rows)
    ) / len(rows)


def states_read(model: Any, kind: str, text: str) -> list[Tensor]:
    """The states that the denoiser reads in each step [2n, tokens, width], the safeguard's too."""
    calls: list[Tensor] = []
    model.protect(Guard(kind, text))
    with model.guard.around(model, PROMPTS):
        handle = model.denoiser.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append(kwargs["encoder_hidden_states"].clone()),
            with_kwargs=True,
        )
        guard, model.guard = model.guard, None
        model.sample(PROMPTS, **SAMPLING)
        model.guard = guard
        handle.remove()
    return calls


# --- AdaVD ---------------------------------------------------------------------------------------


def test_each_value_loses_its_projection_on_the_target() -> None:
    """The least-squares coefficient comes from numpy. The start token stays."""
    value, target = draw(2, 5, 8), draw(1, 5, 8, seed=1)
    result = safeguards.orthogonal_values(value, target, adaptive=False)
    for i in range(2):
        assert torch.equal(result[i, 0], value[i, 0])
        for token in range(1, 5):
            t, v = target[0, token].numpy()[:, None], value[i, token].numpy()
            expected = v - t @ np.linalg.lstsq(t, v, rcond=None)[0]
            np.testing.assert_allclose(result[i, token].numpy(), expected, atol=1e-12)
            assert abs(float(result[i, token] @ target[0, token])) < 1e-12


def test_the_adaptive_shift_is_the_codes_sigmoid() -> None:
    target = draw(1, 6, 8)
    value = target + torch.linspace(0, 0.8, 6).double()[:, None] * draw(1, 6, 8, seed=1)
    result = safeguards.orthogonal_values(value, target, adaptive=True)
    shifts = []
    for token in range(1, 6):
        t, v = target[0, token].numpy(), value[0, token].numpy()
        cosine = t @ v / np.sqrt((t @ t) * (v @ v))
        shifts.append(2 / (1 + np.exp(-100 * (cosine - 0.93))))
        expected = v - shifts[-1] * (v @ t) / (t @ t) * t
        np.testing.assert_allclose(result[0, token].numpy(), expected, atol=1e-9)
    assert max(shifts) > 1.5
    assert min(shifts) < 0.5


@pytest.mark.parametrize("adaptive", [False, True])
def test_values_in_half_precision_lose_what_the_same_values_in_fp32_lose(adaptive: bool) -> None:
    """The adaptive shift is so steep that a cosine in bf16 would change it by a third."""
    target = draw(1, 6, 8).bfloat16()
    noise = torch.linspace(0, 0.8, 6).double()[:, None] * draw(1, 6, 8, seed=1)
    output = torch.cat((target + noise).bfloat16().chunk(2, dim=-1))
    hook = safeguards._value_hook(target, 1, adaptive=adaptive)
    exact = safeguards._value_hook(target.float(), 1, adaptive=adaptive)(None, None, output.float())
    result = hook(None, None, output)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, exact.bfloat16())


def test_a_target_of_zero_changes_nothing() -> None:
    value = draw(1, 3, 4)
    for adaptive in (False, True):
        result = safeguards.orthogonal_values(
            value, torch.zeros(1, 3, 4).double(), adaptive=adaptive
        )
        assert torch.equal(result, value)


def test_the_values_of_every_layer_are_orthogonal_to_those_of_the_concept(tiny: Any) -> None:
    """Values of the empty prompt and of the prompt as one vector; the concept's last word is at all
    places but the first.
    """
    tiny.protect(Guard("adavd", "a star"))
    layers = cross_attention.layers(tiny.denoiser)
    ids = tiny.tokenize(["a star"]).tensors["ids"][0].tolist()
    last = ids.index(tiny.words.end) - 1
    empty, star, house = tiny.encode(["", "a star", PROMPTS[1]]).tensors["states"]
    for layer in layers:
        with torch.no_grad():
            before = layer.to_v(torch.stack([empty, house]))
            concept = torch.cat([layer.to_v(empty), layer.to_v(star[last]).expand(77, -1)], dim=1)
            with tiny.guard.around(tiny, [PROMPTS[1]]):
                after = layer.to_v(torch.stack([empty, house]))
        joined = torch.cat(list(after), dim=1)
        assert float((joined * concept).sum(1)[1:].abs().max()) < 1e-3 * float(
            (concept * concept).sum(1).max()
        )
        assert torch.equal(after[:, 0], before[:, 0])
        assert float((after - before)[:, 1:].abs().max()) > 0.01


def test_adavd_erases_the_star_and_preserves_other_shapes(tiny: Any) -> None:
    assert share(tiny, "tiny_star", "star") > 0.8
    tiny.protect(Guard.read("adavd:a star"))
    assert share(tiny, "tiny_star", "star") < 0.2
    assert share(tiny, "tiny_rest") > 0.8


# --- SAFREE --------------------------------------------------------------------------------------


def by_hand(states: np.ndarray, masked: np.ndarray, concepts: np.ndarray) -> tuple[Any, list[bool]]:
    """The authors' formulas with pseudo-inverses, token by token."""

    def on_span(rows: np.ndarray) -> np.ndarray:
        return rows.T @ np.linalg.pinv(rows @ rows.T) @ rows

    away = np.eye(states.shape[1]) - on_span(concepts)
    distances = [float(np.linalg.norm(away @ p)) for p in masked]
    triggers = [
        d >= 1.01 * np.mean(distances[:i] + distances[i + 1 :]) for i, d in enumerate(distances)
    ]
    result = states.copy()
    for i, hit in enumerate(triggers):
        if hit:
            result[i + 1] = away @ on_span(masked) @ states[i + 1]
    return result, triggers


@pytest.mark.parametrize("seed", range(3))
def test_safree_is_the_authors_formula(seed: int) -> None:
    states, concepts = draw(9, 12, seed=seed), draw(2, 12, seed=seed + 10)
    masked = concepts.mean(0) + draw(5, 12, seed=seed + 20)
    changed, triggers, projected = safeguards.safree_states(states, masked, concepts)
    expected, hits = by_hand(states.numpy(), masked.numpy(), concepts.numpy())
    assert triggers.tolist() == hits
    assert 0 < sum(hits) < 5
    np.testing.assert_allclose(changed.numpy(), expected, atol=1e-10)
    assert float((projected @ concepts.T).abs().max()) < 1e-10


def test_a_prompt_of_one_word_has_no_others_to_compare_with() -> None:
    states = draw(4, 6)
    changed, triggers, _ = safeguards.safree_states(states, draw(1, 6, seed=1), draw(1, 6, seed=2))
    assert triggers.tolist() == [False]
    assert torch.equal(changed, states)


def test_the_steps_grow_with_the_angle_between_the_states() -> None:
    one, other = torch.eye(8)[:1], torch.eye(8)[1:2]
    assert safeguards.safree_steps(one, one, 50) == 1
    assert safeguards.safree_steps(one, other, 50) == 11
    assert safeguards.safree_steps(one, other, 10) == 3
    half = 0.5 * one + 0.75**0.5 * other  # b = 0.5: 10 sigmoid(5 (5 - 5.333)) = 1.59
    assert safeguards.safree_steps(one, half, 50) == 3


@pytest.mark.parametrize("spec", ["safree:,", "safree-validated: , ,"])
def test_safree_needs_a_text_to_avoid(spec: str) -> None:
    with pytest.raises(UserError, match="no text to avoid"):
        Guard.read(spec)
    assert safeguards.texts_to_avoid(" star, moon,") == ["star", "moon"]


def test_safree_changes_words_of_the_prompt_only(tiny: Any) -> None:
    """The states that the denoiser reads, against the formula on states of masked prompts."""
    plain = tiny.encode(PROMPTS).tensors["states"]
    concept_ids = tiny.tokenize(["star"]).tensors["ids"]
    end = int((concept_ids[0] == tiny.words.end).nonzero()[0])
    concept = tiny.encode(["star"]).tensors["states"][0, end]
    calls = states_read(tiny, "safree", "star")
    n_changed = 0
    for row, prompt in enumerate(PROMPTS):
        ids = tiny.tokenize([prompt]).tensors["ids"][0]
        stop = int((ids == tiny.words.end).nonzero()[0])
        masked = []
        for i in range(1, stop):
            tokens = tiny.tokenize([prompt])
            tokens.tensors["ids"][0, i] = 0
            with torch.no_grad():
                masked.append(tiny.embed(tokens).tensors["states"][0, stop])
        expected, hits = by_hand(
            plain[row].double().numpy(),
            torch.stack(masked).double().numpy(),
            concept[None].double().numpy(),
        )
        n_changed += sum(hits)
        for call in calls:
            np.testing.assert_allclose(call[2 + row].numpy(), expected, atol=1e-3)
    assert n_changed
    empty = tiny.encode([""]).tensors["states"][0]
    assert all(torch.allclose(call[:2], empty.expand(2, -1, -1), atol=1e-5) for call in calls)


def test_safree_validated_leaves_the_last_steps_alone(tiny: Any) -> None:
    plain = tiny.encode(PROMPTS).tensors["states"]
    first, *_, last = states_read(tiny, "safree-validated", "star")
    assert float((first[2:] - plain).abs().max()) > 0.01
    assert torch.allclose(last[2:], plain, atol=1e-5)


def test_safree_needs_texts(tiny: Any) -> None:
    tiny.protect(Guard("safree", "a star"))
    with pytest.raises(UserError, match="'safree' reads the words of a prompt"):
        tiny.sample(tiny.encode(PROMPTS), **SAMPLING)


# --- Semantic Surgery ----------------------------------------------------------------------------


def test_surgery_subtracts_the_direction_where_the_concept_is_present() -> None:
    direction = draw(5, 8)
    states = torch.stack([draw(5, 8, seed=s + 1) + 0.2 * (s - 3) * direction for s in range(8)])
    result, alphas = safeguards.surgery(states, direction), []
    for row, state in enumerate(states.numpy()):
        cosines = [
            d @ s / np.sqrt((d @ d) * (s @ s))
            for d, s in zip(direction.numpy(), state, strict=True)
        ]
        alpha = 1 / (1 + np.exp(-(np.mean(cosines) - 0.12) / 0.02))
        alphas.append(alpha)
        expected = state - (alpha if alpha >= 0.5 else 0) * direction.numpy()
        np.testing.assert_allclose(result[row].numpy(), expected, atol=1e-12)
    assert min(alphas) < 0.5 < 0.9 < max(alphas)


def test_surgery_reads_the_prompts_and_leaves_other_prompts_alone(tiny: Any) -> None:
    plain = tiny.encode(PROMPTS).tensors["states"]
    star, empty = tiny.encode(["a star", ""]).tensors["states"]
    for call in states_read(tiny, "semantic-surgery", "a star"):
        assert torch.allclose(call[2], plain[0] - (star - empty), atol=0.05)
        assert not torch.allclose(call[2], plain[0], atol=0.5)
        assert torch.allclose(call[3], plain[1], atol=1e-5)


# --- all -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_guidance_is_needed_and_no_hook_is_left(tiny: Any, kind: str) -> None:
    plain = tiny.sample(PROMPTS, **SAMPLING)
    tiny.protect(Guard.read(f"{kind}:a star"))
    tiny.sample(PROMPTS, **SAMPLING)
    with pytest.raises(UserError, match="guidance above 1"):
        tiny.sample(PROMPTS, **{**SAMPLING, "guidance": 1.0})
    tiny.guard = None
    assert torch.equal(tiny.sample(PROMPTS, **SAMPLING), plain)
