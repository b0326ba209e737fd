"""The studies on labelled data run end to end at a small size, keep earlier rows, and render."""

from __future__ import annotations

import argparse
import base64
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from scipy.io import savemat
from torchvision.datasets import SVHN

from studies import classifiers, grids
from tests.conftest import ROOT


@pytest.fixture
def small(tmp_path: Path) -> Path:
    study = yaml.safe_load((ROOT / "studies" / "configs" / "classification.yaml").read_text())
    study["training"]["epochs"], study["history"] = 2, 5
    study["select"]["seeds"], study["seeds"] = [100], [0, 1]
    for method in study["methods"].values():
        method["steps"] = min(method.get("steps", 5), 5)
        method["grid"] = grids.points(method.get("grid", [{}]))[-2:]
    study["methods"]["rewind"]["method"]["k"] = 5
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


def test_classify(small: Path, no_results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from studies import classifiers
    from studies.rendering import labelled
    from studies.result_tables import Results

    describe = classifiers.provenance.describe
    for commit, methods in (("aaaa", "munba,rewind,shs,scrub_r"), ("bbbb", "iu,be")):
        monkeypatch.setattr(
            classifiers.provenance,
            "describe",
            lambda commit=commit: {**describe(), "commit": commit},
        )
        monkeypatch.setattr(
            sys, "argv", ["classify", str(small), "--tasks", "class", "--methods", methods]
        )
        classifiers.main()
    results = Results("toy")["class"]
    assert [row["method"] for row in results["rows"]] == [
        "original",
        "retrain",
        "be",
        "shs",
        "scrub_r",
        "munba",
        "iu",
        "rewind",
    ]
    # the commit of its own run
    assert {row["method"]: row["environment"]["commit"] for row in results["rows"]}[
        "munba"
    ] == "aaaa"
    assert {row["method"]: row["environment"]["commit"] for row in results["rows"]}["be"] == "bbbb"
    retrain_runs = results["rows"][1]["runs"]
    # a class without training examples is never predicted
    assert all(run["gap"] == 0 and run["forget"] < 5 for run in retrain_runs)
    assert results["n"] == {"forget": 146, "retain": 1291, "test": 164}
    Results("classification")["class"] = results
    page = labelled.classification()
    assert "| Retrain | 0.0 ± 0.0 |" in page
    assert "Commits aaaa, bbbb; torch" in page
    # every grid here has two settings, so each choice lies at an edge, and the page says so
    assert re.search(r"\| MUNBa \|.*\| 0\.[13][▲▼] \| 2 \|", page)
    assert page.count(grids.NOTE) == 1
    assert "Settings chosen from an earlier grid than that of the configuration: all.\n" in page


def svhn(folder: Path, device: str) -> dict[str, Any]:
    """Return the shipped study of SVHN, for twenty images and a narrow network."""
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        pixels = generator.integers(0, 256, (32, 32, 3, 20), dtype=np.uint8)
        digits = [[1 + i % 10] for i in range(20)]  # the file says 10 for the digit 0
        savemat(folder / f"{split}_32x32.mat", {"X": pixels, "y": np.array(digits)})
    configuration = ROOT / "studies" / "configs" / "classification_svhn.yaml"
    study: dict[str, Any] = yaml.safe_load(configuration.read_text())
    assert study["device"] == "cuda"
    study |= {"options": {"root": str(folder)}, "device": device, "seeds": [0]}
    study["select"]["seeds"] = [100, 101]  # a membership attack needs two shadow models
    study["model"]["options"]["width"], study["training"]["epochs"] = 2, 1
    for method in study["methods"].values():
        method["steps"] = 1
        method["grid"] = grids.points(method["grid"])[:1]
    return study


def test_the_study_of_svhn_gives_the_whole_table(
    tmp_path: Path, no_results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from studies.rendering import labelled
    from studies.result_tables import Results

    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)
    study = svhn(tmp_path, "cpu")
    path = tmp_path / "classification_svhn.yaml"
    path.write_text(yaml.safe_dump(study))
    monkeypatch.setattr(sys, "argv", ["classify", str(path), "--tasks", "class"])
    classifiers.main()
    result = Results("classification_svhn")["class"]
    assert result["failed"] == {}
    assert [row["method"] for row in result["rows"][2:]] == sorted(study["methods"])
    assert result["n"] == {"forget": 2, "retain": 18, "test": 10}
    assert result["settings"]["device"] == "cpu"
    page = labelled.classification("classification_svhn", "SVHN")
    assert "## one class (0)" in page
    assert "| MUNBa |" in page


def test_the_methods_of_a_study_run_on_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)
    devices: list[str] = []

    def erase(**settings: Any) -> Any:
        devices.append(settings["training"]["device"])
        return SimpleNamespace(seconds=1.0)

    monkeypatch.setattr(classifiers.api, "erase", erase)
    for device in ("cuda", None):
        study = svhn(tmp_path, "cuda")
        study = study if device else {k: v for k, v in study.items() if k != "device"}
        bench = classifiers.Bench(study, study["tasks"]["class"], tmp_path)
        net = torch.nn.Linear(1, 1)
        bench.erase(study["methods"]["munba"], {}, classifiers.World(0, net, net, {}))
    assert devices == ["cuda", "cpu"]


def test_a_study_of_images_and_names_it_does_not_have(
    no_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The ResNet's study at a small size: options of the data, another plan of training."""
    from studies import classifiers
    from studies.result_tables import Results

    study = yaml.safe_load(
        (ROOT / "studies" / "configs" / "classification_painted.yaml").read_text()
    )
    study |= {
        "options": {"n": 60, "size": 8},
        "model": {"architecture": "resnet18", "options": {"width": 2}},
        "seeds": [0, 1],
    }
    study["training"]["epochs"] = 1
    study["methods"] = {"be": {**study["methods"]["be"], "steps": 2, "grid": [{}]}}
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(study))
    monkeypatch.setattr(sys, "argv", ["classify", str(path), "--tasks", "random_10"])
    classifiers.main()
    assert Results("toy")["random_10"]["settings"]["options"] == {"n": 60, "size": 8}
    monkeypatch.setattr(sys, "argv", ["classify", str(path), "--methods", "bee"])
    with pytest.raises(SystemExit):
        classifiers.main()
    assert "--methods: the study has no 'bee'; it has be" in capsys.readouterr().err


def test_a_call_for_some_methods_leaves_the_others(
    no_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Also their failures. Rows of other settings are not put beside new ones."""
    from studies import tasks
    from studies.result_tables import Results

    study = {
        "tasks": {"one": {}},
        "seeds": [0, 1],
        "steps": 3,
        "methods": {name: {"label": name.upper()} for name in ("a", "b", "c")},
    }
    path = tmp_path / "toy.yaml"
    fails = {"b", "c"}

    def run_task(study: Any, name: str, methods: list[str], work: Path) -> dict[str, Any]:
        ran.append(methods)
        return {
            "seeds": study["seeds"],
            "settings": {"steps": study["steps"]},
            "rows": [{"method": one} for one in ["original", *methods] if one not in fails],
            "failed": {one.upper(): "diverged" for one in methods if one in fails},
            "environment": {},
        }

    def call(methods: str, **changes: Any) -> tuple[list[str], dict[str, str]]:
        path.write_text(yaml.safe_dump({**study, **changes}))
        monkeypatch.setattr(sys, "argv", ["toy", str(path), "--methods", methods])
        tasks.main("", run_task)
        content = Results("toy")["one"]
        return [row["method"] for row in content["rows"]], content["failed"]

    ran: list[list[str]] = []
    assert call("") == (["original", "a"], {"B": "diverged", "C": "diverged"})
    assert call("a") == (["original", "a"], {"B": "diverged", "C": "diverged"})
    fails.remove("b")
    assert call("b") == (["original", "a", "b"], {"C": "diverged"})
    fails.add("a")
    assert call("a") == (["original", "b"], {"C": "diverged", "A": "diverged"})
    for changes, what in (({"steps": 4}, "steps"), ({"seeds": [0]}, "seeds")):
        count = len(ran)
        with pytest.raises(SystemExit):
            call("a", **changes)
        assert f"the stored rows of one have other settings ({what})" in capsys.readouterr().err
        assert len(ran) == count, "before anything is measured"
    fails.clear()
    assert call("", steps=4) == (["original", "a", "b", "c"], {})


def settings_of_erase(monkeypatch: pytest.MonkeyPatch, study: Any) -> list[dict[str, Any]]:
    """Record the training of each call of `erase`, which still runs."""
    trainings: list[dict[str, Any]] = []
    erase = study.api.erase

    def spy(**settings: Any) -> Any:
        run = erase(**settings)
        trainings.append(run.recipe.training.model_dump())
        return run

    monkeypatch.setattr(study.api, "erase", spy)
    return trainings


def optimiser_of(recipe: str) -> dict[str, Any]:
    """Return the optimiser of a shipped recipe."""
    training = yaml.safe_load((ROOT / "pipelines" / f"{recipe}.yaml").read_text())["training"]
    return {key: training[key] for key in ("optimizer", "momentum", "weight_decay", "clip")}


@pytest.mark.parametrize("name", ["classification", "classification_painted"])
def test_munba_with_its_codes_optimiser(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row has the optimiser of the recipe of Table 1. The row without it has none of that."""
    study = yaml.safe_load((ROOT / "studies" / "configs" / f"{name}.yaml").read_text())
    study["training"]["epochs"] = 1
    if name == "classification_painted":
        study["options"] = {"n": 60, "size": 8}
        study["model"]["options"] = {"width": 2}
    study.pop("history", None)
    bench = classifiers.Bench(study, study["tasks"]["random_10"], tmp_path)
    world = bench.world(0)
    trainings = settings_of_erase(monkeypatch, classifiers)
    results = []
    for method in ("munba_code", "munba"):
        spec = {**study["methods"][method], "steps": 3}
        results.append(bench.erase({**spec, "optimizer": "sgd"}, {"training.lr": 0.3}, world)[0])
    with_settings, without = trainings
    assert {key: with_settings[key] for key in optimiser_of("cifar10_class_munba")} == (
        optimiser_of("cifar10_class_munba")
    )
    assert (without["momentum"], without["weight_decay"], without["clip"]) == (0.0, 0.0, None)
    assert with_settings["lr"] == without["lr"] == 0.3
    one, two = (torch.cat([p.flatten() for p in module.parameters()]) for module in results)
    assert not torch.allclose(one, two)


def test_min_max_ngd_with_the_papers_optimiser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = yaml.safe_load((ROOT / "studies" / "configs" / "classification.yaml").read_text())
    study["training"]["epochs"] = 1
    study.pop("history")
    bench = classifiers.Bench(study, study["tasks"]["class"], tmp_path)
    trainings = settings_of_erase(monkeypatch, classifiers)
    spec = study["methods"]["minmax_paper"]
    bench.erase(spec, {"training.lr": 1e-3}, bench.world(0))
    assert {key: trainings[0][key] for key in ("momentum", "weight_decay", "decay")} == {
        "momentum": 0.9,
        "weight_decay": 0.1,
        "decay": "step",
    }
    # after four of six epochs
    assert trainings[0]["milestones"] == [round(4 / 6 * trainings[0]["steps"])]


def test_clip_has_a_row_with_its_codes_optimiser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from studies import clip

    study = yaml.safe_load((ROOT / "studies" / "configs" / "clip.yaml").read_text())
    study |= {"data": {"n": 40}, "steps": 2, "batch_size": 4}
    trainings = settings_of_erase(monkeypatch, clip)
    for method in ("munba_code", "munba"):
        clip.erase(
            study["methods"][method],
            study,
            classes=["star"],
            point={"training.lr": 0.01},
            seed=0,
            folder=tmp_path / method,
        )
    assert {key: trainings[0][key] for key in optimiser_of("pets_clip_munba")} == (
        optimiser_of("pets_clip_munba")
    )
    assert (trainings[1]["optimizer"], trainings[1]["momentum"]) == ("adam", 0.0)


def test_attack_table(
    no_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Two victims under two attacks at a small size; finished results are not computed again; the
    page renders.
    """
    from studies import attack_table
    from studies.rendering import attacks
    from tests.conftest import short

    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(short(training__steps=1)))
    spec = {"label": "one step", "recipe": str(tmp_path / "recipe.yaml")}
    study = {
        "suite": "tiny_star",
        "group": "direct",
        "n": 2,
        "seed": 0,
        "training_seeds": [0],
        "victims": {"a": spec, "b": {**spec, "set": {"training.seed": 1}}},
        "attacks": {"seed_search": {"tries": 1}, "relearning": {"steps": 1, "every": 1}},
    }
    path = tmp_path / "tiny_attacks.yaml"
    path.write_text(yaml.safe_dump(study))
    monkeypatch.setattr(sys, "argv", ["attack_table", str(path), "--work", str(tmp_path / "work")])
    attack_table.main()
    assert capsys.readouterr().out.count("under") == 4
    attack_table.main()
    assert capsys.readouterr().out == ""
    path.write_text(
        yaml.safe_dump({**study, "victims": {"a": {**spec, "set": {"training.lr": 1}}}})
    )
    with pytest.raises(SystemExit, match="tiny_attacks/a_relearning_seed0 has another recipe"):
        attack_table.main()
    page = attacks.page()
    assert (
        "| erased with | training seeds | pre-ASR % | relearning | seed_search | "
        "relearning: steps to half |"
    ) in page
    assert page.count("one step") == 2


def test_vae_unlearn_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from studies import vae

    monkeypatch.setattr(sys, "argv", ["vae_unlearn", "--algorithms", "uno"])
    with pytest.raises(SystemExit):
        vae.main()
    assert "unknown algorithm 'uno'; available: retain only, A" in capsys.readouterr().err


def test_one_run_of_each_algorithm_of_the_vae_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    from studies import vae as bench

    monkeypatch.setitem(
        bench.DATA, "digits", {**bench.DATA["digits"], "vae_epochs": 3, "judge_epochs": 3}
    )
    world = bench.make_world("digits", fid_samples=300)
    assert len(world.reference) == 300
    norms = [m for m in world.vae.modules() if isinstance(m, torch.nn.BatchNorm1d)]
    assert norms
    # the VAE was trained with its statistics
    assert all(int(norm.num_batches_tracked) > 0 for norm in norms)
    rates: dict[str, float] = {}
    erase = bench.api.erase

    def spy(**settings):  # type: ignore[no-untyped-def]
        rates[algorithm] = settings["training"]["lr"]
        return erase(**settings)

    monkeypatch.setattr(bench.api, "erase", spy)
    for algorithm in bench.ALGORITHMS:
        result = bench.unlearn(world, algorithm, seed=0, steps=2, with_fid=True)
        assert [row["step"] for row in result["measurements"]] == [0, 1, 2], algorithm
        assert result["fid"] > 0
        assert result["early_rate"] is None  # two steps only
        with Image.open(io.BytesIO(base64.b64decode(result["samples"]))) as sheet:
            assert sheet.size == (16 * 8, 8)
            assert np.asarray(sheet).std() > 0
        assert sum(result["class_rates"]) == pytest.approx(1)
        assert result["class_rates"][world.forgotten_class] == pytest.approx(result["concept_rate"])
    assert {name for name, rate in rates.items() if rate == 1e-5} == {"SA at 1e-5", "S at 1e-5"}
    assert {rates[name] for name in rates if "1e-5" not in name} == {1e-3}


def vae_result(class_rates: list[float] | None = None) -> dict[str, Any]:
    """Two runs of an algorithm as the benchmark stores them."""
    run = {
        "seed": 0,
        "steps": 3.0,
        "seconds": 0.1,
        "fid_at_bound": 40.0,
        "fid": 41.0,
        "concept_rate": 0.01,
        "per_step": 0.01,
        "measurements": [
            {"step": 0, "seconds": 0.0, "concept_rate": 0.2, "fid": 40.0},
            {"step": 7, "seconds": 6.0, "concept_rate": 0.01, "fid": 41.0},
        ],
    }
    runs = [{**run, "seed": seed} for seed in range(2)]
    if class_rates is not None:
        shifted = [*class_rates[1:], class_rates[0]]
        runs = [
            {**one, "class_rates": rates}
            for one, rates in zip(runs, (class_rates, shifted), strict=True)
        ]
    return {"runs": runs, "memory_mb": 2.0, "memory_before_mb": 1.0}


def vae_arguments(algorithms: list[str], **others: Any) -> argparse.Namespace:
    """The arguments of a call on digits, with two runs."""
    settings = {"data": "digits", "batchnorm": "train", "runs": 2, "fid_samples": 5000}
    return argparse.Namespace(algorithms=algorithms, **{**settings, **others})


def test_a_sheet_has_a_row_of_samples_for_each_model(no_results: Path) -> None:
    from studies.rendering import labelled
    from studies.rendering.figures import canvas

    file = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(file, format="PNG")
    samples = base64.b64encode(file.getvalue()).decode()
    result = vae_result()
    result["runs"][0]["samples"] = samples
    content = {"original": {"samples": samples}, "algorithms": {"S": result, "A": vae_result()}}
    assert list(labelled.sample_rows(content)) == ["original", "S"]
    figure = canvas(4, 2)
    labelled.draw_samples(figure, labelled.sample_rows(content))
    panels = figure.axes
    assert [axes.get_ylabel() for axes in panels] == ["original", "S"]
    assert panels[0].images[0].get_array().shape == (8, 8)
    del content["original"]["samples"], result["runs"][0]["samples"]
    assert labelled.sample_rows(content) == {}


def test_the_rate_after_five_steps_is_a_column() -> None:
    from studies.rendering.labelled import early_rate

    early = [{"early_rate": rate, "measurements": []} for rate in (0.1, 0.2)]
    assert early_rate(early) == "15.0 ± 7.1"
    assert early_rate([{"early_rate": None}, {"early_rate": None}]) == "-"
    stored = [{"measurements": [{"step": 5, "concept_rate": 0.3}]}, {"measurements": []}]
    assert early_rate(stored) == "30.0 (one run)"
    assert early_rate(vae_result()["runs"]) == "-"


@pytest.mark.parametrize(
    ("others", "name"),
    [
        ({}, "digits"),
        ({"batchnorm": "frozen"}, "digits_frozen"),
        ({"fid_samples": 25000}, "digits_fid25000"),
    ],
)
def test_another_number_of_fid_samples_is_another_result(others: dict[str, Any], name: str) -> None:
    from studies import vae as bench

    assert bench.result_name(vae_arguments(["S"], **others)) == name


def paper_data(folder: Path, name: str) -> dict[str, Any]:
    """Write a small stand-in in the files of MNIST or CelebA, and return changed settings."""
    from tests.data.test_datasets import idx

    rng = np.random.default_rng(0)
    if name == "mnist":
        for split, n in (("train", 260), ("t10k", 20)):
            labels = np.arange(n) % 10
            images = rng.integers(0, 60, (n, 28, 28)) + 15 * labels[:, None, None]
            (folder / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
            (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))
        return {}
    (folder / "img_align_celeba").mkdir()
    names = [f"{i:06}.jpg" for i in range(100)]
    values = ["1" if i % 3 == 0 else "-1" for i in range(100)]  # most faces are not of the class
    for i, file in enumerate(names):
        pixels = np.full((218, 178, 3), 200 if values[i] == "1" else 50, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "img_align_celeba" / file)
    lines = [f"{file} {value}" for file, value in zip(names, values, strict=True)]
    (folder / "list_attr_celeba.txt").write_text("\n".join(["100", "Male", *lines]))
    parts = [f"{file} {2 if i % 10 == 9 else 0}" for i, file in enumerate(names)]
    (folder / "list_eval_partition.txt").write_text("\n".join(parts))
    return {
        "vae": ("vae_conv", {"width": 2, "latent": 4}),
        "judge": ("resnet18", {"width": 2, "classes": 2}),
        "batch": 64,
    }


@pytest.mark.parametrize(
    ("name", "options", "classes"),
    [("mnist", {}, 10), ("celeba", {"width": 32, "latent": 512}, 2)],
)
def test_the_vae_bench_on_the_papers_data(
    name: str,
    options: dict[str, int],
    classes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in in the data's own files; the paper's network has its settings."""
    from studies import vae as bench

    settings = bench.DATA[name]
    if name == "celeba":
        assert settings["vae"] == ("vae_conv", options)
    else:
        assert [settings[key] for key in ("inputs", "hidden", "latent")] == [784, 400, 2]
    changes = paper_data(tmp_path, name)
    monkeypatch.setitem(bench.DATA, name, {**settings, **changes, "vae_epochs": 1})
    monkeypatch.setattr(bench, "SAMPLES", 100)
    world = bench.make_world(name, root=str(tmp_path), fid_samples=210)
    assert world.fid_samples == 210
    if name == "celeba":
        assert world.forgotten_class == 1  # Male, though other faces are more frequent
        assert len(world.reference) == 60  # all real faces of the other class
    result = bench.unlearn(world, "UNO^-S^", seed=0, steps=2, with_fid=True)
    assert [row["step"] for row in result["measurements"]] == [0, 1, 2]
    assert result["fid"] > 0
    assert len(result["class_rates"]) == classes
    assert sum(result["class_rates"]) == pytest.approx(1)


def test_the_vae_bench_says_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from studies import vae

    for arguments, message in (
        (["--data", "mnist", "--root", str(tmp_path)], "MNIST is not at"),
        (["--data", "digits", "--root", "data"], "--root is for the data sets mnist and celeba"),
        (["--fid-samples", "1"], "--fid-samples must be at least 2, found 1"),
    ):
        monkeypatch.setattr(sys, "argv", ["vae", *arguments])
        with pytest.raises(SystemExit):
            vae.main()
        assert message in capsys.readouterr().err


def test_rows_of_other_algorithms_stay_if_the_vae_is_the_same(
    no_results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from studies import vae as bench
    from studies.rendering import labelled
    from studies.result_tables import Results

    world = bench.World("digits", 3, None, None, None, None, None, 0.97)  # type: ignore[arg-type]
    monkeypatch.setattr(bench, "class_rates", lambda *_: [0.1] * 10)
    monkeypatch.setattr(bench, "sample_sheet", lambda *_: "")
    describe = bench.provenance.describe
    for commit, name, result in (
        ("aaaa", "S", vae_result()),
        ("bbbb", "SA", vae_result([0.0, 0.2, *[0.1] * 8])),
    ):
        monkeypatch.setattr(
            bench.provenance, "describe", lambda commit=commit: {**describe(), "commit": commit}
        )
        args = vae_arguments([name])
        rows = bench.earlier_algorithms(args, world, 0.14, 46.7)
        measured = {name: {**result, "environment": bench.provenance.describe()}}
        bench.write(
            args, world, rate=0.14, fid=46.7, seconds=1.0, results=bench.ordered(rows | measured)
        )
    content = Results("vae")["digits"]
    assert list(content["algorithms"]) == ["SA", "S"]  # the order of the benchmark
    assert content["algorithms"]["S"]["environment"]["commit"] == "aaaa"
    page = labelled.vae()
    assert "Commits aaaa, bbbb; torch" in page
    assert "| original |" + " 10.0 |" * 10 in page
    # the mean of (0, .2, .1, ...) and (.2, .1, ..., 0)
    assert "| SA | 10.0 | 15.0 |" + " 10.0 |" * 7 + " 5.0 |" in page
    assert "Measured without these rates: S." in page
    bars = labelled.trajectories(content).axes[-1].patches
    assert [round(bar.get_height(), 6) for bar in bars[:2]] == [10.0, 10.0]
    assert len(bars) == 20
    for change in ({"fid": 46.8}, {"runs": 3}):
        args = vae_arguments(["A"])
        args.runs = change.get("runs", args.runs)
        with pytest.raises(SystemExit, match="of another VAE, other settings or other seeds"):
            bench.earlier_algorithms(args, world, 0.14, change.get("fid", 46.7))
    args.algorithms = ["S", "SA"]  # nothing would stay
    assert bench.earlier_algorithms(args, world, 0.5, 1.0) == {}


def test_a_result_without_class_rates_has_no_table_of_them(no_results: Path) -> None:
    from studies.rendering import labelled

    content = {"algorithms": {"S": vae_result()}, "settings": {"below": 0.02}}
    assert labelled.class_rates(content) == {}
    axes = labelled.trajectories(content).axes
    assert len(axes) == 4
    # the rate of the class in percent, and below it the FID, over steps and seconds
    for column, end in enumerate((7.0, 6.0)):
        rate, fid = axes[column].lines[0], axes[2 + column].lines[0]
        assert [list(line.get_xdata()) for line in (rate, fid)] == [[1e-3, end]] * 2
        assert [list(line.get_ydata()) for line in (rate, fid)] == [[20.0, 1.0], [40.0, 41.0]]


def test_a_dead_process_is_reported_and_peaks_are_its_own() -> None:
    from multiprocessing import get_context

    from concept_eraser.training.log import peak_memory
    from studies import vae as bench

    hog = bytearray(300 * 2**20)
    assert peak_memory() > 300
    context = get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_peak, args=(queue,))
    process.start()
    assert bench._answer(process, queue)["peak"] < peak_memory() - 150
    del hog
    process = context.Process(target=_die, args=(queue,))
    process.start()
    assert "ended with 7" in bench._answer(process, queue)["error"]


def _peak(queue) -> None:  # type: ignore[no-untyped-def]
    from concept_eraser.training.log import peak_memory

    queue.put({"peak": peak_memory()})


def _die(queue) -> None:  # type: ignore[no-untyped-def]
    import os

    os._exit(7)


def test_a_turn_of_scrub_is_a_pass_and_methods_that_draw_have_the_seed_of_the_run() -> None:
    scrub = classifiers.with_passes({"name": "scrub", "rounds": 2}, 65, 640, 64)
    assert scrub == {"name": "scrub", "rounds": 2, "forget_steps": 2, "retain_steps": 10}
    assert classifiers.with_passes({"name": "munba"}, 65, 640, 64) == {"name": "munba"}
    assert classifiers.seeded({"name": "ssd"}, 3) == {"name": "ssd", "seed": 3}
    assert classifiers.seeded({"name": "munba"}, 3) == {"name": "munba"}
