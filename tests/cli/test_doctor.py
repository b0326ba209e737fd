"""`concept-eraser doctor`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from concept_eraser.cli import doctor
from concept_eraser.cli.application import app

ROOT = Path(__file__).parents[2]


def test_it_names_versions_device_disk_and_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONCEPT_ERASER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "EXTRAS", {"curvature": ("no_such_module",)})
    result = CliRunner().invoke(app, ["doctor", "--output", str(tmp_path / "new" / "runs")])
    assert result.exit_code == 0, result.output
    for words in (
        "Python 3.",
        "torch ",
        "device:",
        "GB free for runs",
        "training:",
        'pip install "concept-eraser[curvature]"',
        "ViT-B-32.pt (CLIP, openai) is missing",
        str(tmp_path / "cache" / "weights"),
    ):
        assert words in result.output
    assert not (tmp_path / "new").exists()


def test_its_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(doctor.EXTRAS) == set(extras) - {"all", "dev", "docs"}
    assert set(doctor.PURPOSES) == set(doctor.EXTRAS)


def test_what_fits_on_a_card_comes_from_the_estimates() -> None:
    rows = json.loads((ROOT / "benchmarks" / "estimates.json").read_text())["rows"]
    small, large = doctor._estimates(8), doctor._estimates(48)
    assert set(small) == set(large) == {row["model"] for row in rows}
    assert small["Stable Diffusion 1.4"][0] == "8gb"
    assert large["Flux.1 dev"][0] == "48gb"
    row = next(
        row
        for row in rows
        if (row["model"], row["trained"], row["memory"]) == ("Flux.1 dev", doctor.DEFAULT, "48gb")
    )
    assert large["Flux.1 dev"][1] == max(row["training_gb"], row["examples_gb"])
