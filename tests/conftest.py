"""Fixtures that all tests share: the bundled pipeline, a short recipe, a cache for the session."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from concept_eraser.utils.collector import collect_less_often
from tests import processes, small_model

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may depend on a download
# or on the weights, the tables and the account of this user
for _name in ("CONCEPT_ERASER_WEIGHTS", "CONCEPT_ERASER_DATA", "CONCEPT_ERASER_DEMO_AUTH"):
    os.environ.pop(_name, None)
# the workers share the cores: with more threads each they would wait for each other
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The C library keeps freed memory. A training step on the CPU is 6 % faster without page faults.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1073741824")
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "1073741824")
ROOT = Path(__file__).parent.parent
# The files that take longest, the longest first: a worker that begins one late keeps the other
# one waiting.
LONG_FILES = [
    "cli/test_cli",
    "campaigns/test_campaigns",
    "demo/test_browser",
    "evaluation/test_attacks",
    "training/test_offload",
    "docs/test_how_to",
    "docs/test_docs",
    "docs/test_tutorials",
    "training/test_resume",
    "exporting/test_output",
    "exporting/test_merge",
    "training/test_two_processes",
    "exporting/test_card_concepts",
    "cli/test_erase_concept",
    "examples/test_examples",
    "training/test_closure",
    "runs/test_dry_run",
    "training/test_memory",
    "training/test_trackers",
    "studies/test_labelled_studies",
    "studies/test_leaderboard",
    "docs/test_site",
    "test_trust",
    "training/test_fsdp",
    "training/test_engine",
    "runs/test_several_concepts",
    "runs/test_baselines",
]
HANG = processes.HANG
os.fsync = processes.skip_flush
collect_less_often()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first. The order within a file stays."""
    ranks = {f"tests/{name}.py": rank for rank, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.nodeid.split("::")[0], len(ranks)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # they import torch, which reads the variables above
    import torch

    from benchmarks import rehearsal_device
    from tests import shared_drawing, shared_tokenizers  # noqa: F401

    # with CUDA it would be in the way of the thread of that GPU
    if rehearsal_device.is_possible() and not torch.cuda.is_available():
        rehearsal_device.register()  # only the first backward pass of a process starts its thread
    shared_tokenizers.share(is_shared=not item.nodeid.startswith("tests/demo/"))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of generated images for this session.

    The workers and the processes that tests start share it.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # above the folders of the workers
    small_model.SESSION[:] = [folder]
    folder = folder / "cache"
    folder.mkdir(exist_ok=True)
    os.environ["CONCEPT_ERASER_CACHE"] = str(folder)
    return folder


@pytest.fixture
def tiny() -> Any:
    """The bundled pipeline, freshly loaded (tests may train it)."""
    from concept_eraser.models.loading import load

    return load("tiny-sd")


@pytest.fixture(scope="session")
def shared_tiny() -> Any:
    """The bundled pipeline for tests that only read it."""
    from concept_eraser.models.loading import load

    return load("tiny-sd")


@pytest.fixture(scope="session")
def shared_small() -> Any:
    """The model of the recipe `short`, for tests that only read it."""
    from concept_eraser.models.loading import load

    return load(small_model.small_sd())


@pytest.fixture(scope="session")
def tiny_fp32(shared_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled pipeline as a checkpoint in fp32, so that nothing is rounded when it is written.

    The bundled one is in fp16, and runs write pipelines in the precision of their checkpoint.
    """
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny_fp32"
    shared_tiny.pipeline.save_pretrained(folder)
    return folder


# changes of `short`: a classifier on labelled data
LABELLED = {
    "model": "classifier",
    "target": "classifier",
    "forget": {"data": "digits", "classes": [3], "loss": "relabel"},
    "retain": {"data": "rest"},
    "trainable": {"select": "all"},
}


def short(**changes: Any) -> dict[str, Any]:
    """A recipe that trains for a second: a small model, few images, few steps, few weights.

    Its weights are random. `model="tiny-sd"` is for tests that look at what a model generates.
    """
    recipe: dict[str, Any] = {
        "model": changes.get("model") or small_model.small_sd(),
        "forget": {"prompts": "tiny_star", "loss": "anchor", "anchor": {"shape": "circle"}, "n": 8},
        "retain": {"prompts": "tiny_rest", "n": 8},
        "method": {"name": "munba"},
        "trainable": {"select": "cross_attention"},
        "training": {"steps": 4, "batch_size": 2, "save_every": 2, "device": "cpu"},
        "generation": {"steps": 2, "batch_size": 8},
    }
    return with_values(recipe, changes)


def with_values(content: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set values of a nested mapping, in place: `a__b` is the key b in a."""
    for path, value in changes.items():
        place = content
        *parents, last = path.split("__")
        for name in parents:
            place = place[name]
        place[last] = value
    return content


@pytest.fixture
def no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the studies an empty scratch folder for their results: the tables go to `tables`."""
    from studies import result_tables

    monkeypatch.setattr(result_tables, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(result_tables, "NEW_RESULTS", tmp_path / "new_results")
    return tmp_path


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a process of its own, in a scratch folder or in `cwd`."""

    def run(*arguments: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return processes.run_command(*arguments, folder=cwd)

    return run


@pytest.fixture
def cold_cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a new interpreter, in a scratch folder or in `cwd`."""

    def run(*arguments: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return processes.run_cold_command(*arguments, folder=cwd)

    return run
