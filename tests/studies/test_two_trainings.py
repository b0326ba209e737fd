"""The study of two trainings: numbers of the second model, and distances of predictions."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from concept_eraser import api
from concept_eraser.evaluation import suite as suites
from studies import two_trainings
from studies.rendering import two_trainings as rendering
from studies.result_tables import Results
from tests.conftest import ROOT

CONFIG = ROOT / "studies" / "configs" / "two_trainings.yaml"


def test_the_study_has_the_suites_and_controls_of_the_repository() -> None:
    study = yaml.safe_load(CONFIG.read_text())
    for case in study["concepts"].values():
        assert suites.load(case["suite"]).concept
        assert api.load(case["control"])


def test_a_copy_has_no_distance_and_the_page_has_all_pairs(
    no_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The second model is the control here, so that both have the same distance from the first."""
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
        "first": "tiny-sd",
        "second": "tiny-sd-without-heart",
        "concepts": {
            "heart": {"suite": str(tmp_path / "suite.yaml"), "control": "tiny-sd-without-heart"}
        },
    }
    config = tmp_path / "two_trainings.yaml"
    config.write_text(yaml.safe_dump(study))
    two_trainings.main([str(config)])
    content = Results("two_trainings")["heart"]
    for row in content["predictions"]:
        (_, two), (_, never), (_, copy) = (pair.values() for pair in row["pairs"])
        assert two == never
        assert two["value"] > 0
        assert copy["value"] == 0
        assert two["n"] == 3
    page = rendering.page()
    assert "| heart | direct | concept rate |" in page
    assert page.count("| 1.00 |") == 2
    study["second"] = str(tmp_path / "missing")
    config.write_text(yaml.safe_dump(study))
    with pytest.raises(SystemExit, match="2"):
        two_trainings.main([str(config)])
    assert "missing" in capsys.readouterr().err
