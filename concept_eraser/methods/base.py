"""The base classes of methods. A method turns the gradients of several losses into one step.

Methods see tensors only, never a model. The closure names the objectives and gives their order:
"retain", "forget" and possibly others.
"""

from __future__ import annotations

import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from concept_eraser.methods.vectors import Vec, combine_and_free, is_finite

HessianProduct = Literal["difference", "forward", "exact"]


class NoSecondDerivative(ValueError):
    """An exact Hessian product is not possible: see `Closure.hvp`."""


class Closure(Protocol):
    """The losses of one step as functions of the trainable parameters.

    All gradients of a step are of the same examples, time steps and noise. They are averaged over
    micro-batches and ranks. All losses are to be minimised: gradient ascent is a loss with a minus
    sign.
    """

    step: int  # counted from 0; rules that alternate use it, so a resumed run alternates alike
    params: Vec
    # positions in params of the variable of a lower-level problem; () where there is none
    inner: tuple[int, ...]

    @property
    def last_loss(self) -> float:
        """Return the value of the loss whose gradient was computed last."""
        ...

    @property
    def objectives(self) -> tuple[str, ...]:
        """Return the names of the objectives of this step."""
        ...

    def grad(self, objective: str, of: Sequence[int] | None = None) -> Vec:
        """Return the gradient of an objective's loss.

        Args:
            objective: The name of the objective.
            of: Positions in `params`; None for all parameters.
        """
        ...

    def gramian(self, gradients: Sequence[Vec]) -> Tensor:
        """Return all inner products of m gradients: [m, m] float64 on the CPU.

        The losses are read with them, so that the host waits for a GPU once.
        """
        ...

    def terms(self, objective: str) -> int:
        """Return the number of terms in the mean of an objective's loss.

        The loss times this number is its sum-reduced form.
        """
        ...

    def at(self, offset: Vec) -> AbstractContextManager[None]:
        """Take gradients at params + offset inside the context.

        Afterwards the parameters have their earlier values, bit for bit.
        """
        ...

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
        """Return the Hessian of an objective's loss times v.

        Args:
            objective: The name of the objective.
            v: The vector.
            how: "exact" for double backward; "difference" for central differences of `grad`;
                "forward" for the difference between one further gradient and `base`.
            size: The step of the differences: params +- size v / ||v||.
            base: The objective's gradient at the present parameters, for "forward". Without it the
                gradient is computed.
            of: Positions in `params` of the tensors of v, which is zero elsewhere; None for all.

        Returns:
            The product, one tensor for each parameter.

        Raises:
            NoSecondDerivative: The product is to be exact, and a layer or the distribution of the
                weights does not allow it.
        """
        ...


@dataclass(frozen=True)
class Direction:
    """The vector that the optimiser subtracts as a gradient, with notes for the log."""

    vec: Vec
    gram: Tensor | None = None  # [m, m] float64, nan for gradients that were not computed
    weights: Tensor | None = None  # [m] float64
    notes: Mapping[str, float] = field(default_factory=dict)  # e.g. {"clamped": 1}
    # take no step at all: an optimiser with momentum or weight decay moves even on a gradient of 0
    hold: bool = False
    # move the variable of the lower level alone, for the same reason
    hold_trained: bool = False
    # no entry of vec, and no weight, is larger in absolute value; None if that is not known. A
    # direction with a bound that its type can hold is finite, and nobody has to read its entries
    bound: float | None = None

    @classmethod
    def weighted_sum(
        cls,
        weights: Tensor,
        gradients: list[Vec],
        gram: Tensor,
        *,
        notes: Mapping[str, float] | None = None,
        hold: bool = False,
    ) -> Direction:
        """Return sum_i weights[i] * gradients[i], and empty the list `gradients`.

        Args:
            weights: [m] float64.
            gradients: m gradients.
            gram: Their inner products, [m, m] float64.
            notes: Numbers for the log.
            hold: Whether no step is taken.
        """
        bound = 0.0
        for weight, square in zip(weights.tolist(), gram.diagonal().tolist(), strict=True):
            if weight != 0.0:
                length = math.sqrt(square) if square >= 0 else math.nan
                bound += abs(weight) * max(length, 1.0)  # nan stays: it must be the first
        vec = combine_and_free(weights, gradients)
        return cls(vec, gram, weights, notes or {}, hold=hold, bound=bound)


class Options:
    """The options of a plug-in. They are checked in recipes and in Python alike."""

    theorems: ClassVar[frozenset[str]] = frozenset()  # properties that one shared test proves
    # where each option's default comes from: the paper, its code, or us
    defaults: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Raise ValueError for a value outside its Literal, or for a number that is not finite."""
        hints = typing.get_type_hints(type(self))
        for option in fields(self):  # type: ignore[arg-type]  # every plug-in is a dataclass
            if option.init:
                _require_allowed(option.name, getattr(self, option.name), hints[option.name])

    def laws(self) -> frozenset[str]:
        """Return the theorems that hold with these options.

        By default they are all of the class's.
        """
        return self.theorems


def _require_allowed(name: str, value: Any, hint: Any) -> None:
    choices = [hint, *typing.get_args(hint)] if typing.get_origin(hint) is not Literal else [hint]
    literals = [
        value
        for choice in choices
        if typing.get_origin(choice) is Literal
        for value in typing.get_args(choice)
    ]
    if isinstance(value, str) and literals and value not in literals:
        raise ValueError(f"{name} must be {' or '.join(map(repr, literals))}, found {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, found {value}")


class Method(Options, ABC):
    """A combination rule: a frozen dataclass whose fields are its options.

    A file of methods/ holds one method, named PLUGIN.
    """

    title: ClassVar[str]
    source: ClassVar[str]  # arXiv id or other reference
    needs_fp32: ClassVar[bool] = False  # bf16 is too coarse for differences of gradients
    needs_attack: ClassVar[bool] = False  # it solves a lower-level problem, the objective `attack`
    # it hardens the model against a later fine-tuning, the objective `relearn`
    needs_relearning: ClassVar[bool] = False
    # the targets that it can train; None for every target with two losses
    targets: ClassVar[tuple[str, ...] | None] = None
    has_rounds: ClassVar[bool] = False  # `ends_round` says where they end
    # the optimizer of a recipe that names none, for a step that another optimizer would rescale
    optimizer: ClassVar[str | None] = None

    @abstractmethod
    def direction(self, closure: Closure) -> Direction:
        """Return the step, which the optimiser subtracts as a gradient."""

    @property
    def search(self) -> tuple[int, int, int] | None:
        """The rounds of a search for attacks before the training, if there is one.

        They are the number of rounds, and in each of them the steps on the weights and then on the
        attack. After them the eraser starts anew from the original weights.
        """
        return None

    def uses_all(self, objectives: tuple[str, ...]) -> bool:
        """Whether every step uses the gradients of all objectives at its first parameters.

        Then one pass for all objectives wastes nothing (`training.one_pass: auto`).
        """
        return False

    def ends_round(self, steps: int) -> bool:
        """Whether a round of the method ends after this number of steps (`rewinding`)."""
        return False

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        """Raise ValueError if the method cannot combine these objectives.

        The message states the reason and the remedy.
        """
        return

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state between steps.

        Its tensors are replaced, never changed in place, so a reference is a copy.
        """
        return dict(getattr(self, "_state", {}))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        own_state: dict[str, Tensor] | None = getattr(self, "_state", None)
        if own_state is None:
            if state:
                raise ValueError(
                    f"{type(self).__name__} keeps no state, but was given {sorted(state)}"
                )
            return
        own_state.clear()
        own_state.update(state)


class GramMethod(Method):
    """A method whose step is a weighted sum of the gradients.

    The weights depend on the inner products of the gradients only.
    """

    @abstractmethod
    def solve(self, gram: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        """Map a Gram matrix [m, m] float64 to m weights and notes for the log."""

    def weights(self, gram: Tensor) -> Tensor:
        return self.solve(gram)[0]

    def uses_all(self, objectives: tuple[str, ...]) -> bool:
        return True

    def direction(self, closure: Closure) -> Direction:
        grads = [closure.grad(objective) for objective in closure.objectives]
        gram = closure.gramian(grads)
        weights, notes = self.solve(gram)
        return Direction.weighted_sum(weights, grads, gram, notes=notes)


def usable(gram: Tensor) -> Tensor:
    """Return which objectives have a finite gradient other than zero, as [m] bool."""
    squares = gram.diagonal()
    return torch.isfinite(squares) & (squares > 0) & torch.isfinite(gram).any(1)


@contextmanager
def all_or_nothing(params: Vec, remedy: str) -> Iterator[Vec]:
    """Restore the parameters after an error, or if they are not finite at the end.

    Yields the values that the parameters had before. Raises ValueError with the remedy if the
    parameters are not finite at the end.
    """
    before = tuple(p.detach().clone() for p in params)
    try:
        yield before
        if not is_finite(params):
            raise ValueError(
                f"the edit gave weights that are not finite, so nothing was changed; {remedy}"
            )
    except BaseException:
        with torch.no_grad():
            for parameter, value in zip(params, before, strict=True):
                parameter.copy_(value)
        raise


class Edit(Options, ABC):
    """A plug-in that changes a model in one step, without a training loop.

    It is a frozen dataclass whose fields are its options.
    """

    title: ClassVar[str]
    source: ClassVar[str]
    needs_fp32: ClassVar[bool] = True
    needs_attack: ClassVar[bool] = False
    targets: ClassVar[tuple[str, ...] | None] = ("classifier",)
    why: ClassVar[str] = "it needs a likelihood of labels"  # the reason for `targets`, for errors
    needs_retain: ClassVar[bool] = True

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if set(objectives) != {"forget", "retain"}:
            raise ValueError(
                f"{self.title!r} needs the objectives forget and retain and no other, found "
                f"{', '.join(objectives)}"
            )

    @abstractmethod
    def edit(self, request: Any) -> Mapping[str, float]:
        """Change the model in place.

        Args:
            request: An EditRequest; for a ProjectionEdit a ProjectionRequest.

        Returns:
            What the edit did, for done.json.

        Raises:
            ValueError: The edit is not possible; the message names a remedy.
        """


@dataclass(frozen=True)
class EditRequest:
    """A classifier and its data, in the form that edits need.

    Attributes:
        model: The classifier, which returns logits [n, classes]. Its trained parameters require
            gradients.
        forget: The positions of the samples to forget.
        retain: The positions of the samples to preserve.
        ridge: The factor of 1/2 ||theta||^2 in the loss.
        batches: Returns (inputs, labels) of the samples at some positions, in that order.
        loss: Returns the mean cross-entropy of the samples at some positions, plus ridge/2
            ||theta||^2.
        params: The trained parameters.
    """

    model: nn.Module
    forget: tuple[int, ...]
    retain: tuple[int, ...]
    ridge: float
    batches: Callable[[Sequence[int]], Sequence[tuple[Tensor, Tensor]]]
    loss: Callable[[Sequence[int]], Tensor]
    params: Vec = ()


Tokens = Literal["all", "context", "from_last", "last"]


class ProjectionEdit(Edit):
    """An edit of the keys and values of cross-attention, which are linear in the states of a text.

    Take a least-squares problem in W with the targets W_old a. Its solution is W_old times one
    matrix that does not depend on W_old. So one edit serves all layers: W_new = W_old (I + D).
    A method whose constraints differ between layers has one D for each layer.

    Every such edit has the option `tokens`. It selects the tokens of a concept's prompt and of its
    anchor's prompt, which are paired (see targets/cross_attention_edit.py).
    """

    targets: ClassVar[tuple[str, ...] | None] = ("denoiser",)
    why: ClassVar[str] = "it edits the layers of a denoiser that read a text"
    needs_retain: ClassVar[bool] = False
    remedy: ClassVar[str] = "use a larger lamb"  # where the edit is not finite
    tokens: Tokens

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        """Raise ValueError for objectives other than forget, forget.2, ... and retain.

        Several concepts are erased at once.
        """
        if (
            not {"forget"}
            <= {objective.split(".")[0] for objective in objectives}
            <= {"forget", "retain"}
        ):
            raise ValueError(
                f"{self.title!r} needs the objective forget, may have retain, and has no use "
                f"for others; found {', '.join(objectives)}"
            )

    @abstractmethod
    def change(self, request: ProjectionRequest) -> Change | LayerChange:
        """Return D, and further results for `edit` to return.

        D is one matrix [width, width] float64 for all layers, or one for each layer by its name.
        Raises ValueError if there is no D.
        """

    def edit(self, request: ProjectionRequest) -> Mapping[str, float]:
        """Add W_old D to each layer, in place.

        Let |x|^2 be the sum of |W_old x|^2 over the layers and T = I + D.

        Returns:
            moved: the change of the weights, ||W_old D|| / ||W_old||.
            left: the remainder of the concepts, sqrt(sum |T c - a|^2 / sum |c - a|^2).
            drift: the change of the preserved prompts, sqrt(sum |D p|^2 / sum |p|^2).
        """
        change, details = self.change(request)
        groups = (
            [(request.gram(), change)]
            if isinstance(change, Tensor)
            else [(_gram([request.layers[name]]), change[name]) for name in request.layers]
        )
        outcome = {}
        total = sum(float(gram.trace()) for gram, _ in groups)
        outcome["moved"] = (
            math.sqrt(sum(float((d.T @ gram @ d).trace()) for gram, d in groups) / total)
            if total
            else 0.0
        )
        pairs, retain = list(zip(request.forget, request.anchor, strict=True)), request.retain
        if not isinstance(change, Tensor):
            pairs, retain = (
                _compressed(pairs),
                [r for r, _ in _compressed([(p, p) for p in retain])],
            )
        outcome["left"] = _share(
            (gram, c.to(gram) + c.to(gram) @ d.T - a.to(gram), c.to(gram) - a.to(gram))
            for gram, d in groups
            for c, a in pairs
        )
        outcome["drift"] = _share(
            (gram, p.to(gram) @ d.T, p.to(gram)) for gram, d in groups for p in retain
        )
        with torch.no_grad():
            for name, weight in request.layers.items():
                d = change if isinstance(change, Tensor) else change[name]
                weight += (weight.to(d) @ d).to(weight)
        return {**outcome, **details}


Change = tuple[Tensor, Mapping[str, float]]
LayerChange = tuple[Mapping[str, Tensor], Mapping[str, float]]


def _compressed(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return at most 2 width pairs of rows with the same sums of squares of linear maps.

    The rows of [C - A, C] = Q R and of R have the same sum of |L (c - a, c)|^2 for every matrix L,
    since Q has orthonormal columns. Where C = A, both are equal in the result too, without
    rounding.
    """
    if not pairs:
        return []
    rows = torch.cat([torch.cat([c.double() - a.double(), c.double()], dim=1) for c, a in pairs])
    difference, first = torch.linalg.qr(rows, mode="r")[1].chunk(2, dim=1)
    return [(first, first - difference)]


def _share(parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Return sqrt(sum |x|^2 / sum |y|^2) over the rows of all (gram, x, y).

    |x|^2 is x^T gram x. Returns 0 if the sum of |y|^2 is 0.
    """
    above = below = 0.0
    for gram, x, y in parts:
        above += float(((x @ gram) * x).sum())
        below += float(((y @ gram) * y).sum())
    return math.sqrt(max(above, 0.0) / below) if below > 0 else 0.0


def _gram(weights: Iterable[Tensor]) -> Tensor:
    """Return the sum of W^T W [width, width] float64; a scalar 0 without weights."""
    return sum(
        (w.detach().double().T @ w.detach().double() for w in weights),
        torch.zeros(()),
    )


@dataclass(frozen=True)
class ProjectionRequest:
    """The states and the layers for an edit of projections.

    All tensors are on one device with float64.

    Attributes:
        layers: Weights [out, width] by name. All layers read the same states.
        forget: For each concept, the states of some tokens [tokens, width].
        anchor: For each concept, the states [tokens, width] that replace them, row by row.
        retain: States [tokens, width] whose projections are preserved.
        empty: The states of the empty prompt [tokens, width], if they are known.
    """

    layers: Mapping[str, Tensor]
    forget: Sequence[Tensor]
    anchor: Sequence[Tensor]
    retain: Sequence[Tensor] = ()
    empty: Tensor | None = None

    def gram(self) -> Tensor:
        """Return G, the sum of W^T W over the layers, [width, width] float64.

        The layers distinguish two states c and a by (c - a)^T G (c - a).
        """
        return _gram(self.layers.values())


class GateEdit(Edit):
    """An edit that fits a gate beside the keys and values of cross-attention.

    The gate is a module of its own (see models/residual_gate.py). The weights do not change. It is
    fitted to the states of texts, without images and without the denoiser. Its options `gate_rank`
    and `rank` give the sizes of the gate.
    """

    targets: ClassVar[tuple[str, ...] | None] = ("denoiser",)
    why: ClassVar[str] = "it adds a gate to the layers of a denoiser that read a text"
    adds_gate: ClassVar[bool] = True
    gate_rank: int
    rank: int

    @abstractmethod
    def edit(self, request: GateRequest) -> Mapping[str, float]:
        """Fit the gate in place; see `Edit.edit`."""


class Gate(Protocol):
    """A gate, as its fit reads it (see models/residual_gate.py)."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def gated(self, states: Tensor) -> Tensor:
        """Return [n, tokens, width] or [tokens, width] from states of that shape."""
        ...

    def addition(self, layer: str, gated: Tensor) -> Tensor:
        """Return what the output of a layer gets [n, tokens, outputs]."""
        ...


@dataclass(frozen=True)
class GatedLayer:
    """A layer of keys or values that has the gate, with the matrices of its attention.

    Attributes:
        name: The layer's name in the gate.
        kind: What the layer gives.
        query: [inner, width of the image].
        key: [inner, width].
        value: [inner, width].
        output: [width of the image, inner].
    """

    name: str
    kind: Literal["key", "value"]
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    @property
    def weight(self) -> Tensor:
        """The layer's own matrix [inner, width]."""
        return self.key if self.kind == "key" else self.value


@dataclass(frozen=True)
class GateRequest:
    """The states, the layers and a new gate for a `GateEdit`. All tensors are on one device.

    Attributes:
        gate: The gate, which changes nothing yet.
        layers: The layers that have it.
        forget: The states of the concept's prompts [prompts, tokens, width].
        anchor: The states of their anchors [prompts, tokens, width].
        retain: The states of the preserved prompts [preserved, tokens, width].
        empty: The states of the empty prompt [tokens, width].
        seed: Of all draws.
        report: Called after each step with the step, their number and a remark.
    """

    gate: Gate
    layers: Sequence[GatedLayer]
    forget: Tensor
    anchor: Tensor
    retain: Tensor
    empty: Tensor
    seed: int = 0
    report: Callable[[int, int, str], None] = lambda step, steps, remark: None
