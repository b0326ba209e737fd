"""Arithmetic on a tuple of tensors, one for each trainable parameter, without concatenating them.

A `Vec` is a point in parameter space: `tuple[Tensor, ...]` in a fixed order. Inner products are
accumulated tensor by tensor in float64 (float32 on devices without float64). The cosine of two
gradients with 10^9 entries would be meaningless in half precision.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Vec = tuple[Tensor, ...]

BLOCK = 2**16  # numbers of each vector that are in float64 at once on a CPU: 0.5 MB, in its cache


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64).flatten()


def fetch(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of tensors without dimensions, which are on one device.

    The host waits for a GPU once, not for each of them.
    """
    if not scalars:
        return []
    if len({scalar.dtype for scalar in scalars}) > 1:
        scalars = [_wide(scalar).squeeze() for scalar in scalars]
    values: list[float] = torch.stack([scalar.detach() for scalar in scalars]).tolist()
    return values


def dot(u: Vec, v: Vec) -> Tensor:
    """Return <u, v> as a float64 scalar on the CPU."""
    products = fetch([torch.dot(_wide(a), _wide(b)) for a, b in zip(u, v, strict=True)])
    return torch.tensor(_total(products), dtype=torch.float64)


def _total(numbers: Sequence[float]) -> float:
    """Return the sum in this order. From Python 3.12 on, `sum` adds in another way."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def norm(u: Vec) -> Tensor:
    """Return ||u|| as a float64 scalar on the CPU."""
    return dot(u, u).sqrt()


def gramian(vectors: Sequence[Vec]) -> Tensor:
    """Return all inner products of `m` vectors: [m, m] float64 on the CPU."""
    return gramian_and_scalars(vectors, ())[0]


def gramian_and_scalars(
    vectors: Sequence[Vec], scalars: Sequence[Tensor]
) -> tuple[Tensor, list[float]]:
    """Return `gramian` and the values of `scalars`. The host waits for a GPU once for both."""
    if all(part.device.type == "cpu" for vector in vectors for part in vector):
        return _blockwise_gramian(vectors), fetch(scalars)
    return _partwise_gramian(vectors, scalars)


def _partwise_gramian(
    vectors: Sequence[Vec], scalars: Sequence[Tensor]
) -> tuple[Tensor, list[float]]:
    """Return the result of `gramian_and_scalars`, from a float64 copy of each part."""
    m = len(vectors)
    pairs = [(i, j) for i in range(m) for j in range(i, m)]
    products: list[Tensor] = []  # of each part, for each pair
    for parts in zip(*vectors, strict=True):
        wide = [_wide(part) for part in parts]
        products += [torch.dot(wide[i], wide[j]) for i, j in pairs]
    values = fetch([*products, *scalars])
    inner_products, gram = values[: len(products)], torch.zeros(m, m, dtype=torch.float64)
    for place, (i, j) in enumerate(pairs):
        gram[i, j] = _total(inner_products[place :: len(pairs)])
    return gram + gram.triu(1).T, values[len(products) :]


def _blockwise_gramian(vectors: Sequence[Vec]) -> Tensor:
    """Return `gramian` of vectors on the CPU, from blocks that gather the parts in float64.

    A float64 copy of a whole part does not fit in a CPU's cache, so that each inner product would
    read it from memory again.
    """
    largest = max((part.numel() for vector in vectors for part in vector), default=0)
    size = min(BLOCK, largest)
    block = torch.empty(len(vectors), size, dtype=torch.float64)
    gram, filled = torch.zeros(len(vectors), len(vectors), dtype=torch.float64), 0
    for parts in zip(*vectors, strict=True):
        flat_parts, start = [part.detach().flatten() for part in parts], 0
        while start < len(flat_parts[0]):
            taken = min(len(flat_parts[0]) - start, size - filled)
            for row, part in zip(block, flat_parts, strict=True):
                row[filled : filled + taken].copy_(part[start : start + taken])
            start, filled = start + taken, filled + taken
            if filled == size:
                gram.addmm_(block, block.T)
                filled = 0
    if filled:
        gram.addmm_(block[:, :filled], block[:, :filled].T)
    return gram.triu() + gram.triu(1).T


def combine(weights: Tensor | Sequence[float], vectors: Sequence[Vec]) -> Vec:
    """Return sum_i weights[i] * vectors[i].

    A vector with a weight of exactly 0 is left out, even if it is not finite. A weight that the
    tensors' type cannot hold counts as infinite, so that the sum is not finite.
    """
    return combine_and_free(weights, list(vectors))


def combine_and_free(weights: Tensor | Sequence[float], vectors: list[Vec]) -> Vec:
    """Return the result of `combine`, and empty the list `vectors`.

    Where the list has the only references to its tensors, each is freed as soon as its sum is
    computed. So there is never a copy of the vectors beside their sum.
    """
    terms = [(float(w), v) for w, v in zip(weights, vectors, strict=True) if float(w) != 0.0]
    if not terms:
        zeros = tuple(torch.zeros_like(part) for part in vectors[0])
        vectors.clear()
        return zeros
    factors, columns = [weight for weight, _ in terms], [deque(vector) for _, vector in terms]
    vectors.clear()
    terms.clear()
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"vectors of {', '.join(str(len(c)) for c in columns)} tensors")
    result = []
    while columns[0]:
        result.append(_weighted_sum(factors, [column.popleft() for column in columns]))
    return tuple(result)


def scaled_difference(u: list[Tensor], v: Vec, factor: float) -> Vec:
    """Return factor * (u - v), and empty the list u.

    Where it has the only references to its tensors, each is freed as soon as it was used.
    """
    remaining = deque(u)
    u.clear()
    if len(remaining) != len(v):
        raise ValueError(f"vectors of {len(remaining)} and {len(v)} tensors")
    result = []
    for part in v:
        result.append((remaining.popleft() - part).mul_(factor))
    return tuple(result)


def _weighted_sum(factors: Sequence[float], parts: Sequence[Tensor]) -> Tensor:
    total = parts[0] * factors[0]
    for factor, part in zip(factors[1:], parts[1:], strict=True):
        total.add_(part, alpha=_representable(factor, part.dtype))
    return total


def _representable(weight: float, dtype: torch.dtype) -> float:
    """Return the weight, or an infinity if the type cannot hold it.

    PyTorch multiplies a tensor by such a number, but refuses it as the factor of an addition.
    """
    return weight if abs(weight) <= torch.finfo(dtype).max else math.copysign(math.inf, weight)


def clip(u: Vec, largest: float) -> Vec:
    """Return u, scaled down to the norm `largest` if it is longer. A shorter one is u itself."""
    length = float(norm(u))
    return tuple(part * (largest / length) for part in u) if length > largest else u


def is_finite(u: Vec) -> bool:
    """Whether all entries are finite.

    They are if their sum is, which is quicker to compute. A sum may overflow without an infinite
    entry; then the entries are examined.
    """
    return has_finite_sums(u, fetch([part.sum() for part in u]))


def has_finite_sums(u: Vec, sums: Sequence[float]) -> bool:
    """Whether all entries of u are finite, given the sum of each of its tensors."""
    return all(
        math.isfinite(value) or bool(torch.isfinite(part).all())
        for part, value in zip(u, sums, strict=True)
    )


def spectral_norm(multiply: Callable[[Vec], Vec], like: Vec, iterations: int) -> float:
    """Return ||A|| of a symmetric matrix that is given by its products; 0 for A = 0.

    It uses power iteration from a fixed start.
    """
    generator = torch.Generator().manual_seed(0)
    v = tuple(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) for p in like)
    length = float(norm(v))
    for _ in range(iterations):
        if length == 0:
            return 0.0
        v = multiply(tuple(part / length for part in v))
        length = float(norm(v))
    return length


def cosine(gram: Tensor, i: int = 0, j: int = 1) -> float:
    """Return the cosine of vectors i and j from their Gram matrix; nan if one of them is zero."""
    scale = float(gram[i, i].sqrt() * gram[j, j].sqrt())
    return float(gram[i, j]) / scale if scale > 0 else float("nan")
