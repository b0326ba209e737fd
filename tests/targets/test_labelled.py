"""Objectives on labelled data, and runs on them with batch norm, masks and objects in memory."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from concept_eraser import api, registry
from concept_eraser.cli.main import app
from concept_eraser.data.labelled import Labelled, choose, from_arrays, open_data
from concept_eraser.erasers import classifier, vae
from concept_eraser.models.module import build
from concept_eraser.runs import labelled_measurement
from concept_eraser.training.closure import of_step
from concept_eraser.utils.errors import Interrupted, UserError

SHORT: dict[str, Any] = {"steps": 4, "batch_size": 8, "lr": 1e-2, "device": "cpu", "save_every": 1}


@pytest.fixture(scope="module")
def digits() -> Labelled:
    return registry.build("dataset", "digits", {}).load("train")


@pytest.fixture
def batchnorm_net() -> nn.Module:
    torch.manual_seed(0)
    return build("mlp", "classifier", inputs=64, hidden=16).module


def test_classes_go_by_name_first() -> None:
    people = from_arrays(np.zeros((3, 1)), [0, 1, 2], ["1", "10", "2"])
    # not the third by position, which is also "2" here
    assert people.class_index(2) == people.class_index("2") == 2
    assert people.class_index("10") == 1
    assert from_arrays(np.zeros((2, 1)), [0, 1], ["cat", "dog"]).class_index(1) == 1
    with pytest.raises(UserError, match="did you mean 'cat'"):
        from_arrays(np.zeros((2, 1)), [0, 1], ["cat", "dog"]).class_index("cats")


def test_labels_are_aligned_by_name() -> None:
    test = from_arrays(np.arange(3)[:, None], [0, 1, 1], ["ann", "cid"])
    data = test.with_classes(("ann", "bob", "cid"))
    assert data.labels.tolist() == [0, 2, 2]
    assert data.inputs([2]).tolist() == [[2.0]]
    with pytest.raises(UserError, match="class 'cid' that the other data do not have"):
        test.with_classes(("ann", "bob"))


def test_a_share_is_seeded_and_of_the_given_classes(digits: Labelled) -> None:
    first, second = (choose(digits, classes=[3], share=0.5, seed=seed) for seed in (0, 1))
    assert torch.equal(first, choose(digits, classes=[3], share=0.5, seed=0))
    assert not torch.equal(first, second)
    assert len(first) == 73
    assert set(digits.labels[first].tolist()) == {3}


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ([[1.0]], ["cat"], "labels must be integers"),
        ([[1.0]], [0.5], "labels must be integers"),
        ([[1.0]], [-1], "labels must be integers"),
        ([["a"]], [0], "the inputs are no numbers"),
    ],
)
def test_arrays_that_are_no_labelled_data(x: list, y: list, words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_arrays(np.array(x), np.array(y))


def test_tensors_with_gradients_and_damaged_files(tmp_path: Path) -> None:
    assert len(from_arrays(torch.ones(2, 3, requires_grad=True), torch.tensor([0, 1]))) == 2
    (tmp_path / "a.npz").write_bytes(b"no zip")
    with pytest.raises(UserError, match="damaged or holds no plain arrays"):
        open_data(str(tmp_path / "a.npz"))


def test_labels_without_a_name_and_archives_without_the_arrays(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a label is 2, but there are 2 classes, numbered from 0"):
        from_arrays(np.ones((3, 2)), [0, 1, 2], ["a", "b"])
    for arrays, names in (({"a": np.ones(3)}, "a.npy"), ({}, "none")):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(UserError, match=f"expected arrays named x and y, found {names}"):
            open_data(str(tmp_path / "a.npz"))


def test_a_random_other_label_is_another_even_if_only_one_class_is_given(digits: Labelled) -> None:
    rows = (digits.labels == 0).nonzero()[:, 0]
    zeros = from_arrays(digits.inputs(rows.tolist()), torch.zeros(len(rows)))
    eraser = classifier.Classifier(
        nn.Linear(64, 10),
        {"forget": classifier.ClassifierObjective(zeros, torch.arange(len(rows)), "relabel")},
        ["weight"],
    )
    others = eraser.draw("forget", list(range(100))).others
    assert int(others.min()) >= 1
    assert len(others.unique()) == 9


def test_two_sets_in_memory_are_two_sets(tmp_path: Path) -> None:
    """Their positions mean different examples, so they cannot overlap."""
    rng = np.random.default_rng(0)
    forget, retain = (
        (rng.standard_normal((20, 4)).astype(np.float32), np.arange(20) % 3) for _ in range(2)
    )
    settings = {"target": "classifier", "training": SHORT}
    run = api.erase(
        model=nn.Linear(4, 3),
        forget={"data": forget, "loss": "relabel"},
        retain={"data": retain},
        output=tmp_path / "a",
        **settings,
    )
    with pytest.raises(UserError, match="both to be forgotten and to be retained"):
        api.erase(
            model=nn.Linear(4, 3),
            forget={"data": forget, "loss": "relabel"},
            retain={"data": forget},
            output=tmp_path / "b",
            **settings,
        )
    with pytest.raises(UserError, match="may not have been this one"):
        api.erase(
            model=nn.Linear(4, 3),
            forget={"data": forget, "loss": "relabel"},
            retain={"data": retain},
            output=run.folder,
            **settings,
        )


def test_gradients_do_not_move_running_statistics(
    batchnorm_net: nn.Module, digits: Labelled
) -> None:
    """Gradients and products change no statistics; `settle` does, as one pass in training mode."""
    objective = classifier.ClassifierObjective(digits, torch.arange(len(digits)), "data")
    eraser = classifier.Classifier(
        batchnorm_net,
        {"retain": objective},
        [n for n, _ in batchnorm_net.named_parameters()],
        batchnorm="train",
    )
    draw = eraser.draw("retain", list(range(32)))
    before = {k: v.clone() for k, v in eraser.buffers().items()}
    closure = of_step(eraser, tuple(eraser.trainable().values()), {"retain": [draw]})
    v = tuple(torch.ones_like(p) for p in closure.params)
    closure.grad("retain")
    closure.hvp("retain", v)
    assert len(before) == 3
    assert all(torch.equal(value, before[name]) for name, value in eraser.buffers().items())
    plain = copy.deepcopy(batchnorm_net).train()
    plain(draw.inputs)
    eraser.settle("retain", draw)
    assert all(torch.equal(value, eraser.buffers()[name]) for name, value in plain.named_buffers())
    assert not batchnorm_net.training


def test_batch_statistics_are_used_and_dropout_stays_off(digits: Labelled) -> None:
    module = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10))
    objective = classifier.ClassifierObjective(digits, torch.arange(len(digits)), "data")
    eraser = classifier.Classifier(module, {"retain": objective}, ["0.weight"], batchnorm="train")
    draw = eraser.draw("retain", list(range(16)))
    first, second = (eraser.logits(draw) for _ in range(2))
    assert torch.equal(first, second)
    activations = module[0](draw.inputs)
    expected = module[3](
        (activations - activations.mean(0)) / (activations.var(0, unbiased=False) + 1e-5).sqrt()
    )
    torch.testing.assert_close(first, expected)


def test_running_statistics_belong_to_the_state_of_a_run(
    batchnorm_net: nn.Module, tmp_path: Path
) -> None:
    def run(net: nn.Module, folder: str, **changes: Any) -> nn.Module:
        api.erase(
            model=net,
            target="classifier",
            forget={"data": "digits", "classes": [3], "loss": "relabel"},
            retain={"data": "rest", "loss": "distill"},
            trainable={"batchnorm": "train"},
            training=SHORT,
            output=tmp_path / folder,
            **changes,
        )
        return net

    def stop(step: int, seconds: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    whole = run(copy.deepcopy(batchnorm_net), "whole")
    with pytest.raises(Interrupted):
        run(copy.deepcopy(batchnorm_net), "parts", on_step=stop)
    again = run(copy.deepcopy(batchnorm_net), "parts", resume=True)
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items()
    )
    assert not torch.equal(
        whole.state_dict()["body.2.running_mean"], batchnorm_net.state_dict()["body.2.running_mean"]
    )


def test_an_objective_without_a_gradient_moves_no_statistics(
    batchnorm_net: nn.Module, digits: Labelled, tmp_path: Path
) -> None:
    """Fine-tuning on the retain set alone: the running statistics do not depend on the
    forget set.
    """
    states = []
    for name in ("3", "8"):
        net = copy.deepcopy(batchnorm_net)
        rows = {
            "forget": {"data": "digits", "classes": [name]},
            "retain": {"data": "digits", "classes": ["0", "1"]},
        }
        api.erase(
            model=net,
            target="classifier",
            **rows,
            method="finetune",
            trainable={"batchnorm": "train"},
            training=SHORT,
            output=tmp_path / name,
        )
        states.append(net.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not torch.equal(
        states[0]["body.2.running_mean"], batchnorm_net.state_dict()["body.2.running_mean"]
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_masked_weights_do_not_decay(optimizer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Linear(64, 10)
    before = net.weight.detach().clone()
    api.erase(
        model=net,
        target="classifier",
        forget={"data": "digits", "classes": [3], "loss": "relabel"},
        retain="rest",
        trainable={"saliency": 0.2},
        training={**SHORT, "optimizer": optimizer, "weight_decay": 0.5},
        output=tmp_path,
    )
    assert float((net.weight != before).float().mean()) < 0.25


def test_a_deletion_of_one_sample_is_measured(tmp_path: Path) -> None:
    build("mlp", "classifier", inputs=64, norm=False).save(tmp_path / "net")
    run = api.erase(
        model=str(tmp_path / "net"),
        target="classifier",
        forget={"data": "digits", "indices": [3], "loss": "relabel"},
        retain="rest",
        training=SHORT,
        output=tmp_path / "run",
    )
    evaluation = api.evaluate(run.folder)
    assert evaluation.too_few == ["forget"]
    assert set(evaluation.measurements["after"]["accuracy"]) == {"retain", "test"}
    assert evaluation.refused == {"membership attacks": "fewer than two examples in forget"}
    for arguments in ({"suite": "tiny_star"}, {"n": 4}, {"guard": "negative:a star"}):
        with pytest.raises(UserError, match="no suite of prompts measures"):
            api.evaluate(run.folder, **arguments)
    with pytest.raises(UserError, match="no report of images"):
        api.report(evaluation)


def test_a_test_set_without_the_forgotten_class_has_membership_attacks(tmp_path: Path) -> None:
    """The attacks and the table do not need that class in the test set, except for the AUC."""
    build("mlp", "classifier", inputs=64, norm=False).save(tmp_path / "net")
    run = api.erase(
        model=str(tmp_path / "net"),
        target="classifier",
        forget={"data": "digits", "classes": [3], "loss": "relabel"},
        retain="rest",
        training=SHORT,
        output=tmp_path / "run",
    )
    test = registry.build("dataset", "digits", {}).load("test")
    rows = (test.labels != 3).nonzero()[:, 0].tolist()
    without = (test.inputs(rows).numpy(), test.labels[rows].numpy())
    evaluation = labelled_measurement.measure(run.folder, objects={"test": without})
    assert evaluation.too_few == ["test, forgotten classes"]
    assert evaluation.refused == {}
    after = evaluation.measurements["after"]
    assert after["membership"]
    assert np.isnan(after["table"]["auc"])
    assert after["table"]["mia"] >= 0


def test_one_set_named_twice_has_the_membership_attacks_of_the_rest(tmp_path: Path) -> None:
    build("mlp", "classifier", inputs=64, norm=False).save(tmp_path / "net")
    rest = [name for name in range(10) if name != 3]
    forget = {"data": "digits", "classes": [3], "loss": "relabel"}
    measurements = []
    for name, retain in (("rest", "rest"), ("named", {"data": "digits", "classes": rest})):
        run = api.erase(
            model=str(tmp_path / "net"),
            target="classifier",
            forget=forget,
            retain=retain,
            training=SHORT,
            output=tmp_path / name,
        )
        evaluation = api.evaluate(run.folder)
        assert evaluation.refused == {}
        measurements.append(evaluation.measurements["before"])
    assert measurements[0]["membership"]
    assert measurements[1] == measurements[0]


def test_retained_examples_of_other_data_have_no_membership_attack(tmp_path: Path) -> None:
    build("mlp", "classifier", inputs=64, norm=False).save(tmp_path / "net")
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "other.npz",
        x=rng.random((40, 64), dtype=np.float32),
        y=np.arange(40) % 10,
    )
    run = api.erase(
        model=str(tmp_path / "net"),
        target="classifier",
        forget={"data": "digits", "classes": [3], "loss": "relabel"},
        retain={"data": str(tmp_path / "other.npz"), "classes": [1, 2]},
        training=SHORT,
        output=tmp_path / "run",
    )
    result = CliRunner().invoke(app, ["evaluate", str(run.folder), "-q"], catch_exceptions=False)
    reason = "the retain set is of other data than the forget set"
    assert f"not measured: membership attacks: {reason}" in result.output
    content = json.loads((run.folder / "evaluation.json").read_text())
    assert content["refused"] == {"membership attacks": reason}
    assert "membership" not in content["results"]["after"]


def test_a_run_from_memory_is_measured_with_its_objects(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = rng.standard_normal((60, 5)).astype(np.float32), np.arange(60) % 3
    net = nn.Linear(5, 3)
    before = copy.deepcopy(net)
    run = api.erase(
        model=net,
        target="classifier",
        forget={"data": data, "indices": [1, 2, 4], "loss": "relabel"},
        retain="rest",
        training=SHORT,
        output=tmp_path,
    )
    with pytest.raises(UserError, match="In Python: evaluate"):
        api.evaluate(run.folder, data={"forget": data})
    evaluation = api.evaluate(
        run.folder, before=before, after=net, data={"forget": data, "test": data}, output=tmp_path
    )
    measurements = evaluation.measurements
    assert set(measurements) == {"before", "after"}
    assert measurements["after"]["accuracy"]["forget"]["n"] == 3
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content["results"] == json.loads(json.dumps(measurements))
    number = evaluation.find("accuracy", "forget")
    assert (number.better, evaluation.find("accuracy", "retain").better) == ("lower", "higher")
    assert asdict(number.after) == measurements["after"]["accuracy"]["forget"]
    assert asdict(number.before) == measurements["before"]["accuracy"]["forget"]
    assert evaluation.find("psnr", "forget") is None


def test_a_number_that_is_not_defined_is_null_in_the_file(tmp_path: Path) -> None:
    """The test set has no example of the forgotten examples' class, so there is no AUC."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((60, 5)).astype(np.float32)
    data, net = (inputs, np.arange(60) % 3), nn.Linear(5, 3)
    test = inputs[:40], np.arange(40) % 2
    run = api.erase(
        model=net,
        target="classifier",
        forget={"data": data, "indices": [2, 5, 8], "loss": "relabel"},
        retain="rest",
        training=SHORT,
        output=tmp_path,
    )
    evaluation = api.evaluate(
        run.folder, after=net, data={"forget": data, "test": test}, output=tmp_path
    )
    assert np.isnan(evaluation.measurements["after"]["table"]["auc"])
    text = (tmp_path / "evaluation.json").read_text()
    assert "NaN" not in text
    assert '"auc": null' in text


def test_a_function_that_makes_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mynet.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Linear(64, 10)\n\ndef "
        "other(size):\n    return size\n"
    )
    settings = {
        "target": "classifier",
        "forget": {"data": "digits", "classes": [3], "loss": "relabel"},
        "retain": "rest",
        "training": SHORT,
    }
    run = api.erase(model="mynet:make", output=tmp_path / "run", **settings)
    assert "test" in api.evaluate(run.folder, allow_code=True).measurements["after"]["accuracy"]
    with pytest.raises(UserError, match="without arguments"):
        api.erase(model="mynet:other", output=tmp_path / "b", **settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"forget": {"data": "digits", "classes": [3], "loss": "relabel", "n": 5}},
            "forget: the target 'classifier' does not use n",
        ),
        (
            {"retain": {"data": "rest", "classes": [1]}},
            "data: rest stands for all data that are not in the forget set",
        ),
        ({"method": "natural_gradient"}, r"does not use forget\.loss"),
        (
            {
                "method": "influence",
                "forget": {"data": "digits", "classes": [3]},
                "trainable": {"reinitialise": 0.5},
            },
            r"does not use trainable\.reinitialise",
        ),
        (
            {
                "method": "influence",
                "forget": {"data": "digits", "classes": [3]},
                "trainable": {"saliency": 0.5},
            },
            r"does not use trainable\.saliency",
        ),
        (
            {"forget": {"data": "digits", "classes": [3], "loss": "anchor", "anchor": 12}},
            "the anchor is class 12, the model has 10",
        ),
    ],
)
def test_settings_without_a_use_are_errors(changes: dict, words: str, tmp_path: Path) -> None:
    settings = {
        "forget": {"data": "digits", "classes": [3], "loss": "relabel"},
        "retain": "rest",
        "training": SHORT,
        **changes,
    }
    with pytest.raises(UserError, match=words):
        api.erase(model=nn.Linear(64, 10), target="classifier", output=tmp_path, **settings)


def test_bernoulli_outputs_need_data_between_0_and_1() -> None:
    module = build("vae_mlp", "vae", inputs=4, hidden=8).module
    data = from_arrays(np.full((4, 4), -1.0), [0, 1, 0, 1])
    with pytest.raises(UserError, match=r"needs data in \[0, 1\]"):
        vae.Vae(
            module, {"retain": vae.VaeObjective(data, torch.arange(4), "data")}, ["mean.weight"]
        )


def test_a_folder_of_images_at_the_given_size(tmp_path: Path) -> None:
    from PIL import Image

    from concept_eraser.targets.labelled_data import open_named

    (tmp_path / "a").mkdir()
    Image.new("RGB", (50, 40)).save(tmp_path / "a" / "0.png")
    assert open_named(str(tmp_path), {"size": 32}, "train").inputs([0]).shape == (1, 3, 32, 32)
    with pytest.raises(UserError, match="has the option size only"):
        open_named(str(tmp_path), {"sise": 32}, "train")


def _npz(path: Path, **entries: bytes) -> str:
    import zipfile

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(f"{name}.npy", content)
    return str(path)


def _npy(array: np.ndarray) -> bytes:
    import io

    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


def _header(shape: str, kind: str = "<f4") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + b"\0" * 8


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (_header("(1000000000000, 3)"), _npy(np.zeros(4)), "says its shape is .* damaged"),
        (_header("(2, -1)"), _npy(np.zeros(4)), "damaged"),
        (_header("x"), _npy(np.zeros(4)), "damaged"),
        (_header("(2,)", "|V2000000000"), _npy(np.zeros(4)), "expected plain numbers"),
        (_npy(np.array([{}, []], object)), _npy(np.zeros(2)), "objects are never read"),
        (_npy(np.array([["a"], ["b"]])), _npy(np.zeros(2)), "expected plain numbers"),
        (_npy(np.zeros((2, 3), complex)), _npy(np.zeros(2)), "expected plain numbers"),
        (_npy(np.zeros(4)), _npy(np.zeros(4)), "expected x of shape"),
        (_npy(np.zeros((4, 3))), _npy(np.zeros(3)), r"expected labels of shape \[4\]"),
        (_npy(np.zeros((0, 3))), _npy(np.zeros(0)), "there must be some"),
        (_npy(np.full((4, 3), np.inf)), _npy(np.zeros(4)), "infinite or none"),
        (_npy(np.zeros((4, 3))), _npy(np.full(4, np.nan)), "must be integers"),
        (_npy(np.zeros((2, 3))), _npy(np.array([0, 2**40])), "at most 1,000,000 classes"),
        (_npy(np.zeros((2, 3)))[:-8], _npy(np.zeros(2)), "damaged"),
    ],
)
def test_arrays_are_checked_before_they_are_read(
    x: bytes, y: bytes, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words) as error:
        open_data(_npz(tmp_path / "a.npz", x=x, y=y))
    assert len(str(error.value)) < 800


def test_an_archive_that_grows_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = _npz(tmp_path / "a.npz", x=_npy(np.zeros((300, 2**17), np.uint8)), y=_npy(np.zeros(300)))
    assert open_data(path).inputs([0]).shape == (1, 2**17)  # 39 MB of zeros in 40 kB may be
    import zipfile

    with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w") as file:
            file.write(_header("(200, 1048576)", "|u1")[:-8])
            for _ in range(200):
                file.write(b"\0" * 2**20)
        archive.writestr("y.npy", _npy(np.zeros(200)))
    with pytest.raises(UserError, match="which no data have"):
        open_data(str(tmp_path / "b.npz"))


@pytest.mark.parametrize("text", ["²", "1e3", "-1", "9" * 5000, "100000001", "1\0"])
def test_positions_are_plain_numbers(text: str, tmp_path: Path) -> None:
    from concept_eraser.targets.labelled_data import read_indices

    (tmp_path / "rows.txt").write_text(f"1\n{text}\n")
    with pytest.raises(UserError, match="line 2: expected a position"):
        read_indices(tmp_path / "rows.txt")
    with pytest.raises(UserError, match="not among them"):
        choose(from_arrays(np.zeros((3, 2)), [0, 1, 0]), indices=[2**70])


@pytest.mark.parametrize("size", ["many", 10**12, 0, float("nan"), [64]])
def test_the_size_of_a_folders_images_is_bounded(size: Any, tmp_path: Path) -> None:
    from concept_eraser.targets.labelled_data import open_named

    with pytest.raises(UserError, match="expected a"):
        open_named(str(tmp_path), {"size": size}, "train")
