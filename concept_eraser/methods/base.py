"""What a method is: a rule that turns the gradients of the forget and the retain loss into one
step.

Methods see tensors only, never a model. Objectives and their order are the closure's: "retain",
"forget", perhaps others.
"""

from __future__ import annotations

import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from concept_eraser.methods.vectors import Vec, combine, gramian, is_finite

HessianProduct = Literal["difference", "exact"]


class Closure(Protocol):
    """The losses of one step as functions of the trainable parameters.

    All gradients of a step are of the same examples, time steps and noise. They are averaged over
    micro-batches and ranks. All losses are to be minimised: an ascent is a loss with a minus sign,
    not a flag.
    """

    step: int  # counted from 0; what alternates goes by it, so that a resumed run alternates alike
    params: Vec
    # positions in params of the variable of a lower-level problem; () where there is none
    inner: tuple[int, ...]
    last_loss: float  # the loss that was last asked for a gradient

    @property
    def objectives(self) -> tuple[str, ...]:
        """The names of the objectives of this step."""
        ...

    def grad(self, objective: str, of: Sequence[int] | None = None) -> Vec:
        """The gradient of an objective's loss, or its parts for the parameters at the positions
        `of`.
        """
        ...

    def terms(self, objective: str) -> int:
        """How many numbers the mean in the objective's loss is taken over: loss * terms is its
        sum-reduced form.
        """
        ...

    def at(self, offset: Vec) -> AbstractContextManager[None]:
        """Inside, gradients are taken at params + offset. Afterwards the parameters have their
        earlier values, bit by bit.
        """
        ...

    def hvp(
        self, objective: str, v: Vec, how: HessianProduct = "difference", size: float = 0.01
    ) -> Vec:
        """The Hessian of an objective's loss times v: exactly by double backward, or by central
        differences of `grad` at params +- size v / ||v||."""
        ...


@dataclass(frozen=True)
class Direction:
    """What the optimiser receives as gradient and subtracts, with its description for the log."""

    vec: Vec
    gram: Tensor | None = None  # [m, m] float64, nan for gradients that were not computed
    weights: Tensor | None = None  # [m] float64
    notes: Mapping[str, float] = field(default_factory=dict)  # e.g. {"clamped": 1}


class Options:
    """Options that are checked however a plug-in is made: from a recipe, or by hand in Python."""

    theorems: ClassVar[frozenset[str]] = frozenset()  # properties that one shared test proves
    # where each option's default comes from: the paper, its code, or us
    defaults: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is none of a Literal's, and for a number that is not
        finite.
        """
        hints = typing.get_type_hints(type(self))
        for option in fields(self):  # type: ignore[arg-type]  # every plug-in is a dataclass
            if option.init:
                _require_allowed(option.name, getattr(self, option.name), hints[option.name])

    def laws(self) -> frozenset[str]:
        """The theorems that hold with these options: all of the class's, unless a method says
        otherwise.
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
    """A plug-in: a frozen dataclass whose fields are its options. A file of methods/ holds one,
    named PLUGIN.
    """

    title: ClassVar[str]
    source: ClassVar[str]  # arXiv id or other reference
    needs_fp32: ClassVar[bool] = False  # differences of gradients drown in the rounding of bf16
    needs_attack: ClassVar[bool] = False  # it solves a lower-level problem, the objective `attack`
    # what it can train; None for everything with two losses
    targets: ClassVar[tuple[str, ...] | None] = None

    @abstractmethod
    def direction(self, closure: Closure) -> Direction: ...

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        """Raise ValueError, with the reason and the remedy, where the method cannot combine these
        objectives.
        """
        return

    def state_dict(self) -> dict[str, Tensor]:
        """The state between steps. Its tensors are replaced, never changed in place, so a
        reference is a copy.
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
    """A method whose step is a weighted sum of the gradients, the weights depending on inner
    products only.
    """

    @abstractmethod
    def solve(self, gram: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        """[m, m] float64 Gram matrix -> ([m] weights, notes for the log)."""

    def weights(self, gram: Tensor) -> Tensor:
        return self.solve(gram)[0]

    def direction(self, closure: Closure) -> Direction:
        grads = [closure.grad(objective) for objective in closure.objectives]
        gram = gramian(grads)
        weights, notes = self.solve(gram)
        return Direction(combine(weights, grads), gram, weights, notes)


def usable(gram: Tensor) -> Tensor:
    """Which objectives have a gradient one can divide by: finite and not zero. [m] bool."""
    squares = gram.diagonal()
    return torch.isfinite(squares) & (squares > 0) & torch.isfinite(gram).any(1)


@contextmanager
def all_or_nothing(params: Vec, remedy: str) -> Iterator[Vec]:
    """Inside, the parameters may move; the values they had are given. An error puts them back, and
    so do weights that are not finite at the end: ValueError, with the remedy."""
    before = tuple(p.detach().clone() for p in params)
    try:
        yield before
        if not is_finite(params):
            raise ValueError(
                f"the edit ran away (weights that are not finite), so nothing was changed; {remedy}"
            )
    except BaseException:
        with torch.no_grad():
            for parameter, value in zip(params, before, strict=True):
                parameter.copy_(value)
        raise


class Edit(Options, ABC):
    """A plug-in that changes a model in one go, without a loop of gradient steps: a frozen
    dataclass of its options.
    """

    title: ClassVar[str]
    source: ClassVar[str]
    needs_fp32: ClassVar[bool] = True
    needs_attack: ClassVar[bool] = False
    targets: ClassVar[tuple[str, ...] | None] = ("classifier",)
    why: ClassVar[str] = "it needs a likelihood of labels"  # no other target will do
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

    model: logits [n, classes]; trained parameters require gradients. loss: mean cross-entropy of
    some samples by position, plus ridge/2 ||theta||^2. batches: (inputs, labels) of some positions,
    in the order given.
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
    """An edit of the linear layers that read the states of a text: the keys and values of
    cross-attention.

    Where a least-squares problem in W has targets W_old a, its solution is W_old times one matrix
    that does not depend on W_old. So an edit is found once, for all layers: W_new = W_old (I + D).
    Options that every such edit has: `tokens`, which tokens of a concept's prompt and of its
    anchor's it is given, paired (see targets/cross_attention_edit.py).
    """

    targets: ClassVar[tuple[str, ...] | None] = ("denoiser",)
    why: ClassVar[str] = "it edits the layers of a denoiser that read a text"
    needs_retain: ClassVar[bool] = False
    tokens: Tokens

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        """Several concepts, forget, forget.2, ..., are erased at once."""
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
    def change(self, request: ProjectionRequest) -> tuple[Tensor, Mapping[str, float]]:
        """D [width, width] float64, and further results for `edit` to return.

        Raises ValueError where there is no D.
        """

    def edit(self, request: ProjectionRequest) -> Mapping[str, float]:
        """Add W_old D to each layer, in place.

        With G = sum of W_old^T W_old over the layers, |x|^2 = x^T G x and T = I + D:

        Returns:
            moved: the change of the weights, ||W_old D|| / ||W_old||.
            left: what is left of the concepts, sqrt(sum |T c - a|^2 / sum |c - a|^2).
            drift: the change of the preserved prompts, sqrt(sum |D p|^2 / sum |p|^2).
        """
        change, details = self.change(request)
        gram, outcome = request.gram(), {}
        total = float(gram.trace())
        outcome["moved"] = (
            math.sqrt(float((change.T @ gram @ change).trace()) / total) if total else 0.0
        )
        pairs = [
            (c.to(gram), a.to(gram)) for c, a in zip(request.forget, request.anchor, strict=True)
        ]
        outcome["left"] = _share(gram, [(c + c @ change.T - a, c - a) for c, a in pairs])
        outcome["drift"] = _share(
            gram, [(p.to(gram) @ change.T, p.to(gram)) for p in request.retain]
        )
        with torch.no_grad():
            for weight in request.layers.values():
                weight += (weight.to(change) @ change).to(weight)
        return {**outcome, **details}


def _share(gram: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """sqrt(sum |x|^2 / sum |y|^2) over the rows of all pairs, |x|^2 = x^T gram x; 0 where there is
    nothing to compare.
    """
    above, below = (
        (
            sum(float(((v @ gram) * v).sum()) for v in vectors)
            for vectors in zip(*pairs, strict=True)
        )
        if pairs
        else (0.0, 0.0)
    )
    return math.sqrt(max(above, 0.0) / below) if below > 0 else 0.0


@dataclass(frozen=True)
class ProjectionRequest:
    """What an edit of projections is given, all on one device that knows float64.

    layers: weights [out, width] by name, all reading the same states. forget, anchor: for each
    concept the states of some tokens [tokens, width] and, row by row, those they are to be read as.
    retain: states [tokens, width] whose reading stays.
    """

    layers: Mapping[str, Tensor]
    forget: Sequence[Tensor]
    anchor: Sequence[Tensor]
    retain: Sequence[Tensor] = ()

    def gram(self) -> Tensor:
        """sum of W^T W over the layers, [width, width] float64: two states differ for the model by
        (c - a)^T G (c - a).
        """
        return sum(
            (w.detach().double().T @ w.detach().double() for w in self.layers.values()),
            torch.zeros(()),
        )
