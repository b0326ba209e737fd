"""Whole runs on the bundled pipeline: equivalences, skipped steps, output folders, full disks."""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from diffusers import DDIMScheduler
from safetensors.torch import load_file

import concept_eraser
from concept_eraser import UserError
from concept_eraser.erasers.denoiser import Denoiser, steps_within
from concept_eraser.methods.base import Direction, Method
from concept_eraser.methods.checks import flat
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs.job import Job
from concept_eraser.training import log as logs
from concept_eraser.utils.progress import silent
from tests import processes
from tests.conftest import short
from tests.processes import run_command
from tests.small_model import small_sd


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> concept_eraser.Run:
    return concept_eraser.erase(short(), output=tmp_path_factory.mktemp("run") / "run")


def test_the_run_folder_describes_itself(run) -> None:
    names = {p.name for p in run.folder.iterdir()}
    assert names == {
        ".concept_eraser.json",
        "recipe.yaml",
        "environment.json",
        "log.jsonl",
        "weights.safetensors",
        "pipeline",
        "done.json",
        "conflict.png",
    }
    report = json.loads((run.folder / "done.json").read_text())
    assert report["steps"] == 4
    assert report["skipped_steps"] == 0
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["versions"]["torch"]
    rows = logs.read(run.folder / "log.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row.keys() >= {
            "losses",
            "norms",
            "cosine",
            "weights",
            "clamped",
            "degenerate",
            "seconds",
            "memory_mb",
        }
        contribution = [row["norms"][k] * row["weights"][k] for k in ("retain", "forget")]
        assert contribution[0] == pytest.approx(contribution[1], rel=1e-6), (
            "MUNBa: equal contribution"
        )


def test_only_the_selected_weights_changed(run, shared_small) -> None:
    before = shared_small.denoiser.state_dict()
    after = concept_eraser.load(run.folder).denoiser.state_dict()
    names = {name for name in before if not torch.equal(before[name], after[name])}
    assert names == set(weights(run.folder))
    assert all(".attn2." in name for name in names)
    for name, value in weights(run.folder).items():
        assert torch.equal(value, after[name])


def test_the_other_parts_are_untouched(run, shared_small) -> None:
    after = concept_eraser.load(run.folder)
    for part in ("vae", "text_encoder"):
        for name, value in shared_small.parts[part].state_dict().items():
            assert torch.equal(value, after.parts[part].state_dict()[name]), (part, name)


def test_same_seed_same_weights_other_seed_other_weights(run, tmp_path: Path) -> None:
    again = concept_eraser.erase(short(), output=tmp_path / "again")
    other = concept_eraser.erase(short(training__seed=1), output=tmp_path / "other")
    first = weights(run.folder)
    assert all(torch.equal(first[k], v) for k, v in weights(again.folder).items())
    assert not any(torch.equal(first[k], v) for k, v in weights(other.folder).items())


def test_two_micro_batches_of_one_are_one_of_two(run, tmp_path: Path) -> None:
    other = concept_eraser.erase(
        short(training__batch_size=1, training__micro_batches=2), output=tmp_path / "split"
    )
    for name, value in weights(other.folder).items():
        torch.testing.assert_close(value, weights(run.folder)[name], rtol=0, atol=2e-5)
    before = concept_eraser.load(small_sd()).denoiser.state_dict()
    change = max(float((v - before[k]).abs().max()) for k, v in weights(run.folder).items())
    assert change > 2e-4, "the tolerance is far below what training moves"


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_munba_does_not_notice_the_scale_of_a_loss(run, tmp_path: Path, scale: float) -> None:
    other = concept_eraser.erase(short(forget__scale=scale), output=tmp_path / "scaled")
    for name, value in weights(other.folder).items():
        torch.testing.assert_close(value, weights(run.folder)[name], rtol=0, atol=2e-5)


def test_the_plain_sum_does_notice(tmp_path: Path) -> None:
    one = concept_eraser.erase(short(method={"name": "weighted"}), output=tmp_path / "one")
    other = concept_eraser.erase(
        short(method={"name": "weighted"}, forget__scale=100.0), output=tmp_path / "other"
    )
    difference = max(
        float((v - weights(one.folder)[k]).abs().max()) for k, v in weights(other.folder).items()
    )
    assert difference > 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"name": "ngdiff"}, "forget__loss": "ascent"},
        {"method": {"name": "surgery", "rule": "pcgrad"}},
        {"method": {"name": "weighted", "retain": 0}, "forget__loss": "esd", "retain": None},
        {"forget__loss": "relabel"},
        {"forget__images": "free", "retain__images": "free", "retain__loss": "distill"},
        {"training__precision": "bf16", "training__optimizer": "sgd", "training__warmup": 2},
    ],
    ids=["ngdiff", "pcgrad", "esd", "relabel", "free", "bf16"],
)
def test_other_settings_run(changes: dict, tmp_path: Path) -> None:
    recipe = short(training__steps=2, **changes)
    result = concept_eraser.erase(
        {k: v for k, v in recipe.items() if v is not None}, output=tmp_path / "run"
    )
    assert all(torch.isfinite(v).all() for v in weights(result.folder).values())
    assert [row["step"] for row in logs.read(result.folder / "log.jsonl")] == [1, 2]


def test_images_from_a_folder(tmp_path: Path) -> None:
    import numpy as np
    from PIL import Image

    from concept_eraser.tiny import painter

    folder = tmp_path / "images"
    folder.mkdir()
    _scenes, images = painter.paint_batch(6, np.random.default_rng(0))
    for i, image in enumerate(images):
        Image.fromarray(image).resize((96, 80)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"a red star number {i}")
    recipe = short(
        forget={
            "prompts": ["a red star"],
            "loss": "anchor",
            "anchor": "a red circle",
            "images": str(folder),
        },
        training__steps=1,
    )
    assert concept_eraser.erase(recipe, output=tmp_path / "run").seconds > 0
    (folder / "0.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match="no readable image"):
        concept_eraser.erase(recipe, output=tmp_path / "run2")


def test_nan_losses_are_skipped_counted_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Denoiser.loss
    calls = {"n": 0}

    def sometimes(self, objective, draw):
        calls["n"] += 1
        return original(self, objective, draw) * (float("nan") if calls["n"] in (3, 4) else 1.0)

    monkeypatch.setattr(Denoiser, "loss", sometimes)
    run = concept_eraser.erase(short(), output=tmp_path / "run")
    assert json.loads((run.folder / "done.json").read_text())["skipped_steps"] == 1
    rows = logs.read(run.folder / "log.jsonl")
    assert [row.get("skipped") for row in rows] == [None, 1, None, None]
    assert all(torch.isfinite(v).all() for v in weights(run.folder).values())

    calls["n"] = 0
    monkeypatch.setattr(
        Denoiser,
        "loss",
        lambda self, objective, draw: (
            original(self, objective, draw)
            * (float("nan") if (calls.__setitem__("n", calls["n"] + 1) or calls["n"]) > 6 else 1.0)
        ),
    )
    with pytest.raises(
        UserError,
        match=r"not finite in 10 steps in a row \(steps 4-13\).*last good state.*lower training.lr",
    ):
        concept_eraser.erase(short(training__steps=30), output=tmp_path / "hopeless")
    state = torch.load(tmp_path / "hopeless" / "state.ckpt", weights_only=True)
    assert state["step"] == 13
    assert all(torch.isfinite(v).all() for v in state["params"].values())
    assert not (tmp_path / "hopeless" / "done.json").exists()


def test_folders_that_hold_something_else(run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds another run .differs in training\.lr"):
        concept_eraser.erase(short(training__lr=1e-3), output=run.folder)
    (tmp_path / "photo.jpg").write_text("mine")
    with pytest.raises(UserError, match="is not empty and concept_eraser did not make it"):
        concept_eraser.erase(short(), output=tmp_path)
    assert (tmp_path / "photo.jpg").read_text() == "mine"
    assert concept_eraser.erase(short(), output=run.folder).seconds == run.seconds, (
        "a finished run is not repeated"
    )


def test_overwrite_replaces_a_run(tmp_path: Path) -> None:
    concept_eraser.erase(short(training__steps=1), output=tmp_path / "run")
    old = concept_eraser.export(tmp_path / "run", "tensors").path
    concept_eraser.erase(short(training__steps=2), output=tmp_path / "run", overwrite=True)
    assert not old.exists(), "it was the old run's"
    assert len(logs.read(tmp_path / "run" / "log.jsonl")) == 2


def test_learning_rates() -> None:
    from concept_eraser.training.engine import Schedule

    rates = [Schedule(4, 1, lr=1.0, warmup=2, decay="linear").lr_at(step) for step in range(4)]
    assert rates == pytest.approx([0.5, 0.75, 0.5, 0.25])
    assert {Schedule(4, 1, lr=1.0).lr_at(step) for step in range(4)} == {1.0}


def test_an_absent_device_is_named(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(
        UserError, match=r"training\.device is cuda, which this machine does not have; found: cpu"
    ):
        concept_eraser.erase(short(training__device="cuda"), output=tmp_path / "run")


def test_a_pipeline_in_memory(tiny, tmp_path: Path) -> None:
    """The object is changed in place, and the recipe records that it was an object in memory."""
    before = {k: v.clone() for k, v in tiny.denoiser.state_dict().items()}
    recipe = short(training__steps=1)
    del recipe["model"]
    run = concept_eraser.erase(**recipe, model=tiny.pipeline, output=tmp_path / "run")
    assert run.recipe.model == "a StableDiffusionPipeline in memory"
    assert any(not torch.equal(v, before[k]) for k, v in tiny.pipeline.unet.state_dict().items())


def test_a_run_is_measured_with_the_suite_of_its_forget_set() -> None:
    from concept_eraser.runs import suite_matching

    assert suite_matching.suite_of("tiny-sd") == "tiny_star"
    with pytest.raises(UserError, match=r"nowhere is no run folder, .* give a suite with --suite"):
        suite_matching.suite_of("nowhere")


def test_overlapping_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="in both the forget set"):
        concept_eraser.erase(short(retain__prompts="tiny_star"), output=tmp_path / "run")


def test_a_full_disk_is_one_clear_line_and_leaves_the_old_state(tmp_path: Path) -> None:
    """The operating system's limit of the file size, which the state exceeds."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(short(trainable__select="all", training__steps=4)))
    folder = tmp_path / "run"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))

    code = (
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from "
        "concept_eraser.cli.main import main; main()"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, "erase", str(recipe), "-o", str(folder), "-q"],
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    assert process.returncode == 2, process.stderr
    assert "the disk is full or a size limit is reached" in process.stderr
    assert f"continue with: concept-eraser erase {folder}/recipe.yaml" in process.stderr
    assert "Traceback" not in process.stderr
    assert not list(folder.glob(".*partial")), "nothing half-written"
    assert not (folder / "state.ckpt").exists()
    again = run_command("erase", str(recipe), "-o", str(folder), "-q", folder=tmp_path)
    assert again.returncode == 0, again.stderr


def test_two_processes_overwrite_one_run(tmp_path: Path) -> None:
    """Two ranks over a finished run: one of them claims the folder, and the log is whole."""
    import yaml

    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short()))
    concept_eraser.erase(short(training__steps=2), output=tmp_path / "run")
    command = ["erase", "recipe.yaml", "-q", "-o", "run", "--overwrite"]
    processes.Ranks(*command, folder=tmp_path).wait()
    assert [row["step"] for row in logs.read(tmp_path / "run" / "log.jsonl")] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "done.json").is_file()


@dataclass(frozen=True)
class HoldsTwoSteps(Method):
    """The retain gradient, and no step at the steps 1 and 2. It records the parameters it sees."""

    title: ClassVar[str] = "a method of a test"
    source: ClassVar[str] = "none"
    _state: dict = field(default_factory=dict, init=False, repr=False, compare=False)
    _seen: list = field(default_factory=list, init=False, repr=False, compare=False)

    def direction(self, closure: Any) -> Direction:
        self._seen.append(flat(closure.params).detach().clone())
        return Direction(closure.grad("retain"), hold=closure.step in (1, 2))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_held_step_moves_nothing(tiny, tmp_path: Path, optimizer: str) -> None:
    """Neither momentum nor weight decay moves a weight, and the step does not count as skipped."""
    content = short(
        training__steps=5,
        training__optimizer=optimizer,
        training__weight_decay=0.1,
    )
    method = HoldsTwoSteps()
    job = Job(recipes.load(content), tiny, tmp_path, silent)
    engine = job.train(method, resume=False)
    seen = method._seen
    assert [torch.equal(a, b) for a, b in pairwise(seen)] == [
        False,
        True,
        True,
        False,
    ]
    assert engine.skipped == 0


def test_a_factor_beyond_fp32_is_a_skipped_step(tmp_path: Path) -> None:
    """A diverging UNO was an error of PyTorch: the value cannot be converted without overflow."""
    content = short(
        method={"name": "uno", "strength": 1e39, "hvp": "difference"},
        forget__loss="data",
        training__steps=2,
    )
    with pytest.raises(UserError, match="all 2 steps were skipped"):
        concept_eraser.erase(content, output=tmp_path / "run")
    assert [row["skipped"] for row in logs.read(tmp_path / "run" / "log.jsonl")] == [1, 1]


@pytest.mark.parametrize("steps", [10, 20, 50])
def test_free_steps_end_within_the_bounds_of_the_time_steps(steps: int) -> None:
    """The sampler's time steps are 1, 1 + 1000 / steps, ... A bound is no float on the way."""
    scheduler = DDIMScheduler(steps_offset=1)
    scheduler.set_timesteps(steps)
    times = scheduler.timesteps.tolist()
    bounds = range(0, 1001, 1000 // steps)
    for low, high in itertools.combinations(bounds, 2):
        expected = [stop for stop, t in enumerate(times) if low < t <= high]
        assert list(steps_within((low, high), 1000, steps=steps)) == expected
    assert list(steps_within((990, 995), 1000, steps=steps)) == [0]
