"""Alternating adversarial training: one attack, then one step under it. The baseline of FORUM.

    omega <- omega - eta grad_omega f, T times;
    theta <- theta - mu sum_i w_i grad_theta F_i(theta, omega)

The method is that of Madry et al., arXiv 1706.06083, with f and F as in FORUM. The authors' code is
MadryLab/mnist_challenge: steps on the attack (pgd_attack.py, lines 43-61), then one step of Adam on
the attacked batch alone (train.py, lines 77-117). The paper's text was not read here.

For concept erasing, AdvUnlearn (arXiv 2405.15234) is of this kind: it trains the text encoder with
ESD's loss. Its code is OPTML-Group/AdvUnlearn, train-scripts/AdvUnlearn.py. The attack takes 30
steps of Adam with 1e-3 (lines 258 and 260; train-scripts/utils/attack_util.py, lines 168-207),
after 200 steps of training without one (line 261). This is `inner_steps: 30`, `inner_optimizer:
adam`, `inner_lr: 1.0e-3` and `attack.warmup: 200`, as in `sd14_nudity_advunlearn`. The recipe
`tiny_star_advunlearn_short` has three plain steps and no warm-up.

Deliberate differences:
* The default attack is an offset of the embedding, as in FORUM. It starts from its last value and
  takes plain gradient steps. So only the treatment of the two levels differs from FORUM.
* The attack is not projected on a ball: its loss has the term c/2 ||omega||^2 instead. Madry's code
  takes steps of the gradient's sign, clips to a ball and starts at random in it, as `race` does.
* F has further objectives (retain) and weights w_i. Madry's code has the attacked loss alone.
* All T steps have the same images, time steps and noise. The objective `attack` draws its own, so
  they are not those of the forget loss; in Receler's and RACE's code they are. AdvUnlearn's code
  draws a new image and time step for each of them. Adam starts anew at each training step, as
  there.
* Each of the T steps has its own gradient. AdvUnlearn's code never sets the gradient to zero in an
  attack, so that it adds up over the 30 steps. The result of its last step is not used.
* `inner_steps: 0` is training without an attack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from concept_eraser.methods.base import Closure, Direction, Method
from concept_eraser.methods.forum import ATTACK, at_inner, descend_inner
from concept_eraser.methods.vectors import combine, gramian


@dataclass(frozen=True)
class Adversarial(Method):
    """An attack on the embedding, then a weighted sum of the gradients under the attack.

    Args:
        inner_steps: T, the attack's gradient steps.
        inner_lr: eta, the attack's step size, or the learning rate of Adam.
        inner_optimizer: Plain gradient steps (gradient), or those of Adam (adam).
        retain: The weight of the retain loss.
        forget: The weight of the forget loss and of all other losses.
    """

    title: ClassVar[str] = "Alternating adversarial training"
    source: ClassVar[str] = "arXiv 1706.06083; for erasing arXiv 2405.15234"
    defaults: ClassVar[Mapping[str, str]] = {
        "inner_steps": "ours (AdvUnlearn: 30)",
        "inner_lr": "ours (AdvUnlearn: 1e-3, with adam)",
        "inner_optimizer": "arXiv 1706.06083 (AdvUnlearn: adam)",
        "retain": "ours",
        "forget": "ours",
    }
    needs_attack: ClassVar[bool] = True

    inner_steps: int = 5
    inner_lr: float = 0.1
    inner_optimizer: Literal["gradient", "adam"] = "gradient"
    retain: float = 1.0
    forget: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner_steps < 0 or self.inner_lr <= 0 or min(self.retain, self.forget) < 0:
            raise ValueError(
                "inner_steps, retain and forget must be >= 0 and inner_lr > 0, found "
                f"{self.inner_steps}, {self.retain}, {self.forget}, {self.inner_lr}"
            )

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if ATTACK not in objectives:
            raise ValueError(
                f"adversarial training needs an attack, the objective {ATTACK!r}; found "
                f"{', '.join(objectives)}. Give the recipe an `attack:` section"
            )

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        start = [torch.zeros_like(closure.params[i]) for i in closure.inner]
        descend = adam_inner if self.inner_optimizer == "adam" else descend_inner
        offset = descend(closure, start, self.inner_steps, self.inner_lr)
        return step_under(closure, offset, retain=self.retain, forget=self.forget)


def step_under(
    closure: Closure, offset: list[Tensor], *, retain: float, forget: float
) -> Direction:
    """Return the step under an attack: a weighted sum of the gradients at omega + offset.

    Args:
        closure: The losses of the step.
        offset: The end of the attack, relative to omega. The step moves omega there.
        retain: The weight of the retain loss.
        forget: The weight of all other losses, apart from the attack's.
    """
    uppers = [objective for objective in closure.objectives if objective != ATTACK]
    with at_inner(closure, offset):
        grads = [closure.grad(objective) for objective in uppers]
    grads = [
        tuple(torch.zeros_like(p) if i in closure.inner else p for i, p in enumerate(g))
        for g in grads
    ]
    weights = torch.tensor(
        [retain if p == "retain" else forget for p in uppers], dtype=torch.float64
    )
    step = combine(weights, grads)
    offsets = dict(zip(closure.inner, offset, strict=True))
    vec = tuple(-offsets[i] if i in offsets else part for i, part in enumerate(step))
    size = float(sum(o.square().sum() for o in offset)) ** 0.5 if offset else 0.0
    return Direction(vec, gramian(grads), weights, {"attack_moved": size})


def adam_inner(closure: Closure, offset: list[Tensor], steps: int, lr: float) -> list[Tensor]:
    """Take `steps` steps of Adam on f from omega + offset.

    Returns the end as an offset from omega.
    """
    variables = [part.clone() for part in offset]
    if not variables:
        return variables
    optimizer = torch.optim.Adam(variables, lr=lr)
    for _ in range(steps):
        with at_inner(closure, variables):
            grads = closure.grad(ATTACK, of=closure.inner)
        for variable, gradient in zip(variables, grads, strict=True):
            variable.grad = gradient.to(variable.dtype)
        optimizer.step()
    return variables


PLUGIN = Adversarial
