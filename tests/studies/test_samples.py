"""The problems of the papers on data sets of this machine: real files, few and small."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10

from studies import paper_problems, render_results
from studies.papers import hyper_cleaning, mini_table, mini_unlearning, ngd_tradeoff, samples
from studies.papers.networks import NETWORKS
from studies.result_tables import Results
from tests.data.test_datasets import idx

RNG = np.random.default_rng(0)


def write_mnist(folder: Path, n: int) -> None:
    """Write the four files of MNIST's format, with half of the images for tests."""
    folder.mkdir()
    for part in ("train", "t10k"):
        images = RNG.integers(0, 256, (n // 2, 28, 28)).astype(np.uint8)
        labels = np.arange(n // 2).astype(np.uint8) % 10
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))


def test_a_source_has_all_images_between_0_and_1(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", 40)
    data = samples.load(f"mnist:{tmp_path / 'mnist'}")
    assert data.shape == (1, 28, 28)
    assert data.flat.shape == (40, 784)
    assert (float(data.images.min()), float(data.images.max())) == (0.0, 1.0)
    assert data.labels.tolist() == [*range(10)] * 4
    digits = samples.load()
    assert digits.shape == (1, 8, 8)
    assert len(digits.labels) == 1797


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_fits_the_images(name: str) -> None:
    for shape in ((1, 8, 8), (1, 28, 28), (3, 32, 32)):
        assert NETWORKS[name](shape)(torch.zeros(2, *shape)).shape == (2, 10)


def test_problems_run_on_mnist_and_fashion_mnist(
    no_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del no_results
    write_mnist(tmp_path / "mnist", 1600)
    write_mnist(tmp_path / "fashion", 1600)
    monkeypatch.setattr(hyper_cleaning, "STEPS", 1)
    monkeypatch.setattr(hyper_cleaning, "INNER", 1)
    monkeypatch.setattr(mini_table, "EPOCHS", 1)
    monkeypatch.setattr(mini_table, "SHARES", (0.1,))
    monkeypatch.setattr(mini_unlearning, "EPOCHS", 1)
    monkeypatch.setattr(mini_unlearning, "KS", (1,))
    monkeypatch.setattr(ngd_tradeoff, "EPOCHS", 1)
    monkeypatch.setattr(ngd_tradeoff, "METHODS", ("fine-tuning, SGD",))
    monkeypatch.setattr(ngd_tradeoff, "RATES", (0.001,))
    monkeypatch.setattr(ngd_tradeoff, "TRAIN", 120)
    monkeypatch.setattr(ngd_tradeoff, "FORGET", 20)
    monkeypatch.setattr(ngd_tradeoff, "NETWORKS", {"OLP": NETWORKS["OLP"]})
    mnist = f"mnist:{tmp_path / 'mnist'}"

    def run(names: str, data: str) -> int:
        words = ["--only", names, "--seeds", "0,1", "--data", data]
        monkeypatch.setattr("sys.argv", ["paper_problems", *words])
        return paper_problems.main()

    assert run("mini_unlearning,mini_table,ngd_tradeoff", mnist) == 0
    assert run("hyper_cleaning", f"{mnist},fashion_mnist:{tmp_path / 'fashion'}") == 0
    results = Results("papers")
    assert set(results) == {
        "hyper_cleaning_mnist_fashion_mnist",
        "mini_table_mnist",
        "mini_unlearning_mnist",
        "ngd_tradeoff_mnist",
    }
    cleaning = results["hyper_cleaning_mnist_fashion_mnist"]
    assert cleaning["settings"]["net"] == "784-64-(10, 10)"
    assert list(cleaning["table"][0])[1:] == [
        "test accuracy, mnist",
        "test accuracy, fashion_mnist",
    ]
    assert {row["data"] for row in results["mini_table_mnist"]["table"]} == {"mnist"}
    page = next(text for path, text in render_results.pages().items() if path.name == "papers.md")
    assert "## hyper_cleaning_mnist_fashion_mnist" in page
    assert str(tmp_path) not in page


def test_cifar10_has_three_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the checksums are those of the real files
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        data = np.full((2, 3072), 255 * (name == "test_batch"), np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [1, 2]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    data = samples.load(f"cifar10:{tmp_path}")
    assert data.shape == (3, 32, 32)
    assert data.images.mean((1, 2, 3)).tolist() == [0.0] * 10 + [1.0] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "mnist"], "there is no source 'mnist'; there are digits, mnist:FOLDER, "),
        (["--only", "eq24", "--data", "mnist:x"], "eq24 takes 0 sources; give --only with some of"),
        (["--only", "mini_table", "--data", "mnist:x,mnist:y"], "mini_table takes 1 sources"),
        (["--only", "mini_unlearning", "--data", "mnist:nowhere"], "error: MNIST is not at "),
    ],
)
def test_wrong_data_is_an_error(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["paper_problems", *words])
    try:
        code = paper_problems.main()
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err
