"""Weighted, NGDiff and surgery against hand-built sums and TorchJD."""

from __future__ import annotations

import pytest
import torch

from concept_eraser.methods.ngdiff import NGDiff
from concept_eraser.methods.surgery import Surgery
from concept_eraser.methods.weighted import Weighted
from tests.methods.zoo import closure, flat, pair


def test_weighted_is_the_sum_it_says() -> None:
    retain, forget = pair(-0.3, 2.0, 5.0)
    found = Weighted(retain=0.5, forget=3.0).direction(closure(retain, forget))
    torch.testing.assert_close(flat(found.vec), 0.5 * flat(retain) + 3 * flat(forget))
    assert found.weights.tolist() == [0.5, 3.0]


@pytest.mark.parametrize(("options", "asked"), [({"forget": 0.0}, ["retain"]), ({"retain": 0.0}, ["forget"])])
def test_a_weight_of_zero_costs_no_backward_pass(options: dict, asked: list[str]) -> None:
    given = closure(*pair(0.1, 1.0, 1.0))
    found = Weighted(**options).direction(given)
    assert given.asked == asked
    assert torch.isnan(found.gram).any()


@pytest.mark.parametrize("options", [{"forget": -1.0}, {"forget": 0.0, "retain": 0.0}])
def test_weights_are_checked(options: dict) -> None:
    with pytest.raises(ValueError, match="weights"):
        Weighted(**options)


def test_ngdiff_is_the_sum_of_unit_vectors() -> None:
    retain, forget = pair(0.4, 7.0, 1e-5)
    found = flat(NGDiff().direction(closure(retain, forget)).vec)
    torch.testing.assert_close(found, flat(retain) / 7 + flat(forget) / 1e-5)


@pytest.mark.parametrize("cosine", [-0.8, -0.1, 0.0, 0.5])
def test_pcgrad_against_torchjd(cosine: float) -> None:
    from torchjd.aggregation import PCGrad

    retain, forget = pair(cosine, 2.0, 0.5)
    found = Surgery(rule="pcgrad").direction(closure(retain, forget))
    expected = PCGrad()(torch.stack([flat(retain), flat(forget)]))
    torch.testing.assert_close(flat(found.vec), expected)
    if cosine:  # at a right angle rounding decides the sign, and the sum is the same either way
        assert found.notes["projected"] == int(cosine < 0)


def test_descent_surgery_does_not_notice_the_sign_of_the_forget_loss() -> None:
    """The paper's g_f is the gradient of the training loss, ours of its negative: S is the same either way."""
    retain, forget = pair(0.7, 1.0, 3.0)
    one = flat(Surgery("descent").direction(closure(retain, forget)).vec)
    other = flat(Surgery("descent").direction(closure(retain, tuple(-p for p in forget))).vec)
    torch.testing.assert_close(one, other)


def test_ascent_surgery_is_the_papers_step_up() -> None:
    """theta += eta (g_f - proj g_f) with the paper's g_f equals theta -= eta * ours."""
    retain, training = pair(0.7, 1.0, 3.0)  # the gradient of the training loss on forget data
    r, t = flat(retain), flat(training)
    up = t - (r @ t) / (r @ r) * r
    ours = flat(Surgery("ascent").direction(closure(retain, tuple(-p for p in training))).vec)
    torch.testing.assert_close(-ours, up)


def test_surgery_refuses_three_players() -> None:
    with pytest.raises(ValueError, match="two players"):
        Surgery().weights(torch.eye(3, dtype=torch.float64))


def test_a_d_takes_turns_and_asks_one_player_a_step() -> None:
    method = Weighted(alternate=True)
    for step, player in enumerate(("forget", "retain", "forget")):
        given = closure(*pair(0.1, 1.0, 2.0))
        given.step = step
        found = method.direction(given)
        assert given.asked == [player]
        torch.testing.assert_close(flat(found.vec), flat(given.gradients[player]))


def test_alternating_with_a_weight_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="alternate"):
        Weighted(alternate=True, forget=0.0)
