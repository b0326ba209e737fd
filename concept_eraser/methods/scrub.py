"""SCRUB: distillation away from a teacher on forgotten examples, towards it on retained ones.

The paper is Kurmanji et al., arXiv 2302.09880. w^o is the trained model (the teacher). w^u is the
student, which starts from it. With d(x; w) = KL(p(x; w^o) || p(x; w)):

    min over w^u of   alpha/N_r sum_r d(x_r; w^u) + gamma/N_r sum_r l(f(x_r; w^u), y_r)
                      - 1/N_f sum_f d(x_f; w^u)

The paper optimises it in turns (Algorithm 1). Each of `rounds` rounds has first some max-steps on
the last term, then some min-steps on the first two. After that there are min-steps alone. In a
recipe:

    forget: {loss: diverge}                                -KL: minimising it is the max-step
    retain: {loss: data, scale: gamma, distill: alpha}     the min-step

The step's number alone decides whose turn it is, so a resumed run continues in the right turn. An
objective whose turn it is not needs no backward pass. Any other pair of losses can take turns as
well. At the teacher the KL has its minimum, so the max-steps of the first round hardly change the
model. They take effect from the second round on; the paper begins there too.

Deliberate differences from the paper and its code (github.com/meghdadk/SCRUB):
* A turn is a number of steps, not a pass over the examples. For passes give N_f / batch and N_r /
  batch, rounded up.
* No temperature: the code divides the logits by 4 and multiplies the KL by 16. The paper's
  equations have neither.
* The learning rate does not fall in stages and no average of the weights is saved, unless a recipe
  says so: `training.decay: step` and `training.ema`.

SCRUB+R, for privacy, returns to an earlier round: the recipe's section `rewinding`, see
training/rewinding.py. It needs examples that the model has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from concept_eraser.methods.base import Closure, Direction, Method
from concept_eraser.methods.vectors import gramian


@dataclass(frozen=True)
class Scrub(Method):
    """Rounds of max-steps on the forget loss and min-steps on the retain loss, then min-steps only.

    Args:
        forget_steps: The max-steps of a round.
        retain_steps: The min-steps of a round.
        rounds: The number of rounds.
    """

    title: ClassVar[str] = "SCRUB (Towards Unbounded Machine Unlearning)"
    source: ClassVar[str] = "arXiv 2302.09880, Algorithm 1"
    defaults: ClassVar[Mapping[str, str]] = {
        "forget_steps": "ours: a tenth of the examples, where a round is a pass over both",
        "retain_steps": "ours: see forget_steps",
        "rounds": (
            "ours: the authors' code has 2 or 3 passes; a pass is more steps than a round of these"
        ),
    }

    has_rounds: ClassVar[bool] = True

    forget_steps: int = 2
    retain_steps: int = 18
    rounds: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.forget_steps, self.retain_steps, self.rounds) < 1:
            raise ValueError(
                "forget_steps, retain_steps and rounds must be >= 1, found "
                f"{self.forget_steps}, {self.retain_steps}, {self.rounds}"
            )

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if set(objectives) != {"retain", "forget"}:
            raise ValueError(
                f"scrub takes turns between retain and forget; found {', '.join(objectives)}"
            )

    def turn(self, step: int) -> str:
        """Return the objective whose turn it is at a step, counted from 0."""
        past, place = divmod(step, self.forget_steps + self.retain_steps)
        return "forget" if past < self.rounds and place < self.forget_steps else "retain"

    def ends_round(self, steps: int) -> bool:
        """Whether the min-steps of a round end after this number of steps.

        After the rounds every `retain_steps` min-steps are one: the authors' epochs without
        max-steps.
        """
        length = self.forget_steps + self.retain_steps
        steps_after = steps - self.rounds * length
        if steps_after > 0:
            return steps_after % self.retain_steps == 0
        return steps > 0 and steps % length == 0

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        objective = self.turn(closure.step)
        index, grad = closure.objectives.index(objective), closure.grad(objective)
        gram = torch.full((2, 2), float("nan"), dtype=torch.float64)
        gram[index, index] = gramian([grad])[0, 0]
        weights = torch.zeros(2, dtype=torch.float64)
        weights[index] = 1.0
        return Direction(grad, gram, weights)


PLUGIN = Scrub
