"""DeltaGrad: retraining along the recorded path, with few exact gradients (arXiv 2006.14755).

The paper is Wu, Dobriban & Davidson, "DeltaGrad: Rapid retraining of machine learning models" (ICML
2020). A training w_{t+1} = w_t - eta g_t was recorded, with g_t the mean gradient of its batch B_t.
The path v_t without the forgotten samples U starts at v_0 = w_0. Its mean gradient of a whole batch
is exact at the first j_0 iterations and at every T_0-th one after them. Elsewhere it is

    g(v_t) = g_t + H_t (v_t - w_t),

with H_t the L-BFGS matrix of the last m pairs (v - w, g(v) - g) of the exact iterations. Then, with
r_t forgotten samples in a batch of b,

    v_{t+1} = v_t - eta / (b - r_t) [b g(v_t) - sum_{B_t and U} grad l(v_t)].

The gradients of forgotten samples are exact at every iteration, which is cheap for a small share.

It is the paper's Algorithm 1, with batches. The authors' code is wuyinjun-1993/DeltaGrad,
src/main_delete.py, `model_update_deltagrad`, lines 815-1046.

Deliberate differences from the paper and this code:
* g_t is (w_t - w_{t+1}) / eta of the record. The code stores the gradients. In single precision
  this costs digits where the steps are short.
* Before the first batch with a forgotten sample both paths are equal, so nothing is computed.
* Pairs without positive curvature are left out (methods/mini_unlearning.py, `lbfgs_product`).
* A batch that is wholly forgotten leaves v where it is. The code then does not advance in its
  record (line 914), so that later iterations use the records of earlier ones. That is an error.
* The path starts at the oldest recorded iteration. Record the whole training.
* Plain SGD only. A record with momentum is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from concept_eraser.methods.base import Edit, EditRequest, all_or_nothing
from concept_eraser.methods.history import History, Iteration
from concept_eraser.methods.mini_unlearning import (
    REMEDY,
    MeanLoss,
    RecursionOutcome,
    lbfgs_product,
    mean_gradient,
    open_recorded,
    put,
    require_same_loss,
)
from concept_eraser.methods.vectors import Vec, combine, norm


@dataclass(frozen=True)
class DeltaGrad(Edit):
    """Follow the path of retraining, with approximate gradients between exact ones.

    Args:
        history: The folder that a History recorded while the model was trained.
        k: The number of last iterations that are used; 0 for all that are recorded.
        period: T_0. After the first iterations, every T_0-th gradient is exact.
        burn_in: j_0, the number of first iterations whose gradients are exact.
        pairs: m, the number of pairs of the L-BFGS matrix.
    """

    title: ClassVar[str] = "DeltaGrad: rapid retraining of machine learning models"
    source: ClassVar[str] = "arXiv 2006.14755"
    defaults: ClassVar[Mapping[str, str]] = {
        "history": "where yours lies",
        "k": "the paper: all iterations",
        "period": "Mini-Unlearning's comparison",
        "burn_in": "Mini-Unlearning's comparison",
        "pairs": "the authors' README",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point"})

    history: str = ""
    k: int = 0
    period: int = 5
    burn_in: int = 10
    pairs: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.k, self.burn_in) < 0 or min(self.period, self.pairs) < 1:
            raise ValueError(
                "k and burn_in must be >= 0, period and pairs >= 1; found "
                f"{self.k}, {self.burn_in}, {self.period}, {self.pairs}"
            )

    def apply(self, history: History, loss: MeanLoss, forget: Sequence[int]) -> RecursionOutcome:
        """Move history.params from w_T to v_T."""
        steps = history.last(self.k or min(history.recorded_count, history.k))
        if any(step.momentum for step in steps):
            raise ValueError(
                "DeltaGrad follows plain SGD, and the recorded training has momentum; use "
                "mini_unlearning or rewind"
            )
        params, forgotten_rows = history.params, {int(j) for j in forget}
        shift = tuple(torch.zeros_like(p) for p in params)  # v_t - w_t
        pairs: deque[tuple[Vec, Vec]] = deque(maxlen=self.pairs)
        lengths, affected_steps = [], 0
        with all_or_nothing(params, REMEDY) as final:
            ends = [*(step.weights for step in steps[1:]), final]
            for t, (step, end) in enumerate(zip(steps, ends, strict=True)):
                forgotten = [j for j in step.indices if j in forgotten_rows]
                affected_steps += bool(forgotten)
                if affected_steps:
                    recorded = tuple(
                        (a - b) / step.lr for a, b in zip(step.weights, end, strict=True)
                    )
                    exact = t < self.burn_in or (t - self.burn_in) % self.period == 0
                    change = _change(
                        step,
                        forgotten=forgotten,
                        shift=shift,
                        recorded=recorded,
                        params=params,
                        loss=loss,
                        pairs=pairs,
                        exact=exact,
                    )
                    shift = combine([1.0, -step.lr], [shift, change])
                lengths.append(float(norm(shift)))
            put(params, tuple(w + part for w, part in zip(final, shift, strict=True)))
        return RecursionOutcome(tuple(lengths), affected_steps / len(steps))

    def edit(self, request: EditRequest) -> Mapping[str, float]:
        history = open_recorded(request, self.history, "DeltaGrad")
        require_same_loss(history, request.loss)
        outcome = self.apply(history, request.loss, request.forget)
        return {"step": outcome.lengths[-1], "touched": outcome.touched_share}


def _change(
    step: Iteration,
    *,
    forgotten: Sequence[int],
    shift: Vec,
    recorded: Vec,
    params: Vec,
    loss: MeanLoss,
    pairs: deque[tuple[Vec, Vec]],
    exact: bool,
) -> Vec:
    """Return the mean gradient of the retained samples at v_t, less the recorded one.

    An exact iteration adds its pair to `pairs`.
    """
    members = set(forgotten)
    retained = [j for j in step.indices if j not in members]
    if not retained:  # v stands still
        return tuple(-g for g in recorded)
    b, r = len(step.indices), len(forgotten)
    put(params, combine([1.0, 1.0], [step.weights, shift]))
    away = mean_gradient(loss, forgotten, params) if forgotten else recorded
    if not exact:
        curved = lbfgs_product([s for s, _ in pairs], [y for _, y in pairs], shift)
        whole = combine([1.0, 1.0], [recorded, curved])
        kept = combine([b / (b - r), -r / (b - r)], [whole, away])
        return combine([1.0, -1.0], [kept, recorded])
    kept = mean_gradient(loss, retained, params)
    whole = combine([(b - r) / b, r / b], [kept, away])
    pairs.append((shift, combine([1.0, -1.0], [whole, recorded])))
    return combine([1.0, -1.0], [kept, recorded])


PLUGIN = DeltaGrad
