"""RACE: Robust Adversarial Concept Erase (Kim et al., arXiv 2405.16341).

ESD's loss is trained under an attack on the prompt's states, which stays in a box. The attack is
that of Madry et al. (arXiv 1706.06083), projected gradient steps on the loss f that it minimises:

    omega ~ U[-r, r],   omega <- clip(omega - eta sign grad_omega f(theta, omega), -r, r), T times

with f the denoising loss for the prompt under omega at one time step. Then theta takes a step on
the forget loss under omega.

The paper's text was not read here. The authors' code is chkimmmmm/R.A.C.E.,
train-scripts/train-esd.py: the attack is lines 26-60 and 326, with T = 10 and eta = r/4; r = 0.1 is
line 409; the loss under it is lines 333-336. This is `race` with `attack: {decay: 0, forget:
attacked}` and the loss `esd`, as in `tiny_star_race`.

Deliberate differences from the code:
* The code starts from weights that ESD has trained (lines 203-212). Here the original model is the
  start, as for every other method.
* The code has one example in a batch and an attack for it. Here all examples of a batch share one
  attack, and its loss is their mean.
* In f the code has the noise from which x_t was sampled by the model (lines 318-326). Here it is
  the training loss: x_t is a noised image of the concept, and the target is its noise.
* The code also clips the attacked states to the smallest and the largest number of the prompt's
  own states (lines 34-56).
* The attack has images, time steps and noise of its own. The code attacks and trains at one x_t.
* The start is drawn from the number of the training step, for a resumed run and all processes the
  same.
* The code's L1 penalty on the change of the weights is off by default (line 413) and left out.
* A retain loss is possible, with the weight `retain`. The code has none, which is `retain: 0`, the
  default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.methods.adversarial import step_under
from concept_eraser.methods.base import Closure, Direction, Method
from concept_eraser.methods.forum import ATTACK, at_inner


@dataclass(frozen=True)
class Race(Method):
    """An attack along the gradient's sign in a box, then a step under it.

    Args:
        inner_steps: T, the attack's steps.
        inner_lr: eta, the size of each of them.
        box: r, the largest change of each number of the prompt's states.
        retain: The weight of the retain loss. A recipe needs a retain set if it is > 0.
        forget: The weight of the forget loss and of all other losses.
    """

    title: ClassVar[str] = "RACE: robust adversarial concept erasure"
    source: ClassVar[str] = "arXiv 2405.16341; the attack: arXiv 1706.06083"
    defaults: ClassVar[Mapping[str, str]] = {
        "inner_steps": "its code",
        "inner_lr": "its code, r/4",
        "box": "its code",
        "retain": "its code",
        "forget": "its code",
    }
    needs_attack: ClassVar[bool] = True

    inner_steps: int = 10
    inner_lr: float = 0.025
    box: float = 0.1
    retain: float = 0.0
    forget: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner_steps < 0 or min(self.retain, self.forget) < 0:
            raise ValueError(
                "inner_steps, retain and forget must be >= 0, found "
                f"{self.inner_steps}, {self.retain}, {self.forget}"
            )
        if self.inner_lr <= 0 or self.box <= 0:
            raise ValueError(f"inner_lr and box must be > 0, found {self.inner_lr} and {self.box}")

    @property
    def needs_retain(self) -> bool:
        """Whether the recipe must have a retain set."""
        return self.retain > 0

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if ATTACK not in objectives:
            raise ValueError(
                f"race needs an attack, the objective {ATTACK!r}; found {', '.join(objectives)}. "
                "Give the recipe an `attack:` section"
            )

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        offset = attack_in_box(closure, self.inner_steps, self.inner_lr, self.box)
        return step_under(closure, offset, retain=self.retain, forget=self.forget)


def attack_in_box(closure: Closure, steps: int, lr: float, box: float) -> list[Tensor]:
    """Take `steps` steps of `lr` against the sign of f's gradient, from a random start in a box.

    The values of omega stay in |omega_i| <= box. Returns the end as an offset from omega.
    """
    omega = [closure.params[i].detach().clone() for i in closure.inner]
    generator = torch.Generator().manual_seed(closure.step)
    values = [
        (box * (2 * torch.rand(part.shape, generator=generator) - 1)).to(part) for part in omega
    ]
    for _ in range(steps):
        with at_inner(closure, [v - o for v, o in zip(values, omega, strict=True)]):
            grads = closure.grad(ATTACK, of=closure.inner)
        values = [
            (v - lr * g.sign().to(v)).clamp(-box, box) for v, g in zip(values, grads, strict=True)
        ]
    return [v - o for v, o in zip(values, omega, strict=True)]


PLUGIN = Race
