"""The method gives the steps of TorchJD itself, and leaves out objectives without a gradient."""

from __future__ import annotations

import subprocess
import sys
import typing

import pytest
import torch

from concept_eraser import registry
from concept_eraser.methods.checks import Fixed, closure, flat, pair
from concept_eraser.methods.munba import Munba
from concept_eraser.methods.torchjd import Rule, TorchJD, _factor


@pytest.mark.parametrize("rule", typing.get_args(Rule))
@pytest.mark.parametrize("cosine", [-0.5, 0.4])
def test_every_rule_is_torchjds(rule: str, cosine: float) -> None:
    import torchjd.aggregation as rules

    retain, forget = pair(cosine, 1.0, 0.5)
    step = flat(TorchJD(rule=rule).direction(closure(retain, forget)).vec)
    options = {
        "CAGrad": {"c": 0.4},
        "NashMTL": {"n_tasks": 2, "max_norm": 0.0, "update_weights_every": 1, "optim_niter": 100},
    }
    expected = getattr(rules, rule)(**options.get(rule, {}))(
        torch.stack([flat(retain), flat(forget)])
    )
    tolerance = 0.02 if rule == "NashMTL" else 1e-4  # the scale enters its iterations
    assert float(torch.nn.functional.cosine_similarity(step, expected, dim=0)) > 1 - tolerance
    if rule not in ("NashMTL", "CAGrad"):
        torch.testing.assert_close(step, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rule", ["PCGrad", "GradVac"])
def test_the_order_of_three_objectives_depends_on_the_step_alone(rule: Rule) -> None:
    """These rules draw an order. A resumed run and all ranks must draw the same."""
    gradients = torch.tensor([[1.0, 0.2, -0.6], [-0.7, 1.0, 0.3], [0.1, -0.9, 1.0]])
    named = {name: (row,) for name, row in zip("abc", gradients, strict=True)}

    def weights(step: int) -> list[float]:
        losses = Fixed(named)
        losses.step = step
        direction = TorchJD(rule=rule).direction(losses)
        assert direction.weights is not None
        return direction.weights.tolist()

    first = [weights(step) for step in range(12)]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert [weights(step) for step in range(12)] == first
    assert torch.equal(torch.get_rng_state(), state)
    if rule == "PCGrad":
        assert len({tuple(one) for one in first}) > 1


def test_nash_mtl_has_the_direction_of_munba() -> None:
    retain, forget = pair(0.2, 1.0, 3.0)
    a = flat(TorchJD(rule="NashMTL").direction(closure(retain, forget)).vec)
    b = flat(Munba().direction(closure(retain, forget)).vec)
    assert float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 0.99


def test_short_gradients_do_not_fall_under_the_rules_tolerances() -> None:
    one = flat(TorchJD().direction(closure(*pair(-0.5, 1.0, 0.5))).vec)
    tiny = flat(TorchJD().direction(closure(*pair(-0.5, 1e-9, 0.5e-9))).vec)
    torch.testing.assert_close(tiny * 1e9, one)


def test_a_useless_objective_is_left_out() -> None:
    retain, forget = pair(0.3, 1.0, 0.0)
    direction = TorchJD().direction(closure(retain, forget))
    assert direction.notes["degenerate"] == 1
    torch.testing.assert_close(flat(direction.vec), flat(retain))


@pytest.mark.parametrize("rule", ["AlignedMTL", "ConFIG", "GradVac", "NashMTL", "UPGrad"])
@pytest.mark.parametrize("length", [1e-4, 1e3])
def test_the_length_of_the_gradients_changes_no_direction(rule: str, length: float) -> None:
    gram = torch.tensor([[1.0, -0.4, 0.2], [-0.4, 2.0, 0.1], [0.2, 0.1, 0.5]], dtype=torch.float64)
    one, other = TorchJD(rule=rule).solve(gram)[0], TorchJD(rule=rule).solve(gram * length**2)[0]
    assert float(torch.nn.functional.cosine_similarity(one, other, dim=0)) > 1 - 1e-6


def test_nash_mtl_has_the_length_of_its_definition() -> None:
    """The weights a of m objectives solve G G^T a = 1 / a (arXiv 2202.01017, section 3), so a^T G
    G^T a = m.
    """
    gram = torch.tensor([[1.0, 0.3], [0.3, 0.6]], dtype=torch.float64)
    weights = TorchJD(rule="NashMTL").solve(gram)[0]
    assert float(weights @ gram @ weights) == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("objectives", [2, 5, 8])
def test_gradients_that_depend_on_each_other_have_a_factor(objectives: int) -> None:
    """Rounding makes eigenvalues of a singular Gram matrix negative."""
    torch.manual_seed(objectives)
    for _ in range(20):
        rows = torch.randn(objectives, 1, dtype=torch.float64)
        factor = _factor(rows @ rows.T)
        torch.testing.assert_close(factor @ factor.T, rows @ rows.T)


def test_only_mgda_promises_to_stop_where_no_direction_serves_all() -> None:
    """UPGrad's program is regularised, so it does not stop exactly."""
    assert "stationarity" in TorchJD(rule="MGDA").laws()
    assert "stationarity" not in TorchJD(rule="UPGrad").laws()
    assert TorchJD(rule="MGDA").solve(torch.eye(2))[1]["degenerate"] == 0


@pytest.mark.parametrize("rule", typing.get_args(Rule))
def test_a_lone_objective_steps_along_its_own_gradient(rule: str) -> None:
    weights, notes = TorchJD(rule=rule).solve(torch.tensor([[0.0, 0.0], [0.0, 4.0]]))
    torch.testing.assert_close(
        weights, torch.tensor([0.0, 1.0], dtype=torch.float64), rtol=0, atol=0
    )
    assert notes["degenerate"] == 1


def test_rules_that_look_at_coordinates_are_not_offered() -> None:
    assert (
        "unknown value 'GradDrop'"
        in registry.problems("method", "torchjd", {"rule": "GradDrop"})[0]
    )


@pytest.mark.parametrize("rule", ["UPGrad", "CAGrad"])
def test_without_torchjd_the_error_says_how_to_install_it(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchjd"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchjd", None)  # its import fails from now on
    with pytest.raises(ValueError, match=r'pip install "concept-eraser\[torchjd\]"') as error:
        TorchJD(rule=rule)
    assert "\n" not in str(error.value)
    problems = registry.problems("method", "torchjd", {"rule": rule})
    assert len(problems) == 1
    assert "concept-eraser[torchjd]" in problems[0]
    assert "torchjd" in registry.names("method"), "listing needs no import"


def test_methods_import_torchjd_only_when_it_is_chosen() -> None:
    code = (
        "import sys; from concept_eraser import registry; [registry.load('method', name) for "
        "name in registry.names('method')]; print('torchjd' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "False"
    )
