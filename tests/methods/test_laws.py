"""The laws that methods declare: those of methods/checks.py, and those of edits on problems with
known answers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from concept_eraser import registry
from concept_eraser.methods import checks
from concept_eraser.methods.base import Edit, Method
from concept_eraser.methods.fisher import Risk, flatten
from concept_eraser.methods.history import History
from tests.methods.test_influence import problem, request
from tests.methods.test_mini_unlearning import ridge
from tests.methods.test_natural_gradient import fitted, regression, ridge_solution
from tests.methods.test_uce import problem as projections

# every method once with its defaults, and the settings with other laws
LOADED = {name: registry.load("method", name) for name in registry.names("method")}
CASES = [(name, plugin()) for name, plugin in LOADED.items() if issubclass(plugin, Method)]
NAMED = [
    (name, registry.build("method", name, {}))
    for name, (owner, _) in registry.named("method").items()
    if issubclass(LOADED[owner], Method)
]
CASES += [
    (name, method) for name, method in NAMED if not getattr(method, "histogram", 0)
]  # a judge is no objective of the checks
CASES += [("torchjd-mgda", registry.build("method", "torchjd", {"rule": "MGDA"}))]


def claiming(law: str) -> list:
    cases = [
        pytest.param(law, method, id=f"{law}-{name}")
        for name, method in CASES
        if law in method.laws()
    ]
    assert cases, f"no method declares {law}; the test would prove nothing"
    return cases


def test_every_theorem_is_known() -> None:
    claimed = set().union(*(method.laws() for _, method in CASES))
    assert claimed <= checks.LAWS.keys(), "a theorem nobody proves is claimed"
    assert not any(method.laws() for _, method in NAMED if getattr(method, "histogram", 0))
    edits = {name: plugin for name, plugin in LOADED.items() if issubclass(plugin, Edit)}
    assert set(edits) == set(EDITS), "every edit is tried on a problem whose answer is known"
    assert set().union(*(plugin.theorems for plugin in edits.values())) <= {
        "fixed_point",
        "exact_on_quadratics",
    }


@pytest.mark.parametrize(("law", "method"), [one for law in checks.LAWS for one in claiming(law)])
def test_declared_law_holds(law: str, method: Method) -> None:
    checks.check_law(law, method)


@pytest.mark.parametrize("law", checks.ALWAYS)
@pytest.mark.parametrize(("name", "method"), CASES)
def test_law_of_every_method_holds(name: str, method: Method, law: str) -> None:
    checks.check_law(law, method)


# --- edits: what they claim, on ridge regression, where the answer is known -----------------------


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
    """It knows the cross-entropy only, so there is no ridge regression to be exact on: two classes,
    no target.
    """
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
    c, a, p = (
        torch.cat(list(many))
        for many in (
            asked.forget[:gone] or [before[:0]],
            asked.anchor[:gone] or [before[:0]],
            asked.retain,
        )
    )
    rows = torch.cat(
        [
            c,
            options.preserve_scale**0.5 * p,
            options.lamb**0.5 * torch.eye(before.shape[1]).double(),
        ]
    )
    wanted = torch.cat(
        [a @ before.T, options.preserve_scale**0.5 * p @ before.T, options.lamb**0.5 * before.T]
    )
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


@pytest.mark.parametrize(
    "name", [name for name in EDITS if "exact_on_quadratics" in LOADED[name].theorems]
)
def test_exact_on_quadratics(name: str) -> None:
    """Least squares, where the answer is known: the edited weights are those of training again."""
    before, after, target = EDITS[name](8)
    assert float((before - target).norm()) > 1e-3
    torch.testing.assert_close(after, target, rtol=0, atol=1e-9)
