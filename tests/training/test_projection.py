"""Training away from retained inputs: singular vectors against numpy's of patches cut out by hand,
and a network whose outputs for retained data stay, whatever the optimizer does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from concept_eraser import api
from concept_eraser.data.labelled import from_arrays
from concept_eraser.erasers.classifier import Classifier, ClassifierObjective
from concept_eraser.recipes import recipe
from concept_eraser.training import projection
from concept_eraser.utils.errors import UserError


def images(n: int, *, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 2, 5, 4)).astype(np.float32)


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=(2, 1)),
            nn.Tanh(),
            nn.Flatten(),
            nn.LayerNorm(12),
            nn.Linear(12, 3),
        )


class Rows:
    """An eraser with one objective, whose draws are its examples in turn."""

    def __init__(self, module: nn.Module, inputs: Tensor) -> None:
        self.module, self.inputs = module, inputs
        self.names: list[str] = []
        self.seeds: list[int] = []

    def turn(self, step: int | None) -> dict[str, str]:
        return {}

    def draw(self, objective: str, seeds: Any) -> Tensor:
        self.names.append(objective)
        self.seeds += seeds
        place = len(self.names) % len(self.inputs)
        return self.inputs[place : place + 1]

    def loss(self, objective: str, draw: Tensor) -> Tensor:
        result: Tensor = self.module(draw)
        return result.sum()


def patches(x: np.ndarray, stride: tuple[int, int]) -> np.ndarray:
    """The 3 x 3 patches of images [n, c, h, w], channels first: [patches, 9 c]."""
    rows = [
        x[i, :, a : a + 3, b : b + 3].ravel()
        for i in range(len(x))
        for a in range(0, x.shape[2] - 2, stride[0])
        for b in range(0, x.shape[3] - 2, stride[1])
    ]
    return np.stack(rows)


@pytest.mark.parametrize("share", [0.4, 0.8, 1.0])
def test_the_basis_has_the_first_singular_vectors_of_the_inputs(share: float) -> None:
    net = network().double()
    x = torch.from_numpy(images(2, seed=1)).double()
    eraser: Any = Rows(net, x)
    names = dict(net.named_parameters())
    found = dict(
        zip(
            names,
            projection.bases(eraser, names, share=share, seed=0, batch_size=2),
            strict=True,
        )
    )
    assert {name for name, basis in found.items() if basis is None} == {
        "0.bias",
        "3.weight",
        "3.bias",
        "4.bias",
    }
    assert eraser.names == ["retain"] * 8
    assert len(set(eraser.seeds)) == 8 * 2, "each example of each batch has its own seed"
    with torch.no_grad():
        inputs = {"0.weight": patches(x.numpy(), (2, 1)), "4.weight": net[:4](x).numpy()}
    for name, rows in inputs.items():
        _, values, vectors = np.linalg.svd(rows)
        total, k = values.sum(), 0
        while k < len(values) and values[: k + 1].sum() <= share * total * (1 + 1e-9):
            k += 1
        basis = found[name]
        assert basis is not None
        assert basis.shape == (rows.shape[1], k)
        expected = vectors[:k].T @ vectors[:k]  # a projection does not depend on signs
        np.testing.assert_allclose((basis @ basis.T).numpy(), expected, atol=1e-7)


def test_what_is_left_is_orthogonal_and_nothing_else_changes() -> None:
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(4, 2, 3, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(6, 2, generator=generator, dtype=torch.float64))[0]
    rest = projection.without(change, basis)
    assert rest.shape == change.shape
    assert float((rest.flatten(1) @ basis).abs().max()) < 1e-12
    torch.testing.assert_close(projection.without(rest, basis), rest)
    in_span = (change - rest).flatten(1)
    torch.testing.assert_close(in_span @ basis @ basis.T, in_span)


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_the_rows_of_a_convolution_are_what_its_weight_multiplies(mode: str) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, stride=2, padding=(1, 2), padding_mode=mode).double()
    x = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    output = projection.rows_of(layer, x) @ layer.weight.flatten(1).T + layer.bias
    torch.testing.assert_close(output, layer(x).flatten(2).transpose(1, 2).flatten(0, 1))


def test_which_layers_are_projected() -> None:
    """A grouped convolution multiplies a part of the channels by each weight, so it is held."""
    module = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4))
    layers = [projection.layer_of(module, f"{place}.weight") for place in range(3)]
    assert layers == [module[0], None, None]
    assert projection.layer_of(module, "0.bias") is None


def test_inputs_of_zero_have_no_directions() -> None:
    assert projection.leading(torch.zeros(3, 3, dtype=torch.float64), 1.0).shape == (3, 0)


def test_the_outputs_for_retained_data_stay_and_those_to_forget_change(tmp_path: Path) -> None:
    """With all directions of the inputs left out, each layer gives the same outputs for them, so
    that the next has the same inputs. Adam and weight decay alone would change both.
    """
    retained = np.stack([np.full((2, 5, 4), c, dtype=np.float32) for c in (-1.0, 0.5, 2.0)])
    forgotten = images(6, seed=2)

    def outputs(net: nn.Module) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return net(torch.from_numpy(retained)), net(torch.from_numpy(forgotten))

    changes: dict[float | None, tuple[float, float]] = {}
    for share in (1.0, None):
        net = network()
        before = outputs(net)
        held = {name: value.clone() for name, value in net.named_parameters()}
        run = api.erase(
            model=net,
            target="classifier",
            forget={"data": (forgotten, [0] * 6), "loss": "ascent"},
            retain={"data": (retained, [0, 1, 2]), "loss": "distill"},
            method={"name": "weighted"},
            trainable={} if share is None else {"project": share},
            training={
                "steps": 8,
                "batch_size": 8,
                "lr": 0.02,
                "optimizer": "adamw",
                "weight_decay": 0.1,
                "device": "cpu",
            },
            output=tmp_path / str(share),
        )
        after = outputs(net)
        changes[share] = tuple(
            float((a - b).abs().max()) for a, b in zip(after, before, strict=True)
        )  # type: ignore[assignment]
        if share is not None:
            assert all(
                torch.equal(value, held[name])
                for name, value in net.named_parameters()
                if name in ("0.bias", "3.weight", "3.bias", "4.bias")
            )
            assert run.recipe.trainable.project == share
    assert changes[1.0][0] < 1e-5
    assert changes[1.0][1] > 0.05
    assert min(changes[None]) > 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["trainable.lora=4"], r"project is for changes of whole weights.* with lora"),
        (["trainable.saliency=0.5"], r"project is for changes of whole weights.* with saliency"),
        (["finish=uce"], "also those that trainable.project keeps frozen"),
        (["retain=null", "method={name: weighted, retain: 0}"], "and there is none"),
    ],
)
def test_settings_that_contradict_it_are_refused(changes: list[str], message: str) -> None:
    project = "trainable={select: cross_attention, project: 0.95}"
    assert recipe.load("tiny_star_munba", [project]).trainable.project == 0.95
    with pytest.raises(UserError, match=message):
        recipe.load("tiny_star_munba", [project, *changes])


def test_examples_do_not_depend_on_micro_batches() -> None:
    net = network().double()
    x = torch.from_numpy(images(2, seed=1)).double()
    seeds = []
    for size in (4, 1):
        eraser: Any = Rows(net, x)
        params = dict(net.named_parameters())
        projection.bases(
            eraser, params, share=0.5, seed=0, batch_size=size, micro_batches=4 // size
        )
        seeds.append(eraser.seeds)
    assert seeds[0] == seeds[1]
    assert len(seeds[0]) == 8 * 4


def test_a_module_that_is_one_layer_is_projected() -> None:
    """A hook on the module itself runs in its forward pass too."""
    linear = torch.nn.Linear(6, 3)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    objective = ClassifierObjective(
        from_arrays(x.numpy(), [0, 1, 2, 0, 1], ["a", "b", "c"]), torch.arange(5), "data"
    )
    eraser = Classifier(linear, {"retain": objective}, ["weight"])
    (basis,) = projection.bases(eraser, eraser.trainable(), share=0.5, seed=0, batch_size=4)
    assert basis is not None
    assert basis.shape[0] == 6
    norm = torch.nn.LayerNorm(3)
    few = ClassifierObjective(
        from_arrays(x[:, :3].numpy(), [0] * 5, ["a", "b", "c"]), objective.rows, "data"
    )
    with pytest.raises(UserError, match="no trained parameter is the weight of a linear layer"):
        projection.bases(
            Classifier(norm, {"retain": few}, ["weight"]),
            dict(norm.named_parameters()),
            share=0.5,
            seed=0,
            batch_size=4,
        )
