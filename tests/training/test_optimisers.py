"""The optimizers, schedules, clipping and the average of the weights: against their formulas and
against other implementations, on whole runs, and resumed bit by bit.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import concept_eraser
from concept_eraser import UserError
from concept_eraser.methods.vectors import norm
from concept_eraser.recipes import recipe
from concept_eraser.training import averaging, engine
from concept_eraser.training import log as logs
from concept_eraser.training.averaging import Average
from concept_eraser.training.closure import LossClosure
from concept_eraser.training.engine import Engine, Schedule
from tests.conftest import short
from tests.small_model import small_sd

SGD = {"training__optimizer": "sgd", "training__lr": 1.0}
ALL: dict[str, Any] = {
    "training__optimizer": "sgd",
    "training__lr": 0.1,
    "training__momentum": 0.9,
    "training__nesterov": True,
    "training__weight_decay": 0.01,
    "training__clip": 0.7,
    "training__decay": "cosine",
    "training__warmup": 2,
    "training__ema": 0.9,
    "training__steps": 6,
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights.safetensors")


def change(folder: Path, model: Any) -> float:
    """Return the norm of the change of the trained weights."""
    before = model.denoiser.state_dict()
    return float(norm(tuple(v - before[k] for k, v in weights(folder).items())))


def steps_of(schedule: Schedule, gradients: list[float]) -> list[float]:
    """Return a weight of 1 after each step of the optimizer on given gradients."""
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = engine._optimizer([parameter], schedule)
    values = []
    for gradient in gradients:
        parameter.grad = torch.full((1,), gradient, dtype=torch.float64)
        optimizer.step()
        values.append(float(parameter.detach()))
    return values


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_momentum_and_weight_decay_by_hand(nesterov: bool) -> None:
    schedule = Schedule(
        3, 1, lr=0.1, optimizer="sgd", momentum=0.9, nesterov=nesterov, weight_decay=0.5
    )
    weight, velocity, expected = 1.0, 0.0, []
    for gradient in (1.0, -2.0, 0.0):
        decayed = gradient + 0.5 * weight
        velocity = 0.9 * velocity + decayed
        weight -= 0.1 * (decayed + 0.9 * velocity if nesterov else velocity)
        expected.append(weight)
    assert steps_of(schedule, [1.0, -2.0, 0.0]) == pytest.approx(expected, rel=1e-12)


def test_weight_decay_serves_every_optimizer() -> None:
    """With a gradient of 0 sgd and adamw shrink the weight by lr times the decay; adam's moments
    make a step of lr of the same gradient.
    """
    for name, expected in (("sgd", 0.95), ("adamw", 0.95), ("adam", 0.9)):
        schedule = Schedule(1, 1, lr=0.1, optimizer=name, weight_decay=0.5)
        assert steps_of(schedule, [0.0])[0] == pytest.approx(expected, rel=1e-6), name


def test_betas_by_hand() -> None:
    schedule = Schedule(2, 1, lr=0.1, optimizer="adamw", betas=(0.5, 0.8))
    first, second, weight, expected = 0.0, 0.0, 1.0, []
    for step, gradient in enumerate((1.0, 3.0), 1):
        first = 0.5 * first + 0.5 * gradient
        second = 0.8 * second + 0.2 * gradient**2
        weight -= 0.1 * (first / (1 - 0.5**step)) / math.sqrt(second / (1 - 0.8**step))
        expected.append(weight)
    assert steps_of(schedule, [1.0, 3.0]) == pytest.approx(expected, rel=1e-6)
    assert steps_of(Schedule(2, 1, lr=0.1), [1.0, 3.0])[1] != pytest.approx(expected[1], rel=1e-3)


@pytest.mark.parametrize(("cycles", "warmup"), [(1, 0), (1, 5), (3, 5)])
def test_cosines_are_those_of_diffusers(cycles: int, warmup: int) -> None:
    from diffusers.optimization import get_scheduler

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    theirs = get_scheduler(
        "cosine_with_restarts",
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=50,
        num_cycles=cycles,
    )
    ours = Schedule(50, 1, lr=2.0, decay="cosine", cycles=cycles, warmup=warmup)
    rates = []
    for _ in range(50):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    # their warm-up starts at 0, ours at the first step of it
    assert [ours.lr_at(step) for step in range(warmup, 50)] == pytest.approx(rates[warmup:])
    assert ours.lr_at(49) < 0.05 * 2.0


def test_steps_are_those_of_torch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7], gamma=0.2)
    ours = Schedule(10, 1, lr=2.0, decay="step", milestones=[3, 7], decay_factor=0.2)
    for step in range(10):
        assert ours.lr_at(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


def test_the_combined_gradient_is_clipped(shared_small, tmp_path: Path) -> None:
    """MUNBa's direction has the norm sqrt(2); with clip it has this norm, or the smaller one."""
    for clip, length, clipped in ((None, 2**0.5, None), (0.5, 0.5, 1), (2.0, 2**0.5, 0)):
        run = concept_eraser.erase(
            short(training__steps=1, training__clip=clip, **SGD), output=tmp_path / str(clip)
        )
        assert change(run.folder, shared_small) == pytest.approx(length, rel=1e-4)
        assert logs.read(run.folder / "log.jsonl")[0].get("clipped") == clipped


def test_each_gradient_is_clipped_before_the_combination(shared_small, tmp_path: Path) -> None:
    """The sum of two unit gradients; MUNBa does not notice, since it normalises them itself."""
    each = {"training__steps": 1, "training__clip": 1e-3, "training__clip_each": True, **SGD}
    run = concept_eraser.erase(short(method="weighted", **each), output=tmp_path / "sum")
    row = logs.read(run.folder / "log.jsonl")[0]
    assert row["norms"] == pytest.approx({"retain": 1e-3, "forget": 1e-3}, rel=1e-5)
    assert row["clipped"] == 2
    expected = 1e-3 * math.sqrt(2 + 2 * row["cosine"])
    assert change(run.folder, shared_small) == pytest.approx(expected, rel=1e-3)
    clipped = concept_eraser.erase(short(**each), output=tmp_path / "clipped")
    plain = concept_eraser.erase(short(training__steps=1, **SGD), output=tmp_path / "plain")
    for name, value in weights(plain.folder).items():
        torch.testing.assert_close(weights(clipped.folder)[name], value, rtol=0, atol=1e-5)


def test_clipping_is_after_the_sum_over_micro_batches(tmp_path: Path) -> None:
    changes = {
        "method": "weighted",
        "training__clip": 1e-3,
        "training__clip_each": True,
        "training__optimizer": "sgd",
        "training__lr": 10.0,
    }
    one = concept_eraser.erase(short(**changes), output=tmp_path / "one").folder
    two = concept_eraser.erase(
        short(training__batch_size=1, training__micro_batches=2, **changes),
        output=tmp_path / "two",
    ).folder
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(two)[name], value, rtol=0, atol=2e-5)


def test_hessian_products_and_single_tensors_are_not_clipped() -> None:
    params = (nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.tensor([12.0])))

    def loss() -> torch.Tensor:
        return 0.5 * sum((p.square().sum() for p in params), torch.zeros(()))

    closure = LossClosure(params, {"retain": [loss]}, clip=1.0)
    assert float(norm(closure.grad("retain"))) == pytest.approx(1)
    assert float(norm(closure.grad("retain", of=[0]))) == pytest.approx(5)
    v = (torch.tensor([1.0, 2.0]), torch.tensor([3.0]))
    for how in ("difference", "exact"):
        for product, part in zip(closure.hvp("retain", v, how), v, strict=True):
            torch.testing.assert_close(product, part, rtol=1e-3, atol=1e-3)
    assert closure.clipped == 1


def test_the_average_by_hand() -> None:
    parameter = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    average = Average({"w": parameter}, decay=0.3)
    expected = 1.0
    for step, value in enumerate((2.0, 5.0, -1.0), 1):
        with torch.no_grad():
            parameter.fill_(value)
        average.update()
        decay = min(0.3, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
        assert float(average.values["w"]) == pytest.approx(expected, rel=1e-12)
    with average.applied():
        assert float(parameter.detach()) == pytest.approx(expected, rel=1e-12)
    assert float(parameter.detach()) == -1.0


def test_the_average_is_saved_and_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved weights are the average of those after each step. `on_step` sees it too."""
    content, history, views = short(training__ema=0.9), [], []
    update = Average.update

    def record(self: Average) -> None:
        history.append({k: v.detach().clone() for k, v in self.params.items()})
        update(self)

    monkeypatch.setattr(averaging.Average, "update", record)
    model = concept_eraser.load(small_sd())
    before = {k: v.clone() for k, v in model.denoiser.state_dict().items()}

    def on_step(step: int, seconds: float) -> None:
        views.append({k: v.clone() for k, v in model.denoiser.state_dict().items()})

    run = concept_eraser.erase(content, model=model, output=tmp_path / "run", on_step=on_step)
    assert len(history) == 4
    last = weights(run.folder)
    for name, saved in last.items():
        value = before[name].double()
        for step, after in enumerate(history, 1):
            decay = min(0.9, (1 + step) / (10 + step))
            value = decay * value + (1 - decay) * after[name].double()
        torch.testing.assert_close(saved.double(), value, rtol=0, atol=1e-6)
        assert torch.equal(saved, views[-1][name])
    assert any(not torch.equal(last[k], history[-1][k]) for k in last)
    plain = concept_eraser.erase(short(), output=tmp_path / "plain")
    assert all(torch.equal(history[-1][k], v) for k, v in weights(plain.folder).items()), (
        "the average does not change the training"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"training__clip_each": True, "training__micro_batches": 2},
        {"trainable": {"select": "cross_attention", "lora": 2}},
        {
            "trainable": {"select": "cross_attention", "saliency": 0.3},
            "training__decay": "step",
            "training__milestones": [2, 5],
        },
    ],
    ids=["weights", "lora", "masked"],
)
def test_everything_resumes_bit_by_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    content = short(**{**ALL, **changes}, save="changed")
    whole = concept_eraser.erase(content, output=tmp_path / "whole").folder

    def stop(step: int, seconds: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(concept_eraser.utils.errors.Interrupted):
        concept_eraser.erase(content, output=tmp_path / "parts", on_step=stop)
    state = torch.load(tmp_path / "parts" / "state.ckpt", weights_only=True)
    assert state["average"]["steps"] == 3
    assert all("momentum_buffer" in one for one in state["optimizer"]["state"].values())
    concept_eraser.erase(content, output=tmp_path / "parts", resume=True)
    a, b = weights(whole), weights(tmp_path / "parts")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(float(value.abs().max()) > 0 for value in a.values())


def test_a_masked_weight_stays_with_momentum_and_decay(shared_small, tmp_path: Path) -> None:
    changes = {**ALL, "trainable": {"select": "cross_attention", "saliency": 0.3}}
    run = concept_eraser.erase(short(**changes), output=tmp_path / "run")
    before = shared_small.denoiser.state_dict()
    moved = torch.cat([(v != before[k]).flatten() for k, v in weights(run.folder).items()])
    assert 0.2 < float(moved.float().mean()) <= 0.301


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__momentum": 0.9}, r"momentum is for .*sgd, found optimizer: adam, whose"),
        (
            {"training__optimizer": "adafactor", "training__momentum": 0.9},
            r"momentum is for .*sgd, found optimizer: adafactor$",
        ),
        ({"training__optimizer": "sgd", "training__nesterov": True}, "set training.momentum"),
        (
            {"training__optimizer": "sgd", "training__betas": [0.5, 0.9]},
            "betas are for training.optimizer: adam, adamw, adamw8bit; found optimizer: sgd",
        ),
        ({"training__betas": [0.9, 1.0]}, "betas"),
        ({"training__betas": [0.9]}, "betas"),
        ({"training__clip": 0}, "clip"),
        ({"training__clip_each": True}, "clip_each needs training.clip"),
        (
            {"training__clip": 1, "training__clip_each": True, "method": "uno"},
            "'uno' combines, and this method also takes Hessian products.*leave clip_each out",
        ),
        (
            {
                "training__clip": 1,
                "training__clip_each": True,
                "method": "adversarial",
                "attack": {"n": 8},
            },
            "solves a lower-level problem",
        ),
        (
            {
                "training__clip": 1,
                "training__clip_each": True,
                "method": "meta_unlearning",
                "relearn": {"prompts": "tiny_star", "loss": "data", "n": 4},
            },
            "simulates a fine-tuning",
        ),
        (
            {
                "method": {"name": "stereo", "rounds": 1, "erase_steps": 1, "inner_steps": 1},
                "forget__loss": "stereo",
                "training__steps": 3,
                "attack": {"n": 4},
                "trainable__reinitialise": 0.1,
            },
            "restores the original's after a search",
        ),
        ({"forget__eta": 3.0}, "eta is a setting of the loss 'esd' or 'stereo', found loss"),
        ({"forget__beta": 7.0}, "beta is a setting of the loss 'npo', found loss"),
        (
            {"forget__loss": "anchor", "forget__images": "free", "forget__noised": "anchor"},
            "needs images: generate, found images: free",
        ),
        ({"training__decay": "step"}, "needs training.milestones"),
        ({"training__decay": "step", "training__milestones": [3, 2]}, "must ascend, found 3, 2"),
        (
            {"training__milestones": [3]},
            "milestones is for training.decay: step, found decay: none",
        ),
        ({"training__decay_factor": 0.5}, "decay_factor is for training.decay: step"),
        ({"training__cycles": 2, "training__decay": "linear"}, "cycles is for .*cosine, found"),
        ({"training__ema": 1.0}, "ema"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe.load(short(**changes))


def test_the_average_needs_frozen_running_statistics() -> None:
    content = {
        "model": "net",
        "target": "classifier",
        "forget": {"data": "digits", "classes": [3], "loss": "relabel"},
        "retain": "rest",
        "trainable": {"batchnorm": "train"},
        "training": {"ema": 0.9},
    }
    with pytest.raises(UserError, match="use batchnorm: frozen, or leave ema out"):
        recipe.load(content)


def test_recipes_without_these_settings_keep_their_fingerprint() -> None:
    """Runs of earlier versions have none of the keys."""
    from concept_eraser.recipes.training_fields import OPTIMISATION

    plain = recipe.load(short())
    assert not set(OPTIMISATION) & set(plain.resolved()["training"])
    assert recipe.load(short(training__momentum=0.0)).fingerprint == plain.fingerprint
    changed = recipe.load(short(training__clip=1.0))
    assert changed.fingerprint != plain.fingerprint
    assert recipe.load(changed.resolved()).fingerprint == changed.fingerprint


def test_a_state_without_an_average_is_as_before(tmp_path: Path) -> None:
    def stop(step: int, seconds: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(concept_eraser.utils.errors.Interrupted):
        concept_eraser.erase(short(), output=tmp_path / "run", on_step=stop)
    assert "average" not in torch.load(tmp_path / "run" / "state.ckpt", weights_only=True)


def test_a_method_may_ask_for_an_optimizer() -> None:
    """Min/Max NGD takes SGD's steps. The recipe may name another; runs of before did."""
    content = short(method="minmax_ngd")
    assert recipe.load(content).training.optimizer == "sgd"
    assert recipe.load({**content, "training": {}}).training.optimizer == "sgd"
    without = {k: v for k, v in content.items() if k != "training"}
    assert recipe.load(without).training.optimizer == "sgd"
    assert recipe.load(short()).training.optimizer == "adam"
    named = recipe.load(short(method="minmax_ngd", training__optimizer="adam"))
    assert named.training.optimizer == "adam"
    assert recipe.load(named.resolved()).training.optimizer == "adam"


def test_another_optimizer_than_the_methods_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        concept_eraser.erase(
            short(method="minmax_ngd", training__steps=1), output=tmp_path / "quiet"
        )
        assert "training.optimizer" not in caplog.text
        concept_eraser.erase(
            short(method="minmax_ngd", training__steps=1, training__optimizer="adam"),
            output=tmp_path / "warned",
        )
    assert "steps of the method 'minmax_ngd' are defined with sgd" in caplog.text


def test_natural_gradient_fine_tuning_takes_no_forget_step(tmp_path: Path) -> None:
    run = concept_eraser.erase(
        short(method="ngd-finetune", training__momentum=0.9), output=tmp_path / "run"
    )
    rows = logs.read(run.folder / "log.jsonl")
    assert [list(row["losses"]) for row in rows] == [["retain"]] * 4
    assert {row["forget_turn"] for row in rows} == {0.0}
    assert run.recipe.training.optimizer == "sgd"


def test_masks_are_those_of_the_training_loss(tmp_path: Path, monkeypatch) -> None:
    """SalUn's mask does not depend on the forget loss of the recipe."""
    masks: list[list[torch.Tensor]] = []
    original = Engine._prepare

    def record(self: Engine) -> Any:
        mask, bases = original(self)
        masks.append([one.clone() for one in mask or []])
        assert bases is None
        return mask, bases

    monkeypatch.setattr(Engine, "_prepare", record)
    for i, changes in enumerate(
        ({}, {"forget__loss": "data"}, {"forget__loss": "esd", "forget__scale": 7.0})
    ):
        concept_eraser.erase(
            short(
                trainable={"select": "cross_attention", "saliency": 0.3},
                training__steps=1,
                **changes,
            ),
            output=tmp_path / str(i),
        )
    for other in masks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(masks[0], other, strict=True))
