"""The study of full models: numbers of the other trainings, and distances of predictions."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from concept_eraser import api
from concept_eraser.evaluation import suite as suites
from studies import full_models
from studies.rendering import full_models as rendering
from studies.result_tables import Results
from tests.conftest import ROOT

CONFIG = ROOT / "studies" / "configs" / "full_models.yaml"


def test_the_study_has_the_suites_and_controls_of_the_repository() -> None:
    study = yaml.safe_load(CONFIG.read_text())
    for case in study["concepts"].values():
        assert suites.load(case["suite"]).concept
        assert api.load(case["control"])


def test_a_copy_has_no_distance_and_the_page_has_all_pairs(
    no_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The control stands in for a second training, so that both are equally far from the first."""
    suite = {
        "concept": {"shape": "heart"},
        "judge": "tiny",
        "sampling": {"steps": 1, "guidance": 1.0, "batch_size": 2, "precision": "fp32"},
        "groups": {
            "direct": {"role": "forget", "prompts": ["a red heart", "a blue heart"], "n": 3},
            "retained": {"role": "retain", "prompts": ["a red circle", "a star"], "n": 3},
        },
        "metrics": ["concept_rate", "accuracy"],
    }
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    study = {
        "full_models": {
            "seed 0": "tiny-sd",
            "seed 1": "tiny-sd-without-heart",
            "seed 2": "tiny-sd-without-star",
        },
        "concepts": {
            "heart": {"suite": str(tmp_path / "suite.yaml"), "control": "tiny-sd-without-heart"}
        },
    }
    config = tmp_path / "full_models.yaml"
    config.write_text(yaml.safe_dump(study))
    full_models.main([str(config)])
    content = Results("full_models")["heart"]
    for row in content["predictions"]:
        distances = {tuple(pair["models"]): pair["distance"] for pair in row["pairs"]}
        assert len(distances) == 6
        assert distances["seed 0", "seed 1"] == distances["seed 0", "never learned"]
        assert distances["seed 0", "seed 2"]["value"] > 0
        assert distances["seed 1", "never learned"]["value"] == 0
        assert distances["seed 0", "seed 1"]["n"] == 3
    assert set(content["results"]) == {"seed 1", "seed 2", "never learned"}
    assert sum(content["drawn"]["direct"].values()) == 3
    assert set(content["drawn"]) == {"direct"}  # of the concept's prompts only
    page = rendering.page()
    value, count = next(iter(content["drawn"]["direct"].items()))
    assert f"| heart | direct | 3 | {value} {count}" in page
    assert "| heart | direct | concept rate |" in page
    star = 1000 * distances["seed 1", "seed 2"]["value"]  # of the last group
    assert f"| {star / 2:.2f} (0.00 to {star:.2f}) |" in page
    study["full_models"]["seed 2"] = str(tmp_path / "missing")
    config.write_text(yaml.safe_dump(study))
    with pytest.raises(SystemExit, match="2"):
        full_models.main([str(config)])
    assert "missing" in capsys.readouterr().err
