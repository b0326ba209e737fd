"""OCE: lengths and angles of the values, the problem that the rotation solves against scipy's two
Procrustes solvers, a reflection known by hand, and the errors.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from concept_eraser.methods.base import ProjectionRequest
from concept_eraser.methods.oce import OrthogonalErasure, closest_turn, image_of, leading_basis
from tests.methods.test_uce import WIDTH, edit_copy, problem

OPTIONS = [
    {"erase_scale": 2000.0},
    {"erase_scale": 30.0, "preserve_scale": 0.0, "lamb": 1.0},
    {"erase_scale": 50.0, "preserve_scale": 3.0, "lamb": 0.5, "rank": 1},
    {"erase_scale": 1.0, "preserve_scale": 0.1, "lamb": 0.1, "rank": 2},
]


def request_of(outputs: int, seed: int = 0, concepts: int = 1) -> ProjectionRequest:
    """One layer [outputs, WIDTH]; two tokens for each concept and each anchor."""
    generator = torch.Generator().manual_seed(100 + seed)
    layer = torch.randn(outputs, WIDTH, generator=generator, dtype=torch.float64)
    return replace(problem(seed, concepts=concepts), layers={"w": layer})


def weighted_pairs(
    request: ProjectionRequest, method: OrthogonalErasure
) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors x and y [n, outputs] and weights [n]: R minimises sum weight |R x - y|^2."""
    weight = request.layers["w"]

    def basis(states) -> Tensor:
        values = torch.cat(list(states)) @ weight.T
        values = values / values.norm(dim=1, keepdim=True)
        gram = values.T @ values
        count = min(method.rank or len(gram), int(torch.linalg.matrix_rank(gram)))
        return torch.linalg.eigh(gram)[1][:, -count:]

    concept, anchor = basis(request.forget), basis(request.anchor)
    own = concept - anchor @ anchor.T @ concept
    retained = torch.cat(list(request.retain)) @ weight.T
    return (
        torch.cat([own.T, retained, weight.T]),
        torch.cat([-concept.T, retained, weight.T]),
        torch.cat(
            [
                torch.full((concept.shape[1],), method.erase_scale),
                torch.full((len(retained),), method.preserve_scale / len(retained)),
                torch.full((WIDTH,), method.lamb),
            ]
        ).double(),
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("outputs", [3, 5, 9])
def test_lengths_and_angles_of_all_values_stay(options: dict, outputs: int) -> None:
    """W'^T W' = W^T W has the inner products of the values of all states."""
    request = request_of(outputs)
    old, new = request.layers["w"], edit_copy(OrthogonalErasure(**options), request)["w"]
    assert float((new - old).norm()) > 1e-2 * float(old.norm())
    torch.testing.assert_close(new.T @ new, old.T @ old, rtol=0, atol=1e-9)
    states = torch.cat([*request.forget, *request.retain])
    torch.testing.assert_close((states @ new.T).norm(dim=1), (states @ old.T).norm(dim=1))
    if outputs < WIDTH:
        turn = new @ torch.linalg.pinv(old)
        torch.testing.assert_close(turn @ turn.T, torch.eye(outputs).double(), rtol=0, atol=1e-9)
        assert float(torch.linalg.det(turn)) == pytest.approx(1.0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_three_outputs_are_turned_as_scipys_rotation(options: dict, seed: int) -> None:
    """scipy's align_vectors (Kabsch). Both signs of the determinant of U V^T occur."""
    request, method = request_of(3, seed), OrthogonalErasure(**(options | {"rank": 1}))
    x, y, weights = (values.numpy() for values in weighted_pairs(request, method))
    expected = Rotation.align_vectors(y, x, weights=weights)[0].as_matrix()
    old = request.layers["w"]
    torch.testing.assert_close(
        edit_copy(method, request)["w"], torch.tensor(expected) @ old, rtol=0, atol=1e-7
    )


def test_both_signs_occur() -> None:
    """A control for the test above."""
    signs = set()
    for options in OPTIONS:
        for seed in range(4):
            method = OrthogonalErasure(**(options | {"rank": 1}))
            x, y, weights = weighted_pairs(request_of(3, seed), method)
            signs.add(float(torch.linalg.det(y.T @ (weights[:, None] * x)).sign()))
    assert signs == {-1.0, 1.0}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_more_outputs_than_inputs_allow_a_reflection(options: dict, seed: int) -> None:
    """scipy's orthogonal_procrustes gives some orthogonal matrix; R W is the same for all."""
    request, method = request_of(9, seed), OrthogonalErasure(**options)
    x, y, weights = weighted_pairs(request, method)
    scaled = [(weights.sqrt()[:, None] * values).numpy() for values in (x, y)]
    expected = torch.tensor(scipy.linalg.orthogonal_procrustes(*scaled)[0].T)
    old = request.layers["w"]
    torch.testing.assert_close(edit_copy(method, request)["w"], expected @ old, rtol=0, atol=1e-7)


@pytest.mark.parametrize("outputs", [4, 5])
def test_no_small_turn_is_better(outputs: int) -> None:
    """The objective of the docstring, at turns near and far from the result."""
    request, method = request_of(outputs), OrthogonalErasure(erase_scale=60.0, rank=2)
    x, y, weights = weighted_pairs(request, method)
    new = edit_copy(method, request)["w"]
    best = new @ torch.linalg.pinv(request.layers["w"])

    def objective(turn: Tensor) -> float:
        return float((weights * ((x @ turn.T - y) ** 2).sum(1)).sum())

    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 0.1, 1.0, 10.0):
        for _ in range(10):
            skew = size * torch.randn(outputs, outputs, generator=generator).double()
            assert objective(torch.linalg.matrix_exp(skew - skew.T) @ best) > objective(best)


def test_a_single_concept_is_reflected_above_a_weight() -> None:
    """W = [I; 0], and c and a orthogonal: M = lamb I - erase_scale c c^T. So nothing changes below
    erase_scale = lamb, and above it c alone changes its sign.
    """
    layer = torch.cat([torch.eye(WIDTH), torch.zeros(2, WIDTH)]).double()
    c, a = torch.zeros(1, WIDTH).double(), torch.zeros(1, WIDTH).double()
    c[0, :2], a[0, 2] = torch.tensor([3.0, 4.0]), 7.0
    request = ProjectionRequest({"w": layer}, [c], [a])
    for scale, sign in ((0.99, 1.0), (1.01, -1.0), (2000.0, -1.0)):
        method = OrthogonalErasure(erase_scale=scale, preserve_scale=0.0, lamb=1.0)
        copy = replace(request, layers={"w": layer.clone()})
        figures = method.edit(copy)
        assert figures["overlap"] == pytest.approx(sign)
        torch.testing.assert_close(c @ copy.layers["w"].T, sign * c @ layer.T)
        torch.testing.assert_close(a @ copy.layers["w"].T, a @ layer.T)
    square = replace(request, layers={"w": torch.eye(WIDTH).double()})
    with pytest.raises(ValueError, match=r"undetermined .* larger lamb"):
        OrthogonalErasure(erase_scale=9.0, preserve_scale=0.0, lamb=1.0).edit(square)


def test_a_larger_weight_leaves_less_of_the_concept() -> None:
    """Without a weight nothing would change. The overlap is that of the definition."""
    for outputs in (5, 9):
        request, overlaps = request_of(outputs), []
        for scale in (1e-9, 1.0, 10.0, 100.0, 1e6):
            copy = replace(request, layers={"w": request.layers["w"].clone()})
            method = OrthogonalErasure(erase_scale=scale, rank=1)
            overlaps.append(method.edit(copy)["overlap"])
            x, y, _ = weighted_pairs(request, method)
            turn = copy.layers["w"] @ torch.linalg.pinv(request.layers["w"])
            expected = -(y[0] @ turn @ x[0]) / (x[0] @ x[0])
            assert overlaps[-1] == pytest.approx(float(expected), abs=1e-9)
            if scale == 1e-9:
                difference = copy.layers["w"] - request.layers["w"]
                assert float(difference.abs().max()) < 1e-8
        assert overlaps[0] == pytest.approx(1.0)
        assert all(a > b for a, b in itertools.pairwise(overlaps))
        assert overlaps[-1] < 0


def test_the_retained_states_count_by_their_mean() -> None:
    request, method = request_of(5), OrthogonalErasure(erase_scale=20.0)
    once = edit_copy(method, request)["w"]
    twice = edit_copy(method, replace(request, retain=[*request.retain, *request.retain]))["w"]
    torch.testing.assert_close(once, twice, rtol=0, atol=1e-10)
    scaled = replace(request, retain=[2 * states for states in request.retain])
    same = edit_copy(replace(method, preserve_scale=2.5), scaled)["w"]
    torch.testing.assert_close(once, same, rtol=0, atol=1e-10)
    other = edit_copy(replace(method, preserve_scale=0.0), request)["w"]
    assert float((once - other).abs().max()) > 1e-3


def test_dependent_and_empty_values_count_once_or_not() -> None:
    request, method = request_of(9), OrthogonalErasure(erase_scale=50.0)
    (c,), (a,) = request.forget, request.anchor
    expected = edit_copy(method, request)["w"]
    nothing = torch.zeros_like(c[:1])
    for forget, anchor in (([c, c], [a, 3 * a]), ([c, nothing], [a, nothing])):
        repeated = replace(request, forget=forget, anchor=anchor)
        torch.testing.assert_close(edit_copy(method, repeated)["w"], expected, rtol=0, atol=1e-9)


def test_a_layer_of_zeros_or_of_low_rank() -> None:
    request = request_of(9)
    old = request.layers["w"]
    low = torch.cat([old[:4], old[:4]])
    layers = {"zero": torch.zeros(4, WIDTH).double(), "low": low.clone()}
    new = edit_copy(OrthogonalErasure(rank=1), replace(request, layers=layers))
    assert torch.equal(new["zero"], layers["zero"])
    torch.testing.assert_close(new["low"].T @ new["low"], low.T @ low, rtol=0, atol=1e-9)
    assert float((new["low"] - low).abs().max()) > 0.1


def test_the_leading_directions() -> None:
    rows = torch.tensor([[5.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    basis = leading_basis([rows.double()[:1], rows.double()[1:]], None)
    torch.testing.assert_close(basis @ basis.T, torch.diag(torch.tensor([1.0, 1.0, 0.0])).double())
    first = leading_basis([rows.double()], 1)
    assert first[:, 0].abs().tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert leading_basis([rows.double()[3:]], None).shape == (3, 0)


def test_the_closest_turn_is_unique_or_refused() -> None:
    one = torch.tensor([[-3.0]]).double()
    assert closest_turn(one, reflections=True).item() == -1.0
    assert closest_turn(one, reflections=False).item() == 1.0
    matrix = torch.diag(torch.tensor([3.0, 2.0, 0.0])).double()
    torch.testing.assert_close(closest_turn(matrix, reflections=False), torch.eye(3).double())
    with pytest.raises(ValueError, match="undetermined"):
        closest_turn(matrix, reflections=True)
    with pytest.raises(ValueError, match="undetermined"):
        closest_turn(torch.diag(torch.tensor([3.0, 2.0, -2.0])).double(), reflections=False)
    generator = np.random.default_rng(0)
    for _ in range(20):
        turn = closest_turn(torch.tensor(generator.standard_normal((4, 4))), reflections=False)
        torch.testing.assert_close(turn @ turn.T, torch.eye(4).double(), rtol=0, atol=1e-12)
        assert float(torch.linalg.det(turn)) == pytest.approx(1.0)


def test_what_cannot_be_erased_is_refused() -> None:
    """Anchors that span what the concepts span; states or weights that are not finite."""
    request = request_of(5)
    before = request.layers["w"].clone()
    with pytest.raises(ValueError, match=r"nothing to erase; .* smaller rank"):
        OrthogonalErasure().edit(replace(request, anchor=request.forget))
    with pytest.raises(ValueError, match="nothing to erase"):
        OrthogonalErasure().edit(request_of(5, concepts=4))
    OrthogonalErasure(rank=2).edit(request_of(5, concepts=4))
    for states in ("forget", "retain"):
        broken = replace(request, **{states: [s * float("nan") for s in getattr(request, states)]})
        with pytest.raises(ValueError, match="not finite"):
            OrthogonalErasure().edit(broken)
    with pytest.raises(ValueError, match="not finite"):
        OrthogonalErasure().edit(replace(request, layers={"w": before * float("inf")}))
    assert torch.equal(request.layers["w"], before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"erase_scale": 0.0}, "erase_scale must be > 0"),
        ({"preserve_scale": -1.0}, "preserve_scale and lamb >= 0"),
        ({"lamb": -1.0}, "preserve_scale and lamb >= 0"),
        ({"rank": -1}, r"rank must be >= 0 \(0: all\), found -1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OrthogonalErasure(**options)


def test_a_direction_of_rounding_errors_is_not_turned() -> None:
    """An edit before may have left one, as RECE does; no lamb would determine its rotation."""
    weight = torch.randn(24, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs, sizes, inputs = torch.linalg.svd(weight)
    sizes[-1] = 4e-7 * sizes[0]
    basis, kept, rows = image_of(outputs * sizes @ inputs)
    assert len(kept) == 23
    assert basis.shape == (24, 23)
    assert rows.shape == (23, 24)
    sizes[-1] = 1e-4 * sizes[0]
    assert len(image_of(outputs * sizes @ inputs)[1]) == 24
