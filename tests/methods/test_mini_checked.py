"""The statements of Mini-Unlearning on problems where retraining is cheap: each error of the paper
alone, the truncated past as an equality, a deleted class, learning-rate schedules, and histories in
memory and on disk."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from concept_eraser.methods import mini_unlearning as mini
from concept_eraser.methods.fisher import Fisher, Risk
from concept_eraser.methods.history import History, Iteration
from concept_eraser.methods.mini_unlearning import MiniUnlearning, rewind
from tests.methods.test_mini_unlearning import (
    FORGET,
    Training,
    recursive_bfgs,
    relative_error,
    ridge,
    softmax,
)

RANDOM = tuple(range(30))  # scikit-learn's digits come shuffled


def one_class() -> tuple[int, ...]:
    return tuple(np.flatnonzero(load_digits(n_class=4, return_X_y=True)[1][:300] == 3).tolist())


def dense_hessian(training: Training, step: Iteration, forget: Sequence[int] = FORGET) -> Tensor:
    """The mean Hessian of the samples that an iteration retains, at its weights."""
    with torch.no_grad():
        training.w.copy_(step.weights[0])
    retain = [j for j in step.indices if j not in forget]
    eye = torch.eye(len(training.w), dtype=torch.float64)
    return torch.stack(
        [mini.hessian_product(training.mean_loss, retain, training.params, (e,))[0] for e in eye]
    )


def record_training(training: Training, k: int) -> tuple[list[Iteration], Tensor]:
    history = History(training.params, k)
    final = training.run(history=history)
    return history.last(k), final


# --- Eqs. 6 and 7, and the order of Algorithm 1, by hand ------------------------------------------


def by_hand(
    training: Training, steps: list[Iteration], sign: float
) -> tuple[list[Tensor], list[Tensor]]:
    """H(i) and G(i) = eta/B [sign B/(B - m) sum_U grad - m/(B - m) sum_B grad]: Eq. 7 for sign 1,
    Eq. 6 for -1.
    """
    maps, drives = [], []
    for step in steps:
        maps.append(
            torch.eye(len(training.w), dtype=torch.float64)
            - step.lr * dense_hessian(training, step)
        )
        out, b = [j for j in step.indices if j in FORGET], len(step.indices)
        m = len(out)
        whole = b * mini.mean_gradient(training.mean_loss, step.indices, training.params)[0]
        part = (
            m * mini.mean_gradient(training.mean_loss, out, training.params)[0]
            if out
            else 0 * whole
        )
        drives.append(step.lr / b * (sign * b / (b - m) * part - m / (b - m) * whole))
    return maps, drives


def horner(maps: list[Tensor], drives: list[Tensor]) -> Tensor:
    delta = torch.zeros_like(drives[0])
    for step, drive in zip(maps, drives, strict=True):
        delta = step @ delta + drive
    return delta


@pytest.mark.parametrize(("k", "eq6", "eq7"), [(10, 1.78, 0.41), (40, 2.05, 0.0)])
def test_b1_equation_6_is_worse_than_doing_nothing(k: int, eq6: float, eq7: float) -> None:
    """Errors relative to doing nothing. More history helps Eq. 7 and harms Eq. 6."""
    training = ridge()
    target = training.run(FORGET)
    steps, final = record_training(training, k)
    errors = [
        float(
            (final + horner(*by_hand(training, steps, sign)) - target).norm()
            / (final - target).norm()
        )
        for sign in (-1, 1)
    ]
    assert errors == pytest.approx([eq6, eq7], abs=0.01)
    if k == 40:
        assert errors[1] < 1e-12
    package_error, _ = relative_error(
        training, FORGET, lambda h: MiniUnlearning(k=k).apply(h, training.mean_loss, FORGET), k
    )
    assert package_error == pytest.approx(errors[1], abs=1e-12)


def test_b2_early_hessians_with_later_gradients_are_worse_than_doing_nothing() -> None:
    """Algorithm 1 multiplies G(i) by H(T - k)..H(i - 1), the maps before it. Its k = 39 uses 40
    iterations.
    """
    training = ridge()
    target = training.run(FORGET)
    steps, final = record_training(training, 40)
    maps, drives = by_hand(training, steps, 1)
    product, printed_sum = torch.eye(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for step, drive in zip(maps, drives, strict=True):
        printed_sum = printed_sum + product @ drive
        product = step @ product
    nothing = float((final - target).norm())
    assert float((final + printed_sum - target).norm()) / nothing == pytest.approx(8.30, abs=0.05)
    assert float((final + horner(maps, drives) - target).norm()) / nothing < 1e-12, (
        "the right order of the same terms"
    )


# --- M2, M8: what is dropped, and when the maps contract ------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 16, 39])
def test_m2_on_quadratics_the_error_is_the_propagated_past(k: int) -> None:
    """w*_T - (w_T + D) = prod (I - eta H) D_{T-k}, an equality; the contraction rate only bounds
    it.
    """
    training = ridge()
    target = training.run(FORGET)
    steps, _ = record_training(training, 40)
    short = Training(training.loss, training.start, 60, steps=40 - k, lr=training.lr)
    short.batches = training.batches[: 40 - k]
    past = short.run(FORGET) - short.run()
    for step in steps[-k:]:
        past = past - step.lr * dense_hessian(training, step) @ past
    history = History(training.params, k)
    training.run(history=history)
    MiniUnlearning(k=k).apply(history, training.mean_loss, FORGET)
    error = target - training.w.detach()
    assert float(error.norm()) > 1e-10, "there is something to compare"
    torch.testing.assert_close(error, past, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("share", [0.9, 1.5, 2.2])
def test_m8_the_map_is_positive_below_one_over_l_and_contracts_below_two(share: float) -> None:
    """eta = share / L for the largest L of the retained batches; the estimated contraction is ||I -
    eta H||.
    """
    curvatures = [
        torch.linalg.eigvalsh(dense_hessian(t, s))
        for t in [ridge(steps=4)]
        for s in record_training(t, 4)[0]
    ]
    lr = share / max(float(values[-1]) for values in curvatures)
    training = ridge(steps=4, lr=lr)
    history = History(training.params, 4)
    training.run(history=history)
    outcome = MiniUnlearning(k=4, estimate=600).apply(history, training.mean_loss, FORGET)
    spectra = [
        1 - lr * torch.linalg.eigvalsh(dense_hessian(training, step)) for step in history.last(4)
    ]
    for spectrum, rate in zip(spectra, outcome.contraction, strict=True):
        assert rate == pytest.approx(float(spectrum.abs().max()), rel=1e-3)
    assert (min(float(s.min()) for s in spectra) > 0) == (share < 1)
    assert (max(outcome.contraction) < 1) == (share < 2)


# --- B5, M7: Hessian products from differences ----------------------------------------------------


def test_b5_gradient_differences_of_different_batches_are_noise() -> None:
    """Products along the true D_i of a deleted class, from two pairs of the path: with every
    gradient on the batch at hand they are off by 85 % (median), with each gradient on its own batch
    by 148 %."""
    training, forget = softmax(), set(one_class())
    again = History(training.params, 30)
    training.run(forget, history=again)
    steps, _ = record_training(training, 30)
    errors: dict[str, list[float]] = {"same": [], "own": []}
    for i in range(3, 30):
        v = (again.last(30)[i].weights[0] - steps[i].weights[0],)
        retain = [[j for j in step.indices if j not in forget] for step in steps[i - 2 : i + 1]]
        gradients: dict[str, list[Tensor]] = {"same": [], "own": []}
        for step, own in zip(
            steps[i - 2 : i + 1], retain, strict=True
        ):  # ends at w_{i-1}, where the product is evaluated
            with torch.no_grad():
                training.w.copy_(step.weights[0])
            for kind, rows in (("same", retain[-1]), ("own", own)):
                gradients[kind].append(
                    mini.mean_gradient(training.mean_loss, rows, training.params)[0]
                )
        s = [(b.weights[0] - a.weights[0],) for a, b in itertools.pairwise(steps[i - 2 : i + 1])]
        exact = mini.hessian_product(training.mean_loss, retain[-1], training.params, v)[0]
        for kind, kind_gradients in gradients.items():
            y = [(b - a,) for a, b in itertools.pairwise(kind_gradients)]
            errors[kind].append(
                float((mini.lbfgs_product(s, y, v)[0] - exact).norm() / exact.norm())
            )
    same, own = np.median(errors["same"]), np.median(errors["own"])
    assert own > 1.5 * same
    assert own > 1, "worse than a product of 0"
    assert same > 0.5, "two pairs are poor even so"


def test_b5_more_history_does_not_help_products_from_differences() -> None:
    """They overestimate the curvature off the path, which shrinks D: k = 30 ends where k = 10 does,
    with most of the error left.
    """
    training = softmax()
    errors = {
        (hvp, k): relative_error(
            training,
            RANDOM,
            lambda h, k=k, hvp=hvp: MiniUnlearning(k=k, hvp=hvp).apply(
                h, training.mean_loss, RANDOM
            ),
            k,
        )[0]
        for hvp in ("autograd", "lbfgs")
        for k in (10, 30)
    }
    assert errors["autograd", 30] < 0.03
    assert errors["lbfgs", 30] > 0.8
    assert errors["lbfgs", 30] == pytest.approx(errors["lbfgs", 10], rel=0.01)


def algorithm_4(s: Tensor, y: Tensor, v: Tensor, w: Tensor, mistake: str = "") -> Tensor:
    """B v by the two triangular factors of Algorithm 4, for [d, m] differences, with one of its
    errors.
    """
    sy = s.T @ y
    sigma = y[:, -1] @ s[:, -1] / (w @ w if mistake == "sigma" else s[:, -1] @ s[:, -1])
    lower, diagonal = sy.tril(0 if mistake == "lower" else -1), sy.diagonal()
    inside = lower @ torch.diag(diagonal if mistake == "cholesky" else 1 / diagonal) @ lower.T
    j = torch.linalg.cholesky(sigma * s.T @ s + inside)
    root, zero = torch.diag(diagonal.sqrt()), torch.zeros_like(sy)
    corner = lower / diagonal.sqrt() * (1 if mistake == "corner" else -1)
    left_factor = torch.cat(
        [torch.cat([-root if mistake == "root" else root, zero], 1), torch.cat([corner, j], 1)]
    )
    right_factor = torch.cat(
        [torch.cat([-root, (lower / diagonal.sqrt()).T], 1), torch.cat([zero, j.T], 1)]
    )
    u = torch.cat([y.T @ v, sigma * s.T @ v])
    return sigma * v - torch.cat([y, sigma * s], 1) @ torch.linalg.solve(
        right_factor, torch.linalg.solve(left_factor, u)
    )


@pytest.mark.parametrize("mistake", ["", "sigma", "cholesky", "root", "corner", "lower"])
@pytest.mark.parametrize("seed", range(5))
def test_m7_each_error_of_algorithm_4_spoils_the_product(mistake: str, seed: int) -> None:
    """sigma over w^T w; the Cholesky factor of .. + L D L^T; the signs of D^1/2 and of L D^-1/2; L
    with its diagonal.

    Without any of them it is the recursion and our product. sigma alone is another start matrix,
    for which the secant equation still holds.
    """
    g = torch.Generator().manual_seed(seed)
    basis = torch.randn(6, 6, generator=g, dtype=torch.float64)
    hessian = basis @ basis.T + torch.eye(6, dtype=torch.float64)
    s, v, w = (torch.randn(6, n, generator=g, dtype=torch.float64) for n in (2, 1, 1))
    y, v, w = hessian @ s, v[:, 0], 3 * w[:, 0]
    sigma = float(y[:, -1] @ s[:, -1] / (s[:, -1] @ s[:, -1]))
    expected = recursive_bfgs(list(s.T), list(y.T), sigma) @ v
    torch.testing.assert_close(
        mini.lbfgs_product([(a,) for a in s.T], [(b,) for b in y.T], (v,))[0], expected
    )
    off = float((algorithm_4(s, y, v, w, mistake) - expected).norm() / expected.norm())
    secant = float((algorithm_4(s, y, s[:, -1], w, mistake) - y[:, -1]).norm() / y[:, -1].norm())
    if not mistake:
        assert max(off, secant) < 1e-9
    else:
        assert off > 0.08
        assert secant < 1e-9 if mistake == "sigma" else secant > 0.08


# --- B6: a class ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "expected"), [("random", (0.364, 0.361)), ("class", (0.486, 0.398))]
)
def test_b6_ten_iterations_equal_rewind_on_random_samples_and_lose_to_it_on_a_class(
    what: str, expected: tuple[float, float]
) -> None:
    training, forget = softmax(), RANDOM if what == "random" else one_class()
    errors = [
        relative_error(training, forget, method, 10)[0]
        for method in (
            lambda h: MiniUnlearning(k=10).apply(h, training.mean_loss, forget),
            lambda h: rewind(h, training.mean_loss, forget, 10),
        )
    ]
    assert errors == pytest.approx(expected, abs=0.002)


def test_b6_the_whole_history_is_not_exact_where_the_loss_is_no_quadratic() -> None:
    """Theorem 1 promises 0 at k = T. A class leaves a quarter of the gap, 30 random samples 2 %;
    rewind nothing.
    """
    training = softmax()
    errors = {}
    for what, forget in (("random", RANDOM), ("class", one_class())):
        errors[what] = relative_error(
            training,
            forget,
            lambda h, forget=forget: MiniUnlearning(k=30).apply(h, training.mean_loss, forget),
            30,
        )[0]
        assert (
            relative_error(
                training,
                forget,
                lambda h, forget=forget: rewind(h, training.mean_loss, forget, 30),
                30,
            )[0]
            < 1e-12
        )
    assert errors["class"] == pytest.approx(0.278, abs=0.005)
    assert errors["random"] == pytest.approx(0.016, abs=0.002)


# --- M9 and schedules -----------------------------------------------------------------------------


RATES = [0.3 / (1 + i / 6) for i in range(30)]


def train_on_schedule(
    training: Training,
    rates: Sequence[float],
    forget: Sequence[int] = (),
    histories: Sequence[History] = (),
    history_rates: Sequence[float] | None = None,
) -> Tensor:
    """SGD with one learning rate an iteration; the histories record `history_rates` instead."""
    with torch.no_grad():
        training.w.copy_(training.start)
    for batch, rate, history_rate in zip(
        training.batches, rates, history_rates or rates, strict=True
    ):
        for history in histories:
            history.record(batch, history_rate)
        gradient = mini.mean_gradient(
            training.mean_loss, [j for j in batch if j not in forget], training.params
        )[0]
        with torch.no_grad():
            training.w -= rate * gradient
    return training.w.detach().clone()


def test_the_recorded_schedule_is_honoured() -> None:
    """Exact on a quadratic with a decaying learning rate; with the mean rate in the history, both
    methods have an error.
    """
    training = ridge(steps=30)
    target = train_on_schedule(training, RATES, FORGET)

    def error(history_rates: Sequence[float] | None, again: bool) -> float:
        history = History(training.params, 30)
        final = train_on_schedule(training, RATES, histories=[history], history_rates=history_rates)
        if again:
            rewind(history, training.mean_loss, FORGET, 30)
        else:
            MiniUnlearning(k=30).apply(history, training.mean_loss, FORGET)
        return float((training.w.detach() - target).norm() / (final - target).norm())

    flat = [float(np.mean(RATES))] * 30
    assert max(error(None, again) for again in (False, True)) < 1e-12
    assert [error(flat, again) for again in (False, True)] == pytest.approx(
        [0.335, 0.196], abs=0.01
    )


def test_m9_memory_and_disk_give_the_same_result(tmp_path: Path) -> None:
    training = softmax()
    memory, disk = History(training.params, 12), History(training.params, 12, folder=tmp_path)
    final = train_on_schedule(training, RATES, histories=[memory, disk])
    weights, outcomes = [], []
    for history in (memory, disk):
        with torch.no_grad():
            training.w.copy_(final)
        outcomes.append(MiniUnlearning(k=12, estimate=5).apply(history, training.mean_loss, RANDOM))
        weights.append(training.w.detach().clone())
    assert torch.equal(*weights)
    assert outcomes[0] == outcomes[1]
    assert float((weights[0] - final).norm()) > 0.01


def test_gauss_newton_is_autograd_on_softmax_regression() -> None:
    """Logits that are linear in the weights: the Gauss-Newton matrix is the Hessian, at every rate
    of the schedule.
    """
    training = softmax()
    x, y = load_digits(n_class=4, return_X_y=True)
    x, y = torch.from_numpy(x[:300] / 16), torch.from_numpy(y[:300])

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(training.start.clone())

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs @ self.w.reshape(64, 4)

    model = Scores()
    # one tensor for the loss and for the Fisher
    training.w, training.params = model.w, (model.w,)
    strength = 0.2  # softmax() adds 0.1 ||w||^2
    steps = []
    for hvp in ("autograd", "ggn"):
        history = History(training.params, 10)
        final = train_on_schedule(training, RATES, histories=[history])
        MiniUnlearning(k=10, hvp=hvp).apply(
            history,
            training.mean_loss,
            RANDOM,
            curvature=lambda rows, v: Fisher(Risk(model), [(x[rows], y[rows])], strength).product(
                v
            ),
        )
        steps.append(training.w.detach() - final)
    assert float(steps[0].norm()) > 0.01
    assert float((steps[0] - steps[1]).norm() / steps[0].norm()) < 1e-12
