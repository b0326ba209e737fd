"""MOML: gradients through a lower level against autograd, the min-norm weights against cvxpy, and
quadratics whose hypergradient is known in closed form.
"""

from __future__ import annotations

import cvxpy
import numpy as np
import pytest
import torch
from torch import Tensor

from concept_eraser.methods.checks import check_laws, closure, flat, pair
from concept_eraser.methods.forum import start_inner
from concept_eraser.methods.moml import Moml, min_norm_weights
from concept_eraser.methods.unrolled import hypergradient, iterates
from concept_eraser.training.closure import LossClosure
from tests.methods.test_adversarial import Copies, large_problem

FLOAT = torch.float64


def curved() -> tuple[tuple[Tensor, Tensor], Tensor, dict[str, list]]:
    """Return alpha [3] and omega [2], a matrix, and losses with no second derivative of zero."""
    generator = torch.Generator().manual_seed(0)
    alpha, omega, mix = (
        torch.randn(shape, generator=generator, dtype=FLOAT) for shape in ((3,), (2,), (2, 3))
    )
    params = alpha.requires_grad_(), omega.requires_grad_()
    return params, mix, {name: [lambda name=name: loss(name, *params, mix)] for name in LOSSES}


LOSSES = ("retain", "forget", "attack")


def loss(name: str, alpha: Tensor, omega: Tensor, mix: Tensor) -> Tensor:
    if name == "attack":
        return (omega - torch.tanh(mix @ alpha)).square().sum() + 0.1 * omega.pow(4).sum()
    shift = {"retain": 1.0, "forget": -0.5}[name]
    return (omega.exp() * shift).sum() + (alpha * omega.sum() - shift).square().sum()


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(("hvp", "tolerance"), [("exact", 1e-10), ("difference", 1e-4)])
def test_the_hypergradient_is_that_of_autograd(steps: int, hvp, tolerance: float) -> None:
    """One graph through all steps, by double backward."""
    params, mix, losses = curved()
    alpha, omega = params
    closure = LossClosure(params, losses, inner=[1])
    path = iterates(closure, start_inner(closure, {}, warm=True), steps, 0.07)
    for name in ("retain", "forget"):
        w = omega.detach().requires_grad_()
        for _ in range(steps):
            (slope,) = torch.autograd.grad(loss("attack", alpha, w, mix), w, create_graph=True)
            w = w - 0.07 * slope
        expected_loss = loss(name, alpha, w, mix)
        (expected,) = torch.autograd.grad(expected_loss, alpha)
        gradient, value = hypergradient(closure, name, path=path, lr=0.07, hvp=hvp, size=0.01)
        torch.testing.assert_close(gradient[0], expected, rtol=tolerance, atol=tolerance)
        assert gradient[1].tolist() == [0, 0], "the lower level's variable has no part in the step"
        assert value == pytest.approx(float(expected_loss.detach()))
    torch.testing.assert_close(omega.detach() + path[-1][0], w.detach())


def with_full_copies(
    closure: LossClosure, name: str, *, steps: int, lr: float, hvp
) -> tuple[list[list[Tensor]], tuple[Tensor, ...], float]:
    """Return the iterates and the hypergradient of `unrolled.py`, with all parameters moved."""

    def wide(values: list[Tensor]) -> tuple[Tensor, ...]:
        at = dict(zip(closure.inner, values, strict=True))
        return tuple(at.get(i, torch.zeros_like(p)) for i, p in enumerate(closure.params))

    path = [start_inner(closure, {}, warm=True)]
    for _ in range(steps):
        with closure.at(wide(path[-1])):
            slopes = closure.grad("attack", of=closure.inner)
        path.append([o - lr * slope for o, slope in zip(path[-1], slopes, strict=True)])
    with closure.at(wide(path[-1])):
        total = closure.grad(name)
    value, back = closure.last_loss, [total[i] for i in closure.inner]
    for offset in reversed(path[:-1]):
        with closure.at(wide(offset)):
            product = closure.hvp("attack", wide(back), hvp, 0.01)
        total = tuple(part - lr * change for part, change in zip(total, product, strict=True))
        back = [b - lr * product[i] for b, i in zip(back, closure.inner, strict=True)]
    return path, total, value


@pytest.mark.parametrize("hvp", ["exact", "difference", "forward"])
def test_steps_and_products_copy_the_attack_alone_and_change_no_bit(hvp) -> None:
    weights, attack, losses = large_problem()
    before = weights.detach().clone(), attack.detach().clone()
    expected_path, expected, value = with_full_copies(losses, "forget", steps=3, lr=0.1, hvp=hvp)
    with Copies() as copies:
        path = iterates(losses, start_inner(losses, {}, warm=True), 3, 0.1)
    assert copies.numbers < weights.numel() / 10
    with Copies() as copies:
        gradient, loss_there = hypergradient(
            losses, "forget", path=path, lr=0.1, hvp=hvp, size=0.01
        )
    assert copies.numbers < weights.numel() / 10
    for there, here in zip(expected_path, path, strict=True):
        assert torch.equal(there[0], here[0])
    assert torch.equal(gradient[0], expected[0])
    assert loss_there == value
    assert torch.equal(weights, before[0])
    assert torch.equal(attack, before[1])
    with Copies() as copies:
        with_full_copies(losses, "forget", steps=3, lr=0.1, hvp=hvp)
    assert copies.numbers > 10 * weights.numel(), "copies of all parameters are counted"


@pytest.mark.parametrize("hvp", ["exact", "difference"])
def test_three_variables_of_the_lower_level_change_no_bit(hvp) -> None:
    """Positions between others, and a gradient of zero backwards."""
    g = torch.Generator().manual_seed(3)
    a, b, c, d, e = (torch.randn(4, generator=g, dtype=FLOAT).requires_grad_() for _ in range(5))
    losses = {
        "retain": [lambda: (b.exp() * a).sum() + (d * e).sum().square() + c.pow(3).sum()],
        "forget": [lambda: a.pow(2).sum()],
        "attack": [
            lambda: (b - a.tanh()).pow(4).sum() + (c * b * d).sum() + (e - c).square().sum()
        ],
    }
    closure = LossClosure((a, b, c, d, e), losses, inner=[1, 2, 4])
    for name in ("retain", "forget"):
        path, expected, value = with_full_copies(closure, name, steps=4, lr=0.02, hvp=hvp)
        gradient, loss_there = hypergradient(closure, name, path=path, lr=0.02, hvp=hvp, size=0.01)
        assert all(torch.equal(gradient[i], expected[i]) for i in (0, 3))
        assert loss_there == value
        assert float(gradient[0].norm()) > 0


def quadratic() -> tuple[Tensor, Tensor, LossClosure]:
    """f = (w - 2 alpha)^2 / 2, retain = (w - 1)^2 / 2, forget = (w + 3)^2 / 2 + alpha."""
    alpha = torch.tensor(0.5, dtype=FLOAT, requires_grad=True)
    omega = torch.tensor(0.0, dtype=FLOAT, requires_grad=True)
    losses = {
        "retain": [lambda: 0.5 * (omega - 1) ** 2],
        "forget": [lambda: 0.5 * (omega + 3) ** 2 + alpha],
        "attack": [lambda: 0.5 * (omega - 2 * alpha) ** 2],
    }
    return alpha, omega, LossClosure((alpha, omega), losses, inner=[1])


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_quadratics_by_hand(steps: int) -> None:
    """omega_T = 2 alpha (1 - r) from 0 with r = 0.8^T, so d omega_T / d alpha = 2 (1 - r)."""
    alpha, omega, losses = quadratic()
    direction = Moml(inner_steps=steps, inner_lr=0.2, hvp="exact").direction(losses)
    slope = 2 * (1 - 0.8**steps)
    end = 0.5 * slope
    h = [(end - 1) * slope, (end + 3) * slope + 1]
    # two numbers of opposite signs are opposed, else the shorter one is the min-norm point
    expected = 0.0 if h[0] * h[1] < 0 else min(h, key=abs)
    assert float(direction.vec[0]) == pytest.approx(expected, abs=1e-12)
    assert float(omega.detach() - direction.vec[1]) == pytest.approx(end)
    torch.testing.assert_close(
        direction.gram, torch.outer(torch.tensor(h), torch.tensor(h)).double()
    )
    assert (alpha.item(), omega.item()) == (0.5, 0.0)


def test_a_cold_start_returns_to_the_first_attack() -> None:
    _, omega, losses = quadratic()
    method = Moml(inner_steps=1, inner_lr=0.2, warm=False)
    method.direction(losses)
    with torch.no_grad():
        omega += 5
    direction = method.direction(losses)
    assert float(omega.detach() - direction.vec[1]) == pytest.approx(0.2)
    assert set(method.state_dict()) == {"start_0"}
    assert Moml(inner_steps=1, inner_lr=0.2).state_dict() == {}


@pytest.mark.parametrize("m", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_the_weights_against_cvxpy(m: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(m, 5)) * rng.uniform(0.1, 3, (m, 1)) + rng.normal(size=5)
    weights = min_norm_weights(torch.from_numpy(rows @ rows.T))
    x = cvxpy.Variable(m)
    cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(rows.T @ x)), [x >= 0, cvxpy.sum(x) == 1]).solve(
        solver="CLARABEL"
    )
    np.testing.assert_allclose(weights.numpy(), x.value, atol=1e-5)


def test_weights_at_the_edges() -> None:
    gram = torch.tensor([[1.0, 2.0], [2.0, 9.0]], dtype=FLOAT)  # the first is the shortest point
    assert min_norm_weights(gram).tolist() == [1.0, 0.0]
    assert min_norm_weights(gram.flip(0, 1)).tolist() == [0.0, 1.0]
    assert min_norm_weights(torch.ones(2, 2, dtype=FLOAT)).tolist() == [0.5, 0.5]
    assert min_norm_weights(torch.diag(torch.tensor([1.0, 3.0])).double()).tolist() == [0.75, 0.25]
    for dead in (0.0, float("nan")):
        gram = torch.tensor([[4.0, dead], [dead, dead]], dtype=FLOAT)
        assert min_norm_weights(gram).tolist() == pytest.approx([1.0, 0.0])
    assert min_norm_weights(torch.zeros(2, 2, dtype=FLOAT)).tolist() == [0.0, 0.0]
    assert min_norm_weights(torch.ones(1, 1, dtype=FLOAT)).tolist() == pytest.approx([1.0])


def test_normalising_gives_two_objectives_equal_weights() -> None:
    pair_closure = closure(*pair(0.3, 1.0, 7.0), Moml())
    direction = Moml(normalize=True).direction(pair_closure)
    assert direction.weights.tolist() == [0.5, 0.5]
    sums = [0.5 * (flat(pair_closure.gradients[n])) for n in ("retain", "forget")]
    torch.testing.assert_close(flat(direction.vec), sums[0] + sums[1])
    assert check_laws(Moml(normalize=True)) == ("permutation", "zero_step", "shapes")
    assert "stationarity" in check_laws(Moml())


def test_a_lower_level_that_diverges_is_a_skipped_step() -> None:
    _, _, losses = quadratic()
    direction = Moml(inner_steps=2000, inner_lr=1e6).direction(losses)
    assert direction.notes == {"inner_diverged": 1}
    assert all(bool(part.isnan().all()) for part in direction.vec)


def test_without_an_attack_and_bad_options_are_errors() -> None:
    with pytest.raises(ValueError, match=r"needs a lower-level problem.*found retain, forget"):
        Moml().direction(closure(*pair(0.1, 1.0, 1.0)))
    for options in ({"inner_steps": 0}, {"inner_lr": 0.0}, {"size": 0.0}):
        with pytest.raises(ValueError, match="inner_steps must be >= 1"):
            Moml(**options)


def test_defaults() -> None:
    method = Moml()
    assert (method.inner_steps, method.inner_lr, method.size, method.warm) == (5, 0.1, 0.01, True)


def test_the_weights_of_two_gradients_with_and_without_their_lengths() -> None:
    """With ||a|| = 1/2, ||b|| = 2 and cosine -0.3 the first weight is 4.3 / (4.25 + 0.6)."""
    gradients = pair(0.3, 0.5, 2.0)
    plain = Moml().direction(closure(*gradients, Moml())).weights
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.0], dtype=FLOAT))  # inner product > 1/4
    apart = Moml().direction(closure(*pair(-0.3, 0.5, 2.0), Moml())).weights
    expected = torch.tensor([4.3, 0.55], dtype=FLOAT) / 4.85
    torch.testing.assert_close(apart, expected)
    normal = Moml(normalize=True).direction(closure(*gradients, Moml())).weights
    torch.testing.assert_close(normal, torch.tensor([0.5, 0.5], dtype=FLOAT))


def test_normalising_a_gradient_of_zero_gives_a_finite_step() -> None:
    gradients = pair(0.3, 0.0, 2.0)
    direction = Moml(normalize=True).direction(closure(*gradients, Moml()))
    assert torch.isfinite(flat(direction.vec)).all()
    assert direction.weights is not None
    assert torch.isfinite(direction.weights).all()
