"""Grids of settings: all combinations, and marks where a chosen value lies at an edge."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from concept_eraser.recipes import recipe as recipes
from studies import grids, result_tables
from studies.grids import LARGEST, LEAST
from studies.rendering.common import learning_rate, setting
from studies.runs import recipe_of
from tests.conftest import ROOT

CONFIGS = ROOT / "studies" / "configs"
PAGES = ROOT / "eval" / "results"
WITH_RATES = ("classification", "classification_painted", "clip")


def rates(*values: float) -> list[dict[str, float]]:
    return [{"training.lr": value} for value in values]


def test_a_mapping_is_all_combinations_and_a_list_stays() -> None:
    assert grids.points({"a": [1, 2], "b": ["x", "y"]}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
    assert grids.points([{"a": 1}, 0.1]) == [{"a": 1}, 0.1]


@pytest.mark.parametrize(
    ("value", "marks"), [(1e-3, LEAST), (3e-3, ""), (1e-2, ""), (1e-1, LARGEST)]
)
def test_the_ends_of_a_grid_are_its_edges(value: float, marks: str) -> None:
    found_marks = grids.edges({"training.lr": value}, rates(1e-1, 1e-3, 3e-3, 1e-2))
    assert found_marks == ({"training.lr": marks} if marks else {})


def test_a_setting_that_failed_was_tried() -> None:
    """A learning rate below one that diverged is not at an edge."""
    row = {
        "point": {"training.lr": 0.1},
        "grid": [
            {"point": {"training.lr": 0.01}, "gap": 2.0},
            {"point": {"training.lr": 0.1}, "gap": 1.0},
            {"point": {"training.lr": 1.0}, "gap": None, "failed": "the loss diverged"},
        ],
    }
    assert grids.of_row(row) == {}


def test_numbers_are_compared_within_their_variant() -> None:
    """Names have no edge, and the learning rates of two choices of layers are two grids."""
    tried = [
        {"trainable.select": "all", "training.lr": 1e-4},
        {"trainable.select": "all", "training.lr": 3e-4},
        {"trainable.select": "cross_attention", "training.lr": 1e-3},
        {"trainable.select": "cross_attention", "training.lr": 3e-3},
        {"trainable.select": "cross_attention", "training.lr": 1e-2},
    ]
    assert grids.edges(tried[1], tried) == {"training.lr": LARGEST}
    assert grids.edges(tried[3], tried) == {}
    assert grids.edges(tried[4], tried) == {"training.lr": LARGEST}
    alpha = [{"method.alpha": 1.5}, {"method.alpha": 5.0, "method.batch": 64}]
    assert grids.edges(alpha[1], alpha) == {"method.alpha": LEAST + LARGEST}


def test_a_limit_of_an_option_is_no_edge_and_a_constant_neither() -> None:
    damping = [{"method.damping": value, "forget.scale": 0.1} for value in (0.0, 0.1, 1.0)]
    assert grids.edges(damping[0], damping) == {}
    assert grids.edges(damping[2], damping) == {"method.damping": LARGEST}
    above_zero = damping[1:]
    assert grids.edges(above_zero[0], above_zero) == {"method.damping": LEAST}
    assert grids.edges({"training.lr": 0.1}, []) == {}
    assert grids.edges({"guard": "sld-max"}, [{"guard": "sld-weak"}, {"guard": "sld-max"}]) == {}


def test_marks_stand_in_the_cells_and_their_meaning_below_the_table() -> None:
    point = {"trainable.select": "all", "training.lr": 0.1, "retain.l1": 0.001}
    assert setting(point) == "all 0.1 0.001"
    assert setting(point, {"retain.l1": LEAST}) == "all 0.1 0.001▼"
    run: dict[str, Any] = {
        "recipe": {"training": {"lr": 0.1}},
        "point": {"training.lr": 0.1, "method.ratio": 2.0},
        "grid": [
            {"point": {"training.lr": 0.01, "method.ratio": 1.0}},
            {"point": {"training.lr": 0.1, "method.ratio": 2.0}},
        ],
    }
    assert learning_rate(run) == "0.1▲; ratio 2▲"
    assert learning_rate({"recipe": run["recipe"], "point": {}, "grid": []}) == "0.1"
    assert grids.with_note("| 0.1 |") == "| 0.1 |"
    assert grids.with_note("| 0.1▲ |") == f"| 0.1▲ |\n\n{grids.NOTE}"


def chosen_at_an_edge(study: str) -> list[str]:
    """Return the values of a study that lie at an edge, with the marks that its page must have.

    The training seeds of one setting are one row of the page.
    """
    texts = {}
    for key, content in result_tables.table(study).items():
        if "/" in key:
            continue
        for i, row in enumerate(content.get("rows", [content])):
            marks = grids.of_row(row) if isinstance(row, dict) else {}
            for option, mark in marks.items():
                value = f"{grids.point_of(row)[option]:g}{mark}"
                texts[re.sub(r"_seed\d+$", "", key), i, option, value] = value
    return list(texts.values())


def marks_of(texts: list[str]) -> int:
    return sum(map("".join(texts).count, (LARGEST, LEAST)))


@pytest.mark.parametrize(
    "study", sorted(path.name.split(".")[0] for path in PAGES.glob("*.jsonl.xz"))
)
def test_every_page_marks_its_settings_at_an_edge(study: str) -> None:
    page = (PAGES / f"{study}.md").read_text()
    texts = chosen_at_an_edge(study)
    missing_texts = {text for text in texts if text not in page}
    assert not missing_texts
    assert bool(texts) == (grids.NOTE in page)
    # as many marked cells as marked rows; a leaderboard has further tables of settings
    tables = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    cells = sum(map(tables.count, (LARGEST, LEAST)))
    assert cells == marks_of(texts) if study in WITH_RATES else cells >= marks_of(texts)


@pytest.mark.parametrize("study", WITH_RATES)
def test_all_methods_of_a_study_have_one_grid_of_learning_rates(study: str) -> None:
    """The published methods are compared at the same learning rates."""
    content = yaml.safe_load((CONFIGS / f"{study}.yaml").read_text())
    for name, method in content["methods"].items():
        points = [grids.named(point) for point in grids.points(method.get("grid", [{}]))]
        values = {point["training.lr"] for point in points if "training.lr" in point}
        optimizer = {**method, **method.get("training", {})}.get("optimizer", "adam")
        key = "sgd_rates" if optimizer == "sgd" and "sgd_rates" in content else "rates"
        assert values in (set(), set(content[key])), name
    assert len(content["rates"]) == len(content.get("sgd_rates", content["rates"]))
    if study == "classification":  # MUNBa section 4.2, and one value beyond
        assert min(content["rates"]) == 1e-4
        assert max(content["rates"]) > 1e-1
        assert {1e-4, 1e-3, 1e-2, 3e-2, 1e-1} <= set(content["rates"])


@pytest.mark.parametrize("study", ["classification", "classification_painted"])
def test_natural_gradient_may_choose_the_papers_damping(study: str) -> None:
    content = yaml.safe_load((CONFIGS / f"{study}.yaml").read_text())
    assert 0.0 in content["methods"]["ngd"]["grid"]["method.damping"]


@pytest.mark.parametrize(
    ("name", "stored"), [("tiny_star_uno", "star_uno"), ("tiny_star_uno_s", "star_uno_s")]
)
def test_a_recipe_of_uno_has_the_setting_that_the_grid_chose(name: str, stored: str) -> None:
    chosen = result_tables.Results("tiny_rules")[f"{stored}_seed0"]["point"]
    assert set(chosen) == {"trainable.select", "training.lr", "method.strength"}
    shipped, best = recipes.load(name), recipes.load(name, [f"{k}={v}" for k, v in chosen.items()])
    assert shipped.fingerprint == best.fingerprint


def test_the_recipe_of_salun_has_the_rate_that_the_leaderboard_chose() -> None:
    (line,) = re.findall(r"^\* SalUn: (.*)$", (PAGES / "tiny_leaderboard.md").read_text(), re.M)
    scores = {float(s): float(r) for r, s in re.findall(r"([\d.]+): (-?[\d.]+) \(", line)}
    assert len(scores) == 4
    assert recipes.load("tiny_star_salun").training.lr == scores[max(scores)]


@pytest.mark.parametrize("victim", ["uno_s", "salun_paper", "uno_anchor"])
def test_the_attacked_models_keep_their_recipes_where_a_shipped_one_changed(victim: str) -> None:
    study = yaml.safe_load((CONFIGS / "tiny_attacks.yaml").read_text())
    rows = [
        row
        for row in result_tables.Results("tiny_attacks").values()
        if row.get("victim") == victim and row["training_seed"] == 0
    ]
    assert rows
    present = recipe_of(study["victims"][victim], {}, 0).fingerprint
    assert {recipes.validate(row["recipe"], victim).fingerprint for row in rows} == {present}
