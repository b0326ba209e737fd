"""The Fisher matrix and its solvers on problems that are small enough for dense formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from concept_eraser.methods import fisher as algebra
from concept_eraser.methods.base import EditRequest
from concept_eraser.methods.fisher import Fisher, Risk
from concept_eraser.methods.natural_gradient import NaturalGradient, proximal

FLOAT = torch.float64


def samples(
    n: int = 7, d: int = 3, outputs: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels, targets."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=FLOAT)
    return x, torch.arange(n) % outputs, torch.randn(n, outputs, generator=g, dtype=FLOAT)


def linear(d: int = 3, outputs: int = 2, seed: int = 1) -> nn.Linear:
    model = nn.Linear(d, outputs, bias=False, dtype=FLOAT)
    with torch.no_grad():
        model.weight.copy_(
            torch.randn(outputs, d, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)
        )
    return model


def linear_fisher(model: nn.Linear, x: Tensor, likelihood: str) -> Tensor:
    """mean of Sigma (x) x x^T, the Fisher of a linear model, [p, p]."""
    total = torch.zeros(model.weight.numel(), model.weight.numel(), dtype=FLOAT)
    for row in x:
        p = (model.weight.detach() @ row).softmax(0)
        sigma = (
            torch.eye(len(p), dtype=FLOAT)
            if likelihood == "gaussian"
            else torch.diag(p) - torch.outer(p, p)
        )
        total += torch.kron(sigma, torch.outer(row, row)) / len(x)
    return total


def test_the_gaussian_loss_is_half_the_squared_error_of_a_sample() -> None:
    risk = Risk(linear(), "gaussian")
    output, target = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0], [3.0, 1.0]])
    assert float(risk.mean_loss(output, target)) == (0.5 * 5 + 0.5 * 9) / 2
    image = torch.ones(2, 3, 4)
    assert float(risk.mean_loss(image, 0 * image)) == 6


@pytest.mark.parametrize("likelihood", ["softmax", "gaussian"])
def test_gradients_are_sums_over_samples_whatever_the_batches(likelihood: str) -> None:
    model, (x, labels, targets) = linear(), samples()
    y = labels if likelihood == "softmax" else targets
    risk = Risk(model, likelihood, 0.3)
    each = [
        torch.autograd.grad(risk.mean_loss(model(x[i : i + 1]), y[i : i + 1]), model.weight)[0]
        for i in range(7)
    ]
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    assert algebra.count(batches) == 7
    torch.testing.assert_close(risk.sum_gradient(batches)[0], sum(each))
    expected = sum(each) / 7 + 0.3 * model.weight.detach()
    torch.testing.assert_close(risk.gradient(batches)[0], expected)
    assert risk.certificate(batches, 0.5) == pytest.approx(float(expected.norm()) / 0.5)
    assert risk.certificate(batches, 0.25) == pytest.approx(float(expected.norm()) / 0.25)
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match="strongly convex"):
            risk.certificate(batches, bad)


def test_frozen_parameters_take_no_part_and_unused_ones_have_no_gradient() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.active, self.fixed, self.spare = (
                linear(),
                linear(),
                nn.Parameter(torch.ones(2, dtype=FLOAT)),
            )
            self.fixed.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.active(x) + self.fixed(x)

    model, (x, y, _) = Spare(), samples()
    risk = Risk(model)
    assert [tuple(p.shape) for p in risk.params] == [(2,), (2, 3)]
    assert risk.sum_gradient([(x, y)])[0].tolist() == [0, 0]
    assert Fisher(risk, [(x, y)], 0.5).diagonal()[:2].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("likelihood", ["softmax", "gaussian"])
def test_products_dense_and_diagonal_written_out(likelihood: str) -> None:
    model, (x, labels, targets) = linear(), samples()
    y = labels if likelihood == "softmax" else targets
    fisher = Fisher(Risk(model, likelihood), [(x[:3], y[:3]), (x[3:], y[3:])], 0.2)
    expected = linear_fisher(model, x, likelihood) + 0.2 * torch.eye(6, dtype=FLOAT)
    torch.testing.assert_close(fisher.dense(), expected)
    torch.testing.assert_close(fisher.diagonal(), expected.diagonal())
    v = (torch.arange(6, dtype=FLOAT).reshape(2, 3),)
    torch.testing.assert_close(
        algebra.flatten(fisher.product(v)), expected @ torch.arange(6, dtype=FLOAT)
    )
    assert not fisher.dense().requires_grad
    assert not fisher.product(v)[0].requires_grad


@pytest.mark.parametrize("likelihood", ["softmax", "gaussian"])
@pytest.mark.parametrize("solver", ["cg", "exact", "diagonal", "lissa", "kfac"])
def test_every_solver_inverts_its_matrix(solver: str, likelihood: str) -> None:
    """kfac is exact for one sample and one linear layer; diagonal inverts the diagonal."""
    model, (x, labels, targets) = linear(), samples(1 if solver == "kfac" else 7)
    y = labels if likelihood == "softmax" else targets
    fisher = Fisher(Risk(model, likelihood), [(x, y)], 0.4)
    matrix = linear_fisher(model, x, likelihood) + 0.4 * torch.eye(6, dtype=FLOAT)
    if solver == "diagonal":
        matrix = matrix.diagonal().diag()
    v = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, -1.0], dtype=FLOAT)
    (solution,) = algebra.solve(fisher, (v.reshape(2, 3),), solver, iterations=150)
    torch.testing.assert_close(
        solution.flatten(), torch.linalg.solve(matrix, v), rtol=1e-6, atol=1e-8
    )
    assert solution.shape == (2, 3)


@pytest.mark.parametrize("likelihood", ["softmax", "gaussian"])
def test_kfac_of_one_layer_with_a_bias_and_three_outputs(likelihood: str) -> None:
    """Exact for one sample, weights and bias together: torch's mean over the outputs is taken out
    again.
    """
    torch.manual_seed(0)
    model, (x, labels, targets) = nn.Linear(4, 3, dtype=FLOAT), samples(1, 4, 3)
    fisher = Fisher(
        Risk(model, likelihood), [(x, labels if likelihood == "softmax" else targets)], 0.4
    )
    v = (torch.arange(12, dtype=FLOAT).reshape(3, 4), torch.tensor([1.0, -1.0, 2.0], dtype=FLOAT))
    for solution, exact in zip(
        algebra.solve(fisher, v, "kfac"), algebra.solve(fisher, v, "exact"), strict=True
    ):
        torch.testing.assert_close(solution, exact, rtol=1e-6, atol=1e-9)
        assert not solution.requires_grad


def test_lissa_without_a_sigma_takes_a_tenth_more_than_the_largest_eigenvalue() -> None:
    """A few iterations are the filter (1 - (1 - a / sigma)^(T + 1)) / a of every eigenvalue a."""
    model, (x, _, y) = linear(), samples()
    fisher = Fisher(Risk(model, "gaussian"), [(x, y)], 0.1)
    values, basis = torch.linalg.eigh(
        linear_fisher(model, x, "gaussian") + 0.1 * torch.eye(6, dtype=FLOAT)
    )
    v = torch.arange(1.0, 7.0, dtype=FLOAT)
    for sigma, options in ((1.1 * float(values.max()), {}), (30.0, {"sigma": 30.0})):
        filter_factors = (1 - (1 - values / sigma) ** 4) / values
        (solution,) = algebra.solve(fisher, (v.reshape(2, 3),), "lissa", iterations=3, **options)
        torch.testing.assert_close(
            solution.flatten(), basis @ (filter_factors * (basis.T @ v)), rtol=1e-6, atol=1e-9
        )


def test_conjugate_gradients_stop_at_their_limits() -> None:
    """One iteration is the steepest descent of the quadratic, (r.r / r.Ar) r. It also meets a
    tolerance of 0.9.
    """
    model, (x, _, y) = linear(), samples()
    fisher = Fisher(Risk(model, "gaussian"), [(x, y)], 0.1)
    matrix = linear_fisher(model, x, "gaussian") + 0.1 * torch.eye(6, dtype=FLOAT)
    v = torch.arange(1.0, 7.0, dtype=FLOAT)
    first = (v @ v) / (v @ matrix @ v) * v
    (once,) = algebra.solve(fisher, (v.reshape(2, 3),), "cg", iterations=1)
    torch.testing.assert_close(once.flatten(), first)
    assert float((matrix @ first - v).norm()) < 0.9 * float(v.norm())
    (loose,) = algebra.solve(fisher, (v.reshape(2, 3),), "cg", tolerance=0.9)
    torch.testing.assert_close(loose.flatten(), first)
    (whole,) = algebra.solve(fisher, (v.reshape(2, 3),), "cg")
    assert float((matrix @ whole.flatten() - v).norm()) <= 1e-10 * float(v.norm())


def test_a_dense_matrix_has_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, _ = samples()
    fisher = Fisher(Risk(linear()), [(x, y)])
    monkeypatch.setattr(algebra, "EXACT_LIMIT", 6)
    assert fisher.dense().shape == (6, 6)
    monkeypatch.setattr(algebra, "EXACT_LIMIT", 5)
    with pytest.raises(
        ValueError, match="builds a 6 x 6 matrix; it is meant for at most 5 parameters"
    ):
        fisher.dense()


def test_kfac_refuses_a_matrix_without_a_shift() -> None:
    x, y, _ = samples()
    for shift in (0.0, -1.0):
        with pytest.raises(ValueError, match="kfac needs damping"):
            algebra.solve(
                Fisher(Risk(linear()), [(x, y)], shift), (torch.ones(2, 3, dtype=FLOAT),), "kfac"
            )


def test_flat_and_back() -> None:
    like = [torch.zeros(2, 3, dtype=torch.float32), torch.zeros(4, dtype=FLOAT)]
    parts = algebra.unflatten(torch.arange(10.0, dtype=FLOAT), like)
    assert [(p.shape, p.dtype) for p in parts] == [(p.shape, p.dtype) for p in like]
    assert algebra.flatten(parts).tolist() == list(range(10))


# --- the step -------------------------------------------------------------------------------------


def minimiser(x: Tensor, y: Tensor, ridge: float) -> nn.Linear:
    model = linear(x.shape[1], y.shape[1])
    solution = torch.linalg.solve(
        x.T @ x / len(x) + ridge * torch.eye(x.shape[1], dtype=FLOAT), x.T @ y / len(x)
    )
    with torch.no_grad():
        model.weight.copy_(solution.T)
    return model


@pytest.mark.parametrize("fisher_on", ["retain", "all"])
@pytest.mark.parametrize("objective", ["retain_mean", "fixed_n"])
@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_the_step_written_out(objective: str, fisher_on: str, damping: float) -> None:
    """retain_mean: 1/(n-m) on both sides and the ridge of U; fixed_n: 1/n on both, no ridge term.
    All: F(S).
    """
    ridge, m = 0.1, 3
    x, _, y = samples(11)
    model = minimiser(x, y, ridge)
    w = model.weight.detach().clone()
    method = NaturalGradient(objective=objective, fisher_on=fisher_on, damping=damping)
    outcome = method.apply(
        Risk(model, "gaussian", ridge), [(x[:m], y[:m])], [(x[m:8], y[m:8]), (x[8:], y[8:])]
    )
    push = (x[:m] @ w.T - y[:m]).T @ x[:m]
    n = len(x)
    gram, rows = (x.T @ x, n) if fisher_on == "all" else (x[m:].T @ x[m:], n - m)
    if objective == "retain_mean":
        push, matrix = (push + m * ridge * w) / (n - m), gram / rows
    else:
        push, matrix = push / n, gram / n
    step = torch.linalg.solve(matrix + (ridge + damping) * torch.eye(3, dtype=FLOAT), push.T).T
    torch.testing.assert_close(model.weight.detach(), w + step)
    torch.testing.assert_close(outcome.step[0], step)
    assert outcome.length == pytest.approx(float(step.norm()))
    assert outcome.shrunk == 1
    assert outcome.residual < 1e-9

    def slope(at: Tensor) -> float:
        return float(((x[m:] @ at.T - y[m:]).T @ x[m:] / (n - m) + ridge * at).norm())

    assert (outcome.before, outcome.after) == pytest.approx(
        (slope(w), slope(w + step)), rel=1e-6, abs=1e-9
    )


def test_the_trust_region_is_exact_for_gaussian_outputs() -> None:
    """KL of two Gaussians of unit variance is half the squared distance of their means."""
    x, _, y = samples(11)
    lengths = {}
    for kl in (0.0, 1e-5, 1e3):
        model = minimiser(x, y, 0.1)
        before = model(x[3:]).detach()
        outcome = NaturalGradient(kl=kl).apply(
            Risk(model, "gaussian", 0.1), [(x[:3], y[:3])], [(x[3:], y[3:])]
        )
        divergence = float(0.5 * (model(x[3:]).detach() - before).square().sum(1).mean())
        lengths[kl] = (outcome.length, outcome.shrunk, divergence)
    assert lengths[1e-5][2] == pytest.approx(1e-5, rel=1e-6)
    assert lengths[1e-5][1] == pytest.approx(math.sqrt(1e-5 / lengths[0.0][2]))
    assert lengths[1e-5][0] == pytest.approx(lengths[0.0][0] * lengths[1e-5][1])
    assert lengths[1e3] == lengths[0.0]
    assert lengths[0.0][1] == 1


def test_the_residual_is_a_share_of_the_right_hand_side() -> None:
    """One iteration of conjugate gradients is steepest descent, whose residual is known."""
    x, _, y = samples(11)
    model = minimiser(x, y, 0.1)
    w = model.weight.detach().clone()
    outcome = NaturalGradient(iterations=1).apply(
        Risk(model, "gaussian", 0.1), [(x[:3], y[:3])], [(x[3:], y[3:])]
    )
    b = (((x[:3] @ w.T - y[:3]).T @ x[:3] + 0.3 * w) / 8).flatten()
    matrix = linear_fisher(model, x[3:], "gaussian") + 0.1 * torch.eye(6, dtype=FLOAT)
    first = (b @ b) / (b @ matrix @ b) * b
    torch.testing.assert_close(outcome.step[0].flatten(), first)
    assert outcome.residual == pytest.approx(float((matrix @ first - b).norm() / b.norm()))


def test_nothing_to_forget_has_no_residual_and_does_not_shrink() -> None:
    x, _, y = samples(11)
    for kl in (0.0, 1e-6):
        outcome = NaturalGradient(kl=kl).apply(
            Risk(minimiser(x, y, 0.1), "gaussian", 0.1), [], [(x, y)]
        )
        assert (outcome.residual, outcome.shrunk, outcome.length) == (0, 1, 0)


def test_a_solver_that_runs_away_changes_nothing() -> None:
    x, _, y = samples(11)
    for sigma, iterations, words in ((0.2, 30, "diverged"), (1e-30, 12, "not finite")):
        model = minimiser(x, y, 0.1)
        before = model.weight.detach().clone()
        method = NaturalGradient(solver="lissa", sigma=sigma, iterations=iterations)
        with pytest.raises(ValueError, match=f"{words}.* so nothing was changed"):
            method.apply(Risk(model, "gaussian", 0.1), [(x[:3], y[:3])], [(x[3:], y[3:])])
        assert torch.equal(model.weight.detach(), before)


def test_an_edit_is_the_step_and_its_figures() -> None:
    x, y, _ = samples(11)
    one, other = linear(), linear()
    batches = lambda rows: [(x[list(rows)], y[list(rows)])]  # noqa: E731
    request = EditRequest(
        one, (0, 4), (1, 2, 3, 5, 6, 7, 8, 9, 10), 0.2, batches, lambda rows: one.weight.sum()
    )
    figures = NaturalGradient().edit(request)
    outcome = NaturalGradient().apply(
        Risk(other, "softmax", 0.2), batches(request.forget), batches(request.retain)
    )
    torch.testing.assert_close(one.weight, other.weight)
    assert figures == pytest.approx(
        {
            "step": outcome.length,
            "gradient_before": outcome.before,
            "gradient_after": outcome.after,
            "residual": outcome.residual,
            "shrunk": 1.0,
        }
    )


def test_the_proximal_step_of_a_diagonal_metric_is_soft_thresholding() -> None:
    """argmin a (c - t)^2 + 2 penalty |t| = sign(c) max(|c| - penalty / a, 0)."""
    center, a = (
        torch.tensor([3.0, -3.0, 0.4, -0.4, 0.0], dtype=FLOAT),
        torch.tensor([1.0, 2.0, 1.0, 4.0, 1.0], dtype=FLOAT),
    )
    solution = proximal(center, a.diag(), 0.5)
    torch.testing.assert_close(
        solution, torch.tensor([2.5, -2.75, 0.0, -0.275, 0.0], dtype=FLOAT), rtol=0, atol=1e-12
    )


def test_the_proximal_iteration_is_accelerated() -> None:
    """Beck & Teboulle (2009), Theorem 4.4: F(x_k) - F* <= 2 L ||x_0 - x*||^2 / (k + 1)^2; plain
    steps miss it here.
    """
    metric = torch.diag(torch.tensor([1.0, 0.01, 0.003], dtype=FLOAT))
    center, penalty = torch.tensor([0.0, 5.0, 5.0], dtype=FLOAT), 0.01

    def value(theta: Tensor) -> float:
        return float(
            0.5 * (center - theta) @ metric @ (center - theta) + penalty * theta.abs().sum()
        )

    best = center.sign() * (center.abs() - penalty / metric.diagonal()).clamp(min=0)
    distance = float((center - best).square().sum())
    for k in (20, 50, 100):
        solution = proximal(center, metric, penalty, iterations=k)
        assert value(solution) - value(best) <= 2 * distance / (k + 1) ** 2
    assert value(center) > value(proximal(center, metric, penalty, iterations=1)) > value(best)


@pytest.mark.parametrize("penalty", [0.05, 0.4])
def test_the_proximal_iteration_is_the_sequence_of_beck_and_teboulle(penalty: float) -> None:
    """FISTA with y_1 = x_0, t_1 = 1 and steps of 1 / L, written out; the first iterates differ."""
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    metric = root @ root.T + 0.1 * torch.eye(4, dtype=FLOAT)
    center = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=FLOAT)
    length = float(torch.linalg.matrix_norm(metric, 2))
    x, y, t = center, center, 1.0
    for k in range(1, 7):
        slope = y - metric @ (y - center) / length
        following = torch.nn.functional.softshrink(slope, penalty / length)
        t, before = (1 + math.sqrt(1 + 4 * t**2)) / 2, t
        x, y = following, following + (before - 1) / t * (following - x)
        torch.testing.assert_close(
            proximal(center, metric, penalty, iterations=k), x, rtol=0, atol=1e-12
        )


def test_lissa_by_default_takes_200_steps_with_a_scale_from_50_power_iterations() -> None:
    model, (x, labels, _) = linear(), samples(12)
    fisher = Fisher(Risk(model), [(x, labels)], 1e-3)
    v = (torch.randn(2, 3, generator=torch.Generator().manual_seed(3), dtype=FLOAT),)
    sigma = 1.1 * algebra.spectral_norm(fisher.product, v, 50)
    expected = algebra.lissa(fisher.product, v, sigma, 200)
    assert torch.equal(algebra.solve(fisher, v, "lissa")[0], expected[0])
    fewer = algebra.solve(fisher, v, "lissa", iterations=199)
    assert not torch.equal(fewer[0], expected[0])


class WithoutForwardMode(torch.autograd.Function):
    """The hyperbolic tangent, with a backward pass and no forward mode."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    def backward(context: Any, slope: torch.Tensor) -> torch.Tensor:
        (value,) = context.saved_tensors
        return slope * (1 - value.square())


def small_problem(activation: nn.Module, likelihood: str) -> tuple[Fisher, tuple, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), activation, nn.Linear(5, 3)).double()
    inputs = [torch.randn(n, 4, dtype=torch.float64) for n in (3, 2)]
    targets = [
        torch.arange(len(x)) if likelihood == "softmax" else torch.randn(len(x), 3).double()
        for x in inputs
    ]
    batches = list(zip(inputs, targets, strict=True))
    fisher = Fisher(Risk(model, likelihood), batches, 0.1)
    return fisher, tuple(torch.randn_like(p) for p in model.parameters()), model


@pytest.mark.parametrize("likelihood", ["softmax", "gaussian"])
def test_the_direct_product_is_curvlinops(likelihood: str) -> None:
    """One pass in forward mode and one in reverse, over two batches of different size."""
    fisher, v, _ = small_problem(nn.Tanh(), likelihood)
    expected = [f + 0.1 * part for f, part in zip(fisher._operator @ list(v), v, strict=True)]
    for part, other in zip(fisher.product(v), expected, strict=True):
        torch.testing.assert_close(part, other.detach(), rtol=1e-10, atol=1e-12)
        assert not part.requires_grad


def test_frozen_weights_and_constant_outputs_in_the_direct_product() -> None:
    fisher, v, model = small_problem(nn.Tanh(), "softmax")
    model[0].weight.requires_grad_(False)
    product = fisher.product(v[1:])
    whole = Fisher(fisher.risk, fisher.batches)
    model[0].weight.requires_grad_(True)
    expected = whole.product((torch.zeros_like(v[0]), *v[1:]))[1:]
    for part, other, by in zip(product, expected, v[1:], strict=True):
        torch.testing.assert_close(part, other + 0.1 * by)


def test_a_layer_without_forward_mode_needs_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return WithoutForwardMode.apply(x)

    fisher, v, _ = small_problem(Layer(), "softmax")
    with pytest.raises(NotImplementedError):
        fisher._direct_product(v)
    plain, _, _ = small_problem(nn.Tanh(), "softmax")
    expected = plain.product(v)

    def refuse(self: Fisher, v: tuple) -> tuple:
        raise NotImplementedError

    monkeypatch.setattr(Fisher, "_direct_product", refuse)
    for part, other in zip(plain.product(v), expected, strict=True):
        torch.testing.assert_close(part, other)
