"""Requests that fail change nothing, and requests on labelled data select the right examples."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from concept_eraser import api
from concept_eraser.data.labelled import Labelled, from_arrays, same_examples
from concept_eraser.erasers import vae
from concept_eraser.models.module import build
from concept_eraser.storage import writers
from concept_eraser.utils.errors import UserError

SHORT: dict[str, Any] = {"steps": 2, "batch_size": 8, "lr": 1e-3, "device": "cpu"}
THREE = {"data": "digits", "classes": [3], "loss": "relabel"}


def fresh(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(
        "mlp", "classifier", **{"inputs": 64, "hidden": 16, "norm": False, **changes}
    ).module


def test_a_refused_overwrite_leaves_the_finished_run(tmp_path: Path) -> None:
    """A class that does not occur, with --overwrite: the old run keeps its files and its recipe."""
    folder = tmp_path / "run"
    api.erase(
        model=fresh(),
        target="classifier",
        forget=THREE,
        retain="rest",
        training=SHORT,
        output=folder,
    )
    before = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="has classes 0 to 9, found 11"):
        api.erase(
            model=fresh(),
            target="classifier",
            forget={**THREE, "classes": [11]},
            retain="rest",
            training=SHORT,
            output=folder,
            overwrite=True,
        )
    assert {
        p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    } == before
    writers.write_text(folder / "evaluation.json", "{}")
    api.erase(
        model=fresh(),
        target="classifier",
        forget={**THREE, "classes": [4]},
        retain="rest",
        training=SHORT,
        output=folder,
        overwrite=True,
    )
    assert not (folder / "evaluation.json").exists()  # it belonged to the other run
    assert "- 4" in (folder / "recipe.yaml").read_text()


def test_a_corrected_request_needs_no_other_folder(tmp_path: Path) -> None:
    for classes in ([11], [3]):
        request = {"forget": {**THREE, "classes": classes}, "retain": "rest", "training": SHORT}
        if classes == [11]:
            with pytest.raises(UserError):
                api.erase(model=fresh(), target="classifier", **request, output=tmp_path / "run")
            assert not (tmp_path / "run" / "recipe.yaml").exists()
        else:
            assert api.erase(
                model=fresh(), target="classifier", **request, output=tmp_path / "run"
            ).folder.is_dir()


def test_objectives_with_other_lists_of_names_mean_the_same_classes(tmp_path: Path) -> None:
    """The forget set has cats alone, the retain set has birds, cats and dogs: a cat is class 1 in
    both.
    """
    from concept_eraser.recipes.recipe import load
    from concept_eraser.targets.labelled_data import select_rows

    rng = np.random.default_rng(0)
    few = from_arrays(rng.random((4, 5)), [0] * 4, ["cats"])
    many = from_arrays(rng.random((9, 5)), [0, 1, 2] * 3, ["birds", "cats", "dogs"])
    recipe = load(
        {
            "target": "classifier",
            "forget": {"data": "few"},
            "retain": {"data": "many"},
            "method": "munba",
        }
    )
    rows = select_rows(recipe, {"forget": few, "retain": many})
    assert rows["forget"][0].labels.unique().tolist() == [1]
    assert rows["forget"][0].names == rows["retain"][0].names == ("birds", "cats", "dogs")


def test_the_same_examples_under_other_names_overlap(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((20, 64)).astype("float32"), np.arange(20) % 10
    with pytest.raises(UserError, match="both to be forgotten and to be retained"):
        api.erase(
            model=fresh(),
            target="classifier",
            forget={"data": (x, y), "indices": [1, 2], "loss": "relabel"},
            retain={"data": (x.copy(), y.copy()), "indices": [2, 3]},
            training=SHORT,
            output=tmp_path / "a",
        )
    with pytest.raises(UserError, match="both to be forgotten and to be retained"):
        api.erase(
            model=fresh(),
            target="classifier",
            forget=THREE,
            retain={"data": "digits", "options": {"flat": True}},
            training=SHORT,
            output=tmp_path / "b",
        )
    one, other = from_arrays(x, y), from_arrays(x[::-1].copy(), y[::-1].copy())
    assert same_examples(one, from_arrays(x.reshape(20, 8, 8), y))
    assert not same_examples(one, other)
    assert not same_examples(one, from_arrays(x + 1, y))


class Picky(nn.Module):
    """Raises an AssertionError for a wrong size, as some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == 3, ""
        return self.layer(x)


def test_an_assertion_of_a_model_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the model cannot take an example of .*AssertionError"):
        api.erase(
            model=Picky(),
            target="classifier",
            forget=THREE,
            retain="rest",
            training=SHORT,
            output=tmp_path,
        )


def test_batch_norm_without_running_statistics_can_be_trained(tmp_path: Path) -> None:
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.BatchNorm1d(16, track_running_stats=False),
        nn.Linear(16, 10),
    )
    before = {name: value.clone() for name, value in net.named_parameters()}
    api.erase(
        model=net, target="classifier", forget=THREE, retain="rest", training=SHORT, output=tmp_path
    )
    for name, value in net.named_parameters():
        assert torch.isfinite(value).all(), name
        # the normalisation takes out the bias before it
        assert name == "1.bias" or not torch.equal(value, before[name]), name


class Plain(nn.Module):
    """A VAE with Bernoulli outputs, with or without a sigmoid."""

    likelihood = "bernoulli"

    def __init__(self, squash: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.squash = nn.Linear(64, 4), nn.Linear(2, 64), squash

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.inner(x.flatten(1)).chunk(2, 1)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        output = self.outer(z)
        return output.sigmoid() if self.squash else 10 * output


def test_vaes_whose_values_do_not_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    forget = {"data": "digits", "classes": [3], "loss": "ascent"}
    with pytest.raises(UserError, match=r"must decode to values in \[0, 1\] .a last sigmoid."):
        api.erase(
            model=Plain(False),
            target="vae",
            forget=forget,
            retain="rest",
            training=SHORT,
            output=tmp_path,
        )
    x = torch.rand(20, 64)
    x[17] = 3.0  # not among the examples that are checked first
    data = from_arrays(x, [0] * 20)
    eraser = vae.Vae(
        Plain(True),
        {"retain": vae.VaeObjective(data, torch.tensor([17]), "data")},
        ["inner.weight"],
    )
    with pytest.raises(UserError, match=r"needs data in \[0, 1\].* to 3"):
        eraser.draw("retain", [0])
    objectives = {
        "retain": vae.VaeObjective(data, torch.arange(10), "data"),
        "forget": vae.VaeObjective(
            from_arrays(torch.rand(4, 64), [0] * 4), torch.arange(4), "ascent"
        ),
    }
    assert vae.Vae(Plain(True), objectives, ["inner.weight"]).code_shape == (2,)
    net = Plain(True)
    fine = vae.Vae(net, {"retain": objectives["retain"]}, ["inner.weight"])
    with torch.no_grad():
        net.outer.weight.fill_(float("nan"))
    # a step that is skipped, no traceback
    assert torch.isnan(fine.loss("retain", fine.draw("retain", [0])))


@pytest.mark.parametrize(
    ("log_variance", "image"),
    [((2, 3), (2, 64)), ((2, 2), (2, 63)), ((2, 2), (4, 32))],
)
def test_a_vae_of_wrong_shapes_is_named_with_them(
    log_variance: tuple[int, int], image: tuple[int, int]
) -> None:
    class Wrong(nn.Linear):
        def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.zeros(len(x), 2), torch.zeros(log_variance)

        def decode(self, z: torch.Tensor) -> torch.Tensor:
            return torch.zeros(image)

    data = from_arrays(torch.rand(5, 64), [0] * 5)
    shapes = f"a mean [2, 2], a log variance {list(log_variance)} and an image {list(image)}"
    with pytest.raises(UserError, match=re.escape(f"for an input [2, 64] {shapes}")):
        vae.code_shape(Wrong(1, 1), data, "gaussian")


class GivenCode(nn.Module):
    """A VAE whose code is given, in bf16 where autocast is on. It decodes to the code's mean."""

    def __init__(self, mean: torch.Tensor, log_variance: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.code = mean, log_variance

    def encode(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        return tuple(part[: len(inputs)].to(dtype) for part in self.code)

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return (code * self.weight).to(self.encode(code)[0].dtype)


def test_the_terms_of_a_vae_under_autocast_are_summed_in_fp32() -> None:
    """The inputs have 8 bits, so all differences are those of the terms."""
    generator = torch.Generator().manual_seed(0)
    mean, log_variance = (
        torch.randn(4, 3, 16, 16, generator=generator).bfloat16().float() for _ in range(2)
    )
    data = from_arrays(np.zeros((4, 3, 16, 16), dtype=np.float32), [0, 0, 1, 1])
    objective = vae.VaeObjective(data, torch.arange(4), "distill")
    eraser = vae.Vae(GivenCode(mean, log_variance), {"retain": objective}, ["weight"])
    draw = eraser.draw("retain", [0, 1])
    exact = 0.5 * (mean.double().square() + log_variance.double().exp() - 1 - log_variance)
    with torch.autocast("cpu", torch.bfloat16):
        _, divergence = eraser.reconstruct(draw)
        before, _ = eraser.reconstruct(draw, teacher="frozen")
        with torch.no_grad():
            eraser.trainable()["weight"].fill_(1.25)
        now, _ = eraser.reconstruct(draw)
        loss = eraser.loss("retain", draw)
    expected = exact[:2].flatten(1).sum(1).float()
    torch.testing.assert_close(divergence, expected, rtol=1e-3, atol=0)
    difference = (now.double() - before.double()).square().flatten(1).sum(1).mean() / 2
    torch.testing.assert_close(loss.double(), difference, rtol=1e-3, atol=0)


def test_an_edit_that_overflows_is_refused_and_nothing_is_saved(tmp_path: Path) -> None:
    net = fresh()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(UserError, match="nothing was changed; use more damping"):
        api.erase(
            model=net,
            target="classifier",
            forget={"data": "digits", "classes": [3]},
            retain="rest",
            method={"name": "influence", "strength": 1e40},
            output=tmp_path / "run",
        )
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    assert not (tmp_path / "run").exists()


def test_infinite_activations_leave_the_running_statistics(tmp_path: Path) -> None:
    """A skipped step changes nothing: 0 x inf is nan, and a running variance of nan would destroy
    the model.
    """
    net = build("mlp", "classifier", inputs=64, hidden=16).module
    x = torch.rand(20, 64)
    x[:10] = float("inf")
    data: Labelled = from_arrays(x, [0] * 10 + [1] * 10, [str(i) for i in range(10)])
    from concept_eraser.erasers import classifier

    objective = classifier.ClassifierObjective(data, torch.arange(10), "data")
    eraser = classifier.Classifier(
        net,
        {"forget": objective},
        [n for n, _ in net.named_parameters()],
        batchnorm="train",
        batch_size=4,
    )
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert not torch.isfinite(eraser.loss("forget", eraser.draw("forget", [0, 1, 2, 3])))
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())


def test_unoccurring_json_is_valid(tmp_path: Path) -> None:
    """done.json of an edit is JSON: no bare NaN."""
    run = api.erase(
        model=fresh(),
        target="classifier",
        forget={"data": "digits", "classes": [3]},
        retain="rest",
        method="influence",
        output=tmp_path,
    )

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert (
        json.loads((run.folder / "done.json").read_text(), parse_constant=refuse)["edit"]["step"]
        > 0
    )


def test_numbered_classes_that_are_no_outputs_are_refused(tmp_path: Path) -> None:
    """The classes 3 and 7 of a folder have the places 0 and 1, which are other outputs."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 10))
    x, y = np.zeros((8, 4), np.float32), np.arange(8) % 2
    with pytest.raises(UserError, match=r"10 outputs.*2 named classes.*numbers from 0"):
        api.erase(
            model=net,
            target="classifier",
            forget={"data": from_arrays(x, y, ["3", "7"]), "classes": [3], "loss": "relabel"},
            retain="rest",
            method="munba",
            output=tmp_path,
        )


def test_a_folder_with_another_image_is_no_finished_run(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / name / f"{i}.png")

    def forget() -> None:
        api.erase(
            model=nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2)),
            target="classifier",
            forget={"data": str(folder), "classes": ["cat"], "loss": "relabel"},
            retain="rest",
            method="munba",
            training={**SHORT, "steps": 1},
            output=tmp_path / "run",
        )

    forget()
    with pytest.raises(UserError, match="holds a finished run on an object in memory"):
        forget()
    (folder / "Thumbs.db").write_bytes(b"of a file manager")
    with pytest.raises(UserError, match="holds a finished run on an object in memory"):
        forget()
    Image.new("RGB", (8, 8)).save(folder / "cat" / "2.png")
    with pytest.raises(UserError, match=r"other prompts or data: .*photos \(forget.data\)"):
        forget()


def test_another_request_is_no_finished_run(tmp_path: Path) -> None:
    """The file has the positions to delete. A longer list is another deletion."""
    net = nn.Linear(64, 10)
    request = tmp_path / "request.txt"
    request.write_text("3\n5\n")

    def delete() -> None:
        api.erase(
            model=net,
            target="classifier",
            forget={"data": "digits", "indices": str(request), "loss": "relabel"},
            retain="rest",
            method="munba",
            training={**SHORT, "steps": 1},
            output=tmp_path / "run",
        )

    delete()
    with pytest.raises(UserError, match="holds a finished run on an object in memory"):
        delete()
    request.write_text("3\n5\n7\n")
    with pytest.raises(UserError, match=r"other prompts or data: .*request.txt \(forget.indices\)"):
        delete()


def test_named_classes_must_be_as_many_as_outputs(tmp_path: Path) -> None:
    """Ten named shapes and twelve outputs are ambiguous. Numbered classes may be fewer than
    outputs: the number is the output.
    """
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 12))
    forget_set = {
        "data": "painted",
        "options": {"n": 40, "size": 8},
        "classes": ["star"],
        "loss": "relabel",
    }
    with pytest.raises(UserError, match="the model has 12 outputs, painted has 10 named classes"):
        api.erase(
            model=net,
            target="classifier",
            forget=forget_set,
            retain="rest",
            training=SHORT,
            output=tmp_path,
        )
    x, y = np.random.default_rng(0).random((20, 5)).astype("float32"), [0, 1] * 10
    api.erase(
        model=nn.Linear(5, 4),
        target="classifier",
        forget={"data": (x, y), "indices": [1], "loss": "relabel"},
        retain="rest",
        training=SHORT,
        output=tmp_path / "numbers",
    )
