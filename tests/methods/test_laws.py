"""The laws that methods declare: those of methods/checks.py, and those of edits on problems with
known answers.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from concept_eraser import registry
from concept_eraser.methods import checks
from concept_eraser.methods.base import Edit, Method, ProjectionEdit
from concept_eraser.methods.fisher import Risk, flatten
from concept_eraser.methods.history import History
from tests.methods.test_cpe import request as gates
from tests.methods.test_influence import problem, request
from tests.methods.test_mini_unlearning import ridge
from tests.methods.test_natural_gradient import fit_ridge, regression, ridge_solution
from tests.methods.test_uce import problem as projections

# every method once with its defaults, and the settings with other laws
PLUGINS = {name: registry.load("method", name) for name in registry.names("method")}
CASES = [(name, plugin()) for name, plugin in PLUGINS.items() if issubclass(plugin, Method)]
PRESETS = [
    (name, registry.build("method", name, {}))
    for name, (owner, _) in registry.named("method").items()
    if issubclass(PLUGINS[owner], Method)
]
CASES += [
    (name, method) for name, method in PRESETS if not getattr(method, "histogram", 0)
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
    theorems = set().union(*(method.laws() for _, method in CASES))
    assert theorems <= checks.LAWS.keys(), "a theorem nobody proves is claimed"
    assert not any(method.laws() for _, method in PRESETS if getattr(method, "histogram", 0))
    edits = {name: plugin for name, plugin in PLUGINS.items() if issubclass(plugin, Edit)}
    assert set(edits) == set(EDITS), "every edit is tried on a problem whose answer is known"
    assert set().union(*(plugin.theorems for plugin in edits.values())) <= {
        "fixed_point",
        "exact_on_quadratics",
    }


def test_the_remedy_of_an_edit_names_an_option_of_it() -> None:
    edits = [plugin for plugin in PLUGINS.values() if issubclass(plugin, ProjectionEdit)]
    assert len(edits) >= 4
    for plugin in edits:
        assert plugin.remedy.split()[-1] in {field.name for field in fields(plugin)}


@pytest.mark.parametrize(("law", "method"), [one for law in checks.LAWS for one in claiming(law)])
def test_declared_law_holds(law: str, method: Method) -> None:
    checks.check_law(law, method)


@pytest.mark.parametrize("law", checks.ALWAYS)
@pytest.mark.parametrize(("name", "method"), CASES)
def test_law_of_every_method_holds(name: str, method: Method, law: str) -> None:
    checks.check_law(law, method)


# --- edits: what they claim, on ridge regression, where the answer is known -----------------------


def natural_gradient_on_ridge(n_forget: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = regression()
    model = fit_ridge(x, y, 0.1)
    before = model.weight.detach().clone()
    forget = [(x[:n_forget], y[:n_forget])] if n_forget else []
    PLUGINS["natural_gradient"]().apply(
        Risk(model, "gaussian", 0.1), forget, [(x[n_forget:], y[n_forget:])]
    )
    return before, model.weight.detach(), ridge_solution(x[n_forget:], y[n_forget:], 0.1)


def mini_unlearning_on_ridge(n_forget: int) -> tuple[Tensor, Tensor, Tensor]:
    training = ridge()
    target = training.run(range(n_forget))
    history = History(training.params, 40)
    before = training.run(history=history)
    PLUGINS["mini_unlearning"](k=40).apply(history, training.mean_loss, range(n_forget))
    return before, training.w.detach(), target


def influence_on_labels(m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Two classes without a target: the method knows the cross-entropy only, so that ridge
    regression does not apply.
    """
    model, x, y = problem()
    before = flatten(tuple(p.detach().clone() for p in model.parameters()))
    PLUGINS["influence"]().edit(request(model, x, y, list(range(m))))
    return before, flatten(tuple(p.detach() for p in model.parameters())), None


def dampening_of_labels(m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    model, x, y = problem()
    before = flatten(tuple(p.detach().clone() for p in model.parameters()))
    PLUGINS["ssd"](alpha=2.0).edit(request(model, x, y, list(range(m))))
    return before, flatten(tuple(p.detach() for p in model.parameters())), None


def amnesiac_on_ridge(n_forget: int) -> tuple[Tensor, Tensor, Tensor]:
    training = ridge()
    target = training.run(range(n_forget))
    history = History(training.params, 40)
    before = training.run(history=history)
    PLUGINS["amnesiac"]().apply(history, range(n_forget))
    return before, training.w.detach(), target


def deltagrad_on_ridge(n_forget: int) -> tuple[Tensor, Tensor, Tensor]:
    training = ridge()
    target = training.run(range(n_forget))
    history = History(training.params, 40)
    before = training.run(history=history)
    PLUGINS["deltagrad"]().apply(history, training.mean_loss, range(n_forget))
    return before, training.w.detach(), target


def removal_of_labels(m: int) -> tuple[Tensor, Tensor, Tensor | None]:
    model, x, y = problem()
    before = flatten(tuple(p.detach().clone() for p in model.parameters()))
    PLUGINS["certified_removal"]().edit(replace(request(model, x, y, list(range(m))), ridge=0.01))
    return before, flatten(tuple(p.detach() for p in model.parameters())), None


def projection(name: str, n_forget: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values: the first `n_forget` concepts of eight are replaced by their anchors."""
    edit_request = projections(concepts=8)
    edit_request = replace(
        edit_request, forget=edit_request.forget[:n_forget], anchor=edit_request.anchor[:n_forget]
    )
    before = edit_request.layers["a"].clone()
    PLUGINS[name]().edit(edit_request)
    return before, edit_request.layers["a"], None


def uce_on_least_squares(n_forget: int) -> tuple[Tensor, Tensor, Tensor]:
    before, after, _ = projection("uce", n_forget)
    edit_request, options = projections(concepts=8), PLUGINS["uce"]()
    c, a, p = (
        torch.cat(list(many))
        for many in (
            edit_request.forget[:n_forget] or [before[:0]],
            edit_request.anchor[:n_forget] or [before[:0]],
            edit_request.retain,
        )
    )
    rows = torch.cat(
        [
            c,
            options.preserve_scale**0.5 * p,
            options.lamb**0.5 * torch.eye(before.shape[1]).double(),
        ]
    )
    targets = torch.cat(
        [a @ before.T, options.preserve_scale**0.5 * p @ before.T, options.lamb**0.5 * before.T]
    )
    return before, after, torch.linalg.lstsq(rows, targets).solution.T


def gate_of_concepts(n_forget: int) -> tuple[Tensor, Tensor, None]:
    """CPE's gate, fitted to the first `n_forget` prompts of three."""
    gate_request = gates(3)
    gate_request = replace(
        gate_request,
        forget=gate_request.forget[:n_forget],
        anchor=gate_request.anchor[:n_forget],
    )
    before = flatten(tuple(gate_request.gate.parameters())).detach().clone()
    PLUGINS["cpe"](stages=2, steps=2, adversary_steps=2, lr=0.01).edit(gate_request)
    return before, flatten(tuple(gate_request.gate.parameters())).detach(), None


EDITS = {
    "cpe": gate_of_concepts,
    "natural_gradient": natural_gradient_on_ridge,
    "mini_unlearning": mini_unlearning_on_ridge,
    "amnesiac": amnesiac_on_ridge,
    "deltagrad": deltagrad_on_ridge,
    "certified_removal": removal_of_labels,
    "influence": influence_on_labels,
    "ssd": dampening_of_labels,
    "uce": uce_on_least_squares,
    "oce": partial(projection, "oce"),
    "rece": partial(projection, "rece"),
    "speed": partial(projection, "speed"),
}


@pytest.mark.parametrize(
    "name", [name for name in EDITS if "fixed_point" in PLUGINS[name].theorems]
)
def test_fixed_point(name: str) -> None:
    """An empty forget set changes no bit of the weights."""
    before, after, _ = EDITS[name](0)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    "name", [name for name in EDITS if "exact_on_quadratics" in PLUGINS[name].theorems]
)
def test_exact_on_quadratics(name: str) -> None:
    """Least squares, where the answer is known: the edited weights are those of retraining."""
    before, after, target = EDITS[name](8)
    assert float((before - target).norm()) > 1e-3
    torch.testing.assert_close(after, target, rtol=0, atol=1e-9)
