"""STEREO: search thoroughly enough, then robustly erase once (Srivatsan et al., arXiv 2408.16807).

Search. In each of R rounds the weights learn to predict as for the empty prompt under the last
attack (none in the first round). Then the attack omega_r of this round is learned with fixed
weights, by Adam on the denoising loss f of the concept's images:

    theta <- theta - mu grad_theta F(theta, omega_{r-1}),  n times
    omega_r <- Adam on f(theta, omega_r),                   m times.

Erase. The weights start anew from the original ones, and learn the loss `stereo` for a prompt with
any of the attacks omega_0 = 0, omega_1, ..., omega_R. Its target (losses/denoiser.py) steers away
from the mean over all of them and towards an anchor.

The rounds are in the method; the attacks and the restart are the eraser's (erasers/denoiser.py). A
recipe has `forget: {loss: stereo, eta: 2.0}` and `attack: {decay: 0}`, as `tiny_star_stereo`. The
first R (n + m) steps of a training are the search, all others the erasure.

The paper's text was not read here beyond its introduction. The authors' code is
koushiksrivats/robust-concept-erasing (commit 86f124f): the search is the function
search_thoroughly_enough of utils/stereo.py, with train_erasing and train_concept_inversion; the
erasure is robustly_erase_once, with normalized_compositional_guidance of utils/apg.py. The defaults
are those of train.py: R = 4, n = 200, 3000 steps of inversion at 5e-3.

Deliberate differences from the code:
* The anchor is the recipe's, in `tiny_star_stereo` the prompt with another concept. The code draws
  an anchor in each step from utils/anchor_prompts.json, independently of the erased prompt. Its
  anchors name the erased concept in other surroundings.
* An attack is an offset of the prompt's states, one for all prompts, from 0. The code learns the
  embedding of a new token, from that of a word such as "person".
* In the search the target is the original model's prediction. In the code it is that of the model
  at the start of the round. With its default guidance of 2 both are for the empty prompt.
* x_t is a noised image of the concept. The code samples x_t by the model in training.
* Adam without weight decay for the attack; the code has AdamW. The optimizer of the weights starts
  anew once, after the search; in the code it starts anew in each round.
* Both stages have the learning rate of the recipe. The code has 5e-6 and 2e-5.
* A retain loss is possible, with the weight `retain`. The code has none, which is the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.methods.adversarial import step_under
from concept_eraser.methods.base import Closure, Direction, Method
from concept_eraser.methods.forum import ATTACK

BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch's defaults, as in the code


@dataclass(frozen=True)
class Stereo(Method):
    """Erase and attack in rounds, then erase anew against all attacks.

    Args:
        rounds: R, the number of attacks.
        erase_steps: n, the steps on the weights in each round.
        inner_steps: m, the steps on the attack in each round.
        inner_lr: The learning rate of the attack.
        retain: The weight of the retain loss. A recipe needs a retain set if it is > 0.
        forget: The weight of the forget loss and of all other losses.
    """

    title: ClassVar[str] = "STEREO: search thoroughly enough, then robustly erase once"
    source: ClassVar[str] = "arXiv 2408.16807"
    defaults: ClassVar[Mapping[str, str]] = {
        "rounds": "its code",
        "erase_steps": "its code",
        "inner_steps": "its code",
        "inner_lr": "its code",
        "retain": "its code",
        "forget": "its code",
    }
    needs_attack: ClassVar[bool] = True
    targets: ClassVar[tuple[str, ...] | None] = ("denoiser",)
    why: ClassVar[str] = "its attacks are kept by the eraser of a denoiser"

    rounds: int = 4
    erase_steps: int = 200
    inner_steps: int = 3000
    inner_lr: float = 5e-3
    retain: float = 0.0
    forget: float = 1.0
    # the moments of Adam, and the number of their round and of their steps
    _state: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.rounds, self.erase_steps, self.inner_steps) < 1:
            raise ValueError(
                "rounds, erase_steps and inner_steps must be >= 1, found "
                f"{self.rounds}, {self.erase_steps} and {self.inner_steps}"
            )
        if self.inner_lr <= 0 or min(self.retain, self.forget) < 0:
            raise ValueError(
                "inner_lr must be > 0 and retain and forget must be >= 0, found "
                f"{self.inner_lr}, {self.retain} and {self.forget}"
            )

    @property
    def needs_retain(self) -> bool:
        """Whether the recipe must have a retain set."""
        return self.retain > 0

    @property
    def search(self) -> tuple[int, int, int]:
        return self.rounds, self.erase_steps, self.inner_steps

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if ATTACK not in objectives:
            raise ValueError(
                f"stereo needs an attack, the objective {ATTACK!r}; found "
                f"{', '.join(objectives)}. Give the recipe an `attack:` section"
            )

    def direction(self, closure: Closure) -> Direction:
        self.check_objectives(closure.objectives)
        number, place = divmod(closure.step, self.erase_steps + self.inner_steps)
        if number < self.rounds and place >= self.erase_steps:
            return self._attack(closure, number)
        still = [torch.zeros_like(closure.params[i]) for i in closure.inner]
        return step_under(closure, still, retain=self.retain, forget=self.forget)

    def _attack(self, closure: Closure, number: int) -> Direction:
        """Return Adam's next step on the attack of a round; the weights stay.

        The state has the number of its round and of its steps. A step that the engine skips leaves
        it, so that it counts neither.
        """
        gradients = closure.grad(ATTACK, of=closure.inner)
        is_of_round = int(self._state.get("round", torch.tensor(-1))) == number
        done = int(self._state["taken"]) if is_of_round else 0
        moves: dict[int, Tensor] = {}
        new: dict[str, Tensor] = {
            "round": torch.tensor(number),
            "taken": torch.tensor(done + 1),
        }
        for i, gradient in zip(closure.inner, gradients, strict=True):
            first = self._state[f"first_{i}"].to(gradient) if done else torch.zeros_like(gradient)
            second = self._state[f"second_{i}"].to(gradient) if done else torch.zeros_like(gradient)
            first = BETAS[0] * first + (1 - BETAS[0]) * gradient
            second = BETAS[1] * second + (1 - BETAS[1]) * gradient.square()
            mean = first / (1 - BETAS[0] ** (done + 1))
            scale = (second / (1 - BETAS[1] ** (done + 1))).sqrt() + EPSILON
            moves[i] = self.inner_lr * mean / scale
            new |= {f"first_{i}": first, f"second_{i}": second}
        self._state.update(new)
        vec = tuple(
            moves[i].to(p) if i in moves else torch.zeros_like(p)
            for i, p in enumerate(closure.params)
        )
        return Direction(vec, notes={"attack_loss": closure.last_loss}, hold_trained=True)


PLUGIN = Stereo
