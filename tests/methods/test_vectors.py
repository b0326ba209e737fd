"""Inner products over tuples of tensors."""

from __future__ import annotations

import math

import pytest
import torch

from concept_eraser.methods import vectors
from concept_eraser.methods.checks import PAIRS, flat


def test_gramian_is_that_of_the_concatenated_vectors() -> None:
    for u, v in PAIRS[::11]:
        gram = vectors.gramian([u, v])
        matrix = torch.stack([flat(u), flat(v)])
        torch.testing.assert_close(
            gram, matrix @ matrix.T, rtol=1e-9, atol=float(gram.diagonal().prod() ** 0.5) * 1e-12
        )
        assert float(vectors.dot(u, v)) == pytest.approx(
            float(gram[0, 1]), rel=1e-9, abs=float(gram.diagonal().prod() ** 0.5) * 1e-12
        )


@pytest.mark.parametrize("block", [1, 3, 7, 1000])
def test_a_gramian_does_not_depend_on_the_size_of_its_blocks(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3), (), (5,), (0,), (4, 2, 1)]
    u, v, w = (tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(3))
    matrix = torch.stack([flat(one) for one in (u, v, w)]).double()
    monkeypatch.setattr(vectors, "BLOCK", block)
    gram = vectors.gramian([u, v, w])
    torch.testing.assert_close(gram, matrix @ matrix.T, rtol=1e-12, atol=1e-14)
    assert torch.equal(gram, gram.T)
    infinite = (v[0] * float("inf"), *v[1:])
    assert [float(x) for x in vectors.gramian([u, infinite]).diagonal()] == pytest.approx(
        [float(gram[0, 0]), float("inf")]
    )


def test_the_gramian_of_a_gpu_is_that_of_the_cpu() -> None:
    """It is computed in another order, here on the CPU too, and read with other scalars."""
    u, v = PAIRS[3]
    some = [u, v, vectors.combine([0.5, 2.0], [u, v])]
    gram, values = vectors._partwise_gramian(some, [torch.tensor(3.0), torch.tensor(-1.0)])
    torch.testing.assert_close(gram, vectors.gramian(some), rtol=1e-9, atol=1e-12)
    assert values == [3.0, -1.0]
    assert vectors.gramian_and_scalars(some, [torch.tensor(3.0)])[1] == [3.0]


def test_scalars_of_several_types_are_read_together() -> None:
    numbers = [torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(0.5), torch.tensor(2)]
    assert vectors.fetch(numbers) == [1 / 3, 0.5, 2.0]
    assert vectors.fetch(numbers[:1]) == [1 / 3]
    assert vectors.fetch([torch.tensor(2**53 + 1)]) == [2**53 + 1]  # not by way of a float
    assert vectors.fetch([]) == []


def test_a_difference_is_scaled_and_frees_what_it_no_longer_needs() -> None:
    u, v = PAIRS[2]
    remaining = list(u)
    difference = vectors.scaled_difference(remaining, v, 3.0)
    torch.testing.assert_close(flat(difference), 3.0 * (flat(u) - flat(v)))
    assert remaining == []
    with pytest.raises(ValueError, match=r"1 and \d+ tensors"):
        vectors.scaled_difference([u[0]], v, 3.0)


@pytest.mark.parametrize("weights", [[2.0, -1.0], [0.0, 0.0]])
def test_a_combination_empties_its_list(weights: list[float]) -> None:
    u, v = PAIRS[1]
    remaining = [u, v]
    total = vectors.combine_and_free(weights, remaining)
    torch.testing.assert_close(flat(total), weights[0] * flat(u) + weights[1] * flat(v))
    assert remaining == []
    with pytest.raises(ValueError, match=r"vectors of \d+, 1 tensors"):
        vectors.combine([1.0, 1.0], [u, v[:1]])


def test_float32_parts_are_accumulated_in_float64() -> None:
    """10^7 ones and one small number: float32 accumulation loses it."""
    u = (torch.ones(10_000_000), torch.full((1,), 1e-2))
    assert float(vectors.norm(u) ** 2) == pytest.approx(1e7 + 1e-4, abs=1e-6)


def test_combine() -> None:
    u, v = (torch.tensor([1.0, 2.0]),), (torch.tensor([10.0, 20.0]),)
    torch.testing.assert_close(vectors.combine([2.0, 0.5], [u, v])[0], torch.tensor([7.0, 14.0]))
    assert vectors.combine([0.0, 0.0], [u, v])[0].tolist() == [0.0, 0.0]
    assert u[0].tolist() == [1.0, 2.0], "inputs are not changed"


def test_combine_leaves_out_what_has_weight_zero_even_if_it_is_not_finite() -> None:
    u, v = (torch.tensor([1.0]),), (torch.tensor([math.nan]),)
    assert vectors.combine([1.0, 0.0], [u, v])[0].tolist() == [1.0]


def test_vectors_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        vectors.dot((torch.ones(1),), (torch.ones(1), torch.ones(1)))


def test_cosine_of_zero_is_nan() -> None:
    assert math.isnan(vectors.cosine(torch.zeros(2, 2, dtype=torch.float64)))


def test_spectral_norm_is_the_largest_eigenvalue_in_size() -> None:
    matrix = torch.diag(torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64))
    like = (torch.zeros(3, dtype=torch.float64),)
    assert float(vectors.spectral_norm(lambda v: (matrix @ v[0],), like, 100)) == pytest.approx(3)
    assert vectors.spectral_norm(lambda v: (0 * v[0],), like, 5) == 0


def test_combine_of_one_vector_that_is_left_out() -> None:
    (zeros,) = vectors.combine([0.0], [(torch.tensor([1.0, math.inf]),)])
    assert zeros.tolist() == [0.0, 0.0]


def test_one_number_that_is_not_finite_is_noticed_wherever_it_stands() -> None:
    fine = (torch.ones(3), torch.ones(2, 2))
    assert vectors.is_finite(fine)
    for bad in (math.nan, math.inf, -math.inf):
        for part in range(2):
            bad_vector = tuple(p.clone() for p in fine)
            bad_vector[part].view(-1)[1] = bad
            assert not vectors.is_finite(bad_vector)


def test_large_numbers_are_finite_although_their_sum_is_not() -> None:
    large = torch.full((2,), torch.finfo(torch.float32).max)
    assert not torch.isfinite(large.sum())
    assert vectors.is_finite((torch.zeros(0), large))
    assert not vectors.is_finite((large, torch.tensor([torch.inf, -torch.inf])))


def test_cosine_is_torchs_for_any_two_of_the_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 7, generator=generator, dtype=torch.float64) * torch.tensor(
        [[1e-4], [5.0], [0.2]]
    )
    gram = rows @ rows.T
    for i in range(3):
        for j in range(3):
            expected = float(torch.nn.functional.cosine_similarity(rows[i], rows[j], dim=0))
            assert vectors.cosine(gram, i, j) == pytest.approx(expected, rel=1e-9)
    assert vectors.cosine(gram) == vectors.cosine(gram, 0, 1)


def test_the_spectral_norm_is_the_same_in_every_run() -> None:
    matrix = torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64))
    like = (torch.zeros(2, dtype=torch.float64),)
    torch.rand(1)  # the global state of random numbers plays no part
    once, again = (vectors.spectral_norm(lambda v: (matrix @ v[0],), like, 2) for _ in range(2))
    assert once == again
    assert once < 2  # two iterations are not enough, so that the result depends on the start


@pytest.mark.parametrize("factor", [1e39, -1e39, float("inf"), float("nan")])
def test_a_factor_that_float32_cannot_hold_gives_no_finite_sum(factor: float) -> None:
    """PyTorch refuses such a factor in an addition, and takes it in a product."""
    one = (torch.ones(3),)
    for weights, pair in (([1.0, factor], [one, one]), ([factor, 1.0], [one, one])):
        total = vectors.combine(weights, pair)
        assert not torch.isfinite(total[0]).any()
        assert not vectors.is_finite(total)
    if abs(factor) == 1e39:
        double = (torch.ones(3, dtype=torch.float64),)
        assert vectors.combine([1.0, factor], [double, double])[0].tolist() == [factor] * 3
        assert vectors.combine([1.0, factor], [one, one])[0][0] * factor > 0
    largest = torch.finfo(torch.float32).max
    zero = (torch.zeros(3),)
    assert vectors.combine([1.0, -largest], [zero, one])[0].tolist() == [-largest] * 3


def test_a_vector_is_clipped_to_the_largest_norm() -> None:
    u = (torch.tensor([3.0, 0.0]), torch.tensor([4.0]))
    (first, second), unchanged = vectors.clip(u, 2.5), vectors.clip(u, 5.0)
    assert first.tolist() == [1.5, 0.0]
    assert second.tolist() == [2.0]
    assert unchanged is u, "a vector of the largest norm itself is not scaled"
    assert vectors.clip(u, 7.0) is u
