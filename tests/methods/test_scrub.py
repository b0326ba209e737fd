"""SCRUB's turns and its losses, and NPO's, against torch's own formulas."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser import api, registry
from concept_eraser.data.labelled import Labelled
from concept_eraser.erasers.classifier import Classifier, ClassifierObjective
from concept_eraser.methods.checks import closure, pair
from concept_eraser.methods.scrub import Scrub
from concept_eraser.models.module import build
from concept_eraser.recipes import recipe
from concept_eraser.utils.errors import Interrupted, UserError

SCRUB: dict[str, Any] = {"name": "scrub", "forget_steps": 2, "retain_steps": 6, "rounds": 3}


@pytest.fixture(scope="module")
def digits() -> Labelled:
    return registry.build("dataset", "digits", {}).load("train")


@pytest.fixture(scope="module")
def network(digits: Labelled) -> nn.Module:
    torch.manual_seed(0)
    net = build("mlp", "classifier", inputs=64, hidden=64, norm=False).module.requires_grad_(True)
    x = digits.inputs(range(len(digits)))
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x), digits.labels).backward()
        optimizer.step()
    return net


def eraser(
    net: nn.Module, digits: Labelled, objectives: Mapping[str, dict[str, Any]]
) -> Classifier:
    by_name = {
        name: ClassifierObjective(digits, torch.arange(200), **options)
        for name, options in objectives.items()
    }
    return Classifier(net, by_name, [name for name, _ in net.named_parameters()])


def gradient(classifier: Classifier, objective: str, draw: Any) -> Tensor:
    parts = torch.autograd.grad(
        classifier.loss(objective, draw), list(classifier.trainable().values())
    )
    return torch.cat([p.flatten() for p in parts])


def move(net: nn.Module, by: float = 0.03) -> None:
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(by * torch.randn(p.shape, generator=g))


# --- turns ----------------------------------------------------------------------------------------


def test_rounds_of_max_and_min_steps_then_min_steps_alone() -> None:
    method, requests = Scrub(forget_steps=1, retain_steps=2, rounds=2), []
    for step in range(9):
        pair_closure = closure(*pair(0.2, 1.0, 2.0))
        pair_closure.step = step
        direction = method.direction(pair_closure)
        requests += pair_closure.requests
        assert (
            direction.vec is pair_closure.gradients[pair_closure.requests[0]]
        )  # one gradient, as it is
        assert direction.weights.tolist() == (
            [1.0, 0.0] if pair_closure.requests == ["retain"] else [0.0, 1.0]
        )
    f, r = "forget", "retain"
    assert requests == [f, r, r, f, r, r, r, r, r]


@pytest.mark.parametrize("options", [{"forget_steps": 0}, {"retain_steps": 0}, {"rounds": 0}])
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        Scrub(**options)


def test_it_needs_two_objectives() -> None:
    with pytest.raises(
        ValueError, match="between retain and forget; found retain, forget, replace"
    ):
        Scrub().check_objectives(("retain", "forget", "replace"))


# --- losses ---------------------------------------------------------------------------------------


def test_the_losses_are_torchs_kl_and_cross_entropy(network: nn.Module, digits: Labelled) -> None:
    net = copy.deepcopy(network)
    before = copy.deepcopy(net)
    classifier = eraser(
        net,
        digits,
        {"forget": {"loss": "diverge"}, "retain": {"loss": "data", "scale": 0.9, "distill": 0.3}},
    )
    move(net)
    draw = classifier.draw("forget", list(range(12)))
    with torch.no_grad():
        p, log_q = before(draw.inputs).softmax(1), net(draw.inputs).log_softmax(1)
    divergence = F.kl_div(log_q, p, reduction="batchmean")
    assert float(divergence) > 1e-3
    torch.testing.assert_close(classifier.loss("forget", draw), -divergence)
    torch.testing.assert_close(
        classifier.loss("retain", draw), 0.9 * F.nll_loss(log_q, draw.labels) + 0.3 * divergence
    )
    # the gradient by hand: d/dz KL(p || softmax z) = softmax z - p, taken through the logits
    outputs = net(draw.inputs)
    slope = torch.autograd.grad(
        outputs, list(net.parameters()), grad_outputs=(outputs.softmax(1) - p).detach() / 12
    )
    torch.testing.assert_close(
        gradient(classifier, "forget", draw),
        -torch.cat([s.flatten() for s in slope]),
        rtol=1e-4,
        atol=1e-7,
    )


def test_at_the_teacher_the_kl_terms_and_their_gradients_vanish(
    network: nn.Module, digits: Labelled
) -> None:
    net = copy.deepcopy(network)
    classifier = eraser(
        net,
        digits,
        {
            "forget": {"loss": "diverge"},
            "retain": {"loss": "data", "distill": 0.5},
            "plain": {"loss": "data"},
        },
    )
    draw = classifier.draw("forget", list(range(32)))
    assert abs(classifier.loss("forget", draw).item()) < 1e-7
    fit = gradient(classifier, "plain", draw)
    assert float(gradient(classifier, "forget", draw).norm()) < 1e-5 * float(fit.norm())
    torch.testing.assert_close(gradient(classifier, "retain", draw), fit, rtol=1e-4, atol=1e-6)


def test_npo_is_its_formula(network: nn.Module, digits: Labelled) -> None:
    net = copy.deepcopy(network)
    before = copy.deepcopy(net)
    classifier = eraser(net, digits, {"forget": {"loss": "npo", "beta": 0.7}})
    move(net)
    draw = classifier.draw("forget", list(range(12)))
    with torch.no_grad():
        now, then = (
            m(draw.inputs).softmax(1).gather(1, draw.labels[:, None])[:, 0] for m in (net, before)
        )
    expected = -(2 / 0.7) * torch.log(torch.sigmoid(-0.7 * torch.log(now / then))).mean()
    torch.testing.assert_close(classifier.loss("forget", draw), expected)


def test_npo_is_ascent_at_the_teacher_and_for_small_beta_and_saturates(
    network: nn.Module, digits: Labelled
) -> None:
    net = copy.deepcopy(network)
    objectives = {
        "small": {"loss": "npo", "beta": 1e-4},
        "forget": {"loss": "npo", "beta": 1.0},
        "ascent": {"loss": "ascent"},
    }
    classifier = eraser(net, digits, objectives)
    draw = classifier.draw("forget", list(range(32)))
    for objective in ("small", "forget"):  # the weight 2 p^b / (p^b + p*^b) is 1 where p = p*
        torch.testing.assert_close(
            gradient(classifier, objective, draw),
            gradient(classifier, "ascent", draw),
            rtol=1e-4,
            atol=1e-7,
        )
    # until the labels of these examples are improbable
    while classifier.loss("ascent", draw).item() > -15:
        parts = gradient(classifier, "ascent", draw).split([p.numel() for p in net.parameters()])
        with torch.no_grad():
            for p, part in zip(net.parameters(), parts, strict=True):
                p -= 0.01 * part.view_as(p)
    climbing = gradient(classifier, "ascent", draw)
    assert float(gradient(classifier, "forget", draw).norm()) < 1e-2 * float(climbing.norm())
    torch.testing.assert_close(
        gradient(classifier, "small", draw),
        climbing,
        rtol=2e-2,
        atol=2e-3 * float(climbing.abs().max()),
    )


# --- recipes and runs -----------------------------------------------------------------------------


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "target": "classifier",
        "forget": {"data": "digits", "classes": [3], "loss": "diverge"},
        "retain": {"data": "rest", "loss": "data", "distill": 0.5},
        "method": SCRUB,
        "training": {
            "steps": 60,
            "batch_size": 64,
            "lr": 0.1,
            "optimizer": "sgd",
            "device": "cpu",
            "save_every": 2,
        },
        **changes,
    }


def test_new_settings_are_written_down_only_where_they_are_used() -> None:
    """The fingerprints of older run folders stay the same."""
    plain = recipe.load(
        settings(forget={"data": "digits", "classes": [3], "loss": "relabel"}, retain="rest")
    )
    assert not {"beta", "distill"} & (
        set(plain.resolved()["forget"]) | set(plain.resolved()["retain"])
    )
    npo = recipe.load(settings(forget={"data": "digits", "classes": [3], "loss": "npo"}))
    assert npo.resolved()["forget"]["beta"] == 0.1
    assert npo.resolved()["retain"]["distill"] == 0.5
    assert recipe.load(npo.resolved()).fingerprint == npo.fingerprint
    with pytest.raises(UserError, match="the target 'vae' does not use distill"):
        recipe.load(
            {
                "target": "vae",
                "forget": {"data": "digits", "classes": [1], "loss": "ascent"},
                "retain": {"data": "rest", "distill": 1.0},
            }
        )


def test_scrub_forgets_a_class_and_retains_the_others(
    network: nn.Module, digits: Labelled, tmp_path: Path
) -> None:
    net = copy.deepcopy(network)
    api.erase(model=net, output=tmp_path, **settings())
    with torch.no_grad():
        right = net(digits.inputs(range(len(digits)))).argmax(1) == digits.labels
    three = digits.labels == 3
    assert float(right[three].float().mean()) < 0.1
    assert float(right[~three].float().mean()) > 0.95


def test_a_resumed_run_takes_the_same_turns(network: nn.Module, tmp_path: Path) -> None:
    def stop(step: int, seconds: float) -> None:
        if step == 9:  # in the second round
            raise KeyboardInterrupt

    short = settings(training={**settings()["training"], "steps": 24})
    whole, parts = copy.deepcopy(network), copy.deepcopy(network)
    api.erase(model=whole, output=tmp_path / "whole", **short)
    with pytest.raises(Interrupted):
        api.erase(model=parts, output=tmp_path / "parts", on_step=stop, **short)
    api.erase(model=parts, output=tmp_path / "parts", resume=True, **short)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True)
    )


# --- what is logged, and the turns at their ends --------------------------------------------------


def test_the_turns_of_several_forget_steps() -> None:
    method = Scrub(forget_steps=2, retain_steps=1, rounds=2)
    assert "".join(method.turn(step)[0] for step in range(9)) == "ffrffrrrr"
    assert "".join(Scrub().turn(step)[0] for step in range(70)) == 3 * ("ff" + 18 * "r") + 10 * "r"


def test_the_gram_matrix_has_the_computed_gradient_only() -> None:
    for step, place, square in ((0, 1, 25.0), (2, 0, 4.0)):
        pair_closure = closure(*pair(0.2, 2.0, 5.0))
        pair_closure.step = step
        direction = Scrub().direction(pair_closure)
        assert float(direction.gram[place, place]) == pytest.approx(square)
        assert int(torch.isnan(direction.gram).sum()) == 3
    Scrub().check_objectives(("forget", "retain"))
    pair_closure.gradients["replace"] = pair_closure.gradients["retain"]
    with pytest.raises(ValueError, match="takes turns"):
        Scrub().direction(pair_closure)


def test_a_round_ends_with_its_min_steps_and_then_after_as_many() -> None:
    method = Scrub(forget_steps=2, retain_steps=3, rounds=2)
    assert [step for step in range(18) if method.ends_round(step)] == [5, 10, 13, 16]
    assert Scrub.has_rounds
