"""The studies of the papers' problems, on a few steps: methods by their definitions, interrupted
measurements, and the tables that they give.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, jvp

from concept_eraser.methods.fisher import Fisher, Risk
from studies import paper_problems, result_tables
from studies.papers import (
    bilevel,
    bilevel_cleaning,
    bilevel_eq24,
    bilevel_time,
    mini_table,
    networks,
    ngd_time,
    ngd_tradeoff,
)
from studies.papers.eq24 import STARTS, closure_at


@pytest.mark.parametrize("name", bilevel.METHODS)
def test_every_method_approaches_the_optimal_set_of_eq24(name: str, monkeypatch) -> None:
    monkeypatch.setattr(bilevel_eq24, "STEPS", 20)
    monkeypatch.setattr(bilevel_eq24, "INNER", 10)
    start = STARTS["(0, (0, 3))"]
    distances = bilevel_eq24.distances(name, start)
    assert len(distances) == 20
    assert distances[-1] < 0.5 * math.dist((0, 0, 3), (1, 1, 1))


def test_a_step_moves_each_level_by_its_own_rate() -> None:
    closure = closure_at(STARTS["(0, (0, 3))"])
    direction = SimpleNamespace(vec=(torch.tensor(2.0), torch.tensor([1.0, -1.0])))
    method = SimpleNamespace(direction=lambda closure: direction)
    assert list(bilevel.train(closure, method, 0.25, 2)) == [direction] * 2
    assert closure.params[0].item() == -1.0
    assert closure.params[1].tolist() == [-2.0, 5.0]


def test_cleaning_and_time_give_rows(monkeypatch) -> None:
    monkeypatch.setattr(bilevel_cleaning, "STEPS", 2)
    monkeypatch.setattr(bilevel_cleaning, "EVERY", 1)
    monkeypatch.setattr(bilevel_cleaning, "INNER", (1,))
    monkeypatch.setattr(bilevel_cleaning, "RATES", (1.0, 1000.0))
    runs = {key: compute() for key, compute in bilevel_cleaning.cells([0]).items()}
    assert all(len(run["curve"]) == 2 for run in runs.values())
    assert all(map(bilevel_cleaning.is_current, runs.values()))
    assert not bilevel_cleaning.is_current({"method": "MOML", "seed": 0})
    summary = bilevel_cleaning.summary(runs)
    assert [row["method"] for row in summary["table"]] == list(bilevel.METHODS)
    assert [list(row)[1:] for row in summary["selection"]] == [["rate 1", "rate 1000"]] * 4
    monkeypatch.setattr(bilevel_time, "REPEATS", 1)
    assert set(bilevel_time.seconds(1, 32, 0)) == set(bilevel.METHODS)


def test_the_rates_of_cleaning_are_the_best_of_the_stored_choice() -> None:
    table = result_tables.Results("papers")["bilevel_cleaning"]["selection"]
    best = {row.pop("method"): max(row, key=row.get) for row in map(dict, table)}
    assert best == {name: f"rate {rate:g}" for name, rate in bilevel_cleaning.CHOSEN_RATES.items()}


def test_an_interrupted_measurement_continues(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(result_tables, "NEW_RESULTS", tmp_path)
    calls: list[str] = []

    def compute(key: str) -> dict:
        calls.append(key)
        return {"value": len(calls)}

    problem = SimpleNamespace(
        cells=lambda seeds: {key: lambda key=key: compute(key) for key in ("a", "b")},
        summary=lambda runs: {"table": sorted(runs)},
    )
    assert paper_problems.measure(problem, "stub", [0], -1.0) is None
    assert paper_problems.measure(problem, "stub", [0], float("inf")) == {"table": ["a", "b"]}
    assert paper_problems.measure(problem, "stub", [0], float("inf")) == {"table": ["a", "b"]}
    assert calls == ["a", "b"]
    # a run of an earlier grid is computed again, and is no part of the table before that
    problem.is_current = lambda run: run["value"] > 1
    problem.summary = lambda runs: {"table": sorted(run["value"] for run in runs.values())}
    assert paper_problems.measure(problem, "stub", [0], -1.0) == {"table": [2]}
    assert paper_problems.measure(problem, "stub", [0], float("inf")) == {"table": [2, 3]}
    assert calls == ["a", "b", "a"]
    plain = SimpleNamespace(run=lambda seeds: {"table": seeds})
    assert paper_problems.measure(plain, "plain", [3], 0.0) == {"table": [3]}


@pytest.mark.parametrize("name", ["OLP", "CNN", "ResNet"])
def test_the_products_are_those_of_the_fisher_and_the_hessian(name: str) -> None:
    """The Fisher against curvlinops; the Hessian against forward over reverse mode."""
    torch.manual_seed(0)
    model = networks.NETWORKS[name](networks.DIGIT).double()
    (x, y), _ = networks.split(0, 20, 0.0)
    x = x.double()
    v = tuple(torch.randn_like(p) for p in model.parameters())
    product = ngd_time.fisher_product(model)(x, y, v)
    expected = Fisher(Risk(model), [(x, y)]).product(v)
    for a, b, part in zip(product, expected, v, strict=True):
        torch.testing.assert_close(a - ngd_time.RIDGE * part, b, rtol=1e-6, atol=1e-9)
    names = [name for name, _ in model.named_parameters()]

    def gradient(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def loss(*inner: torch.Tensor) -> torch.Tensor:
            output = functional_call(model, dict(zip(names, inner, strict=True)), (x,))
            return torch.nn.functional.cross_entropy(output, y)

        return grad(loss, argnums=tuple(range(len(values))))(*values)

    product = ngd_time.hessian_product(model)(x, y, v)
    params = tuple(p.detach() for p in model.parameters())
    for a, b, part in zip(product, jvp(gradient, params, v)[1], v, strict=True):
        torch.testing.assert_close(a - ngd_time.RIDGE * part, b, rtol=1e-6, atol=1e-9)


def test_lissa_stops_at_its_tolerances() -> None:
    """For A = sigma I / 2 the change halves at each iteration."""
    right = (torch.ones(3, dtype=torch.float64),)
    data = torch.zeros(5, 1), torch.zeros(5)
    times = ngd_time.seconds(lambda x, y, v: (0.5 * v[0],), data, right, sigma=1.0, seed=0)
    assert times == sorted(times)
    assert all(np.isfinite(times))
    never = ngd_time.seconds(lambda x, y, v: (0 * v[0],), data, right, sigma=1.0, seed=0)
    assert never[0] < float("inf"), "1/t falls below a tenth"
    assert never[-1] < float("inf")
    grows = ngd_time.seconds(lambda x, y, v: (-9 * v[0],), data, right, sigma=1.0, seed=0)
    assert grows == [float("inf")] * 3


def test_the_membership_score_is_half_for_separate_losses_and_small_for_equal_ones() -> None:
    g = torch.Generator().manual_seed(0)
    low, high = torch.rand(200, generator=g), 5 + torch.rand(300, generator=g)
    assert ngd_tradeoff.membership_score(low, high, 0) > 0.48
    assert ngd_tradeoff.membership_score(low, torch.rand(200, generator=g), 0) < 0.1


def test_runs_of_an_earlier_grid_are_not_current(monkeypatch) -> None:
    monkeypatch.setattr(ngd_tradeoff, "EPOCHS", 1)
    monkeypatch.setattr(ngd_tradeoff, "TRAIN", 120)
    monkeypatch.setattr(ngd_tradeoff, "FORGET", 20)
    monkeypatch.setattr(ngd_tradeoff, "METHODS", ("fine-tuning, SGD",))
    monkeypatch.setattr(ngd_tradeoff, "RATES", (0.001, 0.02))
    monkeypatch.setattr(ngd_tradeoff, "fit", partial(networks.fit, epochs=1))
    run = ngd_tradeoff.one("OLP", 0)
    assert ngd_tradeoff.is_current(run)
    monkeypatch.setattr(ngd_tradeoff, "RATES", (0.001, 0.02, 0.5))
    assert not ngd_tradeoff.is_current(run)


def test_a_network_that_diverged_has_no_score() -> None:
    g = torch.Generator().manual_seed(0)
    finite, infinite = torch.rand(20, generator=g), torch.full((20,), float("inf"))
    assert math.isnan(ngd_tradeoff.membership_score(finite, infinite, 0))
    point = {"accuracy": 0.5, "score": 0.1}
    curves = {"original": [point], "SCRUB, 0.5": [point, {"accuracy": 0.1, "score": None}]}
    runs = {"one": {"network": "OLP", "seed": 0, "curves": curves}}
    result = ngd_tradeoff.summary(runs)
    assert [row["|P - 1/2|"] for row in result["table"]] == [0.1, "diverged"]
    assert result["curves"]["OLP, SCRUB, 0.5"] == [[0.5, 0.1]]


@pytest.mark.parametrize("name", ngd_tradeoff.METHODS)
def test_unlearning_starts_at_the_trained_network(name: str, monkeypatch) -> None:
    monkeypatch.setattr(ngd_tradeoff, "EPOCHS", 2)
    data, test = networks.split(0, 60, 0.2)
    start = networks.fit("OLP", data, seed=0, epochs=2)
    before = [p.detach().clone() for p in start.parameters()]
    forget, retain = (data[0][:20], data[1][:20]), (data[0][20:], data[1][20:])
    curve = ngd_tradeoff.unlearn(name, start, forget, retain, test, rate=0.01, seed=0)
    assert len(curve) == 2
    assert all(0 <= p["score"] <= 0.5 and 0 <= p["accuracy"] <= 1 for p in curve)
    assert all(torch.equal(a, b) for a, b in zip(before, start.parameters(), strict=True))


def test_the_comparison_of_deletions_has_a_row_for_each_method(monkeypatch) -> None:
    monkeypatch.setattr(mini_table, "EPOCHS", 3)
    monkeypatch.setattr(mini_table, "SHADOWS", 4)
    run = mini_table._cell("digits", 0.1, 0)
    rows = {row["method"]: row for row in run["rows"]}
    assert tuple(rows) == mini_table.METHODS
    assert rows["original"]["share of the gap left"] == pytest.approx(1)
    assert rows["retrained"]["share of the gap left"] == pytest.approx(0, abs=1e-12)
    assert rows["DeltaGrad"]["share of the gap left"] < 0.2
    assert rows["rewind"]["share of the gap left"] < 1
    assert all(0 <= row[mini_table.RETAINED] <= 1 for row in rows.values())
    # the retained samples are members of the original and of the retrained model
    for name in ("original", "retrained"):
        recall = rows[name]["Shokri, recall on the retained"]
        assert 0 < recall <= 1
        assert rows[name]["Shokri, precision on the retained"] > 0
    assert mini_table.is_current(run)
    older = {
        **run,
        "rows": [{k: v for k, v in row.items() if k != mini_table.RETAINED} for row in run["rows"]],
    }
    assert not mini_table.is_current(older)
    table = mini_table.summary({"one": run})["table"]
    assert [row["method"] for row in table] == list(mini_table.METHODS)


def test_covtype_is_never_downloaded(monkeypatch) -> None:
    requests: list[bool] = []

    def fetch(return_X_y: bool, download_if_missing: bool) -> None:  # noqa: N803
        requests.append(download_if_missing)
        raise OSError("Data not found and `download_if_missing` is False")

    monkeypatch.setattr(mini_table, "fetch_covtype", fetch)
    assert mini_table.covtype() is None
    assert not any(key.startswith("covtype") for key in mini_table.cells([0]))
    with pytest.raises(ValueError, match="no copy of Covtype"):
        mini_table.load("covtype")
    assert requests == [False] * 3


def test_the_comparison_on_a_stand_in_of_covtype(monkeypatch) -> None:
    """54 columns and classes from 1 to 7, as scikit-learn's copy gives them."""
    rng = np.random.default_rng(0)
    labels = rng.integers(1, 8, 2500)
    columns = rng.normal(size=(2500, 54)) + 50 + 3 * np.eye(54)[labels - 1]
    columns[:, 53] = 1.0  # a column of one value has no deviation

    def fetch(return_X_y: bool, download_if_missing: bool) -> tuple:  # noqa: N803
        assert return_X_y
        assert not download_if_missing
        return columns, labels

    monkeypatch.setattr(mini_table, "fetch_covtype", fetch)
    monkeypatch.setattr(mini_table, "EPOCHS", 3)
    monkeypatch.setattr(mini_table, "METHODS", ("original", "Mini-Unlearning", "retrained"))
    x, y = mini_table.load("covtype")
    assert (x.shape, y.min(), y.max()) == ((2000, 54), 0, 6)
    assert np.isfinite(x).all()
    assert np.allclose(x[:, :53].std(0), 1)
    assert "covtype_0.05_0" in mini_table.cells([0])
    rows = {row["method"]: row for row in mini_table._cell("covtype", 0.05, 0)["rows"]}
    assert rows["original"]["test accuracy"] > 0.6
    assert rows["retrained"]["share of the gap left"] == pytest.approx(0, abs=1e-12)
    assert rows["Mini-Unlearning"]["share of the gap left"] < 1
