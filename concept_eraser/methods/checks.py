"""The laws that methods declare. Each is one check for any method, also of another package.

    from concept_eraser.methods.checks import check_laws

    def test_my_method() -> None:
        check_laws(MyMethod())

A law is checked on pairs of gradients of many lengths and cosines, on vectors of a dozen numbers. A
method declares its laws in `theorems`, or in `laws()` if they depend on its options.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from concept_eraser.methods.base import HessianProduct, Method
from concept_eraser.methods.vectors import Vec, dot, gramian, norm

SCALES = (1e-12, 1e-8, 1e-3, 1.0, 1e4, 1e12)
COSINES = (-0.999999, -0.9, -0.3, 0.0, 0.3, 0.9, 1.0)


def pair(cosine: float, first: float, second: float, *, seed: int = 0) -> tuple[Vec, Vec]:
    """Two vectors of three float64 tensors with the given cosine and norms."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (3, 4, 5)
    a = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    b = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    a = a / a.norm()
    b = b - (a @ b) * a
    b = b / b.norm()
    v = cosine * a + (1 - cosine**2) ** 0.5 * b
    return split(a * first, sizes), split(v * second, sizes)


def split(x: Tensor, sizes: tuple[int, ...]) -> Vec:
    return tuple(x.split(sizes))


PAIRS = [pair(c, a, b) for c, a, b in itertools.product(COSINES, SCALES, SCALES)]


@dataclass
class Fixed:
    """A closure with fixed gradients, whose Hessians are therefore zero.

    It counts the calls of `grad`.
    """

    gradients: dict[str, Vec]
    step: int = 0
    inner: tuple[int, ...] = ()
    last_loss: float = 0.0
    requests: list[str] = field(default_factory=list)

    params: Vec = field(init=False)

    def __post_init__(self) -> None:
        self.params = tuple(torch.zeros_like(part) for part in next(iter(self.gradients.values())))

    @property
    def objectives(self) -> tuple[str, ...]:
        return tuple(self.gradients)

    def grad(self, objective: str, of: Sequence[int] | None = None) -> Vec:
        self.requests.append(objective)
        return (
            self.gradients[objective]
            if of is None
            else tuple(self.gradients[objective][i] for i in of)
        )

    def gramian(self, gradients: Sequence[Vec]) -> Tensor:
        return gramian(gradients)

    def terms(self, objective: str) -> int:
        return 1

    def at(self, offset: Vec) -> AbstractContextManager[None]:
        return nullcontext()

    def hvp(
        self,
        objective: str,
        v: Vec,
        how: HessianProduct = "difference",
        size: float = 0.01,
        *,
        base: Vec | None = None,
        of: Sequence[int] | None = None,
    ) -> Vec:
        return tuple(torch.zeros_like(part) for part in self.params)


def closure(retain: Vec, forget: Vec, method: Method | None = None) -> Fixed:
    """Return a closure with two objectives.

    For a method with a lower-level problem it also has an attack that is solved already, and for
    one against a later fine-tuning a fine-tuning that changes nothing.
    """
    gradients = {"retain": retain, "forget": forget}
    if method is not None and method.needs_attack:
        gradients["attack"] = tuple(torch.zeros_like(part) for part in retain)
    if method is not None and method.needs_relearning:
        gradients["relearn"] = tuple(torch.zeros_like(part) for part in retain)
    return Fixed(gradients)


def flat(v: Vec) -> Tensor:
    return torch.cat([part.flatten() for part in v])


class LawError(AssertionError):
    """A method does not satisfy a law that it declares. The message has the law and the numbers."""


def check_laws(method: Method) -> tuple[str, ...]:
    """Check every law that a method declares, and those that hold for all methods.

    Args:
        method: The method with the options to be checked.

    Returns:
        The names of the laws that were checked.

    Raises:
        TypeError: The argument is no `Method`. An edit's laws need a model; see
        tests/methods/test_laws.py.
        LawError: The method declares an unknown law, or a law does not hold.
    """
    if not isinstance(method, Method):
        raise TypeError(f"expected a Method, found {type(method).__name__}")
    unknown = method.laws() - LAWS.keys()
    if unknown:
        raise LawError(
            f"{type(method).__name__} declares {', '.join(sorted(unknown))}; known laws: "
            f"{', '.join(LAWS)}"
        )
    law_names = (*sorted(method.laws()), *ALWAYS)
    for law in law_names:
        check_law(law, method)
    return law_names


def check_law(law: str, method: Method) -> None:
    """Check one law, on a copy of the method without the state of earlier steps.

    Raises LawError if the law does not hold.
    """
    try:
        (LAWS | ALWAYS)[law](replace(method))  # type: ignore[type-var]  # every method is a dataclass
    except AssertionError as error:
        raise LawError(f"{type(method).__name__}, {law}: {error}") from error


def _require(holds: bool, finding: str) -> None:
    if not holds:
        raise LawError(finding)


def pareto_descent(method: Method) -> None:
    """<g, g_i> > 0 for both objectives, wherever the gradients are not opposed."""
    for retain, forget in PAIRS:
        direction = method.direction(closure(retain, forget, method)).vec
        for name, gradient in (("retain", retain), ("forget", forget)):
            inner = float(dot(direction, gradient))
            _require(inner > 0, f"<g, g_{name}> is {inner:.3g}")


def scale_invariance(method: Method) -> None:
    """Multiplying one loss by a constant changes nothing."""
    for cosine in COSINES:
        retain, forget = pair(cosine, 1.0, 1.0)
        expected = flat(method.direction(closure(retain, forget, method)).vec)
        for scale in (1e-8, 0.01, 100.0, 1e8):
            scaled_direction = flat(
                method.direction(closure(retain, tuple(scale * p for p in forget), method)).vec
            )
            torch.testing.assert_close(scaled_direction, expected, rtol=1e-6, atol=1e-9)


def permutation(method: Method) -> None:
    """The order of the objectives does not matter."""
    for retain, forget in PAIRS[::7]:
        objectives = closure(retain, forget, method)
        one = flat(method.direction(objectives).vec)
        other = flat(method.direction(Fixed(dict(reversed(objectives.gradients.items())))).vec)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=0)


def equal_contribution(method: Method) -> None:
    """a_r ||g_r|| = a_f ||g_f|| for the weights of the direction."""
    for retain, forget in PAIRS:
        weights = _weights(method, retain, forget)
        ratio = float(weights[0] * norm(retain) / (weights[1] * norm(forget)))
        _require(abs(ratio - 1) <= 1e-9, f"a_r ||g_r|| / (a_f ||g_f||) is {ratio!r}")


def stationarity(method: Method) -> None:
    """The step is zero if the gradients are opposed, because no step serves both objectives."""
    for ratio in (1e-3, 1.0, 1e3):
        retain, _ = pair(0.3, 1.0, 1.0)
        forget = tuple(-ratio * p for p in retain)
        length = float(norm(method.direction(closure(retain, forget, method)).vec))
        weights = _weights(replace(method), retain, forget)  # type: ignore[type-var]
        parts = max(1.0, *(float(w) * size for w, size in zip(weights, (1.0, ratio), strict=True)))
        _require(length <= 1e-6 * parts, f"||g|| is {length:.3g} for opposed gradients")


def orthogonality(method: Method) -> None:
    """The direction is orthogonal to the gradient that was projected away.

    The attribute `removed_objective` of the method names this gradient.
    """
    removed_objective = getattr(method, "removed_objective", None)
    _require(
        removed_objective in ("retain", "forget"),
        "the method needs the attribute `removed_objective`: 'retain' or 'forget'",
    )
    for cosine in COSINES[1:-1]:
        for seed in range(5):
            retain, forget = pair(cosine, 3.0, 0.2, seed=seed)
            direction = method.direction(closure(retain, forget, method)).vec
            gradient = forget if removed_objective == "forget" else retain
            overlap = abs(float(dot(direction, gradient) / norm(gradient) / norm(direction)))
            _require(overlap < 1e-12, f"|cos(g, g_{removed_objective})| is {overlap:.3g}")


def forget_sign(method: Method) -> None:
    """The direction is the same for the forget loss and for its negative."""
    for retain, forget in PAIRS[::5]:
        one = flat(method.direction(closure(retain, forget, method)).vec)
        other = flat(method.direction(closure(retain, tuple(-p for p in forget), method)).vec)
        torch.testing.assert_close(one, other)


def zero_step(method: Method) -> None:
    """Two gradients of zero give a step of zero."""
    retain, forget = pair(0.3, 0.0, 0.0)
    length = float(norm(method.direction(closure(retain, forget, method)).vec))
    _require(length == 0, f"||g|| is {length:.3g} for two gradients of zero")


def shapes(method: Method) -> None:
    """The direction has the shapes and types of the parameters."""
    retain, forget = (tuple(p.float() for p in v) for v in pair(0.3, 1.0, 2.0))
    direction = method.direction(closure(retain, forget, method)).vec
    layout = [(p.shape, p.dtype) for p in direction]
    _require(layout == [(p.shape, p.dtype) for p in retain], f"the direction is {layout}")


def _weights(method: Method, retain: Vec, forget: Vec) -> Tensor:
    weights = method.direction(closure(retain, forget, method)).weights
    if weights is None:
        raise LawError("the direction has no weights, which this law needs")
    return weights


LAWS: dict[str, Callable[[Method], None]] = {
    "pareto_descent": pareto_descent,
    "scale_invariance": scale_invariance,
    "permutation": permutation,
    "equal_contribution": equal_contribution,
    "orthogonality": orthogonality,
    "forget_sign": forget_sign,
    "stationarity": stationarity,
}
ALWAYS: dict[str, Callable[[Method], None]] = {"zero_step": zero_step, "shapes": shapes}
