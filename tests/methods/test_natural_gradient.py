"""The Fisher step on problems whose answer is known: ridge, softmax regression, lasso; its solvers
and its errors.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from concept_eraser.methods import fisher as algebra
from concept_eraser.methods import natural_gradient as ng
from concept_eraser.methods.fisher import Fisher, Risk
from concept_eraser.methods.gaussian_mechanism import expected_length, noise_scale, sensitivity
from concept_eraser.methods.natural_gradient import NaturalGradient, NaturalStep


def regression(
    seed: int = 0, n: int = 60, d: int = 5, outputs: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    w = torch.randn(d, outputs, generator=g, dtype=torch.float64)
    return x, x @ w + 0.5 * torch.randn(n, outputs, generator=g, dtype=torch.float64)


def linear(d: int, outputs: int) -> nn.Module:
    return nn.Linear(d, outputs, bias=False, dtype=torch.float64)


def ridge_solution(
    x: torch.Tensor, y: torch.Tensor, ridge: float, divisor: int | None = None
) -> torch.Tensor:
    n = divisor or len(x)
    return torch.linalg.solve(
        x.T @ x / n + ridge * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y / n
    ).T


def fit_ridge(x: torch.Tensor, y: torch.Tensor, ridge: float) -> nn.Module:
    model = linear(x.shape[1], y.shape[1])
    with torch.no_grad():
        model.weight.copy_(ridge_solution(x, y, ridge))
    return model


@pytest.mark.parametrize("solver", ["cg", "exact"])
@pytest.mark.parametrize("objective", ["retain_mean", "fixed_n"])
def test_n1_ridge_is_exact(solver: str, objective: str) -> None:
    x, y = regression()
    model = fit_ridge(x, y, 0.1)
    m = 15
    NaturalGradient(objective=objective, solver=solver).apply(
        Risk(model, "gaussian", 0.1), [(x[:m], y[:m])], [(x[m:], y[m:])]
    )
    expected = ridge_solution(x[m:], y[m:], 0.1, len(x) if objective == "fixed_n" else None)
    torch.testing.assert_close(
        model.weight.detach(), expected, rtol=0, atol=1e-10 if solver == "cg" else 1e-12
    )


def test_a1_the_printed_factor_is_worse_than_doing_nothing() -> None:
    """n/(n - m) with a mean over U instead of m/(n - m): the error grows several times over that of
    no step.
    """
    x, y = regression()
    m, n = 6, 60
    start, target = ridge_solution(x, y, 0.1), ridge_solution(x[m:], y[m:], 0.1)
    model = fit_ridge(x, y, 0.1)
    risk = Risk(model, "gaussian", 0.1)
    mean_u = tuple(g / m for g in risk.sum_gradient([(x[:m], y[:m])]))
    printed_step = algebra.solve(
        Fisher(risk, [(x, y)], 0.1), tuple(n / (n - m) * g for g in mean_u), "exact"
    )
    nothing = float((start - target).norm())
    assert float((start + printed_step[0] - target).norm()) > 4 * nothing


def digits(classes: int = 4, n: int = 720) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = load_digits(n_class=classes, return_X_y=True)
    x = torch.from_numpy(x[:n] / 16.0)
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1), torch.from_numpy(y[:n])


def softmax_regression(
    x: torch.Tensor, y: torch.Tensor, ridge: float, classes: int = 4
) -> nn.Module:
    """scikit-learn's minimiser of the same risk: its C is 1 / (n ridge)."""
    estimator = LogisticRegression(
        C=1 / (len(x) * ridge), fit_intercept=False, tol=1e-12, max_iter=5000, solver="newton-cg"
    ).fit(x, y)
    model = linear(x.shape[1], classes)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(estimator.coef_))
    return model


def test_n2_the_fisher_of_a_linear_model_is_its_hessian() -> None:
    x, y = digits()
    model = linear(x.shape[1], 4)  # anywhere, not at the optimum
    risk = Risk(model)
    v = (
        torch.randn(4, x.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    first = torch.autograd.grad(risk.mean_loss(model(x), y), risk.params, create_graph=True)
    hessian = torch.autograd.grad((first[0] * v[0]).sum(), risk.params)[0]
    product = Fisher(risk, [(x[:300], y[:300]), (x[300:], y[300:])]).product(v)[0]
    assert float((product - hessian).norm() / hessian.norm()) < 1e-9


def coherent_errors(ms: tuple[int, ...], **options) -> tuple[list[float], list[float]]:
    """||theta^ - theta*|| and ||theta~ - theta*|| when m copies of one sample are deleted: no
    averaging in between.
    """
    x, y = digits()
    x, y = torch.cat([x[:1].expand(max(ms), -1), x]), torch.cat([y[:1].expand(max(ms)), y])
    whole = softmax_regression(x, y, 0.02)
    initial_errors, final_errors = [], []
    for m in ms:
        target = softmax_regression(x[m:], y[m:], 0.02).weight.detach()
        model = linear(x.shape[1], 4)
        model.load_state_dict(whole.state_dict())
        initial_errors.append(float((model.weight.detach() - target).norm()))
        NaturalGradient(solver="exact", **options).apply(
            Risk(model, ridge=0.02), [(x[:m], y[:m])], [(x[m:], y[m:])]
        )
        final_errors.append(float((model.weight.detach() - target).norm()))
    return initial_errors, final_errors


def slope(ms: tuple[int, ...], errors: list[float]) -> float:
    return float(np.polyfit(np.log(ms), np.log(errors), 1)[0])


@pytest.mark.parametrize("fisher_on", ["retain", "all"])
def test_n3_the_error_is_of_second_order(fisher_on: str) -> None:
    ms = (2, 4, 8, 16)
    initial_errors, final_errors = coherent_errors(ms, fisher_on=fisher_on)
    assert slope(ms, initial_errors) == pytest.approx(1, abs=0.1)
    assert slope(ms, final_errors) == pytest.approx(2, abs=0.15)
    assert final_errors[2] < 0.1 * initial_errors[2]


def test_n4_certificate_bounds_the_error() -> None:
    x, y = digits()
    m, mu = 16, 0.02
    model = softmax_regression(x, y, mu)
    risk = Risk(model, ridge=mu)
    target = softmax_regression(x[m:], y[m:], mu).weight
    # C: gradients of softmax regression are (p - e_y) x^T, of length at most sqrt(2) ||x||, plus
    # the ridge's
    lipschitz = float(2**0.5 * x.norm(dim=1).max() + mu * model.weight.detach().norm())
    assert float((model.weight.detach() - target).norm()) <= m * lipschitz / (len(x) * mu)
    NaturalGradient().apply(risk, [(x[:m], y[:m])], [(x[m:], y[m:])])
    error = float((model.weight - target).norm())
    certificate = risk.certificate([(x[m:], y[m:])], mu)
    assert 0 < error <= certificate
    gamma = sensitivity(
        len(x),
        m,
        convexity=mu,
        lipschitz=lipschitz,
        hessian_lipschitz=float(x.norm(dim=1).max()) ** 3,
    )
    assert certificate < gamma, "the bound before the fact is looser than the certificate after it"
    assert gamma > 10 * float(model.weight.detach().norm()), (
        "... so loose that its noise would drown the weights"
    )
    with pytest.raises(ValueError, match="strongly convex"):
        risk.certificate([(x, y)], 0.0)


def test_n5_deleting_nothing_moves_nothing() -> None:
    x, y = digits()
    model = softmax_regression(x, y, 0.02)
    before = model.weight.detach().clone()
    outcome = NaturalGradient().apply(Risk(model, ridge=0.02), [], [(x, y)])
    assert isinstance(outcome, NaturalStep)
    assert outcome.length == 0
    assert torch.equal(model.weight, before)


def test_n5_the_proximal_step_on_a_lasso() -> None:
    """Corrected: exact where the squared loss makes the metric exact, and a fixed point for m = 0.
    Printed: neither.
    """
    x, y = regression(1, n=80, d=6, outputs=1)
    y = x[:, :2].sum(1, keepdim=True) + 0.3 * (y - y.mean())  # mostly two of the six inputs
    penalty, m = 0.3, 20

    def lasso(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        metric = x.T @ x / len(x)
        return ng.proximal(torch.linalg.solve(metric, x.T @ y / len(x))[:, 0], metric, penalty)

    def step(theta: torch.Tensor, u: int, *, from_paper: bool) -> torch.Tensor:
        retain_x, retain_y = x[u:], y[u:]
        metric = retain_x.T @ retain_x / len(retain_x)
        if from_paper:  # Eq. 11: the gradient on S is taken for 0
            ascent = x[:u].T @ (x[:u] @ theta[:, None] - y[:u]) / max(u, 1) * len(x) / len(retain_x)
            return ng.proximal(theta + torch.linalg.solve(metric, ascent)[:, 0], metric, penalty)
        gradient = retain_x.T @ (retain_x @ theta[:, None] - retain_y) / len(retain_x)
        return ng.proximal_step(theta, metric, gradient[:, 0], penalty)

    theta = lasso(x, y)
    assert int((theta == 0).sum()) > 0, "the penalty bites"
    assert float((step(theta, 0, from_paper=False) - theta).norm()) < 1e-12
    assert float((step(theta, 0, from_paper=True) - theta).norm()) > 0.05
    target = lasso(x[m:], y[m:])
    nothing = float((theta - target).norm())
    assert float((step(theta, m, from_paper=False) - target).norm()) < 1e-10
    assert float((step(theta, m, from_paper=True) - target).norm()) > nothing


def test_n6_lissa_is_its_filter_and_the_printed_recursion_vanishes() -> None:
    g = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(6, 6, generator=g, dtype=torch.float64))
    values = torch.linspace(0.01, 4, 6, dtype=torch.float64)
    a = basis @ torch.diag(values) @ basis.T
    x = torch.randn(6, generator=g, dtype=torch.float64)
    sigma, steps = 5.0, 200
    solution = algebra.lissa(lambda v: (a @ v[0],), (x,), sigma, steps)[0]
    filter_factors = (1 - (1 - values / sigma) ** (steps + 1)) / values
    torch.testing.assert_close(solution, basis @ (filter_factors * (basis.T @ x)))
    printed_solution = x
    for _ in range(steps):
        printed_solution = printed_solution - a @ printed_solution / sigma
    assert float((printed_solution / sigma).norm()) < 0.2 * float(solution.norm())
    # (I - A/sigma)^T x: directions that are not nearly flat are gone
    strong = (basis.T @ printed_solution)[1:]
    assert float(strong.abs().max()) < 1e-6


def network(likelihood: str) -> tuple[Risk, list]:
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(20, 4, generator=g, dtype=torch.float64)
    y = (
        torch.randint(0, 3, (20,), generator=g)
        if likelihood == "softmax"
        else torch.randn(20, 3, generator=g, dtype=torch.float64)
    )
    return Risk(model, likelihood), [(x[:13], y[:13]), (x[13:], y[13:])]


@pytest.mark.parametrize("likelihood", ["softmax", "gaussian"])
def test_n7_products_dense_and_diagonal_are_the_explicit_fisher(likelihood: str) -> None:
    risk, batches = network(likelihood)
    params = risk.params
    x = torch.cat([b[0] for b in batches])
    explicit = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64).diag()
    for row in x:
        output = risk.model(row[None])[0]
        jacobian = torch.stack(
            [algebra.flatten(torch.autograd.grad(o, params, retain_graph=True)) for o in output]
        )
        p = output.detach().softmax(0)
        middle = (
            torch.diag(p) - torch.outer(p, p)
            if likelihood == "softmax"
            else torch.eye(3, dtype=torch.float64)
        )
        explicit += jacobian.T @ middle @ jacobian / len(x)
    fisher = Fisher(risk, batches, 0.3)
    matrix = explicit + 0.3 * torch.eye(len(explicit), dtype=torch.float64)
    torch.testing.assert_close(fisher.dense(), matrix)
    torch.testing.assert_close(fisher.diagonal(), matrix.diagonal())
    assert float(torch.linalg.eigvalsh(explicit).min()) > -1e-12
    v = algebra.unflatten(torch.randn(len(explicit), dtype=torch.float64), params)
    torch.testing.assert_close(algebra.flatten(fisher.product(v)), matrix @ algebra.flatten(v))
    solution = algebra.solve(fisher, v, "cg")
    torch.testing.assert_close(
        algebra.flatten(fisher.product(solution)), algebra.flatten(v), rtol=0, atol=1e-7
    )
    torch.testing.assert_close(
        algebra.flatten(algebra.solve(fisher, v, "lissa", sigma=10.0, iterations=600)),
        algebra.flatten(solution),
        rtol=1e-4,
        atol=1e-6,
    )


def test_n7_kfac_is_exact_for_one_linear_layer_and_squared_error() -> None:
    x, y = regression(3)
    risk = Risk(fit_ridge(x, y, 0.1), "gaussian", 0.1)
    fisher = Fisher(risk, [(x, y)], 0.2)
    v = (torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),)
    torch.testing.assert_close(
        algebra.solve(fisher, v, "kfac"), algebra.solve(fisher, v, "exact"), rtol=1e-6, atol=1e-9
    )
    with pytest.raises(ValueError, match="kfac needs damping"):
        algebra.solve(Fisher(risk, [(x, y)]), v, "kfac")


def test_n9_the_excess_population_risk_of_a_published_deletion() -> None:
    """Theorem 1: sqrt(d) gamma C sqrt(ln 1/delta) / epsilon + O(C^2 / (mu n)), and the noise's
    share falls as gamma does, with n^-2 at least. Two classes, inputs on the unit sphere, a
    population of 20,000 draws."""
    mu, m, d, epsilon, delta = 0.1, 5, 4, 1.0, 1e-5
    # ||grad softmax|| <= sqrt 2, ||theta|| from L(theta) <= L(0)
    lipschitz = 2**0.5 + mu * (2 * np.log(2) / mu) ** 0.5
    rng = np.random.default_rng(0)

    def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = rng.standard_normal((n, d))
        x = torch.from_numpy(x / np.linalg.norm(x, axis=1, keepdims=True))
        return x, torch.from_numpy(
            (rng.random(n) < 1 / (1 + np.exp(-4 * x[:, 0].numpy()))).astype(np.int64)
        )

    population = [sample(20_000)]
    best = softmax_regression(*population[0], mu, classes=2)

    def excess(model: nn.Module) -> float:
        risk, least = (
            nn.functional.cross_entropy(net(population[0][0]), population[0][1])
            + mu / 2 * net.weight.square().sum()
            for net in (model, best)
        )
        return float(risk - least)

    noise_costs = []
    for n in (200, 800):
        gamma = sensitivity(n, m, convexity=mu, lipschitz=lipschitz, hessian_lipschitz=1.0)
        sigma = noise_scale(gamma, epsilon, delta)
        bound = lipschitz * (expected_length(sigma, 2 * d) + gamma) + 2 * lipschitz**2 / (
            mu * (n - m)
        )
        risks, costs = [], []
        for _ in range(10):
            x, y = sample(n)
            model = softmax_regression(x, y, mu, classes=2)
            NaturalGradient().apply(Risk(model, "softmax", mu), [(x[:m], y[:m])], [(x[m:], y[m:])])
            quiet = excess(model)
            with torch.no_grad():
                model.weight.add_(torch.from_numpy(rng.standard_normal((2, d))) * sigma)
            risks.append(excess(model))
            costs.append(risks[-1] - quiet)
        assert 0 < np.mean(risks) <= bound
        noise_costs.append(np.mean(costs))
    assert noise_costs[1] < noise_costs[0] / 8  # gamma falls by 16


def test_n10_an_interpolating_model_is_not_moved() -> None:
    x, y = regression(4, n=4, d=6)
    model = linear(6, 2)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    outcome = NaturalGradient(damping=1e-3).apply(
        Risk(model, "gaussian"), [(x[:2], y[:2])], [(x[2:], y[2:])]
    )
    assert outcome.length < 1e-9


def test_n11_the_softmax_covariance_is_at_most_one_half() -> None:
    g = torch.Generator().manual_seed(0)
    largest = 0.0
    for scale in (0.1, 1.0, 10.0):
        for k in (2, 3, 10):
            p = (scale * torch.randn(200, k, generator=g, dtype=torch.float64)).softmax(1)
            sigma = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
            largest = max(largest, float(torch.linalg.eigvalsh(sigma).max()))
    assert 0.4 < largest <= 0.5 + 1e-12


def test_the_trust_region_bounds_the_divergence_of_the_retained_outputs() -> None:
    x, y = digits()
    model = softmax_regression(x, y, 0.001)
    m, kl = 200, 1e-4
    retain = x[m:]
    before = model(retain).detach().log_softmax(1)
    outcome = NaturalGradient(kl=kl).apply(
        Risk(model, ridge=0.001), [(x[:m], y[:m])], [(retain, y[m:])]
    )
    assert outcome.shrunk < 1
    divergence = nn.functional.kl_div(
        model(retain).log_softmax(1), before, log_target=True, reduction="batchmean"
    )
    assert float(divergence) == pytest.approx(kl, rel=0.1)


def test_a_deep_network_needs_damping_and_then_forgets() -> None:
    """One class of the digits and a small network: a damped step lowers its accuracy more than the
    others'.
    """
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x / 16).float(), torch.from_numpy(y)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(150):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y)).backward()
        optimizer.step()
    forget = y == 3
    batches = [(x[forget], y[forget])], [(x[~forget], y[~forget])]
    NaturalGradient(damping=1e-3, solver="cg", iterations=50).apply(Risk(model), *batches)

    def accuracy(which: torch.Tensor) -> float:
        return float((model(x[which]).argmax(1) == y[which]).float().mean())

    assert accuracy(forget) < 0.5
    assert accuracy(~forget) > 0.9


@pytest.mark.parametrize(
    ("options", "words"),
    [({"damping": -1.0}, "damping"), ({"kl": -1.0}, "kl"), ({"iterations": 0}, "iterations")],
)
def test_options_are_checked(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NaturalGradient(**options)


@pytest.mark.parametrize("solver", ["diagonal", "exact"])
def test_a_singular_fisher_is_refused_and_nothing_is_changed(solver: str) -> None:
    """Softmax without a ridge, and pixels that are always 0."""
    x, y = digits()
    model = softmax_regression(x, y, 0.02)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match="damping > 0"):
        NaturalGradient(solver=solver).apply(Risk(model), [(x[:9], y[:9])], [(x[9:], y[9:])])
    assert torch.equal(model.weight, before)


def test_lissa_chooses_a_sigma_that_converges_and_reports_the_residual() -> None:
    x, y = digits()
    residuals = {}
    for solver, iterations in (("cg", 200), ("cg", 3), ("lissa", 400)):
        model = softmax_regression(x, y, 0.02)
        outcome = NaturalGradient(solver=solver, iterations=iterations).apply(
            Risk(model, ridge=0.02), [(x[:9], y[:9])], [(x[9:], y[9:])]
        )
        residuals[solver, iterations] = outcome.residual
    assert residuals["cg", 200] < 1e-8
    assert residuals["cg", 3] > 1e-3
    assert residuals["lissa", 400] < 0.05


def test_nothing_retained_is_refused() -> None:
    x, y = regression()
    with pytest.raises(ValueError, match="no retained samples"):
        NaturalGradient().apply(Risk(fit_ridge(x, y, 0.1), "gaussian"), [(x, y)], [])


def test_a_dense_matrix_of_a_large_model_is_refused() -> None:
    risk = Risk(nn.Linear(200, 200))
    with pytest.raises(ValueError, match="Use cg"):
        Fisher(risk, [(torch.zeros(1, 200), torch.zeros(1, dtype=torch.long))]).dense()


def test_it_needs_two_objectives() -> None:
    with pytest.raises(ValueError, match="needs the objectives forget and retain"):
        NaturalGradient().check_objectives(("retain", "forget", "replace"))
