"""The Fisher step's remaining statements: the empirical Fisher beside the true one, the bound for
the Fisher of all samples, and the readings of the paper's 1/n, on problems whose answer is known.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from concept_eraser.methods import fisher as algebra
from concept_eraser.methods.fisher import Fisher, Risk
from concept_eraser.methods.gaussian_mechanism import sensitivity
from concept_eraser.methods.natural_gradient import NaturalGradient, proximal, proximal_step
from tests.methods.test_natural_gradient import (
    coherent_errors,
    digits,
    fit_ridge,
    regression,
    ridge_solution,
    slope,
    softmax_regression,
)


def test_eq36_the_printed_sign_of_the_remainder_is_wrong() -> None:
    """The Hessian of the mean of -log P is F + R with R = -1/n sum grad^2 f . grad_f log P. Eq. 36
    prints R with the other sign. Without R neither is right, as the model is not linear in its
    parameters.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0, 1])
    theta = torch.randn(6, generator=generator, dtype=torch.float64)

    def outputs(parameters: Tensor) -> Tensor:
        return torch.tanh(x @ parameters.reshape(2, 3).T)

    def risk(parameters: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs(parameters), y)

    jacobian = torch.func.jacfwd(outputs)(theta)  # [n, classes, p]
    bends = torch.func.jacfwd(torch.func.jacfwd(outputs))(theta)  # [n, classes, p, p]
    p = outputs(theta).softmax(1)
    sigma = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    fisher = torch.einsum("ncp,ncd,ndq->pq", jacobian, sigma, jacobian) / len(x)
    slopes = torch.nn.functional.one_hot(y, 2) - p  # grad_f log P
    remainder = -torch.einsum("nc,ncpq->pq", slopes, bends) / len(x)
    hessian = torch.func.hessian(risk)(theta)
    torch.testing.assert_close(fisher + remainder, hessian)
    size = float(remainder.norm())
    assert size > 0.01
    assert float((fisher - remainder - hessian).norm()) == pytest.approx(2 * size)


def test_eqs38_39_the_printed_models_step_half_as_far_and_away() -> None:
    """A quadratic model of the retained risk at theta has the minimiser theta - A^-1 g. Eqs. 38-39
    print the linear term with the other sign and the quadratic one without its 1/2: theta + A^-1
    g / 2. On ridge regression the first is the retrained model, and the second is worse than no
    step.
    """
    x, y = regression()
    m, ridge = 6, 0.1
    start, target = ridge_solution(x, y, ridge), ridge_solution(x[m:], y[m:], ridge)
    retained_x, retained_y = x[m:], y[m:]
    hessian = retained_x.T @ retained_x / len(retained_x) + ridge * torch.eye(5, dtype=x.dtype)
    gradient = (start @ retained_x.T - retained_y.T) @ retained_x / len(retained_x) + ridge * start

    def minimiser(sign: float, factor: float) -> Tensor:
        """Where the gradient of sign * <g, d> + factor * <d, A d> is zero."""
        return start - torch.linalg.solve(2 * factor * hessian, sign * gradient.T).T

    torch.testing.assert_close(minimiser(1.0, 0.5), target)
    nothing = float((start - target).norm())
    assert float((minimiser(-1.0, 1.0) - target).norm()) == pytest.approx(1.5 * nothing)


def test_eqs61_63_the_printed_sign_moves_a_lasso_away() -> None:
    """Eqs. 61-63 repeat the sign in the proof of the proximal form."""
    x, y = regression(1, n=80, d=6, outputs=1)
    penalty, m = 0.05, 20

    def lasso(x: Tensor, y: Tensor) -> Tensor:
        metric = x.T @ x / len(x)
        return proximal(torch.linalg.solve(metric, x.T @ y / len(x))[:, 0], metric, penalty)

    theta, target = lasso(x, y), lasso(x[m:], y[m:])
    metric = x[m:].T @ x[m:] / (len(x) - m)
    gradient = (x[m:].T @ (x[m:] @ theta[:, None] - y[m:]) / (len(x) - m))[:, 0]
    nothing = float((theta - target).norm())
    right = proximal_step(theta, metric, gradient, penalty)
    printed = proximal_step(theta, metric, -gradient, penalty)
    assert float((right - target).norm()) < 1e-10
    assert float((printed - target).norm()) > 1.5 * nothing


def error_rows(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of each sample's cross-entropy, (p - e_y) x^T, [n, classes * d]."""
    off = (x @ weights.T).softmax(1) - torch.nn.functional.one_hot(y, len(weights))
    return (off[:, :, None] * x[:, None, :]).flatten(1)


@pytest.mark.parametrize("fisher_on", ["retain", "all"])
def test_n3_the_empirical_fisher_is_of_first_order_only(fisher_on: str) -> None:
    """The problem of coherent_errors, m copies of one sample deleted: sum g g^T over the data's own
    labels instead of J^T Sigma J makes an error that grows like m, no smaller than that of doing
    nothing; the true Fisher's like m^2."""
    ms = (2, 4, 8, 16)
    x, y = digits()
    x, y = torch.cat([x[:1].expand(16, -1), x]), torch.cat([y[:1].expand(16), y])
    whole = softmax_regression(x, y, 0.02).weight.detach()
    rows = error_rows(whole, x, y)
    empirical = []
    for m in ms:
        target = softmax_regression(x[m:], y[m:], 0.02).weight.detach()
        fisher_rows = rows if fisher_on == "all" else rows[m:]
        matrix = fisher_rows.T @ fisher_rows / len(fisher_rows) + 0.02 * torch.eye(
            rows.shape[1], dtype=rows.dtype
        )
        push = (rows[:m].sum(0) + m * 0.02 * whole.flatten()) / (len(x) - m)
        empirical.append(
            float((whole.flatten() + torch.linalg.solve(matrix, push) - target.flatten()).norm())
        )
    initial, exact = coherent_errors(ms, fisher_on=fisher_on)
    assert slope(ms, empirical) == pytest.approx(1.0, abs=0.05)
    assert slope(ms, exact) == pytest.approx(2.0, abs=0.15)
    assert all(0.9 < a / b < 1.1 for a, b in zip(empirical, initial, strict=True))
    assert all(
        a > (100 if fisher_on == "retain" else 10) * b
        for a, b in zip(empirical, exact, strict=True)
    )


# --- N4: gamma for F(S) ---------------------------------------------------------------------------


def ridge_deletion(
    x: Tensor, y: Tensor, m: int, ridge: float, fisher_on: str
) -> tuple[float, float, float, float]:
    """Ridge regression of one output: error, certificate, gamma_F(R), gamma_F(S), with the smallest
    valid constants.

    The Hessian does not change: M = 0, for which sensitivity needs a positive number."""
    n, eye = len(x), ridge * torch.eye(x.shape[1], dtype=x.dtype)
    start, target = ridge_solution(x, y, ridge), ridge_solution(x[m:], y[m:], ridge)
    mu = min(
        float(torch.linalg.eigvalsh(part.T @ part / len(part) + eye).min()) for part in (x, x[m:])
    )
    # gradients are affine in theta: on the way from start to target their norms are largest at an
    # end
    largest = max(float(((x @ w.T - y) * x + ridge * w).norm(dim=1).max()) for w in (start, target))
    square = float(x.norm(dim=1).max()) ** 2
    model = fit_ridge(x, y, ridge)
    risk = Risk(model, "gaussian", ridge)
    NaturalGradient(fisher_on=fisher_on, solver="exact").apply(
        risk, [(x[:m], y[:m])], [(x[m:], y[m:])]
    )
    assert float((start - target).norm()) <= m * largest / (n * mu)
    bounds = [
        sensitivity(
            n,
            m,
            convexity=mu,
            lipschitz=largest,
            hessian_lipschitz=1e-12,
            covariance_bound=1.0,
            jacobian_square_bound=square,
            fisher_on=on,
        )
        for on in ("retain", "all")
    ]
    return (
        float((model.weight.detach() - target).norm()),
        risk.certificate([(x[m:], y[m:])], mu),
        *bounds,
    )


@pytest.mark.parametrize(("m", "share"), [(2, 0.933), (10, 0.739), (30, 0.414)])
def test_n4_the_bound_for_all_samples_is_nearly_met(m: int, share: float) -> None:
    """100 numbers, 1 where deleted and .1 elsewhere: the error is so close to gamma_F(S) that all
    of its factors count. gamma_F(R), which is 0 up to rounding here, is no bound.
    """
    x = torch.full((100, 1), 0.1, dtype=torch.float64)
    x[:m] = 1
    y = (x == 1).double()
    error, certificate, retain_bound, all_bound = ridge_deletion(x, y, m, 1.0, "all")
    assert error / all_bound == pytest.approx(share, abs=0.005)
    assert error <= certificate * (1 + 1e-9)
    assert error > 1e6 * retain_bound
    assert ridge_deletion(x, y, m, 1.0, "retain")[0] < 1e-14


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("m", [3, 6, 15, 25])
def test_n4_the_bound_for_all_samples_holds_on_random_problems(seed: int, m: int) -> None:
    x, y = regression(seed, outputs=1)
    error, certificate, _, bound = ridge_deletion(x, y, m, 0.1, "all")
    assert 1e-6 < error <= certificate <= bound


def test_n4_numbers_on_four_digits() -> None:
    """m = 16 of 720, ridge .02: golden values, and the order of the error and its bounds."""
    x, y = digits()
    m, mu = 16, 0.02
    target = softmax_regression(x[m:], y[m:], mu).weight.detach()
    results = {}
    for fisher_on in ("retain", "all"):
        model = softmax_regression(x, y, mu)
        lipschitz = float(2**0.5 * x.norm(dim=1).max() + mu * model.weight.detach().norm())
        initial_error = float((model.weight.detach() - target).norm())
        risk = Risk(model, ridge=mu)
        NaturalGradient(fisher_on=fisher_on).apply(risk, [(x[:m], y[:m])], [(x[m:], y[m:])])
        square = float(x.norm(dim=1).max()) ** 2
        gamma = sensitivity(
            len(x),
            m,
            convexity=mu,
            lipschitz=lipschitz,
            hessian_lipschitz=square**1.5,
            jacobian_square_bound=square,
            fisher_on=fisher_on,
        )
        results[fisher_on] = (
            float((model.weight.detach() - target).norm()),
            risk.certificate([(x[m:], y[m:])], mu),
            gamma,
        )
    assert initial_error == pytest.approx(0.0610, rel=0.01)
    assert results["retain"][:2] == pytest.approx((2.74e-4, 1.418e-3), rel=0.01)
    assert results["all"][:2] == pytest.approx((2.92e-3, 1.096e-2), rel=0.01)
    for error, certificate, gamma in results.values():
        assert error < certificate < gamma
    assert results["all"][2] > results["retain"][2]


# --- A1: the normalisation ------------------------------------------------------------------------


def test_a1_both_readings_of_one_over_n_miss_the_target_of_the_definition() -> None:
    """Errors relative to doing nothing, ridge regression, m = 6 of 60, Fisher of all samples as
    Alg. 1 prints it.

    A mean over U with the factor n/(n - m): 8.8. The same with U's sum over n: .37 from the
    minimiser of the mean over the retained samples, .14 from that which keeps 1/n. Our two steps
    with the Fisher of the retained samples: 0.
    """
    x, y = regression()
    m, n, ridge = 6, 60, 0.1
    start = ridge_solution(x, y, ridge)
    targets = {
        "retain_mean": ridge_solution(x[m:], y[m:], ridge),
        "fixed_n": ridge_solution(x[m:], y[m:], ridge, n),
    }

    def relative_error(weights: Tensor, objective: str) -> float:
        return float((weights - targets[objective]).norm() / (start - targets[objective]).norm())

    risk = Risk(fit_ridge(x, y, ridge), "gaussian", ridge)
    total = risk.sum_gradient([(x[:m], y[:m])])
    step = {
        name: algebra.solve(
            Fisher(risk, [(x, y)], ridge), tuple(n / (n - m) * g / by for g in total), "exact"
        )[0]
        for name, by in (("mean", m), ("sum over n", n))
    }
    assert relative_error(start + step["mean"], "retain_mean") == pytest.approx(8.85, abs=0.05)
    assert relative_error(start + step["sum over n"], "retain_mean") == pytest.approx(
        0.371, abs=0.005
    )
    assert relative_error(start + step["sum over n"], "fixed_n") == pytest.approx(0.136, abs=0.005)
    for objective in targets:
        model = fit_ridge(x, y, ridge)
        NaturalGradient(objective=objective, solver="exact").apply(
            Risk(model, "gaussian", ridge), [(x[:m], y[:m])], [(x[m:], y[m:])]
        )
        assert relative_error(model.weight.detach(), objective) < 1e-12
