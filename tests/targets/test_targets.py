"""The same call for a text encoder, a CLIP model, a VAE and a classifier: which weights change,
which stay, and the errors.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from concept_eraser import api, registry
from concept_eraser.cli.main import app
from concept_eraser.data.labelled import Labelled, from_arrays
from concept_eraser.erasers import classifier
from concept_eraser.models.loading import load_part
from concept_eraser.models.module import build
from concept_eraser.training import saliency
from concept_eraser.utils.errors import Interrupted, UserError
from tests import small_model

METHODS = ["munba", "weighted", "surgery", "ngdiff", "uno", "minmax_ngd", "torchjd"]
SHORT: dict[str, Any] = {"steps": 3, "batch_size": 8, "lr": 1e-3, "device": "cpu"}


@pytest.fixture(scope="module")
def digits() -> Labelled:
    return registry.build("dataset", "digits", {}).load("train")


@pytest.fixture
def net(digits: Labelled) -> nn.Module:
    """A classifier that is trained on the digits."""
    torch.manual_seed(0)
    module = build("mlp", "classifier", inputs=64, hidden=32).module.requires_grad_(True).train()
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    x = digits.inputs(range(len(digits)))
    for _ in range(60):
        nn.functional.cross_entropy(module(x), digits.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.eval()


def accuracy(net: nn.Module, data: Labelled, rows: torch.Tensor) -> float:
    with torch.no_grad():
        return float(
            (net(data.inputs(rows.tolist())).argmax(1) == data.labels[rows]).float().mean()
        )


def parts_of(digits: Labelled) -> tuple[torch.Tensor, torch.Tensor]:
    three = digits.labels == 3
    return three.nonzero()[:, 0], (~three).nonzero()[:, 0]


def test_a_classifier_forgets_a_class_and_retains_the_others(
    net: nn.Module, digits: Labelled, tmp_path: Path
) -> None:
    forget, retain = parts_of(digits)
    before = accuracy(net, digits, forget), accuracy(net, digits, retain)
    api.erase(
        model=net,
        target="classifier",
        forget={"data": "digits", "classes": [3], "loss": "relabel"},
        retain="rest",
        method="munba",
        training={**SHORT, "steps": 60, "batch_size": 64, "lr": 2e-3},
        output=tmp_path,
    )
    after = accuracy(net, digits, forget), accuracy(net, digits, retain)
    assert before[0] > 0.95
    assert after[0] < 0.1, after
    assert after[1] > before[1] - 0.03


@pytest.mark.parametrize("method", METHODS)
def test_every_method_moves_a_classifier(method: str, net: nn.Module, tmp_path: Path) -> None:
    spec = {"name": method, **({"rule": "UPGrad"} if method == "torchjd" else {})}
    loss = "data" if method == "uno" else "relabel"
    run = api.erase(
        model=net,
        target="classifier",
        forget={"data": "digits", "share": 0.1, "loss": loss},
        retain="rest",
        method=spec,
        training=SHORT,
        output=tmp_path,
    )
    assert all(
        torch.isfinite(value).all()
        for value in load_file(run.folder / "weights.safetensors").values()
    )


@pytest.mark.parametrize("method", ["uno-hat", "uno-s-hat", "s-hat", "h"])
def test_the_hat_versions_use_a_judge_on_prior_samples(
    method: str, net: nn.Module, tmp_path: Path
) -> None:
    vae = build("vae_mlp", "vae", inputs=64, hidden=32, latent=4).module
    before = {k: v.clone() for k, v in vae.state_dict().items()}
    api.erase(
        model=vae,
        target="vae",
        forget={"data": "digits", "classes": [1]},
        retain="rest",
        method=method,
        histogram={"concept": {"class": "1"}, "judge": net},
        training=SHORT,
        output=tmp_path,
    )
    names = [
        name for name, value in vae.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert any(name.startswith("decoder") for name in names)


def test_a_vae_makes_fewer_of_a_class_by_its_judge(net: nn.Module, tmp_path: Path) -> None:
    """H, the histogram loss alone, lowers the share of the class among prior samples."""
    torch.manual_seed(1)
    vae = build("vae_mlp", "vae", inputs=64, hidden=64, latent=2).module
    digits = registry.build("dataset", "digits", {}).load("train")
    whole = {"data": "digits", "classes": list(range(10))}
    api.erase(
        model=vae,
        target="vae",
        forget=whole,
        retain=None,
        method={"name": "weighted", "retain": 0},
        trainable={"batchnorm": "train"},
        training={**SHORT, "steps": 300, "batch_size": 64, "lr": 3e-3},
        output=tmp_path / "a",
    )
    z = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))

    def counts() -> torch.Tensor:
        with torch.no_grad():
            return torch.bincount(net(vae.decode(z)).argmax(1), minlength=10) / len(z)

    before = counts()
    target = int(before.argmax())
    api.erase(
        model=vae,
        target="vae",
        forget={"data": "digits", "classes": [target]},
        retain="rest",
        method={"name": "uno", "rule": "none", "histogram": 100.0, "reduction": "mean"},
        histogram={"concept": {"class": str(target)}, "judge": net},
        training={**SHORT, "steps": 40, "batch_size": 64},
        output=tmp_path / "b",
    )
    assert before[target] > 0.1
    assert counts()[target] < before[target] / 2
    assert len(digits.names) == 10


def test_the_pipelines_own_vae(tiny, tmp_path: Path) -> None:
    others = {k: v.clone() for k, v in tiny.denoiser.state_dict().items()}
    run = api.erase(
        model=tiny,
        target="vae",
        forget={
            "data": "painted",
            "options": {"n": 40},
            "classes": ["star"],
            "loss": "anchor",
            "kl": 1e-6,
        },
        retain={"data": "rest", "loss": "distill"},
        training={**SHORT, "batch_size": 2},
        output=tmp_path,
    )
    assert (run.folder / "pipeline" / "vae" / "config.json").is_file()
    assert all(torch.equal(v, others[k]) for k, v in tiny.denoiser.state_dict().items())


def test_a_pickled_vae_is_measured_only_when_allowed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(small_model.small_sd(), model)
    (weights,) = (model / "vae").glob("*.safetensors")
    torch.save(load_file(weights), model / "vae" / "diffusion_pytorch_model.bin")
    weights.unlink()
    painted = {"data": "painted", "options": {"n": 40}, "classes": ["star"], "loss": "anchor"}
    api.erase(
        model=str(model),
        target="vae",
        forget={**painted, "kl": 1e-6},
        retain={"data": "rest", "loss": "distill"},
        training={**SHORT, "steps": 1, "batch_size": 2},
        output=tmp_path / "run",
        allow_pickle=True,
    )
    words = ["evaluate", str(tmp_path / "run"), "-o", str(tmp_path / "numbers"), "-q"]
    assert "--allow-pickle" in str(CliRunner().invoke(app, words).exception)
    result = CliRunner().invoke(app, [*words, "--allow-pickle"])
    assert result.exit_code == 0, result.output
    assert "PSNR" in result.output


def test_a_text_encoder_is_a_drop_in(tmp_path: Path, shared_tiny) -> None:
    from transformers import CLIPTextModel

    run = api.erase(
        model="tiny-sd",
        target="text_encoder",
        forget={"prompts": "tiny_star", "loss": "anchor", "anchor": {"shape": "circle"}},
        retain={"prompts": "tiny_rest", "loss": "distill"},
        method="munba",
        training={**SHORT, "steps": 60},
        output=tmp_path,
    )
    encoder = CLIPTextModel.from_pretrained(run.folder / "pipeline" / "text_encoder")
    tokens = shared_tiny.tokenize(["a red star", "a red circle", "a red house"]).tensors["ids"]
    with torch.no_grad():
        after, before = (
            encoder(tokens)[0],
            shared_tiny.embed(
                shared_tiny.tokenize(["a red star", "a red circle", "a red house"])
            ).tensors["states"],
        )
    assert float((after[0] - before[1]).norm()) < 0.6 * float((before[0] - before[1]).norm())
    assert float((after[2] - before[2]).norm()) < 0.5 * float((after[0] - before[0]).norm())
    assert not torch.equal(before, after)


def test_a_text_encoder_through_the_denoiser(tiny, tmp_path: Path) -> None:
    unet = {k: v.clone() for k, v in tiny.denoiser.state_dict().items()}
    run = api.erase(
        model=tiny,
        target="text_encoder",
        forget={"prompts": "tiny_star", "loss": "relabel", "anchor": {"shape": "circle"}, "n": 4},
        retain={"prompts": "tiny_rest", "loss": "data", "n": 4},
        generation={"steps": 2},
        training={**SHORT, "batch_size": 2},
        output=tmp_path,
    )
    assert all(torch.equal(v, unet[k]) for k, v in tiny.denoiser.state_dict().items())
    assert len(load_file(run.folder / "weights.safetensors")) > 10


@pytest.mark.parametrize(
    ("select", "tower"),
    [("text_attention", "text"), ("image_attention", "vision"), ("attention", "")],
)
def test_clip_towers(select: str, tower: str, tmp_path: Path) -> None:
    run = api.erase(
        model="tiny-sd",
        target="clip",
        forget={"data": "painted", "options": {"n": 60}, "classes": ["star"], "loss": "relabel"},
        retain="rest",
        trainable=select,
        templates=["a picture of a {}"],
        training=SHORT,
        output=tmp_path,
    )
    names = list(load_file(run.folder / "weights.safetensors"))
    assert names
    assert all(tower in name and "self_attn" in name for name in names)
    again = load_part(run.folder, "clip")
    images = torch.randn(2, 3, 64, 64)
    first, second = (m.zero_shot(["star", "house"], ["a {}"])(images) for m in (run.model, again))
    torch.testing.assert_close(first, second)


def test_an_open_clip_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vision = open_clip.CLIPVisionCfg(
        layers=2, width=32, head_width=16, patch_size=16, image_size=32
    )
    text = open_clip.CLIPTextCfg(context_length=77, vocab_size=49408, width=32, heads=2, layers=2)
    model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
    run = api.erase(
        model=model,
        target="clip",
        forget={
            "data": "painted",
            "options": {"n": 40, "size": 32},
            "classes": ["star"],
            "loss": "anchor",
            "anchor": "circle",
        },
        retain="rest",
        trainable="text_attention",
        training=SHORT,
        output=tmp_path,
    )
    names = list(load_file(run.folder / "weights.safetensors"))
    assert names
    assert all("visual" not in name and ".attn." in name for name in names)
    fresh = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
    fresh.load_state_dict(load_file(run.folder / "model" / "open_clip_model.safetensors"))


class Faulty(torch.utils.data.Dataset):
    targets = [0, 1] * 10

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if i == 13:
            raise OSError("the disk is gone")
        return np.zeros(64, dtype=np.float32), i % 2


@pytest.mark.parametrize(
    ("forget", "changes", "words"),
    [
        ({"data": "digits", "classes": [11]}, {}, r"has classes 0 to 9, found 11"),
        ({"data": "digitss"}, {}, r"no such data: 'digitss'.*Named sets: .*digits"),
        (
            {"data": "painted", "options": {"n": 200}, "classes": ["star"]},
            {},
            r"the model cannot take an example of painted",
        ),
        ({"data": "digits", "indices": [5, 4000]}, {}, r"examples 0 to 1436; not among them: 4000"),
        (
            {"data": "digits", "classes": [1]},
            {"retain": {"data": "digits", "classes": [1, 2]}},
            r"both to be forgotten and to be retained",
        ),
        ({"data": "digits", "classes": list(range(10))}, {}, r"the retain set is empty"),
        (
            {"data": "digits", "classes": [1]},
            {"trainable": {"batchnorm": "train"}, "training": {**SHORT, "batch_size": 1}},
            r"at least 2 examples in a batch",
        ),
        (
            {"data": (np.zeros((4, 64)), np.array([0, 1, 11, 12])), "classes": [0]},
            {},
            r"expected logits of shape \[n, 13\]",
        ),
        (
            {"data": (np.zeros((4, 64)), np.array([0, 1])), "classes": [0]},
            {},
            r"expected labels of shape \[4\]",
        ),
        (
            {"data": (np.zeros((4, 64)), np.array([0, 2, 2, 3])), "classes": [1]},
            {},
            r"no example of .* has the class 1",
        ),
        (
            {"data": Faulty(), "classes": [0]},
            {"training": {**SHORT, "steps": 30}},
            r"the Faulty: reading examples .* failed: OSError: the disk is gone",
        ),
        (
            {"data": "digits", "loss": "anchor"},
            {},
            r"needs an anchor: the class to predict instead",
        ),
        ({"data": "digits", "indices": "nowhere.txt"}, {}, r"no such file of indices"),
        *(
            (
                {"data": "digits", "classes": [3, *more], "loss": "anchor", "anchor": "3"},
                {},
                r"forget: the anchor '3' is a class to forget",
            )
            for more in ([], [5])
        ),
    ],
)
def test_bad_requests_are_refused_with_the_reason(
    forget: dict, changes: dict, words: str, net: nn.Module, tmp_path: Path
) -> None:
    settings = {"retain": "rest", "training": SHORT, **changes}
    with pytest.raises(UserError, match=words):
        api.erase(
            model=net,
            target="classifier",
            forget={"loss": "relabel", **forget},
            output=tmp_path,
            **settings,
        )
    assert not (tmp_path / "done.json").exists()


class Crooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 2)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.layer(x)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return z


def test_a_random_share_may_have_examples_of_the_anchors_class(
    net: nn.Module, tmp_path: Path
) -> None:
    forget = {"data": "digits", "share": 0.1, "loss": "anchor", "anchor": 3}
    run = api.erase(
        model=net,
        target="classifier",
        forget=forget,
        retain="rest",
        training={**SHORT, "steps": 1},
        output=tmp_path,
    )
    assert run.folder.exists()


def test_a_vae_whose_shapes_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="wrong shapes"):
        api.erase(
            model=Crooked(),
            target="vae",
            forget={"data": "digits", "classes": [1], "loss": "ascent"},
            retain="rest",
            training=SHORT,
            output=tmp_path / "a",
        )
    with pytest.raises(UserError, match="it needs encode"):
        api.erase(
            model=nn.Linear(64, 2),
            target="vae",
            forget={"data": "digits", "classes": [1], "loss": "ascent"},
            retain="rest",
            training=SHORT,
            output=tmp_path / "b",
        )


def test_a_saved_classifier_is_opened_by_its_folder(
    net: nn.Module, digits: Labelled, tmp_path: Path
) -> None:
    model = build("mlp", "classifier", inputs=64, hidden=32)
    model.module.load_state_dict(net.state_dict())
    model.save(tmp_path / "net")
    (tmp_path / "delete.txt").write_text("# a deletion request\n3\n17\n\n256\n")
    settings = {
        "target": "classifier",
        "forget": {"data": "digits", "indices": str(tmp_path / "delete.txt"), "loss": "ascent"},
        "retain": "rest",
        "training": SHORT,
    }
    run = api.erase(model=str(tmp_path / "net"), output=tmp_path / "run", **settings)
    again = load_part(run.folder, "classifier")
    x = digits.inputs([0, 1])
    torch.testing.assert_close(again.parts["classifier"](x), run.model.parts["classifier"](x))
    # done before
    assert api.erase(model=str(tmp_path / "net"), output=tmp_path / "run", **settings).model is None
    (tmp_path / "net" / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(UserError, match="damaged"):
        load_part(tmp_path / "net", "classifier")


def test_data_from_arrays_folders_and_files(tmp_path: Path) -> None:
    from PIL import Image

    for name, tone in (("cats", 0), ("dogs", 255)):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (80, 70), (tone, tone, tone)).save(
                tmp_path / "pets" / name / f"{i}.png"
            )
    from concept_eraser.data.labelled import open_data

    pets = open_data(str(tmp_path / "pets"))
    assert pets.names == ("cats", "dogs")
    assert pets.labels.tolist() == [0, 0, 1, 1]
    assert pets.inputs([0, 3]).shape == (2, 3, 64, 64)
    assert pets.inputs([0, 3]).amin((1, 2, 3)).tolist() == [-1, 1]
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)), y=np.array([0, 1, 1]))
    assert len(open_data(str(tmp_path / "a.npz"))) == 3
    assert from_arrays([[1.0], [2.0]], [0, 1]).inputs([1]).tolist() == [[2.0]]
    with pytest.raises(UserError, match="no images in subfolders"):
        open_data(str(tmp_path))


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [("boundary", 0.03, 0.2), ("ascent", 0.03, 0.2), ("distill", -0.01, 0.01)],
)
def test_other_losses_of_a_classifier(
    loss: str, low: float, high: float, net: nn.Module, digits: Labelled, tmp_path: Path
) -> None:
    """`boundary` and `ascent` lower the probability of the forgotten class. `distill` keeps it."""
    threes = torch.nonzero(digits.labels == 3).flatten().tolist()

    def probability() -> float:
        with torch.no_grad():
            return float(net(digits.inputs(threes)).softmax(1)[:, 3].mean())

    before = probability()
    api.erase(
        model=net,
        target="classifier",
        forget={"data": "digits", "classes": [3], "loss": loss},
        retain="rest",
        training=SHORT,
        output=tmp_path,
    )
    assert low < before - probability() < high


def test_boundary_is_the_nearest_other_class() -> None:
    """A linear model in the plane whose classes are sectors: for class 0 near its border to 1 the
    nearest class is 1.
    """
    from concept_eraser.erasers import classifier

    linear = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
    data = from_arrays(np.array([[1.0, 0.95]]), [0], ["a", "b", "c"])
    objective = classifier.ClassifierObjective(data, torch.tensor([0]), "boundary")
    eraser = classifier.Classifier(linear, {"forget": objective}, ["weight"])
    draw = eraser.draw("forget", [0])
    expected = nn.functional.cross_entropy(linear(draw.inputs), torch.tensor([1]))
    torch.testing.assert_close(eraser.loss("forget", draw), expected)


def test_the_boundary_does_not_depend_on_how_a_batch_is_split() -> None:
    """One example has values ten times those of the others, so the step is 0.1 of its range."""
    from concept_eraser.erasers import classifier

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 5))
    inputs = np.random.default_rng(0).uniform(-1, 1, (12, 2))
    inputs[5] = [-10, 10]
    data = from_arrays(inputs, [k % 5 for k in range(12)], list("abcde"))
    objective = classifier.ClassifierObjective(data, torch.arange(12), "boundary")
    eraser = classifier.Classifier(net, {"forget": objective}, ["0.weight"])
    assert eraser.input_ranges == {"forget": 20.0}
    seeds = list(range(24))
    draws = [eraser.draw("forget", some) for some in (seeds, *([seed] for seed in seeds))]
    assert float(draws[0].inputs.max()) == 10
    gradients = [
        torch.autograd.grad(eraser.loss("forget", draw), list(eraser.trainable().values()))[0]
        for draw in draws
    ]
    torch.testing.assert_close(gradients[0], torch.stack(gradients[1:]).mean(0))


def test_saliency_moves_only_the_weights_that_matter(net: nn.Module, tmp_path: Path) -> None:
    before = {k: v.clone() for k, v in net.state_dict().items()}
    run = api.erase(
        model=net,
        target="classifier",
        forget={"data": "digits", "classes": [3], "loss": "relabel"},
        retain="rest",
        trainable={"saliency": 0.25},
        training={**SHORT, "optimizer": "sgd"},
        output=tmp_path,
    )
    weights = load_file(run.folder / "weights.safetensors")
    count = sum(int((value != before[name]).sum()) for name, value in weights.items())
    total = sum(value.numel() for value in weights.values())
    assert 0.1 * total < count <= 0.26 * total


def test_expanding_sends_a_class_to_an_output_that_is_then_removed(
    net: nn.Module, digits: Labelled, tmp_path: Path
) -> None:
    """Boundary expanding: threes get other classes, and the model has as many outputs and tensors
    as before.
    """
    forget, _ = parts_of(digits)
    names, before = set(net.state_dict()), accuracy(net, digits, forget)
    run = api.erase(
        model=net,
        target="classifier",
        forget={"data": "digits", "classes": [3], "loss": "expand"},
        method={"name": "weighted", "retain": 0.0},
        training={**SHORT, "steps": 60, "lr": 3e-3},
        output=tmp_path,
    )
    assert before > 0.9
    assert accuracy(net, digits, forget) < 0.5
    assert set(net.state_dict()) == names
    assert net(digits.inputs([0])).shape == (1, 10)
    assert set(load_file(run.folder / "weights.safetensors")) <= names


def test_the_expanded_output_is_one_more_logit_of_the_last_layer(
    net: nn.Module, digits: Labelled
) -> None:
    from concept_eraser.erasers import classifier

    objective = classifier.ClassifierObjective(digits, torch.arange(20), "expand")
    eraser = classifier.Classifier(
        net, {"forget": objective}, [name for name, _ in net.named_parameters()]
    )
    draw = eraser.draw("forget", [0, 1, 2])
    assert eraser.expansion is not None
    wide = nn.Linear(eraser.expansion.head.in_features, 11)
    with torch.no_grad():
        wide.weight.copy_(torch.cat([eraser.expansion.head.weight, eraser.expansion.extra.weight]))
        wide.bias.copy_(torch.cat([eraser.expansion.head.bias, eraser.expansion.extra.bias]))
    head_inputs: list[torch.Tensor] = []
    eraser.expansion.head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0]))
    net(draw.inputs)
    expected = nn.functional.cross_entropy(wide(head_inputs[0]), torch.full((3,), 10))
    torch.testing.assert_close(eraser.loss("forget", draw), expected)


def test_a_model_without_a_linear_last_layer_has_nothing_to_expand(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 10), nn.Softmax(1))
    with pytest.raises(UserError, match="has to be linear"):
        api.erase(
            model=net,
            target="classifier",
            forget={"data": "digits", "classes": [3], "loss": "expand"},
            retain="rest",
            training=SHORT,
            output=tmp_path,
        )


def test_the_most_sensitive_weights_start_anew(net: nn.Module, digits: Labelled) -> None:
    """Scissorhands: the given share of the weights, those with the largest |g theta|, gets new
    values of a similar size; the same ones each time.
    """

    def restart() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
        module = copy.deepcopy(net)
        objective = classifier.ClassifierObjective(digits, parts_of(digits)[0], "data")
        eraser = classifier.Classifier(
            module, {"forget": objective}, [name for name, _ in module.named_parameters()]
        )
        before = {name: value.detach().clone() for name, value in eraser.trainable().items()}
        gradient = saliency.sensitivity(
            eraser, eraser.trainable(), seed=0, batch_size=32, reduce=lambda x: x
        )
        saliency.start_anew(eraser.trainable(), gradient, 0.1, 0)
        return before, {n: v.detach() for n, v in eraser.trainable().items()}, gradient

    before, fresh, gradient = restart()
    is_changed = torch.cat([(fresh[name] != before[name]).flatten() for name in before])
    scores = torch.cat(
        [(g * before[name]).abs().flatten() for name, g in zip(before, gradient, strict=True)]
    )
    assert float(is_changed.float().mean()) == pytest.approx(0.1, abs=0.002)
    assert scores[is_changed].min() >= scores[~is_changed].max()
    for name in before:
        assert fresh[name].std() < 2 * before[name].std()
    assert all(torch.equal(value, fresh[name]) for name, value in restart()[1].items())


def test_the_gradient_of_a_mask_does_not_depend_on_micro_batches(
    net: nn.Module, digits: Labelled
) -> None:
    """`memory` divides a batch. The examples of the mask stay the same."""
    objective = classifier.ClassifierObjective(digits, parts_of(digits)[0], "data")
    eraser = classifier.Classifier(
        net, {"forget": objective}, [name for name, _ in net.named_parameters()]
    )
    whole, divided = (
        saliency.sensitivity(
            eraser,
            eraser.trainable(),
            seed=0,
            batch_size=size,
            micro_batches=16 // size,
            reduce=lambda x: x,
        )
        for size in (16, 2)
    )
    for one, other in zip(whole, divided, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_fresh_start_is_repaired_and_resumed(net: nn.Module, tmp_path: Path) -> None:
    """An interrupted run continues from its own weights, and does not initialise them again."""

    class Stop:
        def __call__(self, step: int, seconds: float) -> None:
            if step == 3:
                raise KeyboardInterrupt

    whole = train(copy.deepcopy(net), tmp_path / "whole", trainable={"reinitialise": 0.2})
    with pytest.raises(Interrupted, match="after 3 of 6 steps"):
        train(
            copy.deepcopy(net), tmp_path / "parts", on_step=Stop(), trainable={"reinitialise": 0.2}
        )
    again = train(
        copy.deepcopy(net), tmp_path / "parts", resume=True, trainable={"reinitialise": 0.2}
    )
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    plain = train(copy.deepcopy(net), tmp_path / "plain")
    assert not all(torch.equal(value, whole[name]) for name, value in plain.items())


def test_an_l1_penalty_shrinks_the_weights(net: nn.Module, tmp_path: Path) -> None:
    def size(module: nn.Module) -> float:
        return sum(float(p.detach().abs().sum()) for p in module.parameters())

    before = size(net)
    api.erase(
        model=net,
        target="classifier",
        forget={"data": "digits", "classes": [3]},
        retain={"data": "rest", "l1": 1e-2},
        method={"name": "weighted", "forget": 0.0},
        training={**SHORT, "steps": 20},
        output=tmp_path,
    )
    assert size(net) < 0.97 * before


def softmax(digits: Labelled, ridge: float) -> nn.Module:
    """The minimiser of cross-entropy + ridge/2 ||theta||^2 on all digits, by L-BFGS."""
    module = build("mlp", "classifier", inputs=64, hidden=8, norm=False).module
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(True)
    x = digits.inputs(range(len(digits)))
    optimizer = torch.optim.LBFGS(
        linear.parameters(), max_iter=300, tolerance_grad=1e-8, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(linear(x), digits.labels) + ridge / 2 * sum(
            p.square().sum() for p in linear.parameters()
        )
        loss.backward()
        return loss

    optimizer.step(closure)
    assert module is not None
    return linear


def test_a_fisher_step_from_a_recipe(digits: Labelled, tmp_path: Path) -> None:
    """The edited model is nearer to the model trained without the samples than the original is."""
    import json

    ridge, module = 1e-2, softmax(digits, 1e-2)
    rows = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    forget, retain = rows[:70].sort().values, rows[70:].sort().values
    target = softmax(from_arrays(digits.inputs(retain.tolist()), digits.labels[retain]), ridge)
    start = {k: v.clone() for k, v in module.state_dict().items()}
    run = api.erase(
        model=module,
        target="classifier",
        forget={"data": "digits", "indices": forget.tolist()},
        retain="rest",
        method={"name": "natural_gradient", "solver": "cg", "tolerance": 1e-6},
        training={"weight_decay": ridge, "batch_size": 500, "device": "cpu"},
        output=tmp_path,
    )

    def apart(state: dict[str, torch.Tensor]) -> float:
        return float(
            sum((state[k] - v).square().sum() for k, v in target.state_dict().items()) ** 0.5
        )

    assert apart(module.state_dict()) < 0.2 * apart(start)
    assert json.loads((run.folder / "done.json").read_text())["edit"]["gradient_after"] < 1e-2


def test_a_last_batch_of_one_example_joins_the_one_before() -> None:
    """Batch norm over a vector has no variance of one example."""
    from concept_eraser.training.fit import Plan, fit

    net, sizes = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), []
    examples, plan = torch.randn(65, 3), Plan(epochs=1, batch_size=64)

    def loss(rows: list[int]) -> torch.Tensor:
        sizes.append(len(rows))
        return net(examples[rows]).square().mean()

    fit(net, loss, torch.arange(65), plan)
    assert sizes == [65]
    counts = {(9, 4): 2, (8, 4): 2, (10, 4): 3, (1, 4): 1, (3, 1): 3}
    assert {key: Plan(epochs=1, batch_size=key[1]).steps(key[0]) for key in counts} == counts


@pytest.mark.parametrize("method", ["mini_unlearning", "rewind"])
def test_mini_unlearning_from_a_recorded_training(
    method: str, digits: Labelled, tmp_path: Path
) -> None:
    from concept_eraser.methods.history import History
    from concept_eraser.training.fit import Plan, fit

    torch.manual_seed(0)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def loss(rows: list[int]) -> torch.Tensor:
        return nn.functional.cross_entropy(linear(digits.inputs(rows)), digits.labels[rows])

    history = History(tuple(linear.parameters()), 10, tmp_path / "history")
    plan = Plan(epochs=2, lr=0.5, momentum=0.0)
    fit(linear, loss, torch.arange(len(digits)), plan, record=history.record)
    forget = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))[:140].tolist()
    settings = {
        "forget": {"data": "digits", "indices": forget},
        "retain": "rest",
        "target": "classifier",
        "training": {"device": "cpu"},
    }
    with pytest.raises(UserError, match=r"give method\.history"):
        api.erase(model=linear, method={"name": method, "k": 10}, output=tmp_path / "a", **settings)
    before = [p.clone() for p in linear.parameters()]
    api.erase(
        model=linear,
        method={"name": method, "k": 10, "history": str(tmp_path / "history")},
        output=tmp_path / "b",
        **settings,
    )
    assert any(not torch.equal(a, b) for a, b in zip(before, linear.parameters(), strict=True))
    with pytest.raises(UserError, match="10 are recorded"):
        api.erase(
            model=linear,
            method={"name": method, "k": 11, "history": str(tmp_path / "history")},
            output=tmp_path / "c",
            **settings,
        )


def test_edits_are_for_classifiers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="works on classifier only, since it needs a likelihood"):
        api.erase(
            forget="tiny_star", retain="tiny_rest", method="natural_gradient", output=tmp_path
        )


def test_a_scrubbed_text_tower_is_plugged_into_the_pipeline(
    tmp_path: Path, shared_tiny, tiny_fp32: Path
) -> None:
    run = api.erase(
        model="tiny-sd",
        target="clip",
        forget={"data": "painted", "options": {"n": 60}, "classes": ["star"], "loss": "relabel"},
        retain="rest",
        trainable="text",
        templates=["a picture of a {}"],
        training=SHORT,
        output=tmp_path / "clip",
    )
    pipe = api.plug(str(tiny_fp32), run.folder, output=tmp_path / "pipeline")
    expected = run.model.text_tower()
    state = pipe.parts["text_encoder"].state_dict()
    assert all(
        torch.equal(value, expected[name.removeprefix("text_model.")])
        for name, value in state.items()
    )
    assert not torch.equal(
        pipe.encode(["a star"]).tensors["states"],
        shared_tiny.encode(["a star"]).tensors["states"],
    )
    again = api.load(tmp_path / "pipeline")
    torch.testing.assert_close(
        again.encode(["a star"]).tensors["states"], pipe.encode(["a star"]).tensors["states"]
    )


def test_an_untouched_tower_changes_nothing_and_a_strange_one_is_refused(shared_tiny) -> None:
    clip = load_part("tiny-sd", "clip")
    pipe = api.plug("tiny-sd", clip)
    torch.testing.assert_close(
        pipe.encode(["a star"]).tensors["states"],
        shared_tiny.encode(["a star"]).tensors["states"],
    )
    with pytest.raises(UserError, match="does not fit the text encoder"):
        pipe.take_text_tower({k: v[..., :1] for k, v in clip.text_tower().items()})


@pytest.mark.parametrize(("name", "value"), [("hidden_act", "gelu"), ("num_attention_heads", 2)])
def test_a_tower_that_computes_otherwise_is_refused(name: str, value: Any) -> None:
    """Its tensors have the shapes of the text encoder's."""
    clip = load_part("tiny-sd", "clip")
    setattr(clip.module.config.text_config, name, value)
    with pytest.raises(UserError, match=f"its {name} is {value}, and .* is needed"):
        api.plug("tiny-sd", clip)


def train(net: nn.Module, folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    training = {
        **SHORT,
        "steps": 6,
        "save_every": 2,
        "optimizer": "adam",
        **changes.pop("training", {}),
    }
    run = api.erase(
        model=net,
        target="classifier",
        forget={"data": "digits", "classes": [3], "loss": "relabel"},
        retain={"data": "rest", "loss": "distill"},
        training=training,
        output=folder,
        **changes,
    )
    return load_file(run.folder / "weights.safetensors")


def test_four_micro_batches_of_two_are_one_of_eight(net: nn.Module, tmp_path: Path) -> None:
    # Adam's first steps go by the sign, also that of a rounding
    plain = {"optimizer": "sgd", "lr": 1e-2}
    one = train(copy.deepcopy(net), tmp_path / "a", training=plain)
    four = train(
        copy.deepcopy(net), tmp_path / "b", training={**plain, "batch_size": 2, "micro_batches": 4}
    )
    for name, value in one.items():
        distance = float((value - net.state_dict()[name]).norm())
        # sums in another order, nothing else
        assert float((four[name] - value).norm()) <= 1e-3 * distance, name


def test_a_resumed_run_is_the_uninterrupted_one_and_needs_the_original(
    net: nn.Module, tmp_path: Path
) -> None:
    class Stop:
        def __call__(self, step: int, seconds: float) -> None:
            if step == 3:
                raise KeyboardInterrupt

    whole = train(copy.deepcopy(net), tmp_path / "whole", trainable={"saliency": 0.5})
    net_copy = copy.deepcopy(net)
    with pytest.raises(Interrupted, match="after 3 of 6 steps"):
        train(net_copy, tmp_path / "parts", on_step=Stop(), trainable={"saliency": 0.5})
    # put back
    assert all(
        torch.equal(value, net.state_dict()[name]) for name, value in net_copy.state_dict().items()
    )
    other = copy.deepcopy(net)
    with torch.no_grad():
        next(other.parameters()).add_(0.1)
    with pytest.raises(UserError, match="started from other weights"):
        train(other, tmp_path / "parts", resume=True, trainable={"saliency": 0.5})
    again = train(net_copy, tmp_path / "parts", resume=True, trainable={"saliency": 0.5})
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


def test_the_psnr_of_a_vae_falls_more_on_the_forgotten_class(tiny, tmp_path: Path, cli) -> None:
    """Its PSNR falls more on the forgotten class than on the others; the command prints it."""
    import json

    data = {"data": "painted", "options": {"n": 120}}
    api.erase(
        model="tiny-sd",
        target="vae",
        forget={**data, "classes": ["star"], "loss": "anchor", "kl": 1e-6},
        retain={"data": "rest", "loss": "distill"},
        training={**SHORT, "steps": 12, "batch_size": 4, "lr": 3e-4},
        output=tmp_path / "run",
    )
    assert "PSNR dB" in cli("evaluate", str(tmp_path / "run")).stdout
    results = json.loads((tmp_path / "run" / "evaluation.json").read_text())["results"]
    drops = {
        name: results["before"]["psnr"][name]["value"] - results["after"]["psnr"][name]["value"]
        for name in ("forget", "retain")
    }
    assert results["before"]["psnr"]["retain"]["value"] > 22
    assert drops["forget"] > drops["retain"]
