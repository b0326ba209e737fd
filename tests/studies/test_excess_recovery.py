"""The study of excess recovery: real attacks at tiny size, and numbers that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from concept_eraser.models.loading import load
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils.errors import UserError
from studies import excess_recovery, render_results
from studies.rendering import excess_recovery as rendering
from studies.result_tables import Results
from studies.runs import recipe_of
from tests.conftest import ROOT

CONFIG = ROOT / "studies" / "configs" / "excess_recovery.yaml"


def attempts(values: list[bool]) -> dict[str, Any]:
    rows = [{"prompt": str(i), "seed": i, "success": value} for i, value in enumerate(values)]
    return {"model": "x", "campaign": {"attempts": rows}}


def test_the_excess_of_one_seed_is_the_paired_difference() -> None:
    erased, control = attempts([True, True, True, False]), attempts([True, False, False, False])
    value = rendering.excess([erased], [control])
    assert value.value == 0.5
    assert value.low < 0.5 < value.high
    assert rendering.excess([control], [control]).value == 0
    assert rendering.success_rate([erased, control]).value == 0.5


def test_the_unit_of_three_seeds_is_the_seed() -> None:
    """Seeds that scatter give a wide interval, however many prompts there are."""
    control = attempts([False] * 200)
    seeds = [attempts([True] * k + [False] * (200 - k)) for k in (20, 100, 180)]
    value = rendering.excess(seeds, [control])
    assert value.value == pytest.approx(0.5)
    assert value.high - value.low > 0.6
    assert value.n == 600


def test_seeds_that_are_all_alike_have_no_interval() -> None:
    value = rendering.excess([attempts([False, False])] * 3, [attempts([False, False])])
    assert rendering.share(value) == "0.0 (all alike)"


def test_attacks_on_other_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different prompts"):
        rendering.excess([attempts([True, False])], [attempts([True])])


def test_the_mean_of_several_controls_is_subtracted() -> None:
    controls = [attempts([True, True]), attempts([False, True])]
    seeds = [attempts([True, True])] * 3
    assert rendering.excess(seeds, controls).value == pytest.approx(np.mean([0.5, 0.0]))


def test_the_configuration_names_recipes_suites_and_attacks() -> None:
    study = yaml.safe_load(CONFIG.read_text())
    for entry in study["entries"].values():
        assert recipe_of({"recipe": entry["recipe"]}, {}, 0).forget.prompts
    for name in study["concepts"]:
        recipes.load("tiny_star_munba", [f"forget.prompts=protocol2_{name}"])
        assert study["concepts"][name]["suite"] == f"protocol2_{name}_test"
    for attack in study["attacks"].values():
        excess_recovery.protocol_of(study, "protocol2_heart_test", attack)


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a record that it never learned the heart."""
    folder = tmp_path_factory.mktemp("controls") / "without_heart"
    load("tiny-sd").save(folder)
    record = {"without": {"shape": ["heart"]}, "seed": 0, "steps": 1, "unet_sha256": "0"}
    (folder / "control.json").write_text(json.dumps(record))
    return folder


def test_the_study_attacks_continues_and_renders(
    no_results: Path, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"n": 2, "role": "forget", "prompts": "protocol2_heart"}
    study = {
        "concepts": {
            "heart": {
                "suite": {
                    "concept": {"shape": "heart"},
                    "sampling": {"steps": 6, "batch_size": 8, "precision": "bf16"},
                    "groups": {
                        "direct": {**small, "n": 4},
                        "retained": {
                            **small,
                            "role": "retain",
                            "prompts": "protocol2_heart_retain",
                        },
                    },
                },
                "controls": [str(control)],
            }
        },
        "entries": {"uce": {"label": "UCE", "recipe": "tiny_star_uce"}},
        "n": 4,
        "batch": 4,
        "seed": 0,
        "attacks": {"completion": {"name": "completion", "options": {"strengths": [0.5]}}},
    }
    call: dict[str, Any] = {
        "concepts": ["heart"],
        "entries": ["uce"],
        "attacks": ["completion"],
        "seeds": [0],
        "work": no_results / "work",
    }
    excess_recovery.run(study, **call)
    results = Results(rendering.STUDY)
    assert list(results) == [
        "heart_control_1_completion",
        "heart_uce_seed0",
        "heart_uce_seed0_completion",
    ]
    assert results["heart_uce_seed0"]["evaluation"]["control"]["predictions"]
    before = dict(results)
    monkeypatch.setattr(excess_recovery.runner, "run", None)  # a new attack would be an error
    excess_recovery.run(study, **call)
    assert dict(results) == before
    page = rendering.page()
    assert "| without text | completion | UCE | 1 |" in page
    assert "## heart" in page
    assert render_results.TABLES  # the page is one of those that the command renders
    assert rendering.STUDY in rendering.PAGES


def test_a_control_of_another_concept_is_refused(control: Path) -> None:
    study = {
        "concepts": {"star": {"suite": "protocol2_star_test", "controls": [str(control)]}},
    }
    with pytest.raises(UserError, match="was trained on images of shape=star"):
        excess_recovery.load_case(study, "star")
