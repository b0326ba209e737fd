"""The adapter gives TorchJD's own steps, and steps over players without a gradient."""

from __future__ import annotations

import typing

import pytest
import torch

from concept_eraser import registry
from concept_eraser.methods.munba import Munba
from concept_eraser.methods.torchjd import Rule, TorchJD
from tests.methods.zoo import closure, flat, pair


@pytest.mark.parametrize("rule", typing.get_args(Rule))
@pytest.mark.parametrize("cosine", [-0.5, 0.4])
def test_every_rule_is_torchjds(rule: str, cosine: float) -> None:
    import torchjd.aggregation as rules

    retain, forget = pair(cosine, 1.0, 0.5)
    found = flat(TorchJD(rule=rule).direction(closure(retain, forget)).vec)
    options = {"CAGrad": {"c": 0.4}, "NashMTL": {"n_tasks": 2, "max_norm": 0.0, "update_weights_every": 1, "optim_niter": 100}}  # fmt: skip
    expected = getattr(rules, rule)(**options.get(rule, {}))(torch.stack([flat(retain), flat(forget)]))
    tolerance = 0.02 if rule == "NashMTL" else 1e-4  # the scale enters its iterations
    assert float(torch.nn.functional.cosine_similarity(found, expected, dim=0)) > 1 - tolerance
    if rule not in ("NashMTL", "CAGrad"):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_nash_mtl_bargains_like_munba() -> None:
    retain, forget = pair(0.2, 1.0, 3.0)
    a = flat(TorchJD(rule="NashMTL").direction(closure(retain, forget)).vec)
    b = flat(Munba().direction(closure(retain, forget)).vec)
    assert float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 0.99


def test_short_gradients_do_not_fall_under_the_rules_tolerances() -> None:
    one = flat(TorchJD().direction(closure(*pair(-0.5, 1.0, 0.5))).vec)
    tiny = flat(TorchJD().direction(closure(*pair(-0.5, 1e-9, 0.5e-9))).vec)
    torch.testing.assert_close(tiny * 1e9, one)


def test_a_useless_player_is_left_out() -> None:
    retain, forget = pair(0.3, 1.0, 0.0)
    found = TorchJD().direction(closure(retain, forget))
    assert found.notes["degenerate"] == 1
    torch.testing.assert_close(flat(found.vec), flat(retain))


def test_rules_that_look_at_coordinates_are_not_offered() -> None:
    assert "unknown value 'GradDrop'" in registry.problems("method", "torchjd", {"rule": "GradDrop"})[0]
