"""SPEED: the null space, the invariants, the least-squares problem against a dense solver, the
formula that the authors' code prints, and the selection of retained states against plain loops.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import scipy.linalg
import torch
from torch import Tensor

from concept_eraser.methods.base import ProjectionRequest
from concept_eraser.methods.speed import (
    NullSpaceErasure,
    centres,
    invariant_states,
    orthogonal_part,
    permitted,
)
from concept_eraser.methods.uce import UnifiedConceptEditing
from tests.methods.test_uce import edit_copy

WIDTH = 12


def problem(seed: int = 0, n_retain: int = 4, tokens: int = 5) -> ProjectionRequest:
    """Two layers of different sizes, three concepts of two tokens, one state per retained prompt.

    The states of the empty prompt lie close to three points.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    points = draw(3, WIDTH)
    empty = torch.cat([draw(1, WIDTH), points.repeat(tokens, 1) + 0.01 * draw(3 * tokens, WIDTH)])
    return ProjectionRequest(
        {"a": draw(7, WIDTH), "b": draw(15, WIDTH)},
        [draw(2, WIDTH) for _ in range(3)],
        [draw(2, WIDTH) for _ in range(3)],
        [draw(1, WIDTH) for _ in range(n_retain)],
        empty=empty,
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(states) -> Tensor:
    return torch.cat([torch.zeros(0, WIDTH, dtype=torch.float64), *states])


def dense_solution(request: ProjectionRequest, basis: Tensor, old: Tensor, scale: float) -> Tensor:
    """min 1/n ||(W + X B^T) C - W A||^2 + scale ||X||^2 over X, by scipy, as rows of one system."""
    c, a = rows(request.forget), rows(request.anchor)
    weight = len(request.forget) ** -0.5
    system = torch.cat([weight * c @ basis, scale**0.5 * torch.eye(basis.shape[1]).double()])
    target = torch.cat([weight * (a - c) @ old.T, torch.zeros(basis.shape[1], len(old)).double()])
    x = torch.from_numpy(scipy.linalg.lstsq(system.numpy(), target.numpy())[0])
    return old + x.T @ basis.T


@pytest.mark.parametrize("invariants", [False, True])
@pytest.mark.parametrize("n_retain", [0, 1, 4])
@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_a_dense_solver_agrees_and_the_retained_states_are_unchanged(
    n_retain: int, scale: float, invariants: bool
) -> None:
    """The constraint is checked on the weights; the basis of the solver comes from scipy too.

    With one retained state there is one concept.
    """
    request = problem(n_retain=n_retain)
    if n_retain == 1:
        request = replace(request, forget=request.forget[:1], anchor=request.anchor[:1])
    method = NullSpaceErasure(retain_scale=scale, augmentations=0, invariants=invariants)
    assert request.empty is not None
    fixed = invariant_states(request.empty) if invariants else rows([])
    constraints = torch.cat([rows(request.retain), fixed])
    basis = torch.eye(WIDTH).double()
    if len(constraints):
        basis = torch.from_numpy(scipy.linalg.null_space(constraints.numpy()))
    assert basis.shape[1] == WIDTH - n_retain - 4 * invariants
    for name, new in edit_copy(method, request).items():
        old = request.layers[name]
        assert float((constraints @ (new - old).T).abs().sum()) < 1e-6
        expected = dense_solution(request, basis, old, scale)
        torch.testing.assert_close(new, expected, rtol=0, atol=1e-9)
        assert float((new - old).norm()) > 0.1
        unconstrained = edit_copy(UnifiedConceptEditing(preserve_scale=0.0), request)[name]
        if n_retain:
            assert float((rows(request.retain) @ (unconstrained - old).T).norm()) > 0.1


def test_without_retained_states_it_is_the_unconstrained_formula() -> None:
    """W (I + R (T + s I)^-1); UCE with the mean for the sum and nothing preserved."""
    request = replace(problem(), retain=[])
    speed = edit_copy(NullSpaceErasure(retain_scale=0.3, invariants=False), request)
    n = len(request.forget)
    uce = UnifiedConceptEditing(erase_scale=1 / n, preserve_scale=0.0, lamb=0.3)
    c, a = rows(request.forget), rows(request.anchor)
    inverse = torch.linalg.inv(c.T @ c / n + 0.3 * torch.eye(WIDTH).double())
    for name, expected in edit_copy(uce, request).items():
        old = request.layers[name]
        torch.testing.assert_close(speed[name], expected, rtol=0, atol=1e-10)
        by_hand = old + old @ ((a - c).T @ c / n) @ inverse
        torch.testing.assert_close(speed[name], by_hand, rtol=0, atol=1e-10)


@pytest.mark.parametrize("threshold", [1e-3, 0.5])
def test_the_formula_of_the_authors_code(threshold: float) -> None:
    """R P (I - M K (K^T P M K)^-1 K^T P) M, with inverses, where K^T P M K has one."""
    request = problem(2)
    assert request.empty is not None
    c, a, retain = rows(request.forget), rows(request.anchor), rows(request.retain)
    moment, pull, identity = c.T @ c / 3, (a - c).T @ c / 3, torch.eye(WIDTH).double()
    u, s, _ = torch.linalg.svd(retain.T @ retain / len(retain))
    p = u[:, s < threshold] @ u[:, s < threshold].T
    m = torch.linalg.inv(moment @ p + 0.7 * identity)
    k = invariant_states(request.empty).T
    middle = m @ k @ torch.linalg.inv(k.T @ p @ m @ k) @ k.T @ p
    change = pull @ p @ (identity - middle) @ m
    method = NullSpaceErasure(threshold=threshold, retain_scale=0.7, augmentations=0)
    for name, new in edit_copy(method, request).items():
        old = request.layers[name]
        torch.testing.assert_close(new, old + old @ change, rtol=0, atol=1e-9)


def test_a_retained_state_may_span_the_invariants() -> None:
    """There the printed inverse does not exist. The constraints count once."""
    request = problem()
    assert request.empty is not None
    same = replace(request, retain=[request.empty])
    method = NullSpaceErasure(threshold=1e-9, augmentations=0)
    few = replace(same, retain=[invariant_states(request.empty)])
    for name, new in edit_copy(method, few).items():
        old = request.layers[name]
        assert float((request.empty[:1] @ (new - old).T).abs().max()) < 1e-9
        expected = edit_copy(NullSpaceErasure(augmentations=0), replace(few, retain=[]))[name]
        torch.testing.assert_close(new, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("filtered", "layer", "scale"), [(True, "b", 1.0), (False, "b", 1.0), (True, "a", 1e-3)]
)
def test_the_states_that_count_are_those_of_plain_loops(
    filtered: bool, layer: str, scale: float
) -> None:
    """Copies are formed one by one here; the method never forms them.

    Layer a has fewer rows than columns. Its direction of noise is that of the smallest of its
    singular values; the code takes no direction that the layer does not read at all.
    """
    request = problem(5, n_retain=20)
    method = NullSpaceErasure(augmentations=3, filter=filtered)
    weight, retain = request.layers[layer], rows(request.retain)
    influence = scale * torch.randn(WIDTH, len(weight), generator=seeded(1)).double()
    mean = torch.stack([r @ influence for r in retain]).norm(dim=1).mean()
    counted = [r for r in retain if not filtered or (r @ influence).norm() > mean]
    assert 0 < len(counted) <= 20
    assert (len(counted) < 20) == filtered
    direction = torch.linalg.svd(weight, full_matrices=False)[2][-1]
    direction = direction * direction[direction.abs().argmax()].sign()
    noise = torch.randn(len(counted), 3, generator=seeded(4), dtype=torch.float64)
    copies = [r + t * direction for r, line in zip(counted, noise, strict=True) for t in line]
    copy_mean = torch.stack([(r @ influence).norm() for r in copies]).mean()
    counted_copies = [r for r in copies if (r @ influence).norm() > copy_mean]
    assert 0 < len(counted_copies) < len(copies)
    all_states = torch.stack([*counted, *counted_copies])
    torch.testing.assert_close(
        method.preserved_moment(retain, weight, influence, seeded(4)),
        all_states.T @ all_states / len(all_states),
        rtol=1e-10,
        atol=1e-10,
    )


def test_the_noise_lies_where_the_layer_reads_least() -> None:
    weight = torch.diag(torch.tensor([3.0, 0.5, 2.0])).double()
    retain = torch.zeros(50, 3).double()
    method = NullSpaceErasure(filter=False)
    moment = method.preserved_moment(retain, weight, torch.eye(3).double(), seeded(0))
    assert float(moment[1, 1]) > 0.5
    moment[1, 1] = 0
    assert float(moment.abs().max()) == 0.0


def test_a_state_that_the_edit_changes_as_much_as_the_mean_does_not_count() -> None:
    """The lengths of the states are 1, 2 and 3. The noise does not change the copies' lengths."""
    weight = torch.diag(torch.tensor([3.0, 2.0, 0.5])).double()
    retain = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 3.0, 0.0]]).double()
    influence = torch.diag(torch.tensor([1.0, 1.0, 0.0])).double()
    moment = NullSpaceErasure().preserved_moment(retain, weight, influence, seeded(0))
    assert torch.equal(moment, torch.diag(torch.tensor([0.0, 9.0, 0.0])).double())


def test_noise_may_cancel_a_state() -> None:
    """The squared length of such a copy is 0 up to rounding, which may be below 0."""
    weight = problem().layers["b"]
    direction = torch.linalg.svd(weight)[2][-1]
    direction = direction * direction[direction.abs().argmax()].sign()
    noise = torch.randn(100, 1, generator=seeded(4), dtype=torch.float64)
    retain = -noise * direction
    retain[:50] += problem(6, n_retain=50).retain[0]
    influence = torch.randn(WIDTH, 15, generator=seeded(1)).double()
    copies = retain + noise * direction
    lengths = (copies @ influence).norm(dim=1)
    assert float(lengths[50:].max()) < 1e-12
    all_states = torch.cat([retain, copies[lengths > lengths.mean()]])
    assert len(all_states) == 150
    method = NullSpaceErasure(augmentations=1, filter=False)
    torch.testing.assert_close(
        method.preserved_moment(retain, weight, influence, seeded(4)),
        all_states.T @ all_states / len(all_states),
        rtol=1e-10,
        atol=1e-10,
    )


def test_the_moment_of_few_states_is_their_mean() -> None:
    """Without states it is 0."""
    retain, layer = rows(problem().retain), problem().layers["a"]
    method = NullSpaceErasure(augmentations=0)
    for states in (retain[:0], retain[:1], retain[:2]):
        expected = sum(
            (torch.outer(r, r) for r in states), torch.zeros(WIDTH, WIDTH).double()
        ) / max(len(states), 1)
        moment = method.preserved_moment(states, layer, torch.zeros(WIDTH, 7), seeded(0))
        torch.testing.assert_close(moment, expected, rtol=0, atol=1e-12)


def test_equal_seeds_give_equal_weights() -> None:
    request = problem(n_retain=8)
    one, same, other = (edit_copy(NullSpaceErasure(seed=s), request)["a"] for s in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_threshold_divides_directions_that_may_change_from_those_that_stay() -> None:
    moment = torch.diag(torch.tensor([0.09, 4.0, 0.11, 0.0])).double()
    basis = permitted(moment, 0.1)
    assert basis.shape == (4, 2)
    torch.testing.assert_close(
        basis @ basis.T, torch.diag(torch.tensor([1.0, 0.0, 0.0, 1.0])).double()
    )
    assert permitted(moment, 4.0).shape == (4, 3)
    moment[1, 1] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        permitted(moment, 0.1)


def test_the_part_orthogonal_to_fixed_vectors() -> None:
    basis = torch.eye(4).double()[:, :3]
    fixed = torch.tensor([[0.0, 2.0, 0.0, 5.0], [0.0, 4.0, 0.0, 10.0], [0.0, 0.0, 0.0, 1.0]])
    for scale in (1.0, 1e-8, 1e8):
        left = orthogonal_part(basis, scale * fixed.double())
        torch.testing.assert_close(
            left @ left.T, torch.diag(torch.tensor([1.0, 0.0, 1.0, 0.0])).double()
        )
    assert orthogonal_part(basis, torch.zeros(0, 4).double()).shape == (4, 3)
    assert orthogonal_part(basis, torch.eye(4).double()).shape == (4, 0)


def test_the_centres_are_those_of_the_clusters() -> None:
    points = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]]).double()
    states = torch.cat([points - 0.5, points + 0.5])
    result = centres(states, 3)
    assert sorted(result.tolist()) == sorted(points.tolist())
    assert centres(states[:1], 1).tolist() == states[:1].tolist()
    assert centres(states[:0], 0).shape == (0, 2)
    for number in (1, 2, 3, 4):
        assert invariant_states(states[:number]).shape == (number, 2)
    assert invariant_states(states).shape == (4, 2)


def test_the_first_centre_is_the_first_row_and_the_next_are_the_farthest() -> None:
    """With the first two rows as first centres the result would be -1, 1 and 10.75."""
    states = torch.tensor([[-1.0], [1.0], [9.5], [12.0]]).double()
    assert centres(states, 3).flatten().tolist() == [0.0, 12.0, 9.5]
    assert centres(states[[0, 2, 3, 1]], 3).flatten().tolist() == [0.0, 12.0, 9.5]


def test_if_every_direction_is_preserved_nothing_changes() -> None:
    request = problem(n_retain=3 * WIDTH)
    figures = NullSpaceErasure(threshold=1e-12, augmentations=0).edit(request)
    assert figures["free"] == figures["moved"] == figures["drift"] == 0
    assert figures["left"] == pytest.approx(1.0)
    figures = NullSpaceErasure(threshold=1e-12, augmentations=0).edit(
        replace(request, anchor=request.forget)
    )
    assert figures == {"free": 0, "moved": 0, "left": 0, "drift": 0}


def test_the_figures_are_those_of_the_edit() -> None:
    """Each layer has a change of its own, since filter and noise depend on the layer."""
    request = problem(3, n_retain=8)
    before = {name: w.clone() for name, w in request.layers.items()}
    figures = NullSpaceErasure().edit(request)
    pairs = list(zip(request.forget, request.anchor, strict=True))
    new = request.layers

    def total(values) -> float:
        return sum(float((v**2).sum()) for v in values)

    moved = total(new[n] - w for n, w in before.items()) / total(before.values())
    left = total(c @ new[n].T - a @ w.T for n, w in before.items() for c, a in pairs) / total(
        (c - a) @ w.T for w in before.values() for c, a in pairs
    )
    drift = total(p @ (new[n] - w).T for n, w in before.items() for p in request.retain) / total(
        p @ w.T for w in before.values() for p in request.retain
    )
    assert [figures[key] ** 2 for key in ("moved", "left", "drift")] == pytest.approx(
        [moved, left, drift], rel=1e-9
    )
    assert 0 < figures["free"] < 1
    changes = [torch.linalg.pinv(before["b"]) @ (new["b"] - before["b"])]
    assert float((before["a"] @ changes[0] - (new["a"] - before["a"])).abs().max()) > 1e-3


def test_what_cannot_be_solved_is_refused() -> None:
    request = problem()
    before = {name: w.clone() for name, w in request.layers.items()}
    with pytest.raises(ValueError, match="not finite"):
        NullSpaceErasure().edit(replace(request, forget=[r * float("inf") for r in request.forget]))
    with pytest.raises(ValueError, match="not finite"):
        NullSpaceErasure(augmentations=0).edit(
            replace(request, retain=[r * float("nan") for r in request.retain])
        )
    assert all(torch.equal(w, before[name]) for name, w in request.layers.items())
    for options in ({"threshold": 0.0}, {"retain_scale": 0.0}, {"augmentations": -1}):
        with pytest.raises(ValueError, match="threshold and retain_scale must be > 0"):
            NullSpaceErasure(**options)
