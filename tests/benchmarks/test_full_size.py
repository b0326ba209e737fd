"""The benchmark at full size, on the bundled model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import full_size
from concept_eraser.cli.main import app
from studies.rendering import benchmarks


def place_of(folder: Path) -> full_size.Place:
    place = full_size.Place("tiny", folder)
    for name, prompt in full_size.PROMPTS.items():
        (folder / f"{name}.txt").write_text(f"{prompt}\n")
    return place


@pytest.mark.parametrize("job", full_size.JOBS)
def test_the_estimates_of_each_dry_run_are_read(job: str, tmp_path: Path) -> None:
    words = full_size._settings(place_of(tmp_path), job)
    result = CliRunner().invoke(app, ["erase", *words, "--dry-run", "--no-two-steps"])
    assert result.exit_code == 0, result.output
    values = full_size.estimates(result.output)
    # the model alone has 16 MB, and the output states at most the run folder and its states
    assert 16 < values["memory_estimate_mb"] < 500
    assert 1 < values["disk_estimate_mb"] < 500
    with pytest.raises(SystemExit, match="no estimate"):
        full_size.estimates("nothing")


def test_memory_and_errors_are_those_of_the_process(tmp_path: Path) -> None:
    script = "x = bytearray(b'1') * ({size} << 20); print('end')"
    small, large = (
        full_size.measure([sys.executable, "-c", script.format(size=size)], tmp_path)
        for size in (1, 100)
    )
    assert large["text"] == "end\n"
    assert small["memory_mb"] < 50, "the test's own memory does not count"
    assert 90 < large["memory_mb"] - small["memory_mb"] < 110
    with pytest.raises(SystemExit, match="ended with 3"):
        full_size.measure([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)


@pytest.mark.slow
def test_every_step_runs_on_the_bundled_model(tmp_path: Path) -> None:
    output, place = tmp_path / "full_size.json", full_size.Place("tiny", tmp_path / "work")
    names = list(full_size.steps(place))
    full_size.run(place, output, names)
    content = json.loads(output.read_text())
    assert [row["step"] for row in content["rows"]] == names
    comparison = next(row for row in content["rows"] if "differences" in row)
    differences = comparison["differences"]
    assert differences["lora"] == 0
    assert differences["original"] > 10
    assert max(differences["kohya"], differences["single-file"]) <= 2
    page = benchmarks.full_size_page(content)
    assert "| erase: LoRA on all layers |" in page
    full_size.run(place, output, names)
    assert json.loads(output.read_text())["rows"] == content["rows"]
