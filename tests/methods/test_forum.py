"""FORUM: duality, the lemmas that a test can measure, Eq. (24), memory, and the errors of the
printed version.
"""

from __future__ import annotations

import cvxpy
import numpy as np
import pytest
import torch

from concept_eraser.methods.checks import closure, pair
from concept_eraser.methods.forum import (
    Forum,
    any_objectives,
    descend_inner,
    dual_value,
    multipliers,
    two_objectives,
)
from concept_eraser.methods.vectors import combine, gramian
from concept_eraser.training.closure import LossClosure


def problem(m: int, seed: int, d: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients [m, d] of unequal length and grad q [d]."""
    rng = np.random.default_rng(seed)
    g = torch.from_numpy(rng.normal(size=(m, d)) * rng.uniform(0.1, 3, (m, 1)))
    return g, torch.from_numpy(rng.normal(size=d) * rng.uniform(0.1, 3))


def gram_of(g: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([g, q[None]])
    return rows @ rows.T


def direction(
    g: torch.Tensor, q: torch.Tensor, rho_e: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    lam, nu = multipliers(gram_of(g, q), rho_e)
    return -(lam @ g + nu * q), lam, nu


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rho_e", [0.0, 0.25, 2.0])
def test_t1_t2_duality_feasibility_slackness(m: int, seed: int, rho_e: float) -> None:
    """The primal problem (Eq. 7), solved by cvxpy, has the value of our dual; the conditions of T1
    and T2 hold.
    """
    g, q = problem(m, seed)
    d, lam, nu = direction(g, q, rho_e)
    phi = rho_e * float(q @ q)
    assert torch.all(lam >= 0)
    assert float(lam.sum()) == pytest.approx(1)
    assert nu >= 0
    assert float(q @ d) <= -phi + 1e-9
    assert abs(nu * (float(q @ d) + phi)) < 1e-8
    assert float((g @ d).max()) == pytest.approx(-float(d @ d) - nu * float(q @ d), abs=1e-8)
    dual = -0.5 * float(d @ d) + nu * phi
    x, worst = cvxpy.Variable(g.shape[1]), cvxpy.Variable()
    primal = cvxpy.Problem(
        cvxpy.Minimize(worst + 0.5 * cvxpy.sum_squares(x)),
        [g.numpy() @ x <= worst, q.numpy() @ x <= -phi],
    )
    assert primal.solve(solver="CLARABEL") == pytest.approx(dual, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_the_closed_form_is_the_general_solver(seed: int) -> None:
    g, q = problem(2, seed)
    gram, inner = g @ g.T, g @ (q / q.norm())
    for tau in (-float("inf"), 0.0, 0.3, 5.0):
        torch.testing.assert_close(
            two_objectives(gram, inner, tau), any_objectives(gram, inner, tau), atol=1e-8, rtol=0
        )


@pytest.mark.parametrize("seed", range(5))
def test_the_closed_form_does_not_depend_on_the_common_length(seed: int) -> None:
    g, q = problem(2, seed)
    gram, inner = g @ g.T, g @ (q / q.norm())
    for tau in (0.3, 5.0):
        expected = two_objectives(gram, inner, tau)
        for scale in (1e-6, 1e6):
            short = two_objectives(scale**2 * gram, scale * inner, scale * tau)
            torch.testing.assert_close(short, expected, atol=1e-8, rtol=0)


def test_two_gradients_that_differ_along_the_constraint_alone() -> None:
    """g = p -+ u with p across u: psi falls towards the gradient that points against u."""
    gram, inner = 2 * torch.eye(2, dtype=torch.float64), torch.tensor([-1.0, 1.0]).double()
    assert two_objectives(gram, inner, 0.5).tolist() == [1.0, 0.0]
    assert two_objectives(gram, -inner, 0.5).tolist() == [0.0, 1.0]


def test_a_floor_is_kept_and_optimal_above_it() -> None:
    g, q = problem(3, 1)
    lam, _ = multipliers(gram_of(g, q), 0.1, floor=0.2)
    assert float(lam.min()) >= 0.2 - 1e-12
    assert float(lam.sum()) == pytest.approx(1)
    x, c = cvxpy.Variable(3), cvxpy.Variable()
    length = float(q.norm())
    u = (q / length).numpy()
    value = 0.5 * cvxpy.sum_squares(g.numpy().T @ x + c * u) - c * 0.1 * length
    cvxpy.Problem(cvxpy.Minimize(value), [x >= 0.2, cvxpy.sum(x) == 1, c >= 0]).solve(
        solver="CLARABEL"
    )
    np.testing.assert_allclose(lam.numpy(), x.value, atol=1e-4)


def test_no_constraint_leaves_mgda() -> None:
    """grad q = 0: the min-norm point of the convex hull, as TorchJD's MGDA finds it."""
    from torchjd.aggregation import MGDAWeighting

    for seed in range(5):
        g, q = problem(3, seed)
        lam, nu = multipliers(gram_of(g, 0 * q), 0.5)
        assert nu == 0
        theirs = MGDAWeighting(epsilon=1e-9, max_iters=10000)(g @ g.T)
        assert float((lam @ g).norm()) == pytest.approx(float((theirs @ g).norm()), rel=1e-3)


def test_nu_stays_bounded_as_the_constraint_vanishes() -> None:
    """E3: c = nu ||grad q|| is finite while nu itself would be 0/0."""
    g, q = problem(2, 3)
    for scale in (1e-6, 1e-12, 1e-100):
        lam, nu = multipliers(gram_of(g, scale * q), 0.5)
        assert nu * scale * float(q.norm()) < 10
        assert torch.isfinite(lam).all()


def test_t9_one_objective_is_bome() -> None:
    """m = 1: d = -(g + nu q) with nu = max(rho_e - <q, g> / ||q||^2, 0)."""
    for seed in range(5):
        g, q = problem(1, seed)
        d, lam, nu = direction(g, q, 0.3)
        assert lam.tolist() == pytest.approx([1.0])
        assert nu == pytest.approx(max(0.3 - float(q @ g[0]) / float(q @ q), 0.0))
        torch.testing.assert_close(d, -(g[0] + nu * q))


def test_e1_the_printed_multiplier_gives_twice_the_descent() -> None:
    """With nu of Eqs. 9 and 17 (rho instead of rho/2) <q, d> is -2 phi, phi = rho/2 ||q||^2, where
    it is active.
    """
    g, q = problem(2, 5)
    rho = 4.0
    d, _, nu = direction(g, q, rho)  # the printed nu is that of rho_e = rho
    assert nu > 0
    assert float(q @ d) / (rho / 2 * float(q @ q)) == pytest.approx(-2)


# --- lemmas on a strongly convex lower level: f = 1/2 (w - B a)^T A (w - B a) ---------------------


def quadratic(
    seed: int, d: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(d, d)))
    a = torch.from_numpy(basis @ np.diag(np.linspace(0.5, 3, d)) @ basis.T)
    b = torch.from_numpy(rng.normal(size=(d, d)))
    return a, b, torch.from_numpy(rng.normal(size=d)), torch.from_numpy(rng.normal(size=d))


def lower(a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return 0.5 * (w - b @ alpha) @ a @ (w - b @ alpha)


def whole_lipschitz(a: torch.Tensor, b: torch.Tensor) -> float:
    """L_f: the largest eigenvalue of f's Hessian in (alpha, w)."""
    jacobian = torch.cat([-b, torch.eye(len(b), dtype=b.dtype)], 1)
    return float(torch.linalg.eigvalsh(jacobian.T @ a @ jacobian).max())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [1, 5, 20])
def test_t3_t4_t5_what_the_inner_steps_leave(seed: int, steps: int) -> None:
    """T3 (Lemma A.1), T4 (B.1c) and T5 (B.1d, B.2b), each as an inequality on a quadratic with
    known constants.
    """
    a, b, alpha, w0 = quadratic(seed)
    c, lip = 0.5, whole_lipschitz(a, b)
    eta = 1 / lip
    best = b @ alpha
    omega = w0.clone().requires_grad_()
    closure = LossClosure((omega,), {"attack": [lambda: lower(a, b, alpha, omega)]}, inner=[0])
    w = w0 + descend_inner(closure, [torch.zeros_like(w0)], steps, eta)[0]

    def slope_alpha(at: torch.Tensor) -> torch.Tensor:
        return -b.T @ a @ (at - best)

    error = float((slope_alpha(w) - slope_alpha(best)).norm())
    distance = float((w0 - best).norm())
    assert error <= lip * (1 - c * eta / 2) ** steps * distance + 1e-12
    assert error <= lip * (1 - c * eta) ** steps * distance + 1e-12
    q0, q1 = float(lower(a, b, alpha, w0)), float(lower(a, b, alpha, w))
    gamma = (1 - c * (2 * eta - lip * eta**2)) ** steps
    assert q1 <= gamma * q0 + 1e-12
    slope_q = torch.cat([slope_alpha(w0) - slope_alpha(best), a @ (w0 - best)])
    lq = lip * (2 + lip / c)
    assert float(slope_q @ slope_q) <= 2 * lq**2 / c * q0
    assert error <= lip / c * gamma**0.5 * float(slope_q.norm()) + 1e-12


# --- Eq. (24) -------------------------------------------------------------------------------------


def eq24(
    start: tuple[float, tuple[float, float]],
) -> tuple[torch.Tensor, torch.Tensor, LossClosure]:
    alpha = torch.tensor(start[0], dtype=torch.float64, requires_grad=True)
    omega = torch.tensor(start[1], dtype=torch.float64, requires_grad=True)

    def to(first: float):
        return lambda: (omega[0] - first) ** 2 + (omega[1] - alpha) ** 2

    losses = {
        "first": [to(1.0)],
        "second": [to(2.0)],
        "attack": [lambda: ((omega - alpha) ** 2).sum()],
    }
    return alpha, omega, LossClosure((alpha, omega), losses, inner=[1])


def distance(alpha: torch.Tensor, omega: torch.Tensor) -> float:
    """To the optimal set {alpha = omega_1 = omega_2 in [1, 2]}."""
    z = torch.stack([alpha.detach(), *omega.detach()])
    nearest = z.mean().clamp(1, 2)
    return float((z - nearest).norm())


def run_eq24(start: tuple, steps: int, **options) -> tuple[float, list[float]]:
    alpha, omega, closure = eq24(start)
    settings = {
        "rho_e": 0.15,
        "inner_steps": 50,
        "inner_lr": 0.05,
        "outer_lr": 0.3,
        "normalize": False,
    }
    method = Forum(**{**settings, **options})
    gaps = []
    for k in range(steps):
        closure.step = k
        result = method.direction(closure)
        gaps.append(result.notes["q"])
        with torch.no_grad():
            alpha -= 0.3 * result.vec[0]
            omega -= result.vec[1]  # scaled by outer_lr already
    return distance(alpha, omega), gaps


STARTS = [(0.0, (0.0, 3.0)), (2.0, (0.0, 3.0)), (2.0, (3.0, 3.0))]


@pytest.mark.parametrize("start", STARTS)
def test_t7_eq24_is_solved(start: tuple) -> None:
    """The paper's settings (mu .3, eta .05, T 50, rho .3): the distance is below 1e-4 after 100
    steps, and q~ >= 0 at every step.
    """
    final_distance, gaps = run_eq24(start, 100)
    assert final_distance < 1e-4
    assert min(gaps) >= -1e-12


def test_t6_the_rate_of_the_theorem() -> None:
    """mu ~ K^-1/2: min kkt * K^1/4 does not grow over K = 16, 64, 256."""
    ratios = []
    for steps in (16, 64, 256):
        alpha, omega, closure = eq24(STARTS[1])
        mu = 2.4 / steps**0.5
        method = Forum(rho_e=0.15, inner_steps=50, inner_lr=0.05, outer_lr=mu, normalize=False)
        lowest = float("inf")
        for k in range(steps):
            closure.step = k
            result = method.direction(closure)
            lowest = min(lowest, result.notes["kkt"])
            with torch.no_grad():
                alpha -= mu * result.vec[0]
                omega -= result.vec[1]
        ratios.append(lowest * steps**0.25)
    assert ratios == sorted(ratios, reverse=True)


def test_t7_a_cold_start_stalls() -> None:
    """E4: with w~^0 = omega_0 a bias of order (1 - eta c)^T remains; the warm start has none."""
    warm, _ = run_eq24(STARTS[1], 400)
    cold, _ = run_eq24(STARTS[1], 400, warm=False)
    assert warm < 1e-8
    assert 1e-3 < cold < 3e-2


def test_t8_saved_bytes_do_not_grow_with_the_inner_steps() -> None:
    """The memory for backward is that of one gradient, whatever T; an unrolled hypergradient keeps
    T graphs.
    """

    def saved_bytes(steps: int, unroll: bool) -> int:
        torch.manual_seed(0)
        alpha = torch.randn(50, 50, requires_grad=True)
        omega = torch.randn(50, requires_grad=True)

        def f(w: torch.Tensor) -> torch.Tensor:
            return ((alpha @ w).tanh() ** 2).mean() + (w**2).mean()

        total = 0

        def pack(x: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        class CountedTensor:
            """A saved tensor that is counted while the graph holds it."""

            def __init__(self, tensor: torch.Tensor) -> None:
                nonlocal total
                self.tensor = tensor
                total += tensor.numel() * tensor.element_size()
                peaks.append(total)

            def __del__(self) -> None:
                nonlocal total
                total -= self.tensor.numel() * self.tensor.element_size()

        peaks: list[int] = []
        hook = CountedTensor
        if unroll:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                w = omega
                for _ in range(steps):
                    w = w - 0.1 * torch.autograd.grad(f(w), w, create_graph=True)[0]
                torch.autograd.grad(f(w), alpha)
            return total

        def loss() -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(hook, lambda h: h.tensor):
                return f(omega)

        losses = {"retain": [loss], "forget": [loss], "attack": [loss]}
        Forum(inner_steps=steps).direction(LossClosure((alpha, omega), losses, inner=[1]))
        return max(peaks)

    assert saved_bytes(4, unroll=False) == saved_bytes(16, unroll=False)
    assert saved_bytes(16, unroll=True) > 3.5 * saved_bytes(4, unroll=True)


# --- the stall at a pretrained model --------------------------------------------------------------


def test_the_printed_version_stands_still_at_a_pretrained_model() -> None:
    """grad F_retain = 0 there: min-norm puts all weight on it. Unit gradients or a floor move."""
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    delta = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def step_length(**options) -> float:
        losses = {
            "retain": [lambda: 1e-9 * theta[2] + (theta**2).sum()],
            "forget": [lambda: ((theta[:2] - 1) ** 2).sum() + 0.1 * delta.sum() * theta[0]],
            "attack": [lambda: ((delta - theta[:2]) ** 2).sum()],
        }
        result = Forum(**options).direction(LossClosure((theta, delta), losses, inner=[1]))
        return float(result.vec[0].norm())

    assert step_length(normalize=False) < 1e-8
    assert step_length(normalize=True) > 0.1
    assert step_length(normalize=False, floor=0.2) > 0.1


def test_an_objective_at_its_minimum_does_not_stop_the_others() -> None:
    """Distillation at the untouched model has a gradient of exactly 0."""
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    delta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    losses = {
        "retain": [lambda: (theta**2).sum()],
        "forget": [lambda: ((theta - 1) ** 2).sum()],
        "attack": [lambda: (delta**2).sum()],
    }
    result = Forum().direction(LossClosure((theta, delta), losses, inner=[1]))
    assert result.weights.tolist() == pytest.approx([0.0, 1 / 8**0.5])
    assert torch.all(result.vec[0] < 0)


def test_a_lower_level_that_diverges_is_a_step_not_taken() -> None:
    """A divergence must not pass as "no constraint"."""
    closure = eq24(STARTS[0])[2]
    result = Forum(inner_lr=100.0, inner_steps=200).direction(closure)
    assert result.notes == {"inner_diverged": 1}
    assert all(torch.isnan(part).all() for part in result.vec)


def test_a_floor_that_does_not_fit_the_objectives_is_refused() -> None:
    Forum(floor=0.5).check_objectives(("retain", "forget", "attack"))
    with pytest.raises(ValueError, match="at most 1/3"):
        Forum(floor=0.5).check_objectives(("retain", "forget", "replace", "attack"))


def test_a_resumed_run_continues_with_equal_steps() -> None:
    closure = eq24(STARTS[0])[2]
    method = Forum(normalize=False)
    vecs = []
    for k in range(4):
        closure.step = k
        if k == 2:
            state = method.state_dict()
            method = Forum(normalize=False)
            method.load_state_dict(state)
        vecs.append(method.direction(closure).vec)
    whole = Forum(normalize=False)
    for k in range(4):
        closure.step = k
        again = whole.direction(closure).vec
        assert all(torch.equal(a, b) for a, b in zip(vecs[k], again, strict=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"rho_e": -1}, "rho_e"), ({"floor": 0.7}, "floor"), ({"inner_steps": 0}, "inner_steps")],
)
def test_options_are_checked(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Forum(**options)


def test_without_an_attack_it_is_refused() -> None:
    with pytest.raises(ValueError, match="lower-level problem"):
        Forum().check_objectives(("retain", "forget"))


def test_multipliers_work_on_a_gram_matrix_of_tensor_tuples() -> None:
    g, q = problem(2, 9)
    vecs = [tuple(v.split((2, 4))) for v in (*g, q)]
    lam, nu = multipliers(gramian(vecs), 0.4)
    step = combine([*lam.tolist(), nu], vecs)
    torch.testing.assert_close(torch.cat(step), lam @ g + nu * q)


@pytest.mark.parametrize("m", [1, 3, 4])
def test_the_common_length_of_the_gradients_does_not_matter(m: int) -> None:
    """A scale of 1e-12 to 1e12 of all gradients, that of q too, leaves the multipliers: no rank
    decision depends on units.
    """
    for seed in range(5):
        g, q = problem(m, seed)
        expected, nu = multipliers(gram_of(g, q), 0.4)
        for scale in (1e-12, 1e-8, 1e-4, 1e4, 1e8, 1e12):
            lam, scaled_nu = multipliers(gram_of(scale * g, scale * q), 0.4)
            torch.testing.assert_close(lam, expected, rtol=1e-9, atol=1e-12)
            assert scaled_nu == pytest.approx(nu, rel=1e-9, abs=1e-12)
        apart = torch.ones(m, dtype=g.dtype)
        apart[0] = 1e6  # one gradient a million times the others
        gram = gram_of(apart[:, None] * g, q)
        tau = 0.4 * float(q.norm())
        lam, _ = multipliers(gram, 0.4)
        inner = gram[:m, m] / float(q.norm())
        value = dual_value(lam, gram[:m, :m], inner, tau)
        others = (
            torch.distributions.Dirichlet(torch.full((m,), 0.3, dtype=g.dtype)).sample((300,))
            if m > 1
            else []
        )
        assert all(
            dual_value(other, gram[:m, :m], inner, tau) >= value * (1 - 1e-9) - 1e-12
            for other in others
        )


# --- the parts of one step ------------------------------------------------------------------------


def gradients_of(closure: LossClosure, objectives: tuple[str, ...]) -> torch.Tensor:
    """[objectives, 3] in (alpha, omega_1, omega_2)."""
    return torch.stack(
        [
            torch.cat([part.flatten() for part in closure.grad(objective)])
            for objective in objectives
        ]
    )


def constraint_of(
    alpha: float, omega: tuple[float, float], lr: float, steps: int
) -> tuple[torch.Tensor, float]:
    """grad q~ and q~ of Eq. (24) by hand: f = ||w - a 1||^2, so w~ - a 1 = (1 - 2 lr)^T (w - a
    1).
    """
    w = torch.tensor(omega, dtype=torch.float64) - alpha
    residual = (1 - 2 * lr) ** steps * w
    slope = torch.cat([(-2 * w.sum() + 2 * residual.sum())[None], 2 * w])
    return slope, float(w @ w - residual @ residual)


@pytest.mark.parametrize("start", [*STARTS, (0.5, (1.5, -1.0))])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rho_e", [0.1, 3.0])
def test_one_step_is_the_solution_of_the_direction_problem(
    start: tuple, normalize: bool, rho_e: float
) -> None:
    """cvxpy solves Eq. 7 for the unit gradients (or the plain ones) and the constraint written out
    by hand.
    """
    _, _, closure = eq24(start)
    method = Forum(rho_e=rho_e, inner_steps=3, inner_lr=0.1, outer_lr=1.0, normalize=normalize)
    result = method.direction(closure)
    step = torch.cat([part.flatten() for part in result.vec])
    q, gap = constraint_of(*start, 0.1, 3)
    raw = gradients_of(closure, ("first", "second"))
    g = raw / raw.norm(dim=1, keepdim=True) if normalize else raw
    x, worst = cvxpy.Variable(3), cvxpy.Variable()
    constraints = [g.numpy() @ x <= worst, q.numpy() @ x <= -rho_e * float(q @ q)]
    cvxpy.Problem(cvxpy.Minimize(worst + 0.5 * cvxpy.sum_squares(x)), constraints).solve(
        solver="CLARABEL"
    )
    np.testing.assert_allclose(-step.numpy(), x.value, atol=2e-5)
    assert result.notes["q"] == pytest.approx(gap)
    assert result.notes["kkt"] == pytest.approx(float(step.norm()), abs=1e-9)
    assert result.notes["q_negative"] == 0
    torch.testing.assert_close(result.gram, raw @ raw.T)
    torch.testing.assert_close(step, result.weights @ raw + result.notes["nu"] * q)
    assert float(
        (result.weights * raw.norm(dim=1) if normalize else result.weights).sum()
    ) == pytest.approx(1)


def test_the_attacks_variable_moves_by_its_own_rate() -> None:
    """And without `move_inner` by the constraint alone."""
    start = (0.5, (1.5, -1.0))
    one = Forum(inner_steps=3, rho_e=3.0, outer_lr=1.0).direction(eq24(start)[2])
    other = Forum(inner_steps=3, rho_e=3.0, outer_lr=0.25).direction(eq24(start)[2])
    torch.testing.assert_close(other.vec[0], one.vec[0])
    torch.testing.assert_close(other.vec[1], 0.25 * one.vec[1])
    still = Forum(inner_steps=3, rho_e=3.0, outer_lr=1.0, move_inner=False).direction(
        eq24(start)[2]
    )
    slope, _ = constraint_of(*start, 0.1, 3)
    assert still.notes["nu"] > 0
    torch.testing.assert_close(still.vec[1], still.notes["nu"] * slope[1:])


@pytest.mark.parametrize("momentum", [0.0, 0.5, 1.0])
def test_weights_are_smoothed_over_the_steps(momentum: float) -> None:
    """lam~_k = (1 - beta_k) lam~_{k-1} + beta_k lam_k, beta_k = (k + 1)^-momentum, by a method
    without memory.
    """
    smooth = Forum(normalize=False, momentum=momentum, inner_steps=3)
    expected = None
    for k, start in enumerate([STARTS[0], (0.5, (1.5, -1.0)), STARTS[2]]):
        closure = eq24(start)[2]
        fresh = Forum(normalize=False, momentum=0.0, inner_steps=3).direction(closure).weights
        closure.step = k
        beta = (k + 1) ** -momentum
        expected = fresh if expected is None else (1 - beta) * expected + beta * fresh
        torch.testing.assert_close(smooth.direction(closure).weights, expected)


def test_a_cold_start_is_where_the_attack_stood_first() -> None:
    """Every inner descent starts at omega_0: q~ at another omega is f there minus f after three
    steps from omega_0.
    """
    alpha, omega, closure = eq24((0.0, (1.0, 2.0)))
    method = Forum(warm=False, inner_steps=3, inner_lr=0.1)
    assert method.direction(closure).notes["q"] == pytest.approx(5 * (1 - 0.8**6))
    with torch.no_grad():
        omega.copy_(torch.tensor([0.5, 0.0]))
    result = method.direction(closure)
    assert result.notes["q"] == pytest.approx(0.25 - 5 * 0.8**6)
    assert result.notes["q_negative"] == 0, "only a warm start cannot be worse than where it starts"
    assert alpha.item() == 0
    state = method.state_dict()
    assert state["start_0"].tolist() == [1.0, 2.0]
    warm = Forum(inner_steps=1, inner_lr=1.5)  # too long a step leads upwards
    assert warm.direction(eq24((0.0, (1.0, 2.0)))[2]).notes["q_negative"] == 1


def test_among_three_objectives_one_without_a_gradient_is_left_out() -> None:
    theta = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    delta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    losses = {
        "retain": [lambda: (theta**2).sum()],
        "forget": [lambda: 0 * theta.sum()],
        "replace": [lambda: ((theta - torch.tensor([3.0, 1.0])) ** 2).sum()],
        "attack": [lambda: ((delta - theta[0]) ** 2).sum()],
    }
    whole = Forum().direction(LossClosure((theta, delta), losses, inner=[1]))
    assert whole.weights[1] == 0
    del losses["forget"]
    without = Forum().direction(LossClosure((theta, delta), losses, inner=[1]))
    torch.testing.assert_close(whole.weights[[0, 2]], without.weights)
    torch.testing.assert_close(whole.vec[0], without.vec[0])


def test_without_gradients_the_constraint_alone_remains() -> None:
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    delta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    losses = {
        "retain": [lambda: 0 * theta.sum()],
        "attack": [lambda: ((delta - theta[0]) ** 2).sum()],
    }
    result = Forum(rho_e=0.5, outer_lr=1.0).direction(
        LossClosure((theta, delta), losses, inner=[1])
    )
    assert result.weights.tolist() == [0.0]
    assert result.notes["nu"] == pytest.approx(0.5)  # -<q, d> = rho ||q||^2


def test_equal_gradients_and_a_constraint_across_them() -> None:
    """g_1 = g_2: any weights solve the problem, and all are finite; with and without the
    constraint.
    """
    gram = torch.ones(3, 3, dtype=torch.float64)
    for q in (0.0, 1.0):
        gram[2, :] = gram[:, 2] = q
        lam, nu = multipliers(gram, 0.5)
        assert float(lam.sum()) == pytest.approx(1)
        assert nu == 0


def test_more_than_ten_objectives_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 10 objectives; found 11"):
        any_objectives(
            torch.eye(11, dtype=torch.float64), torch.zeros(11, dtype=torch.float64), -float("inf")
        )
    ten = any_objectives(
        torch.eye(10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64), -float("inf")
    )
    assert ten.tolist() == pytest.approx([0.1] * 10)


def test_a_program_without_a_solution_is_an_error() -> None:
    inner = torch.full((3,), float("nan"), dtype=torch.float64)
    with pytest.raises(ValueError, match="no solution; are all gradients finite"):
        any_objectives(torch.eye(3, dtype=torch.float64), inner, -float("inf"))
    gram = torch.full((3, 3), float("nan"), dtype=torch.float64)
    with pytest.raises((ValueError, RuntimeError)):
        any_objectives(gram, torch.zeros(3, dtype=torch.float64), -float("inf"))


def test_which_floors_fit_how_many_objectives() -> None:
    Forum(floor=1 / 3).check_objectives(("retain", "forget", "replace", "attack"))
    Forum(floor=0.5).check_objectives(("retain", "forget", "attack"))
    with pytest.raises(ValueError, match=r"at most 1/3 for 3 losses, found 0\.34"):
        Forum(floor=0.34).check_objectives(("retain", "forget", "replace", "attack"))


def test_a_value_of_the_attack_that_is_not_finite_is_a_step_not_taken() -> None:
    """Its gradient may still be finite."""
    _, omega, closure = eq24(STARTS[0])
    closure._pieces["attack"] = [lambda: (omega**2).sum() + float("inf")]
    result = Forum().direction(closure)
    assert result.notes == {"inner_diverged": 1}


def test_gradients_of_zero_and_of_very_different_lengths_have_weights() -> None:
    """Zeros take any weights; lengths of 1, 1e-9 and 2e-9 at right angles take 1 / length^2."""
    none = torch.zeros(3, dtype=torch.float64)
    assert float(any_objectives(torch.zeros(3, 3).double(), none, -float("inf")).sum()) == 1
    gram = torch.diag(torch.tensor([1.0, 1e-18, 4e-18], dtype=torch.float64))
    weights = any_objectives(gram, none, -float("inf"))
    assert weights.tolist() == pytest.approx([0.0, 0.8, 0.2], abs=1e-9)


def test_an_attack_at_its_optimum_is_no_constraint() -> None:
    """grad q~ = 0 and q~ = 0: no multiplier, and no negative gap is counted."""
    notes = Forum().direction(eq24((1.5, (1.5, 1.5)))[2]).notes
    assert (notes["nu"], notes["q"], notes["q_negative"]) == (0, 0, 0)


def test_the_smallest_negative_gap_is_counted() -> None:
    """Steps of 1.02 times the residual lengthen it by 1.04: q~ = (1 - 1.04^2) f."""
    result = Forum(inner_steps=1, inner_lr=1.02).direction(eq24((0.0, (1.0, 2.0)))[2])
    assert result.notes["q"] == pytest.approx(5 * (1 - 1.04**2))
    assert result.notes["q_negative"] == 1


def test_opposed_gradients_leave_a_stationary_point() -> None:
    """The square of a step of zero may be -1e-17 by rounding; kkt is a number all the same."""
    for seed in range(8):
        retain, _ = pair(0.3, 1.0, 1.0, seed=seed)
        method = Forum()
        opposed = closure(retain, tuple(-7.0 * part for part in retain), method)
        assert method.direction(opposed).notes["kkt"] < 1e-7


def test_a_step_needs_an_attack_and_full_precision() -> None:
    """`direction` makes the check of objectives itself; the default rate of the attack is 0.1."""
    with pytest.raises(ValueError, match="lower-level problem"):
        Forum().direction(closure(*pair(0.3, 1.0, 1.0)))
    assert Forum.needs_fp32
    start = (0.5, (1.5, -1.0))
    default = Forum().direction(eq24(start)[2])
    tenth = Forum(outer_lr=0.1).direction(eq24(start)[2])
    assert torch.equal(default.vec[1], tenth.vec[1])
