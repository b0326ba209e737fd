"""Has a classifier forgotten? Accuracies, membership inference, and the gap to a model trained without the examples.

The field's table (MUNBa Tables 1, 8, 9; SalUn): accuracy on forgotten, retained and test examples, MIA, and the average
gap: the mean absolute difference of these four to the retrained model's. MIA here is the "efficacy" of that table: an
attack is trained to tell retained examples (members) from test examples (not members) by one number of the model's
output, and MIA is the share of forgotten examples that it calls non-members. High is not good in itself; like the
retrained model's is.

A number beside it that needs no retrained model: the AUC with which the same number tells forgotten from test examples,
0.5 being no trace. Differences from the public code: logistic regression by default (`attack="svc"` for theirs), balanced
classes, and the attack's own accuracy is reported, since an attack that cannot tell members at all says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from concept_eraser.data.labelled import Labelled
from concept_eraser.errors import UserError
from concept_eraser.evaluation.statistics import wilson

Signal = Literal["confidence", "loss", "entropy"]
Classifier = Literal["logistic", "svc"]


@dataclass(frozen=True)
class Outputs:
    """What a classifier says about some examples: probabilities [n, classes] and the true labels [n]."""

    probabilities: np.ndarray
    labels: np.ndarray

    @property
    def correct(self) -> np.ndarray:
        return self.probabilities.argmax(1) == self.labels

    @property
    def confidence(self) -> np.ndarray:
        """The probability of the true label, [n]."""
        return self.probabilities[np.arange(len(self.labels)), self.labels]

    def signal(self, which: Signal) -> np.ndarray:
        """One number an example, larger for members: confidence, -loss or -entropy."""
        if which == "confidence":
            return self.confidence
        if which == "loss":
            return np.log(np.clip(self.confidence, 1e-30, 1))
        return (self.probabilities * np.log(np.clip(self.probabilities, 1e-30, 1))).sum(1)


@torch.no_grad()
def look(module: nn.Module, data: Labelled, rows: Tensor, batch_size: int = 256) -> Outputs:
    """Ask a classifier about some examples. Raises UserError where there are none."""
    if len(rows) == 0:
        raise UserError(f"no examples of {data.about} to measure on")
    device = next(module.parameters()).device
    module.eval()
    found = [module(data.inputs(part.tolist()).to(device)).double().softmax(1).cpu() for part in rows.split(batch_size)]
    return Outputs(torch.cat(found).numpy(), data.labels[rows].numpy())


def membership(members: Outputs, others: Outputs, asked: Outputs, signal: Signal = "confidence", attack: Classifier = "logistic", seed: int = 0) -> tuple[float, float]:  # fmt: skip
    """(share of `asked` that the attack calls non-members, the attack's balanced accuracy on what it was trained on)."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    rng = np.random.default_rng(seed)
    inside, outside = (o.signal(signal) for o in (members, others))
    n = min(len(inside), len(outside))
    x = np.concatenate([rng.permutation(inside)[:n], rng.permutation(outside)[:n]])[:, None]
    y = np.repeat([1, 0], n)
    scale = StandardScaler().fit(x)
    found = (SVC(C=3, gamma="auto") if attack == "svc" else LogisticRegression()).fit(scale.transform(x), y)
    said = found.predict(scale.transform(asked.signal(signal)[:, None]))
    return float((said == 0).mean()), float(balanced_accuracy_score(y, found.predict(scale.transform(x))))


def every_membership(members: Outputs, others: Outputs, asked: Outputs, seed: int = 0) -> dict[str, dict[str, float]]:
    """Both classifiers on all three signals, in percent: the papers choose differently, and say so seldom."""
    found = {}
    for attack in get_args(Classifier):
        for signal in get_args(Signal):
            mia, own = membership(members, others, asked, signal, attack, seed)
            found[f"{attack} on {signal}"] = {"mia": 100 * mia, "attack": 100 * own}
    return found


def auc(members: Outputs, others: Outputs, signal: Signal = "loss") -> float:
    """Probability that a member's signal is larger than another's, ties counting half: 0.5 is no trace."""
    from scipy.stats import rankdata

    inside, outside = members.signal(signal), others.signal(signal)
    ranks = rankdata(np.concatenate([inside, outside]))[: len(inside)]
    return float((ranks.sum() - len(inside) * (len(inside) + 1) / 2) / (len(inside) * len(outside)))


def likelihood_ratio(asked: Outputs, inside: Sequence[Outputs], outside: Sequence[Outputs]) -> np.ndarray:
    """LiRA (arXiv 2112.03570): log p(signal | trained on it) - log p(signal | not), one number an example.

    inside, outside: the same examples asked of shadow models trained with and without them, at least two each. The
    signal is the logit of the confidence, its densities Gaussian with a mean an example and one spread for all.
    """
    if min(len(inside), len(outside)) < 2:
        raise UserError(f"LiRA needs at least two shadow models with and two without the examples, found {len(inside)} and {len(outside)}")  # fmt: skip
    value = _logit(asked.confidence)
    densities = []
    for shadows in (inside, outside):
        seen = np.stack([_logit(shadow.confidence) for shadow in shadows])
        mean, spread = seen.mean(0), max(float(seen.std(0, ddof=1).mean()), 1e-6)
        densities.append(-0.5 * ((value - mean) / spread) ** 2 - np.log(spread))
    return densities[0] - densities[1]


def _logit(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return np.log(p) - np.log1p(-p)


@dataclass(frozen=True)
class Table:
    """One row of the field's table, in percent except auc; `attack` is the membership attack's own accuracy."""

    forget: float
    retain: float
    test: float
    mia: float
    auc: float
    attack: float

    def gap(self, retrained: Table) -> float:
        """Average gap: the mean absolute difference of the first four to the retrained model's, in points."""
        return float(np.mean([abs(getattr(self, k) - getattr(retrained, k)) for k in ("forget", "retain", "test", "mia")]))  # fmt: skip


def measure(module: nn.Module, data: Labelled, forget: Tensor, retain: Tensor, test: Labelled, *, test_rows: Tensor | None = None, signal: Signal = "confidence", seed: int = 0) -> Table:  # fmt: skip
    """A classifier's row of the table.

    test_rows: which test examples count; default all. For a forgotten class give those of the other classes (Acc_Dt is
    then of the classes that remain). The AUC compares with the test examples of the forgotten ones' classes.
    """
    seen = {"forget": look(module, data, forget), "retain": look(module, data, retain)}
    everything = torch.arange(len(test))
    held = look(module, test, everything if test_rows is None else test_rows)
    alike = everything[torch.isin(test.labels, data.labels[forget])]
    mia, attack = membership(seen["retain"], held, seen["forget"], signal, seed=seed)
    trace = auc(seen["forget"], look(module, test, alike)) if len(alike) else float("nan")
    forgotten, retained, tested = (100 * float(o.correct.mean()) for o in (seen["forget"], seen["retain"], held))
    return Table(forgotten, retained, tested, 100 * mia, trace, 100 * attack)


def intervals(module: nn.Module, sets: Mapping[str, tuple[Labelled, Tensor]]) -> dict[str, dict[str, float]]:
    """Accuracy with its Wilson interval on each named set."""
    found = {}
    for name, (data, rows) in sets.items():
        correct = look(module, data, rows).correct
        interval = wilson(int(correct.sum()), len(correct))
        found[name] = {"value": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}
    return found
