"""RECE's rounds: the state that regenerates a concept, the law of its minimum, and the effect of
erasing it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import scipy.linalg
import torch

from concept_eraser.methods.rece import ReliableEfficientErasure, regenerating
from concept_eraser.methods.uce import UnifiedConceptEditing
from tests.methods.test_uce import WIDTH, edit_copy, problem

WEIGHTS = {"erase_scale": 1.0, "preserve_scale": 0.1, "lamb": 0.1}


@pytest.mark.parametrize("reg", [1e-6, 1e-3, 0.1, 10.0])
def test_the_regenerating_state_is_the_minimiser(reg: float) -> None:
    """Autograd on the printed objective, and scipy on the stacked layers, for the layers after
    UCE.
    """
    request = problem()
    after = edit_copy(UnifiedConceptEditing(**WEIGHTS), request)
    gram = request.gram()
    change, _ = UnifiedConceptEditing(**WEIGHTS).change(request)
    total = torch.eye(WIDTH, dtype=torch.float64) + change
    c = request.forget[0][0]
    state = (regenerating(gram, total, reg) @ c).requires_grad_()
    value = (
        sum((((after[n] @ state) - request.layers[n] @ c) ** 2).sum() for n in after)
        + reg * state.square().sum()
    )
    (slope,) = torch.autograd.grad(value, state)
    assert float(slope.norm()) < 1e-9 * float((gram @ c).norm())
    stack, targets = (
        torch.cat(list(many)) for many in (after.values(), [w @ c for w in request.layers.values()])
    )
    x = torch.cat([stack, reg**0.5 * torch.eye(WIDTH, dtype=torch.float64)])
    y = torch.cat([targets, torch.zeros(WIDTH, dtype=torch.float64)])
    torch.testing.assert_close(
        state.detach(),
        torch.from_numpy(scipy.linalg.lstsq(x.numpy(), y.numpy())[0]),
        rtol=1e-8,
        atol=1e-9,
    )


def test_without_rounds_it_is_uce() -> None:
    request = problem()
    one, other = (
        edit_copy(ReliableEfficientErasure(epochs=0, **WEIGHTS), request),
        edit_copy(UnifiedConceptEditing(**WEIGHTS), request),
    )
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-12)


def test_a_round_is_uce_on_the_edited_layers_with_the_regenerating_states() -> None:
    """By its parts: UCE, then c' by least squares on the edited layers, then UCE again with c' and
    the same anchors.
    """
    request, reg = problem(4), 0.1
    after = edit_copy(UnifiedConceptEditing(**WEIGHTS), request)
    stack, original = torch.cat(list(after.values())), torch.cat(list(request.layers.values()))
    x = torch.cat([stack, reg**0.5 * torch.eye(WIDTH, dtype=torch.float64)])
    back = []
    for states in request.forget:
        y = torch.cat([original @ states.T, torch.zeros(WIDTH, len(states), dtype=torch.float64)])
        back.append(torch.from_numpy(scipy.linalg.lstsq(x.numpy(), y.numpy())[0]).T)
    expected = edit_copy(
        UnifiedConceptEditing(**WEIGHTS), replace(request, layers=after, forget=back)
    )
    new_weights = edit_copy(ReliableEfficientErasure(epochs=1, reg=reg, **WEIGHTS), request)
    for name in expected:
        torch.testing.assert_close(new_weights[name], expected[name], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_rounds_make_it_harder_to_regenerate_the_concept(seed: int) -> None:
    """The paper's claim, on one concept among preserved states: the output of the best c' is
    further from the concept after each round.
    """
    figures = ReliableEfficientErasure(epochs=3).edit(problem(seed, concepts=1))
    back = [figures[f"back_{k}"] for k in range(4)]
    assert back == sorted(back)
    assert back[-1] > 1.05 * back[0]
    assert back[0] < 1


def test_golden() -> None:
    """One layer W = [1 0; 0 1], c = (1, 0), a = (0, 1), erase 1, lamb 1, reg 1, one round. By hand:
    UCE gives T = [1/2 0; 1/2 1]; T^T T + I = [3/2 1/2; 1/2 2], T^T c = (1/2, 0), c' = (4/11,
    -1/11); then M = I + c' c'^T, R = (a - c') c'^T, D = R M^-1 = (a - c') c'^T / (1 + 17/121) = (a
    - c') (44, -11)/138, and T (I + D) is the new W."""
    request = replace(
        problem(),
        layers={"x": torch.eye(2).double()},
        forget=[torch.tensor([[1.0, 0.0]])],
        anchor=[torch.tensor([[0.0, 1.0]])],
        retain=[],
    )
    new = edit_copy(ReliableEfficientErasure(epochs=1, reg=1.0, lamb=1.0), request)["x"]
    first = torch.tensor([[0.5, 0.0], [0.5, 1.0]]).double()
    d = torch.outer(torch.tensor([-4 / 11, 12 / 11]), torch.tensor([44 / 138, -11 / 138])).double()
    torch.testing.assert_close(new, first @ (torch.eye(2).double() + d), rtol=1e-6, atol=1e-7)
    assert new.flatten().tolist() == pytest.approx(
        [0.442029, 0.014493, 0.789855, 0.927536], abs=1e-6
    )


def test_nothing_to_forget_and_wrong_options() -> None:
    request = replace(problem(), forget=[], anchor=[])
    for name, new in edit_copy(ReliableEfficientErasure(), request).items():
        assert torch.equal(new, request.layers[name])
    for wrong in ({"epochs": -1}, {"reg": 0.0}):
        with pytest.raises(ValueError, match="epochs must be >= 0 and reg > 0"):
            ReliableEfficientErasure(**wrong)


@pytest.mark.parametrize("epochs", [0, 1, 3])
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_how_far_the_best_state_stays_away_is_measured_on_the_layers(
    epochs: int, size: float
) -> None:
    """sqrt(sum ||W_k c' - W c||^2 / sum ||W a - W c||^2), c' by least squares on the layers after k
    rounds.
    """
    request, reg = problem(5, scale=size), 0.1
    figures = ReliableEfficientErasure(epochs=epochs, reg=reg, **WEIGHTS).edit(
        replace(request, layers={n: w.clone() for n, w in request.layers.items()})
    )
    assert {name for name in figures if name.startswith("back_")} == {
        f"back_{k}" for k in range(epochs + 1)
    }
    original = torch.cat(list(request.layers.values()))
    for k in range(epochs + 1):
        after = edit_copy(ReliableEfficientErasure(epochs=k, reg=reg, **WEIGHTS), request)
        stack = torch.cat(list(after.values()))
        x = torch.cat([stack, reg**0.5 * torch.eye(WIDTH, dtype=torch.float64)])
        error = apart = 0.0
        for c, a in zip(request.forget, request.anchor, strict=True):
            y = torch.cat([original @ c.T, torch.zeros(WIDTH, len(c), dtype=torch.float64)])
            back = torch.from_numpy(scipy.linalg.lstsq(x.numpy(), y.numpy())[0])
            error += float((stack @ back - original @ c.T).square().sum())
            apart += float((original @ (a - c).T).square().sum())
        assert figures[f"back_{k}"] == pytest.approx((error / apart) ** 0.5, rel=1e-6)


def test_a_concept_that_is_its_anchor_has_no_distance() -> None:
    request = problem()
    figures = ReliableEfficientErasure(epochs=1).edit(replace(request, anchor=request.forget))
    assert (figures["back_0"], figures["back_1"]) == (0, 0)
