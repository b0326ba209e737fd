"""Every family, method, loss, target, preset, export, metric, judge and attack on the device.

Each runs two steps, or a few images. A tensor on the wrong device raises an error. Most are marked
`slow`. The tables of options are complete: a test compares them with the registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import concept_eraser
from benchmarks import rehearsal_device
from benchmarks.device_counts import Counts
from benchmarks.rehearsal import PAGE
from benchmarks.rehearsal_device import count
from concept_eraser import registry
from concept_eraser.api import Run
from concept_eraser.cli.main import app
from concept_eraser.exporting import formats
from concept_eraser.losses import denoiser
from concept_eraser.recipes.memory_presets import PRESETS
from tests import families, golden
from tests.conftest import short
from tests.evaluation.conftest import clip_folder  # noqa: F401 - a fixture
from tests.evaluation.test_distances import evidence, weights  # noqa: F401 - a fixture
from tests.evaluation.test_network_judges import (
    artists,  # noqa: F401 - fixtures
    faces,  # noqa: F401
    imagenet_file,  # noqa: F401
    resnet,  # noqa: F401
)
from tests.rehearsal.jobs import on_digits, two_steps

slow = pytest.mark.slow
DENOISER_RUNS = {
    **{name: golden.METHODS[name] for name in golden.METHODS},
    **golden.VARIANTS,
    **{f"option {name}": one for name, one in golden.OPTIONS.items()},
    **{f"target {name}": one for name, one in golden.TARGETS.items()},
}
# How often the host waits in the second step of a run, or the third of STEREO. The page
# benchmarks/README.md has the methods. The losses and options here are those of MUNBa.
_WAITS: dict[int, tuple[str, ...]] = {
    1: (
        *("munba", "munba-printed", "pcgrad", "sa", "surgery", "torchjd", "torchjd MGDA"),
        *("ngdiff", "weighted", "finetune", "ga", "a-d"),
        *(f"option loss {name}" for name in ("ascent", "data", "distill", "esd", "npo")),
        *(f"option loss {name}" for name in ("relabel", "resteer", "slider", "balance")),
        *("option loss esd to the anchor", "option noised anchor", "option teacher current"),
        "option empty prompts",
    ),
    2: ("erasediff", "minmax_ngd", "scrub", "uno-s", "s-hat", "h"),
    3: ("adversarial", "meta_unlearning", "stereo"),
    4: ("race",),
    5: ("bome", "forum", "uno exact"),
    6: ("resalign",),
    7: ("moml",),
    8: ("moco",),
    13: ("uno",),
    16: ("uno-hat",),
}
WAITS = {name: number for number, names in _WAITS.items() for name in names}
# Attacks that the golden set does not have, each with the smallest budget.
ATTACKS: dict[str, dict[str, Any]] = {
    **golden.ATTACKS,
    "classifier_alone": {"scales": "10", "images": 8, "training_steps": 2, "steps": 2},
    "classifier_guidance": {"scales": "10", "images": 8, "training_steps": 2, "steps": 2},
    "concept_inversion": {"steps": 1, "every": 1, "batch": 2},
    "inpainting": {"shares": "0.5", "steps": 2},
    "mma_diffusion": {"tokens": 3, "iterations": 1, "every": 1, "candidates": 4},
    "noise_gradient": {"iterations": 1, "every": 1, "steps": 2},
    "noise_search": {"rounds": 1, "every": 1, "steps": 2},
    "other_sampling": {"guidances": "1", "steps": "2", "samplers": "DDPMScheduler"},
    "paraphrase": {"prompts": "tiny_star_synonyms", "tries": 1},
    "seed_search": {"tries": 1},
    "sneaky_prompt": {"words": 2, "queries": 2, "pool": 20},
}
METRICS = ("accuracy", "clip_score", "concept_rate", "fid", "unlearn_canvas")
# what computes outside of torch, or needs a file that is not in the package
OUTSIDE = {
    "metric nudenet": "its detector runs in onnxruntime",
    "judge nudenet": "its detector runs in onnxruntime",
    "feature inception": "its network is a TorchScript file that is not in the package",
    "feature torchmetrics64": "its weights are not in the package",
}
JUDGES: dict[str, Callable[[Any], dict[str, Any]]] = {  # -> options from pytest's request
    "tiny": lambda request: {},
    "tiny2": lambda request: {},
    "clip": lambda request: {
        "labels": ["a star", "a circle"],
        "model": f"local-dir:{request.getfixturevalue('clip_folder')}",
    },
    "imagenet": lambda request: {
        "architecture": "resnet18",
        "version": "IMAGENET1K_V1",
        "weights": str(request.getfixturevalue("imagenet_file")),
    },
    "image_classifier": lambda request: {"folder": str(request.getfixturevalue("artists"))},
    "face": lambda request: _face(request.getfixturevalue("faces")),
    "q16": lambda request: _q16(
        request.getfixturevalue("clip_folder"), request.getfixturevalue("tmp_path")
    ),
}


def _face(folder: Path) -> dict[str, Any]:
    from concept_eraser.evaluation.judges import face

    face.write_references(folder, folder.parent / "people", crop=False)
    return {"folder": str(folder), "crop": False}


def _q16(folder: Path, place: Path) -> dict[str, Any]:
    from safetensors.torch import save_file

    save_file({"prompts": torch.eye(2, 16)}, place / "q16.safetensors")
    return {"prompts": str(place / "q16.safetensors"), "model": f"local-dir:{folder}"}


def test_the_tables_are_complete() -> None:
    methods = {*golden.METHODS, *golden.EDITS, *golden.CLASSIFIER_METHODS}
    assert set(registry.builtin("method")) <= methods
    assert set(registry.builtin("attack")) == set(ATTACKS)
    measured = {*(f"metric {name}" for name in METRICS), "metric lpips"}
    measured |= {f"judge {name}" for name in JUDGES} | {"feature judge", "feature clip"}
    kinds = ("metric", "judge", "feature")
    every = {f"{kind} {name}" for kind in kinds for name in registry.builtin(kind)}
    assert every == measured | set(OUTSIDE)
    used = {
        section["loss"]
        for change in DENOISER_RUNS.values()
        for section in (change.get("forget"), change.get("retain"))
        if isinstance(section, dict) and "loss" in section
    }
    histogram = {"histogram"}  # the section of that name
    assert set(denoiser.LOSSES) == used | {"anchor", "distill"} | histogram


@slow
@pytest.mark.parametrize("name", DENOISER_RUNS)
def test_methods_losses_and_options(
    name: str, device: torch.device, steps: list[Counts], tmp_path: Path
) -> None:
    recipe = two_steps(golden.DENOISER, DENOISER_RUNS[name])
    if name == "stereo":  # its search takes the first two
        recipe["training"]["steps"] = 3
    run = concept_eraser.erase(recipe, output=tmp_path / "run")
    assert run.folder.is_dir()
    assert len(steps) == (3 if name == "stereo" else 2)
    assert all(step.operators for step in steps)
    if device.type == rehearsal_device.NAME and name in WAITS:
        assert steps[-1].syncs == WAITS[name]


def test_the_page_has_the_waits_of_each_method() -> None:
    rows = re.findall(r"^\| (\d+) \| ([a-z, `_A-Z-]+) \|$", PAGE.read_text(), re.MULTILINE)
    shown = {name: int(number) for number, names in rows for name in re.findall("`(.+?)`", names)}
    names = {*golden.METHODS, *golden.VARIANTS}
    assert shown == {name: number for name, number in WAITS.items() if name in names}
    assert shown.keys() == names


@slow
@pytest.mark.parametrize("name", golden.EDITS)
def test_edits_of_a_denoiser(name: str, device: torch.device, tmp_path: Path) -> None:
    recipe = two_steps(golden.EDIT, {"method": golden.EDITS[name]})
    with count() as counts:
        concept_eraser.erase(recipe, output=tmp_path / "run")
    assert counts.operators


@slow
@pytest.mark.parametrize("name", golden.CLASSIFIER_METHODS)
def test_methods_of_a_classifier(name: str, device: torch.device, tmp_path: Path) -> None:
    with count() as counts:
        on_digits(golden.CLASSIFIER_METHODS[name], tmp_path)
    assert counts.operators


@slow
@pytest.mark.parametrize("loss", golden.LABELLED_LOSSES)
def test_losses_of_a_classifier(loss: str, steps: list[Counts], tmp_path: Path) -> None:
    anchor = {"anchor": "8"} if loss == "anchor" else {}
    on_digits({"forget": {"loss": loss, **anchor}, "method": "munba"}, tmp_path)
    assert len(steps) == 2


@slow
@pytest.mark.parametrize("name", golden.LABELLED_TARGETS)
def test_targets_with_labels(name: str, device: torch.device, tmp_path: Path) -> None:
    """They are trained and measured on the device."""
    with count() as counts:
        run = concept_eraser.erase(
            two_steps(golden.LABELLED_TARGETS[name]), output=tmp_path / "run"
        )
    assert counts.operators
    with count() as counts:
        assert concept_eraser.evaluate(str(run.folder)).results
    assert counts.operators
    assert counts.bytes_to_device or device.type == "cuda"  # which does not count bytes


@slow
@pytest.mark.parametrize("selection", ["all", "cross_attention"])
@pytest.mark.parametrize("name", families.NAMES)
def test_families(
    name: str, selection: str, device: torch.device, steps: list[Counts], tmp_path: Path
) -> None:
    """Each is trained with and without images, reloaded, and generates images."""
    prompt, other = families.texts(name)
    is_free = selection != "all"
    if is_free and name in ("dit", "zimage"):
        selection = "self_attention"
    folder = families.build(name, tmp_path / "model")
    anchor = {} if is_free else {"anchor": other}
    images = {"images": "free"} if is_free else {}
    recipe = {
        "model": str(folder),
        "model_options": families.options(name),
        "forget": {
            "prompts": [prompt],
            "n": 2,
            "loss": "esd" if is_free else "anchor",
            **anchor,
            **images,
        },
        "retain": {"prompts": [other], "n": 2, "loss": "distill" if is_free else "data"},
        "method": "munba",
        "trainable": selection,
        "training": {"steps": 2, "batch_size": 2, "lr": 1e-2},
        "generation": {"steps": 2, "guidance": 2.0},
    }
    run = concept_eraser.erase(recipe, output=tmp_path / "run")
    assert len(steps) == 2
    model = run.load()
    model.to(device)
    assert model.sample([prompt], seeds=[0], steps=2, guidance=2.0).device.type == "cpu"


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name == "8gb" else slow) for name in PRESETS]
)
def test_memory_presets(preset: str, steps: list[Counts], tmp_path: Path) -> None:
    """Parts of the model come to the device and leave it."""
    recipe = short(training={"steps": 2, "batch_size": 2}, memory=preset)
    concept_eraser.erase(recipe, output=tmp_path / "run")
    assert len(steps) == 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a LoRA, trained on the CPU."""
    recipe = short(training={"steps": 2, "batch_size": 2, "device": "cpu"}, trainable={"lora": 2})
    return concept_eraser.erase(recipe, output=tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture(scope="module")
def finished_zimage(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same for Z-Image."""
    prompt, other = families.texts("zimage")
    recipe = {
        "model": str(families.build("zimage", tmp_path_factory.mktemp("zimage") / "model")),
        "model_options": families.options("zimage"),
        "forget": {"prompts": [prompt], "n": 2, "loss": "esd", "images": "free"},
        "retain": {"prompts": [other], "n": 2, "loss": "distill", "images": "free"},
        "method": "munba",
        "trainable": {"select": "self_attention", "lora": 2},
        "training": {"steps": 2, "batch_size": 2, "device": "cpu"},
        "generation": {"steps": 2},
    }
    return concept_eraser.erase(recipe, output=tmp_path_factory.mktemp("finished") / "run")


# Stable Diffusion has no names of musubi-tuner and AI Toolkit
OF_ZIMAGE = ("musubi", "comfyui")


def _export(run: Run, to: str, folder: Path) -> None:
    path = folder / ("result" if to == "diffusers" else "result.safetensors")
    assert formats.export(run.folder, to, output=path)
    assert path.exists()


@slow
@pytest.mark.parametrize("to", [to for to in formats.FORMATS if to not in OF_ZIMAGE])
def test_exports(to: str, device: torch.device, finished: Run, tmp_path: Path) -> None:
    _export(finished, to, tmp_path)


@slow
@pytest.mark.parametrize("to", OF_ZIMAGE)
def test_exports_of_zimage(
    to: str, device: torch.device, finished_zimage: Run, tmp_path: Path
) -> None:
    _export(finished_zimage, to, tmp_path)


@slow
def test_metrics(device: torch.device, finished: Run, tmp_path: Path) -> None:
    suite = golden.merged(golden.SUITE, {"metrics": list(METRICS)})
    with count() as counts:
        evaluation = concept_eraser.evaluate(str(finished.folder), suite, output=tmp_path)
    assert counts.operators
    measured = {result.metric.split("_")[0] for result in evaluation.results}
    assert {"concept", "accuracy", "clip", "kid"} <= measured
    page = concept_eraser.report(evaluation, tmp_path / "report.html", run=finished.folder)
    assert page.exists()


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on the bundled model, trained on the CPU. Its original generates the concept."""
    recipe = golden.merged(golden.DENOISER, {"training": {"steps": 2, "lr": 1e-6}})
    return concept_eraser.erase(recipe, output=tmp_path_factory.mktemp("victim") / "run")


@slow
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(name: str, device: torch.device, victim: Run, tmp_path: Path) -> None:
    with count() as counts:
        concept_eraser.attack(
            str(victim.folder),
            name,
            golden.SUITE,
            n=3,
            batch=2,
            hide="shape",
            options=ATTACKS[name],
            output=tmp_path / "attack",
        )
    assert counts.operators


@slow
@pytest.mark.parametrize("name", JUDGES)
def test_judges(name: str, request: pytest.FixtureRequest, device: torch.device) -> None:
    judge = registry.build("judge", name, JUDGES[name](request))
    images = torch.zeros(3, 64, 64, 3, dtype=torch.uint8)
    images[1:, ..., 0] = 200
    with count() as counts:
        assert all(len(labels) == 3 for labels in judge.classify(images).values())
        if name != "face":  # whose features are of faces only
            assert judge.features(images).shape[0] == 3
    assert counts.operators
    attribute, values = next(iter(judge.classes.items()))
    if name not in ("tiny2", "face", "clip", "q16"):
        pixels = torch.zeros(2, 3, 64, 64, device=device)
        assert judge.probability(pixels, attribute, values[0]).device == device


@slow
def test_features_of_clip(clip_folder: Path, device: torch.device) -> None:  # noqa: F811
    features = registry.build("feature", "clip", {"model": f"local-dir:{clip_folder}"})
    images: Tensor = torch.zeros(3, 64, 64, 3, dtype=torch.uint8)
    images[1:, ..., 0] = 200
    with count() as counts:
        assert features.extract(images).shape == (3, 16)
    assert counts.operators


@slow
def test_lpips(weights: Path, device: torch.device) -> None:  # noqa: F811
    from torchvision.models import squeezenet1_1

    hub = Path(torch.hub.get_dir()) / "checkpoints"
    hub.mkdir(parents=True)
    torch.save(squeezenet1_1().state_dict(), hub / "squeezenet1_1-b8a52dc0.pth")
    one = torch.randint(0, 255, (3, 64, 64, 3), dtype=torch.uint8)
    with count() as counts:
        (result,) = registry.build("metric", "lpips", {"net": "squeeze"}).measure(
            evidence(one, one.flip(0))
        )
    assert counts.operators
    assert result.after.value > 0


@slow
def test_the_command_for_one_concept(
    steps: list[Counts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It erases, evaluates, exports and writes a report, as the demo's job does."""
    monkeypatch.chdir(tmp_path)
    settings = ["training.steps=2", "training.batch_size=2", "forget.n=4", "retain.n=4"]
    settings += ["generation.steps=2", "trainable.lora.rank=2"]
    result = CliRunner().invoke(app, ["erase", "star", "--images", "4", *settings, "-q"])
    assert result.exit_code == 0, result.output
    assert len(steps) == 2
    assert (tmp_path / "runs" / "star" / "report.html").is_file()
