"""Methods against a later fine-tuning: Meta-Unlearning against its loop written with torch's own
optimizer on a copy of a network, ResAlign against the proximal point of a quadratic.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from concept_eraser.methods.checks import closure, flat, pair
from concept_eraser.methods.meta_unlearning import MetaUnlearning
from concept_eraser.methods.relearning import fine_tuned
from concept_eraser.methods.resalign import ResAlign
from concept_eraser.recipes import recipe
from concept_eraser.training.closure import LossClosure
from concept_eraser.utils.errors import UserError

FLOAT = torch.float64


def network() -> tuple[nn.Module, dict[str, Callable[[nn.Module], Tensor]]]:
    """A small network, and the loss of each objective as a function of a network."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=FLOAT))
    data = {
        name: torch.randn(6, 5, generator=generator, dtype=FLOAT)
        for name in ("retain", "forget", "relearn")
    }

    def loss(name: str) -> Callable[[nn.Module], Tensor]:
        return lambda model: (model(data[name][:, :3]) - data[name][:, 3:]).square().mean()

    return net, {name: loss(name) for name in data}


def closure_of(net: nn.Module, losses: dict[str, Callable[[nn.Module], Tensor]]) -> LossClosure:
    parts = {name: [lambda loss=loss: loss(net)] for name, loss in losses.items()}
    return LossClosure(tuple(net.parameters()), parts)


def gradient(net: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Tensor:
    parts = torch.autograd.grad(loss(net), list(net.parameters()))
    return torch.cat([part.flatten() for part in parts])


def weights(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def tuned_copy(
    net: nn.Module, loss: Callable[[nn.Module], Tensor], optimizer: Any, steps: int
) -> nn.Module:
    """Return a copy of the network after a usual loop of training."""
    other = copy.deepcopy(net)
    moves = optimizer(other.parameters())
    for _ in range(steps):
        moves.zero_grad()
        loss(other).backward()
        moves.step()
    return other


@pytest.mark.parametrize("name", ["adam", "gradient"])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_the_fine_tuning_and_the_step_are_those_of_a_loop_on_a_copy(name: str, steps: int) -> None:
    net, losses = network()
    before = weights(net)
    make = torch.optim.Adam if name == "adam" else torch.optim.SGD
    other = tuned_copy(net, losses["relearn"], lambda p: make(p, lr=0.05), steps)
    change = fine_tuned(closure_of(net, losses), steps, 0.05, name)  # type: ignore[arg-type]
    torch.testing.assert_close(before + flat(change), weights(other), rtol=1e-9, atol=1e-12)

    method = MetaUnlearning(
        inner_steps=steps,
        inner_lr=0.05,
        inner_optimizer=name,  # type: ignore[arg-type]
        forget=2.0,
        retain=0.3,
        relearn=0.7,
        destroy=0.2,
    )
    direction = method.direction(closure_of(net, losses))
    now = 2.0 * gradient(net, losses["forget"]) + 0.3 * gradient(net, losses["retain"])
    later = 0.7 * gradient(other, losses["relearn"]) + 0.2 * gradient(other, losses["retain"])
    torch.testing.assert_close(flat(direction.vec), now - later, rtol=1e-8, atol=1e-11)
    assert direction.notes["retain_later"] == pytest.approx(float(losses["retain"](other).detach()))
    assert direction.notes["tuned"] == pytest.approx(float((weights(other) - before).norm()))
    assert direction.weights is not None
    assert direction.weights.tolist() == [0.3, 2.0, -0.7]
    assert torch.equal(weights(net), before), "the weights stay where they are"


# --- ResAlign on quadratics -----------------------------------------------------------------------


def quadratic(eigenvalues: list[float], lam: float = 0.6) -> tuple[LossClosure, Tensor, Any]:
    """f = 1/2 (p - m)^T A (p - m), L_forget = 1/2 ||p - b||^2 and L_retain = <c, p>."""
    generator = torch.Generator().manual_seed(1)
    n = len(eigenvalues)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=FLOAT))[0]
    a = basis @ torch.diag(torch.tensor(eigenvalues, dtype=FLOAT)) @ basis.T
    m, b, c = torch.randn(3, n, generator=generator, dtype=FLOAT)
    p = torch.randn(n, generator=generator, dtype=FLOAT).requires_grad_()
    losses = {
        "forget": [lambda: 0.5 * (p - b).square().sum()],
        "retain": [lambda: c @ p],
        "relearn": [lambda: 0.5 * (p - m) @ a @ (p - m)],
    }
    return LossClosure((p,), losses), p, (a, m, b, c, lam)


def test_many_terms_are_the_derivative_through_the_proximal_point() -> None:
    """Where the fine-tuning ends at the proximal point, the step is the gradient of the loss as a
    function of theta, by automatic differentiation through the closed form of that point.
    """
    losses, p, (a, m, b, c, lam) = quadratic([0.1, 0.5, 0.9, 2.6])
    identity = torch.eye(4, dtype=FLOAT)

    def proximal(theta: Tensor) -> Tensor:
        return torch.linalg.solve(identity + a, theta + a @ m)

    theta = p.detach().clone().requires_grad_()
    now = 0.5 * (theta - b).square().sum()
    later = 0.5 * (proximal(theta) - b).square().sum()
    (expected,) = torch.autograd.grad(now + lam * (later - now) + 1.5 * (c @ theta), theta)

    method = ResAlign(lam=lam, retain=1.5, terms=200, hvp="exact")
    change = (proximal(p.detach()) - p.detach(),)
    with losses.at(change):
        through, scale = method._through(losses, losses.grad("forget"))
    step = (1 - lam) * (p.detach() - b) + lam * through[0] + 1.5 * c
    torch.testing.assert_close(step, expected, rtol=1e-9, atol=1e-11)
    assert scale < 1, "with an eigenvalue of 2.6 the iteration grows at s = 1"


@pytest.mark.parametrize(
    ("eigenvalues", "scale"),
    [([0.2, 0.5, 0.9], 1.0), ([1.2, 1.5, 2.5], 0.5), ([40.0, 50.0, 55.0], 1 / 32)],
)
def test_the_step_has_the_terms_of_the_truncated_series(
    eigenvalues: list[float], scale: float
) -> None:
    """s sum_{k < K} (I - s (I + A))^k g at the end of plain steps, by powers of a matrix."""
    losses, p, (a, m, b, c, lam) = quadratic(eigenvalues)
    theta = p.detach()
    star = theta.clone()
    for _ in range(3):
        star = star - 0.01 * a @ (star - m)
    jacobian = torch.eye(3, dtype=FLOAT) - scale * (torch.eye(3, dtype=FLOAT) + a)
    series = sum(torch.linalg.matrix_power(jacobian, k) for k in range(4))
    expected = (1 - lam) * (theta - b) + 1.5 * c + lam * scale * series @ (star - b)
    method = ResAlign(
        inner_steps=3, inner_lr=0.01, lam=lam, retain=1.5, terms=4, hvp="exact", size=1.0
    )
    direction = method.direction(losses)
    torch.testing.assert_close(direction.vec[0], expected, rtol=1e-9, atol=1e-11)
    assert direction.notes["scale"] == scale
    assert direction.notes["forget_later"] == pytest.approx(float(0.5 * (star - b).square().sum()))
    assert direction.notes["tuned"] == pytest.approx(float((star - theta).norm()))
    assert direction.weights is not None
    assert direction.weights.tolist() == pytest.approx([0.4, 1.5, 0.0])
    differences = ResAlign(inner_steps=3, inner_lr=0.01, lam=lam, retain=1.5, terms=4)
    torch.testing.assert_close(differences.direction(losses).vec[0], expected, rtol=1e-6, atol=1e-8)
    assert torch.equal(p.detach(), theta)


def test_the_term_is_left_out_where_the_iteration_grows_at_any_step() -> None:
    """An eigenvalue of -3 gives the factor 1 + 2 s for every s > 0."""
    losses, p, (_, _, b, c, lam) = quadratic([-3.0, -2.5])
    direction = ResAlign(inner_steps=0, lam=lam, retain=1.5, hvp="exact").direction(losses)
    expected = (1 - lam) * (p.detach() - b) + 1.5 * c
    torch.testing.assert_close(direction.vec[0], expected)
    assert direction.notes["scale"] == 0


@pytest.mark.parametrize("method", [MetaUnlearning(), ResAlign()])
def test_other_objectives_are_refused(method: MetaUnlearning | ResAlign) -> None:
    method.check_objectives(("retain", "forget", "relearn"))
    for objectives in (
        ("retain", "forget"),
        ("forget", "relearn"),
        ("retain", "forget", "relearn", "replace"),
    ):
        with pytest.raises(ValueError, match="needs the objectives retain, forget and relearn"):
            method.check_objectives(objectives)
    with pytest.raises(ValueError, match="relearn"):
        method.direction(closure(*pair(0.1, 1.0, 1.0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["method={name: munba}"], "'munba' would train on `relearn` as on any objective"),
        (
            ["forget=[{prompts: tiny_star, loss: esd}, {prompts: tiny_blue, loss: esd}]"],
            "relearn is defined for one concept",
        ),
        (
            ["target=classifier", "forget={data: digits}", "retain=rest"],
            "relearn: the target 'classifier'|needs data",
        ),
    ],
)
def test_a_recipe_has_relearn_for_these_methods_only(changes: list[str], message: str) -> None:
    job = recipe.load("tiny_star_meta_unlearning")
    assert job.objectives == ("retain", "forget", "relearn")
    with pytest.raises(UserError, match=message):
        recipe.load("tiny_star_meta_unlearning", changes)
