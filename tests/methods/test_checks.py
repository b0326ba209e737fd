"""The checks of the laws: each refuses methods that break its law, also by a little."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from concept_eraser.methods import checks
from concept_eraser.methods.base import Closure, Direction, GramMethod, Method

Solve = Callable[[Tensor], list[float]]


@dataclass(frozen=True)
class Weights(GramMethod):
    """The gradients' sum with weights that are a function of the Gram matrix."""

    title: ClassVar[str] = "Weights"
    source: ClassVar[str] = "a test"

    weights_of: Solve = lambda gram: [1.0, 1.0]
    removed_objective: str = "forget"

    def solve(self, gram: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        return torch.tensor(self.weights_of(gram), dtype=torch.float64), {}


@dataclass(frozen=True)
class GradientSum(Method):
    """The gradients' sum, changed by a function: a method whose direction has no weights."""

    title: ClassVar[str] = "GradientSum"
    source: ClassVar[str] = "a test"

    change: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def direction(self, closure: Closure) -> Direction:
        gradients = [closure.grad(objective) for objective in closure.objectives]
        return Direction(tuple(self.change(sum(parts)) for parts in zip(*gradients, strict=True)))


def unit_sum(error: float = 0.0) -> Solve:
    """Weights of the gradients divided by their norms, with a relative error of the second."""
    return lambda gram: [float(gram[0, 0] ** -0.5), float(gram[1, 1] ** -0.5) * (1 + error)]


def projection(error: float) -> Solve:
    """Weights that take the forget gradient's part out of the retain gradient, but for an error."""
    return lambda gram: [1.0, -float(gram[0, 1] / gram[1, 1]) * (1 - error)]


def projection_unless(condition: Callable[[float], bool]) -> Solve:
    """The exact projection, with a small error at some cosines of the gradients."""

    def solve(gram: Tensor) -> list[float]:
        cosine = float(gram[0, 1] / (gram[0, 0] * gram[1, 1]).sqrt())
        return projection(1e-6 if condition(cosine) else 0.0)(gram)

    return solve


def where(condition: Callable[[Tensor], bool], factor: float = 1 + 1e-5) -> Solve:
    """Weights of `unit_sum`, with another second weight for some Gram matrices."""
    return lambda gram: [
        float(gram[0, 0] ** -0.5),
        float(gram[1, 1] ** -0.5) * (factor if condition(gram) else 1.0),
    ]


def scaled(factor: float, solve: Solve = unit_sum()) -> Solve:
    """Other weights times a factor."""
    return lambda gram: [factor * weight for weight in solve(gram)]


BREAKS = [
    ("pareto_descent", Weights(lambda gram: [0.0, 0.0])),
    ("pareto_descent", Weights(lambda gram: [1.0, 1.0])),
    ("pareto_descent", Weights(lambda gram: [1.0, 0.0])),
    ("scale_invariance", Weights(lambda gram: [1.0, 1.0])),
    ("scale_invariance", Weights(lambda gram: [float(gram[0, 0] ** -0.5), 1.0])),
    ("scale_invariance", Weights(where(lambda gram: bool(gram[1, 1] > 1e15)))),
    ("scale_invariance", Weights(where(lambda gram: bool(gram[1, 1] < 1e-15)))),
    ("scale_invariance", Weights(where(lambda gram: bool(1e-5 < gram[1, 1] < 1e-3)))),
    ("permutation", Weights(lambda gram: [1.0, 1.0 + 1e-6])),
    ("permutation", Weights(lambda gram: [1.0, 1.0 + 1e-6 * float(gram.trace() < 1e-3)])),
    ("equal_contribution", Weights(lambda gram: [1.0, 1.0])),
    ("equal_contribution", Weights(unit_sum(1e-7))),
    ("equal_contribution", Weights(unit_sum(-1e-7))),
    ("orthogonality", Weights(projection(1e-6))),
    ("orthogonality", Weights(projection_unless(lambda cosine: cosine < -0.8))),
    ("orthogonality", Weights(projection_unless(lambda cosine: cosine > 0.8))),
    ("orthogonality", Weights(projection(0.0), removed_objective="retain")),
    ("orthogonality", Weights(projection(1e-11))),  # the angle counts, whatever the lengths
    ("orthogonality", Weights(scaled(1e-4, projection(1e-9)))),
    ("forget_sign", Weights(lambda gram: [1.0, 1.0])),
    ("stationarity", Weights(lambda gram: [1.0, 1.0])),
    ("stationarity", Weights(where(lambda gram: bool(gram[1, 1] < 1e-4 * gram[0, 0]), 2.0))),
    ("stationarity", Weights(where(lambda gram: bool(gram[1, 1] > 1e4 * gram[0, 0]), 2.0))),
    ("stationarity", Weights(unit_sum(1.5e-6))),
    ("stationarity", Weights(scaled(100, unit_sum(1.5e-6)))),
    ("zero_step", GradientSum(lambda tensor: tensor + 1e-9)),
    ("shapes", GradientSum(lambda tensor: tensor.double())),
    ("shapes", GradientSum(lambda tensor: tensor[None])),
]


@pytest.mark.parametrize(("law", "method"), BREAKS)
def test_a_method_that_breaks_a_law_is_refused(law: str, method: Method) -> None:
    with pytest.raises(checks.LawError, match=f"^{type(method).__name__}, {law}: "):
        checks.check_law(law, method)


HOLDS = [
    ("pareto_descent", Weights(unit_sum())),
    ("scale_invariance", Weights(unit_sum())),
    ("permutation", Weights(lambda gram: [1.0, 1.0])),
    ("equal_contribution", Weights(unit_sum(1e-12))),
    ("orthogonality", Weights(projection(0.0))),
    ("forget_sign", Weights(lambda gram: [1.0, 0.0])),
    ("stationarity", Weights(unit_sum())),
    ("stationarity", Weights(scaled(100, unit_sum(0.7e-6)))),  # the tolerance is relative
    ("stationarity", Weights(scaled(1e12))),  # its step is zero up to rounding
    ("stationarity", Weights(lambda gram: [1e-12, 1e-12])),  # too short to count as a step
    ("zero_step", GradientSum()),
    ("shapes", GradientSum()),
]


@pytest.mark.parametrize(("law", "method"), HOLDS)
def test_a_method_that_holds_it_passes(law: str, method: Method) -> None:
    checks.check_law(law, method)


def test_every_law_is_broken_here_once() -> None:
    laws = checks.LAWS.keys() | checks.ALWAYS.keys()
    assert {law for law, _ in BREAKS} == {law for law, _ in HOLDS} == laws


@pytest.mark.parametrize("law", ["equal_contribution", "stationarity"])
def test_a_law_about_weights_needs_weights(law: str) -> None:
    with pytest.raises(checks.LawError, match="the direction has no weights"):
        checks.check_law(law, GradientSum())


def test_the_removed_gradient_must_be_named() -> None:
    with pytest.raises(checks.LawError, match="`removed_objective`: 'retain' or 'forget'"):
        checks.check_law("orthogonality", Weights(projection(0.0), removed_objective="attack"))


def test_pairs_have_their_cosines_and_norms() -> None:
    for cosine in checks.COSINES:
        first, second = (checks.flat(v) for v in checks.pair(cosine, 3.0, 0.5, seed=2))
        assert float(first.norm()) == pytest.approx(3.0)
        assert float(second.norm()) == pytest.approx(0.5)
        assert float(first @ second) / 1.5 == pytest.approx(cosine)
    assert len(checks.PAIRS) == len(checks.COSINES) * len(checks.SCALES) ** 2
    for vector in checks.pair(0.3, 1.0, 1.0):
        sizes = [len(part) for part in vector]
        assert len(set(sizes)) == 3, "a mistaken order of the tensors is an error of shape"
        assert sum(sizes) == 12, "a dozen numbers, as the module says"


def test_the_pairs_reach_from_opposed_to_parallel_and_over_all_lengths() -> None:
    for values in (checks.SCALES, checks.COSINES):
        assert list(values) == sorted(set(values))
    assert checks.SCALES[0] == 1e-12
    assert checks.SCALES[-1] == 1e12
    assert checks.COSINES[0] < -0.99999
    assert checks.COSINES[-1] == 1.0
    assert {-0.9, 0.0, 0.9} <= set(checks.COSINES)


def test_the_closure_of_fixed_gradients_counts_its_calls() -> None:
    retain, forget = checks.pair(0.3, 1.0, 1.0)
    fixed = checks.closure(retain, forget)
    assert (fixed.step, fixed.inner, fixed.last_loss) == (0, (), 0.0)
    assert fixed.terms("forget") == 1
    fixed.grad("forget")
    assert len(fixed.grad("retain", [0, 2])) == 2
    assert fixed.requests == ["forget", "retain"]


@dataclass(frozen=True)
class Declaring(Weights):
    """Weights that declare laws."""

    names: frozenset[str] = frozenset()

    def laws(self) -> frozenset[str]:
        return self.names


def test_all_declared_laws_are_checked() -> None:
    laws_of_unit_sum = frozenset({"scale_invariance", "equal_contribution"})
    method = Declaring(
        lambda gram: unit_sum()(gram) if gram.trace() > 0 else [0.0, 0.0], names=laws_of_unit_sum
    )
    laws = checks.check_laws(method)
    assert laws == ("equal_contribution", "scale_invariance", "zero_step", "shapes")
    with pytest.raises(checks.LawError, match="Declaring declares nothing; known laws: pareto"):
        checks.check_laws(Declaring(unit_sum(), names=frozenset({"nothing"})))
    with pytest.raises(TypeError, match="expected a Method, found str"):
        checks.check_laws("munba")  # type: ignore[arg-type]


@pytest.mark.parametrize("law", sorted(checks.LAWS))
def test_a_declared_law_that_does_not_hold_is_refused(law: str) -> None:
    """`check_laws` reports the law; a method without a declared law passes."""
    breaking = next(method for name, method in BREAKS if name == law)
    assert isinstance(breaking, Weights)
    declared = Declaring(breaking.weights_of, breaking.removed_objective, frozenset({law}))
    with pytest.raises(checks.LawError, match=f"^Declaring, {law}: "):
        checks.check_laws(declared)


def test_pairs_are_three_tensors_and_the_same_each_time() -> None:
    """The numbers of `pair(0.3, 1.0, 2.0)` with torch's generator on the CPU, seed 0."""
    assert checks.SCALES == (1e-12, 1e-8, 1e-3, 1.0, 1e4, 1e12)
    retain, forget = checks.pair(0.3, 1.0, 2.0)
    assert [tuple(part.shape) for part in retain] == [(3,), (4,), (5,)]
    assert [tuple(part.shape) for part in forget] == [(3,), (4,), (5,)]
    same = checks.pair(0.3, 1.0, 2.0, seed=0)
    for one, other in zip((retain, forget), same, strict=True):
        assert torch.equal(checks.flat(one), checks.flat(other))
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(2))
    assert float(checks.flat(retain) @ first) == pytest.approx(float(first.norm()))
    assert float(checks.flat(forget) @ (second - second @ first / (first @ first) * first)) > 0


@pytest.mark.parametrize(
    ("law", "solve", "calls"),
    [
        ("scale_invariance", unit_sum(), 5 * 7),  # a pair as it is, and four factors
        ("permutation", lambda gram: [1.0, 1.0], 2 * 36),
        ("orthogonality", projection(0.0), 5 * 5),  # five seeds of each cosine inside
        ("forget_sign", lambda gram: [1.0, 0.0], 2 * 51),
    ],
)
def test_how_many_pairs_a_law_tries(law: str, solve: Solve, calls: int) -> None:
    grams: list[Tensor] = []
    checks.check_law(law, Weights(lambda gram: grams.append(gram.clone()) or solve(gram)))
    assert len(grams) == calls
    lengths = {"scale_invariance": [1.0, 1.0], "orthogonality": [9.0, 0.04]}.get(law)
    if lengths is not None:
        assert grams[0].diagonal().tolist() == pytest.approx(lengths)


def shown(law: str, method: Weights) -> list[tuple[float, float, float]]:
    """The lengths of the gradients and their cosine, for each pair that a law shows a method."""
    pairs: list[tuple[float, float, float]] = []

    def recorded(gram: Tensor) -> list[float]:
        first, second = (float(square) ** 0.5 for square in gram.diagonal())
        pairs.append((first, second, float(gram[0, 1]) / (first * second)))
        return method.weights_of(gram)

    checks.check_law(law, Weights(recorded, method.removed_objective))
    return pairs


def test_what_a_method_is_shown_for_scale_invariance() -> None:
    """Unit gradients at all cosines, and the second one at five lengths over 16 decades."""
    lengths = (1.0, 1e-8, 0.01, 100.0, 1e8)
    expected = [(1.0, length, c) for c in checks.COSINES for length in lengths]
    pairs = shown("scale_invariance", Weights(unit_sum()))
    assert len(pairs) == len(expected)
    for found, wanted in zip(pairs, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_what_a_method_is_shown_for_orthogonality() -> None:
    """A long and a short gradient at five angles, each of five directions."""
    pairs = shown("orthogonality", Weights(projection(0.0)))
    expected = [(3.0, 0.2, c) for c in (-0.9, -0.3, 0.0, 0.3, 0.9) for _ in range(5)]
    assert len(pairs) == 25
    for found, wanted in zip(pairs, expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-12)


def test_what_a_method_is_shown_for_stationarity() -> None:
    """Opposed gradients, a thousandth as long, as long, and a thousand times as long; twice each:
    for the step and for its weights.
    """
    pairs = shown("stationarity", Weights(unit_sum()))
    expected = [(1.0, ratio, -1.0) for ratio in (1e-3, 1.0, 1e3) for _ in range(2)]
    assert len(pairs) == 6
    for found, wanted in zip(pairs, expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-12)


def test_how_many_pairs_show_that_the_order_and_the_sign_do_not_matter() -> None:
    """Every seventh and every fifth of 252 pairs, so that all cosines and lengths occur."""
    assert len(shown("permutation", Weights(unit_sum()))) == 2 * 36
    assert len(shown("forget_sign", Weights(lambda gram: [1.0, 0.0]))) == 2 * 51
