"""Gradient surgery: three rules that project one gradient off the other.

With g_r, g_f the gradients of the retain and the forget loss:

* descent (S, UNO's paper arXiv 2506.04712):   g = g_r - (<g_r, g_f> / ||g_f||^2) g_f
* ascent  (SA, Bae et al. 2023, arXiv 2311.15040): g = g_f - (<g_r, g_f> / ||g_r||^2) g_r
* pcgrad  (Yu et al., arXiv 2001.06782): the sum of both projections on conflict (<g_r, g_f> < 0),
  else g_r + g_f

S and SA always project, PCGrad only on conflict. PCGrad's authors have it in tianheyu927/PCGrad,
PCGrad_tf.py, lines 44-49. TorchJD names Algorithm 1 of the paper as its source, and gives the same
weights. The paper's text was not read here.

With `alternate` the forget gradient alone is the step at even steps, and the rule at odd ones. With
`descent` and the loss `ascent` this is `a-s`, the A-D of the code behind the UNO paper's numbers on
MNIST (pinakm9/forget, modules/mnist/vae_ad.py, lines 98-167). The text's A-D is in weighted.py.

Deliberate differences:
* With two objectives the order of PCGrad's projections does not matter, so it is not random. (The
  authors' code shuffles the losses in line 36 and does not use the shuffled ones.)
* There is a difference of sign. The papers write S and SA with g_f the gradient of the training
  loss on forget data, and SA steps *up* along it. Here the forget loss is minimised, so both need
  the loss `ascent`, whose gradient is -g_f. S does not depend on the sign, and SA's step up becomes
  a step down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from concept_eraser.methods.base import Closure, Direction, GramMethod, usable
from concept_eraser.methods.weighted import Weighted


@dataclass(frozen=True)
class Surgery(GramMethod):
    """One gradient, projected off the other.

    A gradient that is zero or not finite is left out.

    Args:
        rule: "descent" (S), "ascent" (SA) or "pcgrad".
        alternate: Forget alone at even steps (counted from 0), the rule at odd ones.
    """

    title: ClassVar[str] = "Gradient surgery: S and SA of the UNO paper, PCGrad"
    source: ClassVar[str] = "arXiv 2506.04712, 2311.15040, 2001.06782"
    defaults: ClassVar[Mapping[str, str]] = {
        "rule": "S of arXiv 2506.04712",
        "alternate": "the paper: S",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"orthogonality", "stationarity"})

    rule: Literal["descent", "ascent", "pcgrad"] = "descent"
    alternate: bool = False

    def laws(self) -> frozenset[str]:
        if self.alternate:  # every second step is no combination
            return frozenset()
        return frozenset({"stationarity"}) if self.rule == "pcgrad" else self.theorems

    @property
    def removed_objective(self) -> str | None:
        """The objective whose gradient is projected away; None if that depends on the gradients."""
        return {"descent": "forget", "ascent": "retain"}.get(self.rule)

    def uses_all(self, objectives: tuple[str, ...]) -> bool:
        return not self.alternate

    def direction(self, closure: Closure) -> Direction:
        if self.alternate and closure.step % 2 == 0:
            return Weighted(retain=0.0).direction(closure)
        return super().direction(closure)

    def check_objectives(self, objectives: tuple[str, ...]) -> None:
        if len(objectives) != 2:
            raise ValueError(
                "surgery needs the two objectives retain and forget; found "
                f"{', '.join(objectives)}. For more use torchjd with rule: PCGrad"
            )

    def solve(self, gram: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        self.check_objectives(tuple(f"objective {i}" for i in range(len(gram))))
        usable_objectives = usable(gram)
        ones = usable_objectives.double()
        if not bool(usable_objectives.all()):  # nothing to project on
            fallbacks = {"descent": torch.tensor([1.0, 0.0]), "ascent": torch.tensor([0.0, 1.0])}
            return ones * fallbacks.get(self.rule, torch.ones(2)).double(), {"degenerate": 1}
        inner = gram[0, 1].double()
        # g_r without its part along g_f
        off_forget = torch.stack([torch.ones_like(inner), -inner / gram[1, 1]])
        # g_f without its part along g_r
        off_retain = torch.stack([-inner / gram[0, 0], torch.ones_like(inner)])
        if self.rule == "descent":
            return off_forget, {"degenerate": 0}
        if self.rule == "ascent":
            return off_retain, {"degenerate": 0}
        conflict = bool(inner < 0)
        return (off_forget + off_retain if conflict else ones), {
            "degenerate": 0,
            "projected": int(conflict),
        }


NAMED = {
    "s": {"rule": "descent"},
    "sa": {"rule": "ascent"},
    "a-s": {"rule": "descent", "alternate": True},
    "pcgrad": {"rule": "pcgrad"},
}
PLUGIN = Surgery
