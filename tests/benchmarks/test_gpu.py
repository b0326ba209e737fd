"""The parts of the GPU benchmark that run without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils.errors import UserError
from studies.rendering import benchmarks
from tests.conftest import ROOT
from tests.processes import Command


@pytest.mark.parametrize("job", gpu.JOBS)
def test_every_job_is_a_valid_recipe(job: str) -> None:
    recipe = recipes.load({"model": "tiny-sd", **gpu.recipe("tiny", job, 4, 8, "cpu")})
    assert recipe.training.batch_size == 4
    assert (recipe.trainable.lora is not None) == ("LoRA" in job)
    assert (recipe.trainable.select == "cross_attention") == (
        "cross-attention" in job or "LoRA" in job
    )


def test_it_is_measured_once_and_written_at_once(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    options = ["--families", "tiny", "--jobs", "munba, cross", "--batches", "1", "--steps", "4"]
    options += ["--device", "cpu", "--output", str(output)]
    script = ROOT / "benchmarks" / "gpu.py"
    first = Command(*options, folder=ROOT, script=script)
    assert first.wait() == 0, first.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [row["job"] for row in rows] == ["munba, cross-attention", "generating"]
    assert rows[0]["n"] == 2
    assert 0 < rows[0]["quickest"] <= rows[0]["seconds"] <= rows[0]["slowest"]
    assert rows[1]["images_per_second"] > 0
    page = benchmarks.page(json.loads(output.read_text()))
    assert f"| munba, cross-attention | 1 | {rows[0]['seconds']:.3f} [" in page
    gpu.add_estimates(output)
    (estimate,) = [r["estimate_mb"] for r in json.loads(output.read_text())["rows"][:1]]
    assert 700 < estimate < 1500, "with CUDA's own memory"
    again = Command(*options, folder=ROOT, script=script)
    assert again.wait() == 0, again.stderr
    assert again.stdout == ""
    assert [row["job"] for row in json.loads(output.read_text())["rows"]] == [
        row["job"] for row in rows
    ]
    content = json.loads(output.read_text())
    content["environment"]["device"] = "another card"
    output.write_text(json.dumps(content))
    other = Command(*options, folder=ROOT, script=script)
    assert other.wait() == 1
    assert "has rows of another device, another card; this is" in other.stderr
    assert json.loads(output.read_text()) == content


def test_the_estimates_are_close_to_what_a_gpu_took() -> None:
    """The committed rows of a GPU. UNO's convolutions without TF32 have large workspaces there."""
    content = json.loads(gpu.OUTPUT.read_text())
    assert "NVIDIA" in content["environment"]["device"]
    for row in content["rows"]:
        taken = benchmarks.taken_mb(row)
        if taken is None or row["family"] == "tiny" or "estimate_mb" not in row:
            continue
        closeness = row["estimate_mb"] / taken
        assert (0.65 < closeness < 0.75) if "uno" in row["job"] else (0.98 < closeness < 1.06), row


def test_the_page_has_what_cuda_itself_took() -> None:
    rows = json.loads(gpu.OUTPUT.read_text())["rows"]
    taken = [row["beside_mb"] for row in rows if row.get("beside_mb") is not None]
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert f"CUDA itself took {min(taken):.0f} to {max(taken):.0f} MB." in page


def test_rows_of_another_torch_are_not_continued() -> None:
    """The file states one environment for all rows."""
    here = {"device": "a card", "versions": {"torch": "2.13.0"}}
    gpu.require_same_machine(Path("gpu.json"), here, here)
    with pytest.raises(SystemExit, match=r"of another torch, 2\.11\.0; this is 2\.13\.0"):
        gpu.require_same_machine(Path("gpu.json"), {**here, "versions": {"torch": "2.11.0"}}, here)


def test_a_machine_without_a_gpu_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit, match="no GPU here"):
        gpu.main()
    with pytest.raises(UserError, match="there are: sd14"):
        gpu.choose("sd15", gpu.PIXELS, "family")
