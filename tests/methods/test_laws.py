"""The theorems that methods declare, each proved once for all who claim it, over the zoo."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from concept_eraser import registry
from concept_eraser.methods.base import Edit, Method
from concept_eraser.methods.fisher import Risk, flatten
from concept_eraser.methods.history import History
from concept_eraser.vectors import dot, norm
from tests.methods.test_influence import problem, request
from tests.methods.test_mini_unlearning import ridge
from tests.methods.test_natural_gradient import fitted, regression, ridge_solution
from tests.methods.test_uce import problem as projections
from tests.methods.zoo import COSINES, PAIRS, Fixed, closure, flat, pair

# every method once with its defaults, and the settings with other laws
LOADED = {name: registry.load("method", name) for name in registry.names("method")}
CASES = [(name, plugin()) for name, plugin in LOADED.items() if issubclass(plugin, Method)]
NAMED = [(name, registry.build("method", name, {})) for name, (owner, _) in registry.named("method").items() if issubclass(LOADED[owner], Method)]  # fmt: skip
CASES += [
    (name, method) for name, method in NAMED if not getattr(method, "histogram", 0)
]  # a judge is no player of the zoo
CASES += [("torchjd-mgda", registry.build("method", "torchjd", {"rule": "MGDA"}))]


def claiming(theorem: str) -> list:
    found = [pytest.param(method, id=name) for name, method in CASES if theorem in method.laws()]
    assert found, f"no method claims {theorem}; the test would prove nothing"
    return found


def test_every_theorem_is_known() -> None:
    known = {
        "pareto_descent",
        "scale_invariance",
        "permutation",
        "equal_contribution",
        "orthogonality",
        "forget_sign",
        "stationarity",
    }
    claimed = set().union(*(method.laws() for _, method in CASES))
    assert claimed <= known, "a theorem nobody proves is claimed"
    assert not any(method.laws() for _, method in NAMED if getattr(method, "histogram", 0))
    edits = {name: plugin for name, plugin in LOADED.items() if issubclass(plugin, Edit)}
    assert set(edits) == set(EDITS), "every edit is tried on a problem whose answer is known"
    assert set().union(*(plugin.theorems for plugin in edits.values())) <= {"fixed_point", "exact_on_quadratics"}


@pytest.mark.parametrize("method", claiming("pareto_descent"))
def test_pareto_descent(method) -> None:
    """<g, g_i> > 0 for both players, wherever the gradients are not opposed."""
    for retain, forget in PAIRS:
        direction = method.direction(closure(retain, forget, method)).vec
        assert dot(direction, retain) > 0
        assert dot(direction, forget) > 0


@pytest.mark.parametrize("method", claiming("scale_invariance"))
def test_scale_invariance(method) -> None:
    """Multiplying one loss by a constant changes nothing."""
    for cosine in COSINES:
        retain, forget = pair(cosine, 1.0, 1.0)
        expected = flat(method.direction(closure(retain, forget, method)).vec)
        for scale in (1e-8, 0.01, 100.0, 1e8):
            scaled = flat(method.direction(closure(retain, tuple(scale * p for p in forget), method)).vec)
            torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", claiming("permutation"))
def test_permutation(method) -> None:
    """The order in which the players are asked does not matter."""
    for retain, forget in PAIRS[::7]:
        asked = closure(retain, forget, method)
        one = flat(method.direction(asked).vec)
        other = flat(method.direction(Fixed(dict(reversed(asked.gradients.items())))).vec)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", claiming("equal_contribution"))
def test_equal_contribution(method) -> None:
    """a_r ||g_r|| = a_f ||g_f||."""
    for retain, forget in PAIRS:
        weights = method.direction(closure(retain, forget, method)).weights
        ratio = float(weights[0] * norm(retain) / (weights[1] * norm(forget)))
        assert ratio == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("method", claiming("stationarity"))
def test_stationarity(method) -> None:
    """Where the gradients are opposed no step serves both, and none is made: ||g|| is nothing beside the players' parts."""
    for ratio in (1e-3, 1.0, 1e3):
        retain, _ = pair(0.3, 1.0, 1.0)
        direction = method.direction(closure(retain, tuple(-ratio * p for p in retain), method))
        parts = max(1.0, *(float(w) * length for w, length in zip(direction.weights, (1.0, ratio), strict=True)))
        assert norm(direction.vec) <= 1e-6 * parts


@pytest.mark.parametrize("method", claiming("orthogonality"))
def test_orthogonality(method) -> None:
    """The direction is orthogonal to the gradient that was projected away."""
    for cosine in COSINES[1:-1]:
        for seed in range(5):
            retain, forget = pair(cosine, 3.0, 0.2, seed=seed)
            direction = method.direction(closure(retain, forget, method)).vec
            removed = forget if method.rule == "descent" else retain  # S removes g_f, SA removes g_r
            assert abs(float(dot(direction, removed) / norm(removed) / norm(direction))) < 1e-12


@pytest.mark.parametrize("method", claiming("forget_sign"))
def test_forget_sign(method) -> None:
    """The direction does not notice whether the forget loss is to rise or to fall."""
    for retain, forget in PAIRS[::5]:
        one = flat(method.direction(closure(retain, forget, method)).vec)
        other = flat(method.direction(closure(retain, tuple(-p for p in forget), method)).vec)
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("name", "method"), CASES)
def test_nothing_to_combine_is_a_zero_step(name: str, method) -> None:
    retain, forget = pair(0.3, 0.0, 0.0)
    method = replace(method)  # without what it keeps from the tests before
    assert float(norm(method.direction(closure(retain, forget, method)).vec)) == 0


@pytest.mark.parametrize(("name", "method"), CASES)
def test_directions_keep_shape_and_type(name: str, method) -> None:
    retain, forget = (tuple(p.float() for p in v) for v in pair(0.3, 1.0, 2.0))
    method = replace(method)
    direction = method.direction(closure(retain, forget, method)).vec
    assert [(p.shape, p.dtype) for p in direction] == [(p.shape, p.dtype) for p in retain]


# --- edits: what they claim, on ridge regression, where the answer is known ---------------------------------------


def natural_gradient_on_ridge(gone: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = regression()
    model = fitted(x, y, 0.1)
    before = model.weight.detach().clone()
    forget = [(x[:gone], y[:gone])] if gone else []
    LOADED["natural_gradient"]().apply(Risk(model, "gaussian", 0.1), forget, [(x[gone:], y[gone:])])
    return before, model.weight.detach(), ridge_solution(x[gone:], y[gone:], 0.1)


def mini_unlearning_on_ridge(gone: int) -> tuple[Tensor, Tensor, Tensor]:
    training = ridge()
    target = training.run(range(gone))
    history = History(training.params, 40)
    before = training.run(history=history)
    LOADED["mini_unlearning"](k=40).apply(history, training.mean_loss, range(gone))
    return before, training.w.detach(), target


def influence_on_labels(m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """It knows the cross-entropy only, so there is no ridge regression to be exact on: two classes, no target."""
    model, x, y = problem()
    before = flatten(tuple(p.detach().clone() for p in model.parameters()))
    LOADED["influence"]().edit(request(model, x, y, list(range(m))))
    return before, flatten(tuple(p.detach() for p in model.parameters())), None


def dampening_of_labels(m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    model, x, y = problem()
    before = flatten(tuple(p.detach().clone() for p in model.parameters()))
    LOADED["ssd"](alpha=2.0).edit(request(model, x, y, list(range(m))))
    return before, flatten(tuple(p.detach() for p in model.parameters())), None


def projection(name: str, gone: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values: the first `gone` concepts of eight are read as their anchors."""
    asked = projections(concepts=8)
    asked = replace(asked, forget=asked.forget[:gone], anchor=asked.anchor[:gone])
    before = asked.layers["a"].clone()
    LOADED[name]().edit(asked)
    return before, asked.layers["a"], None


def uce_on_least_squares(gone: int) -> tuple[Tensor, Tensor, Tensor]:
    before, after, _ = projection("uce", gone)
    asked, options = projections(concepts=8), LOADED["uce"]()
    c, a, p = (torch.cat(list(many)) for many in (asked.forget[:gone] or [before[:0]], asked.anchor[:gone] or [before[:0]], asked.retain))  # fmt: skip
    rows = torch.cat([c, options.preserve_scale**0.5 * p, options.lamb**0.5 * torch.eye(before.shape[1]).double()])
    wanted = torch.cat([a @ before.T, options.preserve_scale**0.5 * p @ before.T, options.lamb**0.5 * before.T])
    return before, after, torch.linalg.lstsq(rows, wanted).solution.T


EDITS = {
    "natural_gradient": natural_gradient_on_ridge,
    "mini_unlearning": mini_unlearning_on_ridge,
    "influence": influence_on_labels,
    "ssd": dampening_of_labels,
    "uce": uce_on_least_squares,
    "rece": partial(projection, "rece"),
}


@pytest.mark.parametrize("name", [name for name in EDITS if "fixed_point" in LOADED[name].theorems])
def test_fixed_point(name: str) -> None:
    """Nothing to forget: not a bit moves."""
    before, after, _ = EDITS[name](0)
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", [name for name in EDITS if "exact_on_quadratics" in LOADED[name].theorems])
def test_exact_on_quadratics(name: str) -> None:
    """Least squares, where the answer is known: the edited weights are those of training again."""
    before, after, target = EDITS[name](8)
    assert float((before - target).norm()) > 1e-3
    torch.testing.assert_close(after, target, rtol=0, atol=1e-9)
