"""UCE's least-squares edit: the law of its minimum, outside references, one golden value, and its
errors.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import scipy.linalg
import torch
from torch import Tensor

from concept_eraser import registry
from concept_eraser.methods.base import ProjectionRequest
from concept_eraser.methods.uce import UnifiedConceptEditing, solve

WIDTH = 6
OPTIONS = [(1.0, 1.0, 0.5), (1.0, 0.1, 0.1), (10.0, 0.0, 1e-3), (0.01, 3.0, 2.0)]


def problem(
    seed: int = 0, concepts: int = 3, n_retain: int = 4, scale: float = 1.0
) -> ProjectionRequest:
    """Two layers of different sizes, concepts of two tokens, preserved prompts of three."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    layers = {"a": draw(5, WIDTH), "b": draw(9, WIDTH)}
    forget = [scale * draw(2, WIDTH) for _ in range(concepts)]
    anchor = [scale * draw(2, WIDTH) for _ in range(concepts)]
    return ProjectionRequest(
        layers, forget, anchor, [scale * draw(3, WIDTH) for _ in range(n_retain)]
    )


def edit_copy(method, request: ProjectionRequest) -> dict[str, Tensor]:
    """The new weights; the weights of the request stay."""
    copy = replace(request, layers={name: w.clone() for name, w in request.layers.items()})
    method.edit(copy)
    return dict(copy.layers)


def objective(
    new: Tensor, old: Tensor, request: ProjectionRequest, erase: float, preserve: float, lamb: float
) -> Tensor:
    """The objective of the paper."""
    erase_error = sum(
        ((c @ new.T - a @ old.T) ** 2).sum()
        for c, a in zip(request.forget, request.anchor, strict=True)
    )
    retain_error = sum(((p @ new.T - p @ old.T) ** 2).sum() for p in request.retain)
    return erase * erase_error + preserve * retain_error + lamb * ((new - old) ** 2).sum()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_gradient_of_the_objective_vanishes(options: tuple, scale: float) -> None:
    """Autograd differentiates the printed objective; at W_old the gradient is not 0."""
    request = problem(scale=scale)
    for name, new in edit_copy(UnifiedConceptEditing(*options), request).items():
        old = request.layers[name]
        (at_new,), (at_old,) = (
            torch.autograd.grad(objective(w, old, request, *options), w)
            for w in (new.requires_grad_(), old.clone().requires_grad_())
        )
        rounding = 1e-15 * options[2] * float(old.norm())  # of W' itself
        assert float(at_new.norm()) < 1e-9 * float(at_old.norm()) + rounding


@pytest.mark.parametrize("options", OPTIONS)
def test_scipy_solves_the_stacked_problem_alike(options: tuple) -> None:
    """min ||X W^T - Y||, rows scaled by the roots of the weights."""
    erase, preserve, lamb = (value**0.5 for value in options)
    request = problem(1)
    c, a, p = (torch.cat(list(many)) for many in (request.forget, request.anchor, request.retain))
    for name, new in edit_copy(UnifiedConceptEditing(*options), request).items():
        old = request.layers[name]
        x = torch.cat([erase * c, preserve * p, lamb * torch.eye(WIDTH, dtype=torch.float64)])
        y = torch.cat([erase * a @ old.T, preserve * p @ old.T, lamb * old.T])
        expected = torch.from_numpy(scipy.linalg.lstsq(x.numpy(), y.numpy())[0]).T
        torch.testing.assert_close(new, expected, rtol=1e-9, atol=1e-10)


def test_where_nothing_is_to_change_not_a_bit_moves() -> None:
    request = problem()
    for same in (replace(request, anchor=request.forget), replace(request, forget=[], anchor=[])):
        for name, new in edit_copy(UnifiedConceptEditing(), same).items():
            assert torch.equal(new, request.layers[name])


def test_with_nothing_else_to_serve_the_concept_reads_as_its_anchor() -> None:
    """lamb -> 0 and few concepts: W' c = W a exactly; preserved states orthogonal to them have the
    same output as before.
    """
    request = problem(concepts=1)
    c = request.forget[0]
    outside = torch.linalg.svd(c)[2][2:]  # orthogonal to both tokens
    request = replace(request, retain=[outside])
    for name, new in edit_copy(UnifiedConceptEditing(lamb=1e-9), request).items():
        old = request.layers[name]
        torch.testing.assert_close(c @ new.T, request.anchor[0] @ old.T, rtol=0, atol=1e-7)
        torch.testing.assert_close(outside @ new.T, outside @ old.T, rtol=0, atol=1e-7)


def test_a_stronger_scale_erases_more_and_retains_less() -> None:
    figures = []
    for erase in (0.1, 1.0, 10.0, 100.0):
        request = problem(2)
        figures.append(UnifiedConceptEditing(erase_scale=erase).edit(request))
    distances, drift = [t["left"] for t in figures], [t["drift"] for t in figures]
    assert distances == sorted(distances, reverse=True)
    assert drift == sorted(drift)
    assert distances[-1] < 0.9 * distances[0]


def test_the_order_of_concepts_and_how_they_are_split_do_not_matter() -> None:
    request = problem()
    permutation = replace(
        request,
        forget=request.forget[::-1],
        anchor=request.anchor[::-1],
        retain=[torch.cat(list(request.retain))],
    )
    one, other = (edit_copy(UnifiedConceptEditing(), r) for r in (request, permutation))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-12)


def test_golden() -> None:
    """By hand: W = [1 0], c = (1, 0), a = (0, 1), nothing preserved, lamb 1: M = diag(2, 1), W a =
    0, so W' = (W + 0) diag(1/2, 1) = [1/2 0]; with W = [1 2] it is [(1 + 2)/2 2]."""
    c, a = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    request = ProjectionRequest(
        {"x": torch.tensor([[1.0, 0.0]]), "y": torch.tensor([[1.0, 2.0]])}, [c], [a]
    )
    new = edit_copy(UnifiedConceptEditing(lamb=1.0), request)
    assert new["x"].tolist() == [[0.5, 0.0]]
    assert new["y"].tolist() == [[1.5, 2.0]]


def test_the_figures_are_those_of_the_edit() -> None:
    request = problem(3)
    before = {name: w.clone() for name, w in request.layers.items()}
    figures = UnifiedConceptEditing().edit(request)

    def total(values) -> float:
        return sum(float((v**2).sum()) for v in values)

    pairs = list(zip(request.forget, request.anchor, strict=True))
    movement = total(request.layers[n] - w for n, w in before.items()) / total(before.values())
    distance = total(
        c @ request.layers[n].T - a @ w.T for n, w in before.items() for c, a in pairs
    ) / total((c - a) @ w.T for w in before.values() for c, a in pairs)
    drift = total(
        p @ (request.layers[n] - w).T for n, w in before.items() for p in request.retain
    ) / total(p @ w.T for w in before.values() for p in request.retain)
    assert [figures["moved"] ** 2, figures["left"] ** 2, figures["drift"] ** 2] == pytest.approx(
        [movement, distance, drift], rel=1e-9
    )


def test_what_cannot_be_solved_is_refused() -> None:
    request = problem(concepts=1, n_retain=0)
    with pytest.raises(ValueError, match=r"undetermined .* give a larger lamb"):
        UnifiedConceptEditing(lamb=0.0).edit(request)
    before = {name: w.clone() for name, w in request.layers.items()}
    with pytest.raises(ValueError, match="not finite"):
        UnifiedConceptEditing().edit(replace(request, forget=[request.forget[0] * float("inf")]))
    assert all(torch.equal(w, before[name]) for name, w in request.layers.items())
    with pytest.raises(ValueError, match="one width, found \\[5, 6\\]"):
        UnifiedConceptEditing().edit(replace(request, forget=[request.forget[0][:, :5]]))
    with pytest.raises(ValueError, match="erase_scale must be > 0"):
        UnifiedConceptEditing(erase_scale=0.0)
    with pytest.raises(ValueError, match="tokens must be"):
        UnifiedConceptEditing(tokens="first")


def test_maces_refinement_is_the_same_problem_with_other_tokens() -> None:
    method = registry.build("method", "mace-cfr", {})
    assert method == UnifiedConceptEditing(tokens="context")


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_what_is_singular_does_not_depend_on_units(scale: float) -> None:
    """The ratio of the smallest eigenvalue to the largest decides, at 1e-13."""
    right = torch.eye(3, dtype=torch.float64)
    for values, fine in (
        ([1e-12, 1.0, 1.0], True),
        ([1e-14, 1.0, 1.0], False),
        ([1e-12, 1e-12, 1.0], True),
        ([1e-14, 1e-13, 1.0], False),
        ([0.0, 1.0, 2.0], False),
        ([0.0, 0.0, 0.0], False),
        ([-1.0, 1.0, 2.0], False),
    ):
        matrix = scale * torch.diag(torch.tensor(values, dtype=torch.float64))
        if fine:
            torch.testing.assert_close(matrix @ solve(matrix, right), right)
        else:
            with pytest.raises(ValueError, match="undetermined"):
                solve(matrix, right)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_number_that_is_not_finite_is_enough_to_refuse(bad: float) -> None:
    fine = torch.eye(3, dtype=torch.float64)
    bad_matrix = fine.clone()
    bad_matrix[0, 2] = bad_matrix[2, 0] = bad
    for matrix, right in ((bad_matrix, fine), (fine, bad_matrix), (bad_matrix, bad_matrix)):
        with pytest.raises(ValueError, match="not finite"):
            solve(matrix, right)
