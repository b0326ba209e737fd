"""One pass for all objectives: the same gradients as separate passes, and how often what runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

import concept_eraser
from benchmarks.floor import examples
from concept_eraser.data.batches import make_examples
from concept_eraser.erasers.base import Inseparable
from concept_eraser.erasers.denoiser import Denoiser, DenoiserObjective, SharedPrediction
from concept_eraser.losses import LossSettings
from concept_eraser.losses.base import Loss
from concept_eraser.losses.denoiser import LOSSES
from concept_eraser.methods.base import Method
from concept_eraser.methods.munba import Munba
from concept_eraser.methods.vectors import Vec, dot, gramian
from concept_eraser.methods.weighted import Weighted
from concept_eraser.models.lora import Adapter, layers_of
from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.selections import select
from concept_eraser.training import one_pass
from concept_eraser.training.closure import LossClosure, of_step
from concept_eraser.training.engine import Engine, Schedule
from concept_eraser.training.memory import Peak
from concept_eraser.training.one_pass import OnePass, Setting
from concept_eraser.utils.errors import Interrupted
from tests import families
from tests.conftest import short

SELECTIONS = {
    "cross-attention": ("cross_attention", None),
    "all weights": ("all", None),
    "LoRA": ("all", 4),
}


def build(model: Any, selection: str, losses: Mapping[str, str], **settings: Any) -> Denoiser:
    """Return an eraser of a model on random examples."""
    selected, rank = SELECTIONS[selection]
    names = select([name for name, _ in model.denoiser.named_parameters()], selected)
    adapter = None
    if rank is not None:
        layers = layers_of(model.denoiser, names, conv=True)
        adapter = Adapter(model.denoiser, layers, rank=rank, alpha=rank, seed=0)
    objectives = {
        name: DenoiserObjective(
            examples(model, 4, seed), loss, settings=LossSettings(**settings), scale=1.0 + seed
        )
        for seed, (name, loss) in enumerate(losses.items())
    }
    return Denoiser(model, objectives, adapter.tensors if adapter else names, adapter=adapter)


def shift(eraser: Denoiser) -> None:
    """Change the trained tensors, so that neither the loss of `distill` nor `up` is 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in eraser.trainable().values():
            value.add_(0.02 * torch.randn(value.shape, generator=generator))


@pytest.fixture(scope="module")
def erasers() -> Mapping[str, Denoiser]:
    """An eraser for each selection, after some change of its weights."""
    result = {}
    for selection in SELECTIONS:
        model: Any = concept_eraser.load("tiny-sd")
        result[selection] = build(model, selection, {"retain": "distill", "forget": "anchor"})
        shift(result[selection])
    return result


def closure_of(eraser: Denoiser, *, joint: bool, bf16: bool = False) -> LossClosure:
    params = tuple(eraser.trainable().values())
    draws = {name: [eraser.draw(name, [1, 2])] for name in eraser.objectives}

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=bf16)

    def gradients() -> one_pass.Gradients:
        with autocast():
            rows = {name: one for name, (one,) in draws.items()}
            return OnePass(eraser, eraser.trainable()).gradients(rows, (2,) * len(rows))

    return of_step(eraser, params, draws, autocast=autocast, joint=gradients if joint else None)


def relative(actual: Vec, expected: Vec) -> float:
    difference = tuple(a - b for a, b in zip(actual, expected, strict=True))
    return float((dot(difference, difference) / dot(expected, expected)).sqrt())


@pytest.mark.parametrize("selection", SELECTIONS)
def test_gradients_and_gram_matrix_are_those_of_separate_passes(
    erasers: Mapping[str, Denoiser], selection: str
) -> None:
    separate = closure_of(erasers[selection], joint=False)
    together = closure_of(erasers[selection], joint=True)
    expected = [separate.grad(name) for name in separate.objectives]
    actual = [together.grad(name) for name in together.objectives]
    for one, other in zip(actual, expected, strict=True):
        # the rounding of fp32; a tensor of another objective would differ by about 1
        assert relative(one, other) < 1e-5
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * float(b.abs().max()) + 1e-9)
    torch.testing.assert_close(gramian(actual), gramian(expected), rtol=1e-5, atol=0)
    assert together.losses == pytest.approx(separate.losses, rel=1e-5)
    assert abs(float(gramian(expected)[0, 1])) > 0


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux", "dit"])
def test_other_families_share_a_pass_too(family: str, tmp_path: Path) -> None:
    model: Any = concept_eraser.load(str(families.build(family, tmp_path / family)))
    model.configure({"size": families.SIZE[family]} if family in families.SIZE else {})
    names = [name for name, _ in model.denoiser.named_parameters()]
    layers = layers_of(model.denoiser, names, conv=True)
    adapter = Adapter(model.denoiser, layers, rank=4, alpha=4, seed=0)
    texts, generator = families.texts(family), torch.Generator().manual_seed(0)
    objectives = {
        name: DenoiserObjective(
            make_examples(
                model,
                texts,
                latents=torch.randn((2, *model.latent_shape()), generator=generator),
                anchors=texts[::-1],
            ),
            loss,
        )
        for name, loss in {"retain": "data", "forget": "anchor"}.items()
    }
    eraser = Denoiser(model, objectives, adapter.tensors, adapter=adapter)
    shift(eraser)
    separate, together = closure_of(eraser, joint=False), closure_of(eraser, joint=True)
    for name in eraser.objectives:
        assert relative(together.grad(name), separate.grad(name)) < 1e-5


def test_bf16_differs_by_its_rounding_only(erasers: Mapping[str, Denoiser]) -> None:
    eraser = erasers["LoRA"]
    exact = closure_of(eraser, joint=False).grad("forget")
    separate = relative(closure_of(eraser, joint=False, bf16=True).grad("forget"), exact)
    actual = closure_of(eraser, joint=True, bf16=True).grad("forget")
    assert 0 < relative(actual, exact) < 1.5 * separate
    assert all(part.dtype == torch.float32 for part in actual)


def test_a_gradient_at_other_weights_is_computed_there(erasers: Mapping[str, Denoiser]) -> None:
    eraser = erasers["cross-attention"]
    separate, together = closure_of(eraser, joint=False), closure_of(eraser, joint=True)
    offset = tuple(0.01 * torch.ones_like(value) for value in separate.params)
    together.grad("retain")
    with separate.at(offset):
        expected = separate.grad("forget")
    with together.at(offset):
        assert relative(together.grad("forget"), expected) < 1e-5
    here = separate.grad("forget")
    assert relative(together.grad("forget"), here) < 1e-5
    assert relative(expected, here) > 1e-3


@contextmanager
def counting(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Count the forward passes of a module with and without gradients, and backward passes."""
    counts = {"student": 0, "teacher": 0, "backward": 0}

    def forward(*_: Any) -> None:
        counts["student" if torch.is_grad_enabled() else "teacher"] += 1

    plain_grad = torch.autograd.grad

    def grad(*arguments: Any, **options: Any) -> Any:
        counts["backward"] += 1
        return plain_grad(*arguments, **options)

    hook = module.register_forward_pre_hook(forward)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", grad)
        yield counts
    hook.remove()


def engine_of(
    eraser: Denoiser, folder: Path, method: Method | None = None, **settings: Any
) -> Engine:
    schedule = Schedule(**{"steps": 2, "batch_size": 2, "lr": 0.0, **settings})
    return Engine(eraser, method or Munba(), schedule, folder, Accelerator(cpu=True))


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize(("mode", "count"), [("off", 2), ("on", 1)])
def test_a_step_of_munba_has_so_many_passes(
    erasers: Mapping[str, Denoiser],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    selection: str,
    mode: str,
    count: int,
) -> None:
    engine = engine_of(erasers[selection], tmp_path, one_pass=mode)
    with counting(engine.eraser.module, monkeypatch) as counts:
        engine.do_step(0, None)
    assert counts == {"student": count, "teacher": count, "backward": count}


class Copies(Peak):
    """Counts the new tensors in fp32 that have one of some shapes."""

    def __init__(self, shapes: Iterable[torch.Size]) -> None:
        super().__init__()
        self.shapes = set(shapes)
        self.made = 0

    def _count(self, value: torch.Tensor, *, is_new: bool) -> None:
        is_copy = is_new and value.dtype == torch.float32 and value.shape in self.shapes
        known = len(self._storages)
        super()._count(value, is_new=is_copy)
        self.made += is_copy and len(self._storages) > known


def test_a_step_makes_one_copy_of_the_gradient_more_than_fine_tuning(
    erasers: Mapping[str, Denoiser], tmp_path: Path
) -> None:
    """Counted on the 3 x 3 convolutions of the UNet, whose shape no activation has.

    Fine-tuning makes the gradient and three tensors inside Adam for each weight. At most one is
    there at once, beside those of the layer that is moved.
    """
    eraser = erasers["all weights"]
    weights = [v for v in eraser.trainable().values() if v.dim() == 4 and v.shape[-1] == 3]
    assert len(weights) == 20
    made, held = {}, {}
    for method in (Weighted(forget=0.0), Weighted(), Munba()):
        name = f"{type(method).__name__} {len(made)}"
        (tmp_path / name).mkdir()
        engine = engine_of(eraser, tmp_path / name, method)
        engine.do_step(0, None)  # makes the state of Adam
        with Copies(value.shape for value in weights) as copies:
            engine.do_step(1, None)
        made[name] = copies.made / len(weights)
        held[name] = int(copies.peak / sum(value.nbytes for value in weights))
    assert made == {"Weighted 0": 4, "Weighted 1": 5, "Munba 2": 5}
    assert held == {"Weighted 0": 1, "Weighted 1": 2, "Munba 2": 2}


# the loss stereo is about attacks, and with an adversary each objective has its own pass;
# balance has predictions at many time steps
APART = ("resteer", "histogram", "stereo", "balance")


@pytest.mark.parametrize("loss", [name for name in LOSSES if name not in APART])
def test_each_loss_and_its_teacher_share_the_pass(
    erasers: Mapping[str, Denoiser], monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """No loss asks its teacher for a prediction that was not declared."""
    eraser = erasers["cross-attention"]
    objectives = {
        "retain": replace(eraser.objective_by_name["retain"], loss="data"),
        "forget": replace(eraser.objective_by_name["forget"], loss=loss, scale=0.5),
    }
    monkeypatch.setattr(eraser, "objective_by_name", objectives)
    draws = {name: eraser.draw(name, [3, 4]) for name in objectives}
    mixture = tuple(
        zip((3.0, -2.0), (draws["forget"].null, draws["retain"].condition), strict=True)
    )
    draws["forget"] = replace(draws["forget"], mixture=mixture)
    with torch.no_grad():
        expected = {name: float(eraser.loss(name, draw)) for name, draw in draws.items()}
        monkeypatch.setattr(Denoiser, "predict", None)
        losses = eraser.losses(draws)
    assert {name: float(value) for name, value in losses.items()} == pytest.approx(
        expected, rel=1e-5
    )


def test_images_of_a_shared_prediction_are_those_of_the_eraser(
    erasers: Mapping[str, Denoiser],
) -> None:
    eraser = erasers["cross-attention"]
    draw = eraser.draw("forget", [3, 4])
    with torch.no_grad():
        shared = SharedPrediction(eraser, draw, eraser.predict(draw), {})
        assert torch.equal(shared.image(draw), eraser.image(draw))
        teacher = shared.predict(draw, draw.null, teacher="frozen")
        assert torch.equal(teacher, eraser.predict(draw, draw.null, teacher="frozen"))
    with pytest.raises(Inseparable, match="further predictions"):
        shared.predict(draw, draw.null)


class Layers(nn.Module):
    """One of each layer that is covered, two of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8, padding_idx=0)
        self.linear, self.twice = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.convolution = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
        self.reflected = nn.Conv2d(8, 8, 3, padding="same", padding_mode="reflect", bias=False)
        self.dilated = nn.Conv2d(8, 4, 3, padding=2, dilation=2)
        self.group_norm, self.layer_norm = nn.GroupNorm(2, 8), nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.reflected(self.group_norm(self.convolution(x)))  # [b, 8, 3, 3]
        h = self.dilated(self.reflected(h)).flatten(2)  # [b, 4, 9]
        rows = self.twice(self.linear(self.embedding(ids))).tanh()  # [b, 3, 8]
        rows = self.frozen(self.twice(self.layer_norm(rows)))
        return h.mean(2) + rows.mean(1)[:, :4] ** 2


@dataclass
class Rows:
    """An eraser of a small module: the loss of each objective on its rows."""

    module: nn.Module
    positions: int = 1
    predict: Callable[[Tensor, Tensor], Tensor] | None = None

    def losses(self, draws: Mapping[str, Any]) -> dict[str, Tensor]:
        x, ids = (torch.cat([draw[i] for draw in draws.values()]) for i in (0, 1))
        output = (self.predict or self.module)(x, ids)
        parts = output.split([len(draw[0]) for draw in draws.values()])
        return {
            name: (k + 1) * (part - k).square().mean()
            for k, (name, part) in enumerate(zip(draws, parts, strict=True))
        }


def rows_of(*sizes: int) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"objective {size}": (
            torch.randn((size, 4, 6, 6), generator=generator, dtype=torch.float64),
            torch.randint(0, 5, (size, 3), generator=generator),
        )
        for size in sizes
    }


def test_every_kind_of_layer_has_one_gradient_for_each_objective() -> None:
    """In float64, for three objectives with batches of different sizes."""
    torch.manual_seed(0)
    module = Layers().double()
    eraser = Rows(module)
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    draws = rows_of(2, 1, 3)
    actual = OnePass(eraser, params).gradients(draws, (2, 1, 3))
    for k, (name, draw) in enumerate(draws.items()):
        loss = (k + 1) * (module(*draw) - k).square().mean()
        expected = torch.autograd.grad(loss, list(params.values()))
        assert float(actual[name][0]) == pytest.approx(loss.item(), rel=1e-12)
        for parameter, a, b in zip(params, actual[name][1], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=parameter)
            assert parameter == "embedding.weight" or float(b.abs().max()) > 0
    assert all("forward" not in vars(layer) for layer in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_only_some_parameters_of_a_layer_are_trained() -> None:
    torch.manual_seed(0)
    module = Layers().double().requires_grad_(False)
    params = {name: p for name, p in module.named_parameters() if name.endswith("m.bias")}
    params["linear.bias"] = module.linear.bias
    for parameter in params.values():
        parameter.requires_grad_()
    draws = rows_of(2, 1)
    actual = OnePass(Rows(module), params).gradients(draws, (2, 1))
    first = torch.autograd.grad(
        module(*draws["objective 2"]).square().mean(), list(params.values())
    )
    for a, b in zip(actual["objective 2"][1], first, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_layer_of_another_kind_is_not_covered() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(Inseparable, match=r"2 of 4 trained tensors.*1\.weight to a BatchNorm1d"):
        OnePass(Rows(module), dict(module.named_parameters()))


def test_a_weight_that_is_used_outside_of_its_layer_is_noticed() -> None:
    module = Layers().double()
    eraser = Rows(module, predict=lambda x, ids: module(x, ids) + module.linear.bias[:4])
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with pytest.raises(Inseparable, match="outside of its layer"):
        OnePass(eraser, params).gradients(rows_of(2, 1), (2, 1))


def test_rows_that_are_not_examples_are_noticed() -> None:
    module = Layers().double()
    eraser = Rows(module, predict=lambda x, ids: module(x[:2], ids[:2]).repeat(2, 1)[:3])
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with pytest.raises(Inseparable, match="for 3 examples"):
        OnePass(eraser, params).gradients(rows_of(2, 1), (2, 1))
    assert all("forward" not in vars(layer) for layer in module.modules())


FALLBACKS: dict[str, tuple[dict[str, Any], str]] = {
    "micro-batches": ({"micro_batches": 2}, "micro_batches is more than 1"),
    "checkpointing": ({"recomputes": True}, "recomputes activations"),
    "weights that are freed": ({"frees_weights": True}, "frees weights"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_settings_that_need_a_pass_for_each_objective(
    erasers: Mapping[str, Denoiser], caplog: pytest.LogCaptureFixture, case: str
) -> None:
    settings, reason = FALLBACKS[case]
    with caplog.at_level(logging.WARNING):
        assert one_pass.choose(erasers["LoRA"], Setting("on", **settings)) is None
    assert reason in caplog.text
    assert one_pass.choose(erasers["LoRA"], Setting("on")) is not None
    caplog.clear()
    assert one_pass.choose(erasers["LoRA"], Setting("off")) is None
    assert not caplog.text


def test_auto_uses_one_pass_where_a_gain_was_measured(erasers: Mapping[str, Denoiser]) -> None:
    """The bundled model has 16 x 16 positions."""

    def largest(selection: str, **settings: Any) -> int:
        eraser = erasers[selection]
        choices = {
            n: one_pass.choose(eraser, Setting("auto", batch_size=n, **settings)) for n in range(20)
        }
        return max((n for n, choice in choices.items() if choice), default=0)

    assert [largest(selection) for selection in SELECTIONS] == [4, 1, 4]
    assert largest("LoRA", uses_all=False) == 0
    assert [largest(selection, device="cuda") for selection in SELECTIONS] == [16, 16, 16]
    assert largest("LoRA", device=None) == largest("LoRA", device="mps") == 0


def test_methods_say_whether_they_use_all_gradients() -> None:
    names = ("retain", "forget")
    assert Munba().uses_all(names)
    assert Weighted().uses_all(names)
    assert not Weighted(retain=0.0).uses_all(names)
    assert not Weighted(alternate=True).uses_all(names)


@dataclass(frozen=True)
class AtNull(Loss):
    """A loss that needs a second prediction of the model in training."""

    def compute(self, model: Any, draw: Any, settings: LossSettings) -> Tensor:
        difference: Tensor = model.predict(draw) - model.predict(draw, draw.null)
        return difference.square().mean()


def test_a_loss_that_needs_more_falls_back_for_good(
    erasers: Mapping[str, Denoiser],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The step is that without one pass, bit by bit, and the log tells the reason once."""
    eraser = erasers["cross-attention"]
    objectives = dict(eraser.objective_by_name)
    loss: Any = AtNull()
    objectives["forget"] = replace(objectives["forget"], loss=loss)
    monkeypatch.setattr(eraser, "objective_by_name", objectives)
    engine = engine_of(eraser, tmp_path, one_pass="on")
    with caplog.at_level(logging.WARNING):
        rows = [engine.do_step(step, None) for step in (0, 1)]
    assert caplog.text.count("a loss needs further predictions") == 1
    assert engine.one_pass is None
    plain = engine_of(eraser, tmp_path, one_pass="off").do_step(1, None)
    assert rows[1]["losses"] == plain["losses"]
    assert rows[1]["norms"] == plain["norms"]


def test_the_teacher_of_a_lora_does_not_run_it(erasers: Mapping[str, Denoiser]) -> None:
    """Its prediction is that with the matrices' first values, bit by bit."""
    eraser = erasers["LoRA"]
    draw = eraser.draw("forget", [1, 2])
    calls: list[int] = []
    adapter: Any = eraser.adapter
    layer = next(iter(adapter.layers.values()))
    hook = layer.lora_A["eraser"].register_forward_pre_hook(lambda *_: calls.append(1))
    actual = eraser.predict(draw, teacher="frozen")
    assert not calls
    with torch.no_grad():
        expected = eraser.model.denoise(draw.noisy, draw.t, draw.condition, eraser.originals)
    assert len(calls) == 1
    hook.remove()
    assert torch.equal(actual, expected)
    assert not actual.requires_grad
    assert all(parameter.requires_grad for parameter in eraser.trainable().values())
    with pytest.raises(ZeroDivisionError), adapter.disabled(eraser.module_in_use):
        raise ZeroDivisionError
    assert not torch.equal(eraser.predict(draw), expected)


def test_a_run_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    content = short(training__one_pass="on")
    whole = concept_eraser.erase(content, output=tmp_path / "whole").folder

    def stop(step: int, seconds: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="stopped after 2"):
        concept_eraser.erase(content, output=tmp_path / "parts", on_step=stop)
    parts = concept_eraser.erase(content, output=tmp_path / "parts", resume=True).folder
    tensors = [load_file(folder / "weights.safetensors") for folder in (whole, parts)]
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
    assert "one_pass: 'on'" in (whole / "recipe.yaml").read_text()


def test_the_default_is_off_and_not_in_the_recipe() -> None:
    recipe = recipes.load(short())
    assert recipe.training.one_pass == Schedule(steps=1, batch_size=1).one_pass == "off"
    assert "one_pass" not in recipe.resolved()["training"]
    joint = recipes.load(short(training__one_pass="on"))
    assert joint.fingerprint != recipe.fingerprint
    assert recipes.load(short(), ["training.one_pass=on"]).fingerprint == joint.fingerprint
    assert recipes.load(short(), ["training.one_pass=off"]).fingerprint == recipe.fingerprint
    with pytest.raises(concept_eraser.UserError, match="one_pass"):
        recipes.load(short(training__one_pass="both"))
