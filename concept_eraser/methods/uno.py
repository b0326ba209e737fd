"""UNO: unlearning via orthogonalisation in generative models (Mandal & Gottwald, arXiv 2506.04712).

With g_r, g_f the gradients of the same training loss on a retain and a forget batch and c =
cos(g_r, g_f),

    L_UNO = L_r + beta c^2,            theta <- theta - eta grad L_UNO.

Descending c^2 moves the model to where a step on the retain batch no longer helps the forget batch.
UNO-S takes a UNO step and a surgery step S in turn. The gradient of c^2 needs two Hessian-vector
products only:

    a = g_f / (|g_f||g_r|) - c g_r / |g_r|^2,   b = g_r / (|g_f||g_r|) - c g_f / |g_f|^2,
    grad c^2 = 2 c (H_r a + H_f b),

since dc/dg_r = a and dc/dg_f = b. So the graphs of the two losses are never in memory together.
With central differences (`hvp: difference`) there is no graph of a gradient either. So UNO runs on
a UNet with fused attention.

Products by differences are right for smooth activations only. A ReLU, a LeakyReLU or a maximum has
kinks. Where a kink lies between the two points of a difference, the gradient jumps, and the
difference has the jump divided by the step. A smaller step meets fewer kinks, and each then counts
for more. The exact product, which the paper's code computes, has no such jumps. So `hvp: checked`
compares the two at the first step, and again at steps 2, 4, 8, ... It uses forward differences,
which take one pass in place of two, while they and central ones agree with the exact products to
TOLERANCE. From the first check on that they fail it uses central differences, and where these fail
it uses exact products. On the bundled UNet forward differences are wrong by 0.4 to 1.0 %, central
ones by 0.02 % or less. tests/methods/test_uno.py has the errors on networks with ReLU and with
SiLU.

The hat versions add a loss that uses a classifier to separate retained from forgotten samples: the
objective `histogram`, with gradient h. g_r and g_f become g_r + beta_h h and g_f + beta_h h
everywhere above (and in S). This gives UNO^, UNO^-S^ and S^; H is L_r + beta_h d_KL alone.

Deliberate differences from the paper and its code:
* beta. The paper writes mean losses, its MNIST code sums over 128 x 784 terms with beta = 1e3. A
  beta means nothing without its reduction, so both are options, and the defaults are those of the
  code. `reduction: sum` multiplies every mean loss by its number of terms. So it also lengthens
  the step, which matters to SGD and not to Adam. Published values range from 0.02 to 1e5.
* `strength: auto` is ours. It sets ||beta grad c^2|| = ratio ||g_r|| anew at every step, so it
  needs no knowledge of the losses' scale. It has a fault: grad c^2 vanishes as c goes to 0, and the
  penalty's step does not. So c overshoots 0, and beta varies over orders of magnitude. On three
  small networks of tests/methods/test_uno.py, over 50 steps of Adam at 0.03, beta is between 0.16
  and 298. At the end |c| is 0.34, 0.02 and 0.13. With the fixed beta it is 0.02 in all three.
* The forget loss enters through c^2 only, which does not depend on its sign: give it the loss
  `data`.
* An unconditional model only has to forget. A prompted model must generate something else instead.
  The authors' extension to class labels adds the training loss of retained images under the
  forgotten label. Here that is the objective `replace` (for example with the loss `relabel`). As in
  their code, L_r is then the sum of both losses everywhere, also in c^2 and in S (pinakm9/forget,
  modules/imagenet/ortho.py, lines 42-57, and surgery.py, lines 29-36). An older commit of theirs,
  2235ac98, has it outside of c^2.
* Surgery in UNO-S always projects, as in the paper (PCGrad only on conflict).
* Steps are counted from 0: step 0 is UNO, step 1 is S. The authors' code has the same order
  (pinakm9/forget, modules/mnist/vae_os.py, lines 81-94).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from concept_eraser.methods.base import (
    Closure,
    Direction,
    HessianProduct,
    Method,
    NoSecondDerivative,
    usable,
)
from concept_eraser.methods.surgery import Surgery
from concept_eraser.methods.vectors import (
    Vec,
    combine,
    combine_and_free,
    gramian,
    norm,
    scaled_difference,
)

Weights = Mapping[str, float]  # a sum of gradients: the weight of each objective's own gradient
TOLERANCE = 0.02  # the largest relative error of difference products that are used
# what `hvp: checked` decided; without a second derivative there is no check
DIFFERENCE, EXACT, UNCHECKED, FORWARD = 0, 1, 2, 3
CHOICES: dict[int, HessianProduct] = {
    FORWARD: "forward",
    DIFFERENCE: "difference",
    EXACT: "exact",
    UNCHECKED: "difference",
}

NAMED = {
    "uno-s": {"alternate": True},
    "uno-hat": {"histogram": 1000.0},
    "uno-s-hat": {"alternate": True, "histogram": 1000.0},
    "s-hat": {"rule": "surgery", "histogram": 1000.0},
    "h": {"rule": "none", "histogram": 1000.0},
}


@dataclass(frozen=True)
class Uno(Method):
    """Orthogonalise the retain and the forget gradient by descending their squared cosine.

    Args:
        rule: uno; surgery (S at every step, for S^); none (no c^2 term, for H).
        alternate: UNO at even steps, S at odd ones (UNO-S).
        strength: beta, or auto: ||beta grad c^2|| = ratio ||g_r||. With auto the penalty does not
            vanish as the gradients become orthogonal, so their cosine oscillates.
        ratio: The ratio of strength: auto.
        reduction: sum or mean, the reduction of the losses to which beta refers. With sum all
            losses, and so the step, are multiplied by their numbers of terms.
        hvp: checked (the quickest of the others that agrees with exact products), forward or
            difference (forward or central differences, any attention kernel), or exact (double
            backward, one loss at a time).
        size: The step of the difference along the unit vector, in units of the parameters.
        histogram: beta_h, the weight of the objective `histogram`; 0 for none.
    """

    title: ClassVar[str] = "UNO: Unlearning via Orthogonalisation in generative models"
    source: ClassVar[str] = "arXiv 2506.04712"
    defaults: ClassVar[Mapping[str, str]] = {
        "rule": "the paper, section 3",
        "alternate": "the paper: UNO",
        "strength": "the paper's code for MNIST",
        "ratio": "ours",
        "reduction": "the paper's code for MNIST (its text has means)",
        "hvp": "ours (the paper's code: exact)",
        "size": "ours, measured on the bundled UNet",
        "histogram": "the paper: UNO without a judge",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"forget_sign"})
    needs_fp32: ClassVar[bool] = True

    rule: Literal["uno", "surgery", "none"] = "uno"
    alternate: bool = False
    strength: float | Literal["auto"] = 1000.0
    ratio: float = 1.0
    reduction: Literal["mean", "sum"] = "sum"
    hvp: HessianProduct | Literal["checked"] = "checked"
    size: float = 0.01
    histogram: float = 0.0
    _state: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength != "auto" and self.strength < 0:
            raise ValueError(f"strength must be 'auto' or >= 0, found {self.strength}")
        if self.ratio <= 0 or self.size <= 0 or self.histogram < 0:
            raise ValueError(
                f"ratio and size must be > 0 and histogram >= 0, found {self.ratio}, "
                f"{self.size}, {self.histogram}"
            )
        if self.rule == "none" and self.alternate:
            raise ValueError(
                "alternate needs a rule to alternate with: uno or surgery, found rule 'none'"
            )

    def laws(self) -> frozenset[str]:
        # the histogram loss depends on its sign; the rule none has no term c^2
        return frozenset() if self.histogram or self.rule == "none" else self.theorems

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        names = {
            "retain",
            "forget",
            "replace",
            *(["histogram"] if self.histogram else []),
        }
        missing = sorted(names - {"replace"} - set(objectives))
        if missing:
            hint = (
                "the hat versions need the recipe's section `histogram`, which has a judge"
                if "histogram" in missing
                else "give the recipe these objectives"
            )
            raise ValueError(
                f"UNO with these options needs {', '.join(missing)} beside "
                f"{', '.join(objectives)}: {hint}"
            )
        if set(objectives) - names:
            raise ValueError(
                f"UNO has no use for {', '.join(sorted(set(objectives) - names))}"
                + ("; set histogram > 0 to use it" if "histogram" in objectives else "")
            )

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        retain = self._weights(closure, "retain")
        forget = {} if self.rule == "none" else self._weights(closure, "forget")
        own = {name: closure.grad(name) for name in {**retain, **forget}}
        gram = _gram_of_sums(own, [retain, forget])
        notes: dict[str, float] = {
            "degenerate": int(self.rule != "none" and not bool(usable(gram).all()))
        }
        if self.rule == "surgery" or (self.alternate and closure.step % 2 == 1):
            step = _materialise(own, _sum(Surgery("descent").weights(gram), [retain, forget]))
        elif self.rule == "uno" and not notes["degenerate"]:
            slope, check = self._slope(closure, own, retain, forget, gram=gram)
            slope_norm = float(norm(slope))
            beta = self._beta(slope_norm, float(gram[0, 0].sqrt()))
            vectors = [*(own[name] for name in retain), slope]
            step = combine([*retain.values(), beta], vectors)
            notes |= {"beta": beta, "slope_norm": slope_norm, **check}
        else:
            step = _materialise(own, retain)
        return Direction(step, gram, None, notes)

    def _weights(self, closure: Closure, objective: str) -> Weights:
        """Return g_r or g_f as a sum of the objectives' gradients.

        The anchor term is a part of g_r. The hat versions add beta_h times the histogram's gradient
        to both.
        """
        weights = {objective: self._scale(closure, objective)}
        if objective == "retain" and "replace" in closure.objectives:
            weights["replace"] = self._scale(closure, "replace")
        return {**weights, "histogram": self.histogram} if self.histogram else weights

    def _scale(self, closure: Closure, objective: str) -> float:
        """Return the factor that turns a mean-reduced loss into a sum.

        d_KL is no mean, so its factor is 1.
        """
        return float(closure.terms(objective)) if self.reduction == "sum" else 1.0

    def _slope(
        self,
        closure: Closure,
        own: Mapping[str, Vec],
        retain: Weights,
        forget: Weights,
        *,
        gram: torch.Tensor,
    ) -> tuple[Vec, dict[str, float]]:
        """Return grad c^2 = 2 c (H_r a + H_f b), and notes on its products for the log."""
        norms = gram.diagonal().sqrt()
        c = float(gram[0, 1] / norms[0] / norms[1])
        scale = 1 / float(norms[0] * norms[1])
        a = _sum([scale, -c / float(gram[0, 0])], [forget, retain])
        b = _sum([scale, -c / float(gram[1, 1])], [retain, forget])
        vectors, factors = {}, {}
        for name, weight in {**retain, **forget}.items():
            parts = [v for v, weights in ((a, retain), (b, forget)) if name in weights]
            vectors[name] = _sum([1.0] * len(parts), parts)  # the histogram's Hessian is in both
            factors[name] = 2 * c * weight
        products = _Products(closure, own, vectors, factors, size=self.size)
        if self.hvp == "checked":
            return self._checked(closure.step, products)
        return products.sum(self.hvp), {}

    def _checked(self, step: int, products: _Products) -> tuple[Vec, dict[str, float]]:
        """Return the sum of difference products where they are right, and of exact ones elsewhere.

        A network with few kinks can pass one check by chance, so there are further ones, at steps
        that are powers of two. A failed check is final.
        """
        choice = int(self._state["choice"]) if "choice" in self._state else None
        is_power_of_two = step & (step - 1) == 0
        if choice is not None and not (choice in (FORWARD, DIFFERENCE) and is_power_of_two):
            return products.sum(CHOICES[choice]), {"exact_products": int(choice == EXACT)}
        try:
            expected = products.sum("exact")
        except (NoSecondDerivative, torch.OutOfMemoryError):
            self._state["choice"] = torch.tensor(UNCHECKED)
            return products.sum(CHOICES[UNCHECKED]), {"exact_products": 0, "unchecked": 1}
        errors = {
            candidate: _relative_error(products.sum(CHOICES[candidate]), expected)
            for candidate in (DIFFERENCE, FORWARD)
        }
        decision = EXACT
        if errors[DIFFERENCE] <= TOLERANCE:
            # a forward difference alone may miss the kinks on the other side
            may_be_forward = choice != DIFFERENCE and errors[FORWARD] <= TOLERANCE
            decision = FORWARD if may_be_forward else DIFFERENCE
        self._state["choice"] = torch.tensor(decision)
        return expected, {
            "exact_products": 1,
            "difference_error": errors[DIFFERENCE],
            "forward_error": errors[FORWARD],
        }

    def _beta(self, slope_norm: float, retain_norm: float) -> float:
        if self.strength != "auto":
            return float(self.strength)
        return self.ratio * retain_norm / slope_norm if slope_norm > 0 else 0.0


@dataclass(frozen=True)
class _Products:
    """The Hessian products of one step.

    Attributes:
        closure: The losses.
        own: The gradient of each objective alone.
        vectors: For each objective the vector that its Hessian multiplies, as a sum of gradients.
        factors: The factor of each product in their sum.
        size: The step of differences.
    """

    closure: Closure
    own: Mapping[str, Vec]
    vectors: Mapping[str, Weights]
    factors: Mapping[str, float]
    size: float

    def sum(self, how: HessianProduct) -> Vec:
        """Return the sum of all products. One vector and one product are in memory beside it."""
        total: list[Vec] = []
        for name, weights in self.vectors.items():
            vector = _materialise(self.own, weights)
            base = self.own.get(name)
            parts = [*total, self.closure.hvp(name, vector, how, self.size, base=base)]
            total.clear()
            total.append(combine_and_free([1.0, self.factors[name]][-len(parts) :], parts))
        return total[0]


def _sum(factors: Sequence[float] | Tensor, sums: Sequence[Weights]) -> Weights:
    """Return the sum of some sums of gradients, each times a factor."""
    names = dict.fromkeys(name for one in sums for name in one)
    pairs = list(zip(map(float, factors), sums, strict=True))
    return {name: sum(factor * one.get(name, 0.0) for factor, one in pairs) for name in names}


def _materialise(own: Mapping[str, Vec], weights: Weights) -> Vec:
    """Return a sum of gradients as a vector. A single gradient of weight 1 is itself."""
    if list(weights.values()) == [1.0]:
        return own[next(iter(weights))]
    return combine(list(weights.values()), [own[name] for name in weights])


def _gram_of_sums(own: Mapping[str, Vec], sums: Sequence[Weights]) -> Tensor:
    """Return the inner products of sums of gradients, [m, m] float64 on the CPU."""
    rows = torch.tensor([[one.get(name, 0.0) for name in own] for one in sums], dtype=torch.float64)
    return rows @ gramian(list(own.values())) @ rows.T


def _relative_error(value: Vec, expected: Vec) -> float:
    """Return ||value - expected|| / ||expected||; 0 if both are 0."""
    distance = float(norm(scaled_difference(list(value), expected, 1.0)))
    length = float(norm(expected))
    return distance / length if length > 0 else float("inf") if distance > 0 else 0.0


PLUGIN = Uno
