"""Tables are what their JSON says, and every JSON says where it comes from."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from concept_eraser import recipe
from tests.conftest import ROOT

FILES = sorted((ROOT / "eval" / "results").glob("*/*.json"))


def test_rendered_files_are_up_to_date() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tools.render_results", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_result_carries_its_provenance(path) -> None:
    content = json.loads(path.read_text())
    evaluation = content["evaluation"]
    assert evaluation["environment"]["commit"]
    assert evaluation["environment"]["versions"]["torch"]
    assert evaluation["protocol_hash"]
    assert set(evaluation["prompt_hashes"]) == set(evaluation["protocol"]["groups"])
    assert content["seed"] == content["recipe"]["training"]["seed"]
    assert recipe.load(content["recipe"]).fingerprint == content["run"]["recipe"]
    for row in evaluation["results"]:
        assert row["after"]["n"] >= 2
        if row["after"]["low"] is not None:
            assert row["after"]["low"] <= row["after"]["value"] <= row["after"]["high"]


def test_selection_seeds_are_not_reported() -> None:
    for path in (ROOT / "eval" / "studies").glob("*.yaml"):
        study = yaml.safe_load(path.read_text())
        assert not set(study["select"]["seeds"]) & set(study["seeds"])
        for entry in study["entries"].values():
            recipe.load(entry["recipe"], [f"{k}={json.dumps(v)}" for k, v in entry.get("set", {}).items()])
