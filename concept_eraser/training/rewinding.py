"""Rewinding: the state of an earlier round of a training (SCRUB+R, arXiv 2302.09880).

A training that forgets too much may itself reveal what was forgotten: the error on the forgotten
examples is larger than on examples that the model never saw. So a state is stored after each round.
With e_f(t) the error on the forget set after round t, of T rounds, and e_u(T) the error of the last
state on unseen examples of the same classes, the result is the state of the round

    argmin over t of  |e_f(t) - e_u(T)|

An error is a share of wrong predictions. The first of several nearest rounds is taken.

The definition was read in the authors' code (github.com/meghdadk/SCRUB, MIA_experiments.ipynb, the
function `scrub`). What is followed: a state after each epoch, the unseen examples (there a
validation set) reduced to the classes of the forget set, the top-1 error, the last error on them as
the reference, and the first of equal distances. Differences:
* The state before the training is no candidate. The code computes its error and may choose it, but
  stores no file for it.
* A state is stored in memory and in the file that a run resumes from, only where its error on the
  forget set is new: of two states with the same error the code takes the first too.
* Any method can be rewound. A round that it has none of is a number of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from concept_eraser.methods.base import Method
from concept_eraser.utils import distributed

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrongPredictions:
    """How many of some examples the model in training predicts wrong.

    Args:
        examples: The number of examples.
        count: Returns the number of wrong predictions at the present weights.
    """

    examples: int
    count: Callable[[], int]


@dataclass(frozen=True)
class RoundState:
    """The state after a round.

    Attributes:
        step: The number of steps that were done.
        wrong: The number of wrong predictions on the forget set.
        values: The trained tensors and running statistics on the CPU; empty where an earlier round
            has as many wrong predictions.
    """

    step: int
    wrong: int
    values: Mapping[str, Tensor] = field(default_factory=dict)


class Rewinding:
    """Stores the state after each round, and returns to one of them.

    With several processes the first one counts.

    Args:
        tensors: What a state consists of, by name.
        ends: Whether a round ends after a number of steps; see `round_ends`.
        forget: The wrong predictions on the forget set.
        unseen: Those on unseen examples of its classes.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        ends: Callable[[int], bool],
        *,
        forget: WrongPredictions,
        unseen: WrongPredictions,
    ) -> None:
        self.tensors, self.ends, self.forget, self.unseen = dict(tensors), ends, forget, unseen
        self.rounds: list[RoundState] = []
        # counted once, at the last state: a run that is resumed later may hold another one
        self.unseen_wrong: int | None = None
        self.summary: dict[str, float] = {}

    def after_step(self, step: int) -> dict[str, float]:
        """Store the state if a round ends after `step` steps. Returns entries of the log."""
        if not self.ends(step):
            return {}
        wrong = distributed.agree(self.forget.count)
        is_new = all(past.wrong != wrong for past in self.rounds)
        # a copy also on the CPU, where `cpu` returns the tensor itself
        values = {k: v.detach().to("cpu", copy=True) for k, v in self.tensors.items()}
        self.rounds.append(RoundState(step, wrong, values if is_new else {}))
        return {"forget_error": wrong / self.forget.examples}

    @torch.no_grad()
    def rewind(self) -> None:
        """Load the round whose error is nearest to the present error on unseen examples."""
        if self.unseen_wrong is None:
            self.unseen_wrong = distributed.agree(self.unseen.count)
        number = nearest(
            [one.wrong for one in self.rounds],
            self.forget.examples,
            unseen_wrong=self.unseen_wrong,
            unseen_examples=self.unseen.examples,
        )
        chosen = self.rounds[number]
        for name, value in chosen.values.items():
            self.tensors[name].copy_(value)
        self.summary = {
            "round": number + 1,
            "rounds": len(self.rounds),
            "step": chosen.step,
            "forget_error": chosen.wrong / self.forget.examples,
            "unseen_error": self.unseen_wrong / self.unseen.examples,
            "unseen_examples": self.unseen.examples,
        }
        _LOG.info(
            "rewinding: round %(round)d of %(rounds)d, after %(step)d steps; its error on the "
            "forget set is %(forget_error).4f, the last round's on %(unseen_examples)d unseen "
            "examples %(unseen_error).4f",
            self.summary,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a run that continues."""
        rounds = [
            {"step": one.step, "wrong": one.wrong, "values": dict(one.values)}
            for one in self.rounds
        ]
        return {"rounds": rounds, "unseen_wrong": self.unseen_wrong}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.rounds = [
            RoundState(int(one["step"]), int(one["wrong"]), one["values"])
            for one in state["rounds"]
        ]
        self.unseen_wrong = state["unseen_wrong"]


def round_ends(method: Method, every: int | None, steps: int) -> Callable[[int], bool]:
    """Return whether a round ends after a number of steps, as a function.

    Args:
        method: The method, whose own rounds count if `every` is None.
        every: The number of steps of a round.
        steps: The number of steps of the training. A round ends there in any case.
    """

    def ends(step: int) -> bool:
        own = method.ends_round(step) if every is None else step % every == 0
        return step == steps or own

    return ends


def nearest(wrong: Sequence[int], examples: int, *, unseen_wrong: int, unseen_examples: int) -> int:
    """Return the first position whose error is nearest to that of unseen examples.

    The distances are compared as whole numbers: |w/n - u/m| = |w m - u n| / (n m).

    Args:
        wrong: The wrong predictions on the forget set, one number for each round.
        examples: The examples of the forget set.
        unseen_wrong: The wrong predictions on unseen examples.
        unseen_examples: The number of these.
    """
    distances = [abs(one * unseen_examples - unseen_wrong * examples) for one in wrong]
    return distances.index(min(distances))
