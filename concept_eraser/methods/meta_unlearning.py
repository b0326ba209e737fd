"""Meta-Unlearning on Diffusion Models (Gao et al., arXiv 2410.12777).

The weights forget a concept, and also come to lie where fine-tuning on the concept does not help:

    theta' = theta after K steps of Adam on the loss of `relearn` (the concept's images),
    g = a grad L_forget(theta) + b grad L_retain(theta)
        - c grad L_relearn(theta') - d grad L_retain(theta').

So after the fine-tuning the model is to be bad at the concept (c) and at retained concepts (d).
theta' counts as theta plus a constant, so there is no second derivative.

The paper's text was not read here. The authors' code is sail-sg/Meta-Unlearning, src/esd_meta.py:
the gradients at theta are lines 979-1003, the steps on the images of the concept line 1007, the
gradients at theta' lines 1010-1045, and their sum lines 1048-1050. The defaults are those of
scripts/esd_meta.sh. It names --gamma2_1 three times, so that a run of it has 0.01, 1 and 1.
Here its three values are taken for those of gamma2_1, gamma2_2 and gamma2_3, in this order.

Deliberate differences from the code:
* The code has two sets of retained images. One is related to the concept (tgt: gamma1_2 0.01,
  gamma2_2 0.1), the other is not (irt: gamma1_1 0.1, gamma2_3 0.01). Here the retain set stands for
  both, and the defaults are those of irt.
* The code goes over each set once in a training step and adds the gradients of its batches. Here
  each has one batch. The loss of all three sets is the denoising loss there. Here the retain loss
  is the recipe's.
* theta' is made by the step's own batch of `relearn`, which also gives the gradient there. The code
  has other images and time steps for each of them (hrm train and test).
* The fine-tuning moves the trained parameters. The code's moves all of the denoiser (line 1007), by
  AdamW with its gradient clipped.
* K = 0 leaves the fine-tuning out, so that theta' is theta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from concept_eraser.methods.base import Closure, Direction, Method
from concept_eraser.methods.relearning import (
    RELEARN,
    TuningSteps,
    fine_tuned,
    require_objectives,
)
from concept_eraser.methods.vectors import Vec, combine, norm


@dataclass(frozen=True)
class MetaUnlearning(Method):
    """Forget, and be worse at concept and retained concepts after fine-tuning on the concept.

    Args:
        inner_steps: K, the steps of the fine-tuning.
        inner_lr: Their learning rate.
        inner_optimizer: Adam (adam) or plain gradient steps (gradient).
        forget: a, the weight of the forget loss.
        retain: b, the weight of the retain loss.
        relearn: c, the weight of the fine-tuning's loss after it, with a minus sign.
        destroy: d, the weight of the retain loss after the fine-tuning, with a minus sign.
    """

    title: ClassVar[str] = "Meta-Unlearning: preventing relearning"
    source: ClassVar[str] = "arXiv 2410.12777"
    defaults: ClassVar[Mapping[str, str]] = {
        "inner_steps": "ours (its code: the batches of one pass over the images)",
        "inner_lr": "its code",
        "inner_optimizer": "its code",
        "forget": "its code",
        "retain": "its command",
        "relearn": "its command, see above",
        "destroy": "its command, see above",
    }
    needs_relearning: ClassVar[bool] = True

    inner_steps: int = 1
    inner_lr: float = 1e-5
    inner_optimizer: TuningSteps = "adam"
    forget: float = 1.0
    retain: float = 0.1
    relearn: float = 0.1
    destroy: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = (self.forget, self.retain, self.relearn, self.destroy)
        if self.inner_steps < 0 or self.inner_lr <= 0 or min(weights) < 0:
            raise ValueError(
                "inner_steps and the four weights must be >= 0 and inner_lr > 0, found "
                f"{self.inner_steps}, {', '.join(map(str, weights))} and {self.inner_lr}"
            )

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        require_objectives("meta_unlearning", objectives)

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        step = combine([self.forget, self.retain], [closure.grad("forget"), closure.grad("retain")])
        change = fine_tuned(closure, self.inner_steps, self.inner_lr, self.inner_optimizer)
        later: Vec
        with closure.at(change):
            later = combine(
                [self.relearn, self.destroy], [closure.grad(RELEARN), closure.grad("retain")]
            )
            relearned = closure.last_loss
        weights = {"retain": self.retain, "forget": self.forget, RELEARN: -self.relearn}
        return Direction(
            combine([1.0, -1.0], [step, later]),
            weights=torch.tensor(
                [weights[objective] for objective in closure.objectives], dtype=torch.float64
            ),
            notes={"tuned": float(norm(change)), "retain_later": relearned},
        )


PLUGIN = MetaUnlearning
