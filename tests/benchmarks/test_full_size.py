"""The benchmark at full size, on the bundled model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from typer.testing import CliRunner

from benchmarks import full_size, lora_sizes, profile_phases
from concept_eraser.cli.main import app
from studies.rendering import benchmarks


def place_of(folder: Path) -> full_size.Place:
    place = full_size.Place("tiny", folder, 64)
    for name, prompt in full_size.PROMPTS.items():
        (folder / f"{name}.txt").write_text(f"{prompt}\n")
    return place


@pytest.mark.parametrize("job", full_size.SD_JOBS)
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


def test_cleaning_removes_the_files_of_the_benchmark_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of `--work` may be one that also holds other runs."""
    work = tmp_path / "runs"
    for name in ("nudity/recipe.yaml", "run_tiny_default_lora/log.jsonl", "sd14/model_index.json"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("{}")
    options = ["--family", "tiny", "--steps", "libraries alone", "--clean", "--work", str(work)]
    options += ["--output", str(tmp_path / "full_size.json")]
    monkeypatch.setattr(sys, "argv", ["full_size", *options])
    monkeypatch.setattr(full_size, "LIBRARIES", "pass")
    full_size.main()
    assert sorted(path.name for path in work.iterdir()) == ["nudity", "sd14"]
    place = full_size.Place("sd14", work, 512)
    place.run("cross-attention").mkdir()
    place.clean()
    assert sorted(path.name for path in work.iterdir()) == ["nudity"]
    own = full_size.Place("tiny", tmp_path / "own", 64)
    own.run("default LoRA").mkdir(parents=True)
    own.clean()
    assert not own.folder.exists()


def test_memory_and_errors_are_those_of_the_process(tmp_path: Path) -> None:
    script = "x = bytearray(b'1') * ({size} << 20); print('end')"
    place = full_size.Place("tiny", tmp_path, 64)
    small, large = (
        full_size.measure([sys.executable, "-c", script.format(size=size)], place)
        for size in (1, 100)
    )
    assert large["text"] == "end\n"
    assert small["memory_mb"] < 50, "the test's own memory does not count"
    assert 90 < large["memory_mb"] - small["memory_mb"] < 110
    spinning = "import time\nwhile time.process_time() < 0.5: pass"
    idle = "import time; time.sleep(0.5)"
    busy, waiting = (full_size.measure([sys.executable, "-c", s], place) for s in (spinning, idle))
    assert busy["cpu_seconds"] >= 0.5 > waiting["cpu_seconds"]
    with pytest.raises(SystemExit, match="ended with 3"):
        full_size.measure([sys.executable, "-c", "raise SystemExit(3)"], place)
    heapless = full_size.measure(
        [sys.executable, "-c", "import os; print(os.environ['MALLOC_MMAP_THRESHOLD_'])"],
        place,
        full_size.HEAPLESS,
    )
    assert heapless["text"] == f"{2**20}\n"
    limited = replace(place, memory=0.05)
    full_size.measure([sys.executable, "-c", script.format(size=1)], limited)
    step = partial(full_size.measure, [sys.executable, "-c", script.format(size=100)], limited)
    assert full_size._limited(step, limited)["beyond_gb"] == 0.05


def test_the_steps_of_sdxl_run_on_a_tiny_one_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command is called in this process, which saves the time of importing the libraries."""
    place = full_size.Place("tiny-sdxl", tmp_path, full_size.PIXELS["tiny-sdxl"])

    def call(
        words: list[str], place: full_size.Place, settings: Mapping[str, str] = full_size.HEAPLESS
    ) -> dict[str, Any]:
        if words[1] == "-c":
            monkeypatch.setattr(sys, "argv", words[2:])
            capsys.readouterr()
            exec(words[2], {})
            text = capsys.readouterr().out
        else:
            result = CliRunner().invoke(app, words[len(full_size.COMMAND) :])
            assert result.exit_code == 0, result.output
            text = result.output
        return {"seconds": 0.0, "cpu_seconds": 0.0, "memory_mb": 1, "text": text}

    monkeypatch.setattr(full_size, "measure", call)
    left_out = ("profile", "dry run", "erase without")  # the steps of the bundled model test these
    names = [name for name in full_size.steps(place) if not name.startswith(left_out)]
    output = tmp_path / "full_size.json"
    full_size.run(place, output, names)
    content = json.loads(output.read_text())
    rows = {row["step"]: row for row in content["rows"]}
    assert list(rows) == names
    stored = load_file(Path(place.model) / "unet" / "diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    for job in full_size.SDXL_JOBS:
        assert len(rows[f"erase: {job}"]["step_seconds"]) == 2
    evaluation = json.loads((place.run(place.lora) / "evaluation.json").read_text())
    assert evaluation["judge"].startswith("imagenet-resnet18")
    assert [(row["group"], row["after"]["n"]) for row in evaluation["results"]] == [
        ("forget", 2),
        ("retain", 2),
    ]
    differences = rows["load in plain diffusers"]["differences"]
    assert differences["lora"] == 0
    assert differences["kohya"] <= 1
    assert differences["original"] > differences["kohya"]
    content["rows"][0]["beyond_gb"] = 14
    output.write_text(json.dumps(content))
    full_size.run(place, output, names)  # makes this row again
    assert [row["step"] for row in json.loads(output.read_text())["rows"]] == [
        *names[1:],
        names[0],
    ]
    before = output.read_text()
    full_size.run(place, output, names[:1])  # finished
    assert output.read_text() == before
    stored_rows = json.loads(before)
    stored_rows["rows"][-1]["seconds"] = -1
    output.write_text(json.dumps(stored_rows))
    full_size.run(place, output, names[:1], again=True)
    assert output.read_text() == before
    page = benchmarks.full_size_page(content)
    assert "## tiny-sdxl, 16 x 16" in page
    assert "| libraries alone | 0 | 0 | beyond 14 GB |" in page


def test_the_costs_of_a_phase_are_its_operators_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, image = torch.nn.Conv2d(8, 64, 3), torch.randn(4, 8, 64, 64)

    def step(size: int) -> torch.Tensor:
        matrix = torch.randn(size, size)
        return torch.nn.functional.silu(layer(image)).sum() + (matrix @ matrix).sum()

    owner = SimpleNamespace(step=step)
    monkeypatch.setattr(profile_phases, "PHASES", {"a step": (owner, "step")})
    with profile_phases.watched() as phases:
        values = [owner.step(16), owner.step(400)]
    assert owner.step is step
    assert all(torch.isfinite(value) for value in values)
    row = phases["a step"]
    assert row["calls"] == 2
    assert {"convolutions", "matrix products", "activation functions"} <= set(row["costs"])
    assert 0 < sum(row["costs"].values()) <= row["seconds"] + 0.001
    assert list(row["costs"].values()) == sorted(row["costs"].values(), reverse=True)
    table = profile_phases.lines({"a step": {**row, "costs": {"a": 3.0, "b": 1.0, "others": 0.0}}})
    assert table[-1].endswith("| a 75, b 25, others 0 |")


def test_the_seconds_of_a_phase_are_without_the_start_and_the_end_of_the_profiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(profile_phases.profile):
        """The end of the profiler takes seconds for a phase with many operators."""

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            time.sleep(1)

    owner = SimpleNamespace(step=lambda: torch.ones(2).sum())
    monkeypatch.setattr(profile_phases, "PHASES", {"a step": (owner, "step")})
    monkeypatch.setattr(profile_phases, "profile", Slow)
    with profile_phases.watched() as phases:
        owner.step()
    assert 0 <= phases["a step"]["seconds"] < 0.9


def test_a_kernel_of_a_gpu_counts_once() -> None:
    """The profiler lists it twice: within its operator, and as an event of the GPU."""
    operator = FunctionEvent(0, "aten::mm", 0, 0, 10, use_device="cuda", stack=[])
    operator.append_kernel("sgemm_128x64", 0, 8)
    kernel = FunctionEvent(
        1, "sgemm_128x64", 0, 2, 10, use_device="cuda", stack=[], device_type=DeviceType.CUDA
    )
    recorded = EventList([operator, kernel], use_device="cuda")
    recorded._build_tree()
    events = recorded.key_averages()
    assert [event.self_device_time_total for event in events] == [8, 8]
    assert profile_phases.costs(events, gpu=True) == {"matrix products": 8e-6}


def test_help_and_missing_words_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, code in ((["--help"], 0), ([], 2), (["phases.json"], 2)):
        with pytest.raises(SystemExit) as end:
            profile_phases.main(words)
        assert end.value.code == code
    assert "OUTPUT.json" in capsys.readouterr().out
    monkeypatch.setattr(lora_sizes, "PAGE", tmp_path / "lora.md")
    monkeypatch.setattr(sys, "argv", ["lora_sizes", "--help"])
    with pytest.raises(SystemExit) as end:
        lora_sizes.main()
    assert end.value.code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_every_step_runs_on_the_bundled_model(tmp_path: Path) -> None:
    output, place = tmp_path / "full_size.json", full_size.Place("tiny", tmp_path / "work", 64)
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
    assert "| erase: default LoRA |" in page
    profiles = [row["phases"] for row in content["rows"] if "phases" in row]
    assert len(profiles) == len(place.jobs_without_preset) == 4
    assert set(profiles[0]) == set(profile_phases.PHASES)
    assert all("training step" in one for one in profiles), "images may be in the cache"
    assert page.count("| training step |") == len(profiles)
    full_size.run(place, output, names)
    assert json.loads(output.read_text())["rows"] == content["rows"]
