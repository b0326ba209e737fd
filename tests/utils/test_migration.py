"""Run folders of version 0.1 load: their results and recipes get today's terms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from concept_eraser import registry
from concept_eraser.exporting import card_results
from concept_eraser.recipes import recipe
from concept_eraser.reporting import compare, run_results
from concept_eraser.utils.migration import migrate_recipe, migrate_results

OLD_RATE = {"value": 0.5, "low": 0.1, "high": 0.9, "n": 4}
OLD_EVALUATION = {
    "protocol": {"metrics": ["concept_share", "accuracy"], "groups": {}},
    "results": [
        {"metric": "concept_share", "group": "direct", "after": OLD_RATE},
        {"metric": "none_share", "group": "direct", "after": OLD_RATE},
    ],
    "cost": {"pictures a prompt": 3.0},
}


def test_results_of_version_0_1_have_todays_terms(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(OLD_EVALUATION))
    _, from_compare = compare.read(path)
    for content in (
        migrate_results(OLD_EVALUATION),
        run_results.read_record(tmp_path, "evaluation.json"),
        card_results.content(path),
        from_compare,
    ):
        assert [row["metric"] for row in content["results"]] == ["concept_rate", "no_object_rate"]
        assert content["protocol"]["metrics"] == ["concept_rate", "accuracy"]
        assert content["cost"] == {"images a prompt": 3.0}
        assert content["results"][0]["after"] == OLD_RATE


def test_results_with_todays_terms_stay_equal() -> None:
    current = migrate_results(OLD_EVALUATION)
    assert migrate_results(current) == current


@pytest.mark.parametrize(
    ("concepts", "expected"),
    [("players", "together"), ("together", "together"), ("rotate", "rotate")],
)
def test_recipes_of_version_0_1_load(tmp_path: Path, concepts: str, expected: str) -> None:
    objective = {"prompts": "tiny_star", "loss": "anchor", "anchor": {"shape": "circle"}}
    content = {
        "model": "tiny-sd",
        "forget": [objective, {**objective, "prompts": "tiny_moon"}],
        "retain": {"prompts": "tiny_five_rest"},
        "method": "munba",
        "concepts": concepts,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    assert recipe.load(str(path)).concepts == expected


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("uno-hat", {}),
        ("uno-s-hat", {"alternate": True}),
        ("s-hat", {"rule": "surgery"}),
        ("h", {"rule": "none"}),
    ],
)
def test_unos_settings_with_a_judge_of_weight_1_load(
    tmp_path: Path, name: str, extra: dict
) -> None:
    """The weight in these settings was 1. Old recipes and run folders state it."""
    content = {
        "model": "tiny-sd",
        "forget": {"prompts": "tiny_star", "loss": "data"},
        "retain": {"prompts": "tiny_rest"},
        "histogram": {"concept": {"shape": "star"}},
        "method": {"name": name, "histogram": 1.0, "reduction": "mean", **extra},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    method = recipe.load(str(path)).method.build()
    expected = registry.build("method", "uno", {"histogram": 1.0, "reduction": "mean", **extra})
    assert method == expected
    content["method"] = {"name": name}
    path.write_text(yaml.safe_dump(content))
    assert recipe.load(str(path)).method.build() == registry.build("method", name, {})


def test_other_methods_with_a_histogram_are_left_alone() -> None:
    for method in (
        {"name": "uno", "histogram": 1.0},
        {"name": "uno-hat", "histogram": 2.0},
        {"name": ["h"], "histogram": 1.0},
        {"histogram": 1.0},
        "uno-hat",
    ):
        assert migrate_recipe({"method": method}) == {"method": method}


def test_other_values_are_left_to_the_check() -> None:
    assert migrate_recipe({"concepts": ["players"]}) == {"concepts": ["players"]}


def test_a_group_keeps_the_name_that_the_user_gave_it() -> None:
    content = {
        "protocol": {"groups": {"pictures": {"n": 3}}},
        "prompt_hashes": {"pictures": "ab"},
        "results": [{"metric": "concept_share", "group": "pictures"}],
    }
    assert migrate_results(content) == {
        **content,
        "results": [{"metric": "concept_rate", "group": "pictures"}],
    }
