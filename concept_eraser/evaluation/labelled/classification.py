"""Forgetting of a classifier: accuracies, membership inference, and the gap to a retrained model.

The table of the papers (MUNBa Tables 1, 8, 9; SalUn) has five columns. They are the accuracy on
forgotten, retained and test examples, MIA, and the average gap. The gap is the mean absolute
difference of the first four to those of the retrained model.

MIA is the "efficacy" of that table. An attack learns to separate retained examples (members) from
test examples (non-members) by one number of the model's output. MIA is the share of forgotten
examples that the attack calls non-members. A high MIA is not good in itself; a MIA close to the
retrained model's is.

One further number needs no retrained model: the AUC with which the same number separates forgotten
from unseen examples.

Differences from the papers' scripts: a logistic attack is the default. `attack="svc"` is theirs,
SVC_MIA.py of OPTML-Group/Unlearn-Saliency, lines 59-68: a support vector machine on the raw signal.
The logistic attack takes members for the more confident. A fit to a model without a trace has
either sign by chance, and calls nearly all examples the opposite for the other sign. The attack's
own accuracy is reported too, because an attack that cannot detect members is no evidence.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from concept_eraser.data.labelled import Labelled
from concept_eraser.evaluation.statistics import wilson
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.extras import import_from_extra

Signal = Literal["confidence", "loss", "entropy"]
Classifier = Literal["logistic", "svc"]


@dataclass(frozen=True)
class Outputs:
    """A classifier's outputs: probabilities [n, classes] and the true labels [n]."""

    probabilities: np.ndarray
    labels: np.ndarray

    @property
    def correct(self) -> np.ndarray:
        """Whether the most probable label is the true one, [n]."""
        correct: np.ndarray = self.probabilities.argmax(1) == self.labels
        return correct

    @property
    def confidence(self) -> np.ndarray:
        """The probability of the true label, [n]."""
        confidence: np.ndarray = self.probabilities[np.arange(len(self.labels)), self.labels]
        return confidence

    def signal(self, which: Signal) -> np.ndarray:
        """One number per example, larger for members: confidence, -loss or -entropy."""
        if which == "confidence":
            return self.confidence
        if which == "loss":
            minus_loss: np.ndarray = np.log(np.clip(self.confidence, 1e-30, 1))
            return minus_loss
        logarithms = np.log(np.clip(self.probabilities, 1e-30, 1))
        minus_entropy: np.ndarray = (self.probabilities * logarithms).sum(1)
        return minus_entropy


@torch.no_grad()
def predict(module: nn.Module, data: Labelled, rows: Tensor, batch_size: int = 256) -> Outputs:
    """Apply a classifier to some examples. Raises UserError where there are none."""
    if len(rows) == 0:
        raise UserError(f"no examples of {data.about} to measure on")
    device = next(module.parameters()).device
    module.eval()
    probabilities = [
        module(data.inputs(part.tolist()).to(device)).double().softmax(1).cpu()
        for part in rows.split(batch_size)
    ]
    return Outputs(torch.cat(probabilities).numpy(), data.labels[rows].numpy())


def membership(
    members: Outputs,
    others: Outputs,
    targets: Outputs,
    signal: Signal = "confidence",
    attack: Classifier = "logistic",
    seed: int = 0,
) -> tuple[float, float]:
    """Run a membership attack.

    Returns:
        The share of `targets` that the attack calls non-members, and the attack's balanced accuracy
        on its own training examples.
    """
    with import_from_extra("labelled", "a membership attack"):
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import balanced_accuracy_score
        from sklearn.svm import SVC

    rng = np.random.default_rng(seed)
    inside, outside = (o.signal(signal) for o in (members, others))
    n = min(len(inside), len(outside))
    x = np.concatenate([rng.permutation(inside)[:n], rng.permutation(outside)[:n]])[:, None]
    y = np.repeat([1, 0], n)
    if attack == "svc":
        is_member = SVC(C=3, gamma="auto").fit(x, y).predict
    else:
        is_member = partial(_is_above, least=_least_of_members(LogisticRegression(), x, y))
    called = is_member(targets.signal(signal)[:, None])
    return float((called == 0).mean()), float(balanced_accuracy_score(y, is_member(x)))


def _least_of_members(regression: Any, x: np.ndarray, y: np.ndarray) -> float:
    """Return the signal from which on a logistic regression calls an example a member.

    Where it says that members have smaller signals, it is the mean signal.

    Args:
        regression: A LogisticRegression of scikit-learn.
        x: The signals, [2 n, 1].
        y: 1 for members and 0 for others, [2 n].
    """
    mean, spread = float(x.mean()), float(x.std()) or 1.0
    regression.fit((x - mean) / spread, y)
    slope, offset = float(regression.coef_[0, 0]), float(regression.intercept_[0])
    return mean - spread * offset / slope if slope > 0 else mean


def _is_above(x: np.ndarray, least: float) -> np.ndarray:
    """Return 1 for the signals [n, 1] of at least `least`, and 0 for others."""
    return (x[:, 0] >= least).astype(int)


def every_membership(
    members: Outputs, others: Outputs, targets: Outputs, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Run both classifiers on all three signals, in percent. The papers' choices differ."""
    results = {}
    for attack in get_args(Classifier):
        for signal in get_args(Signal):
            mia, accuracy = membership(
                members, others, targets=targets, signal=signal, attack=attack, seed=seed
            )
            results[f"{attack} on {signal}"] = {"mia": 100 * mia, "attack": 100 * accuracy}
    return results


def auc(members: Outputs, others: Outputs, signal: Signal = "loss") -> float:
    """Probability that a member's signal is larger than a non-member's.

    Ties count half; 0.5 is no trace.
    """
    from scipy.stats import rankdata

    inside, outside = members.signal(signal), others.signal(signal)
    ranks = rankdata(np.concatenate([inside, outside]))[: len(inside)]
    return float((ranks.sum() - len(inside) * (len(inside) + 1) / 2) / (len(inside) * len(outside)))


def likelihood_ratio(
    targets: Outputs, inside: Sequence[Outputs], outside: Sequence[Outputs]
) -> np.ndarray:
    """LiRA (arXiv 2112.03570): log p(signal | trained on it) - log p(signal | not), per example.

    The signal is the logit of the confidence. Its densities are Gaussian, with one mean per example
    and one standard deviation for all examples, for each of the two kinds of shadow models. It is
    the mean over the examples. The authors' code (tensorflow/privacy, plot.py) takes medians, and
    the standard deviation of all logits of a kind.

    Args:
        targets: the outputs to attack.
        inside: the same examples under at least two shadow models trained with them.
        outside: the same examples under at least two shadow models trained without them.
    """
    if min(len(inside), len(outside)) < 2:
        raise UserError(
            "LiRA needs at least two shadow models with and two without the examples, "
            f"found {len(inside)} and {len(outside)}"
        )
    value = _logit(targets.confidence)
    densities = []
    for shadows in (inside, outside):
        logits = np.stack([_logit(shadow.confidence) for shadow in shadows])
        mean, spread = logits.mean(0), max(float(logits.std(0, ddof=1).mean()), 1e-6)
        densities.append(-0.5 * ((value - mean) / spread) ** 2 - np.log(spread))
    ratio: np.ndarray = densities[0] - densities[1]
    return ratio


ShadowAttack = Literal["mlp", "logistic"]


def shadow_attack(
    members: Sequence[Outputs],
    others: Sequence[Outputs],
    targets: Outputs,
    *,
    attack: ShadowAttack = "mlp",
    seed: int = 0,
) -> np.ndarray:
    """Shokri et al.'s attack (arXiv 1610.05820): the probability that a target is a member, [n].

    A classifier learns to separate the members of shadow models from other examples, by the vector
    of their probabilities. There is one classifier for each true class. A class of which the shadow
    models have no members or no others is attacked by a classifier of all classes.

    Differences from the paper: the classes have equal numbers of members and others, so that 1/2 is
    the threshold. The network is scikit-learn's, with the paper's one hidden layer of 64 units.

    Args:
        members: the outputs of each shadow model on its training examples.
        others: its outputs on examples that it was not trained on.
        targets: the outputs of the attacked model.
        attack: the classifier: a network ("mlp", the paper's) or a logistic regression.
        seed: selects the examples and initialises the network.
    """
    if not members or len(members) != len(others):
        raise UserError(
            "the shadow attack needs the outputs of at least one shadow model on members and on "
            f"others, found {len(members)} and {len(others)}"
        )
    with import_from_extra("labelled", "a shadow attack"):
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from sklearn.neural_network import MLPClassifier

    rng = np.random.default_rng(seed)
    vectors = [np.concatenate([o.probabilities for o in some]) for some in (members, others)]
    labels = [np.concatenate([o.labels for o in some]) for some in (members, others)]

    def fit(label: int | None) -> Any:
        groups = [
            v if label is None else v[y == label] for v, y in zip(vectors, labels, strict=True)
        ]
        n = min(len(group) for group in groups)
        if n == 0:
            return None
        x = np.concatenate([rng.permutation(group)[:n] for group in groups])
        classifier = (
            MLPClassifier((64,), max_iter=500, random_state=seed)
            if attack == "mlp"
            else LogisticRegression(max_iter=1000)
        )
        with warnings.catch_warnings():  # separable outputs have no finite minimum
            warnings.simplefilter("ignore", ConvergenceWarning)
            return classifier.fit(x, np.repeat([1, 0], n))

    probabilities = np.empty(len(targets.labels))
    for label in np.unique(targets.labels):
        rows = targets.labels == label
        classifier = fit(int(label)) or fit(None)
        if classifier is None:
            raise UserError("the shadow models have no members, or no others, to learn from")
        probabilities[rows] = classifier.predict_proba(targets.probabilities[rows])[:, 1]
    return probabilities


def precision_and_recall(
    members: np.ndarray, others: np.ndarray, threshold: float = 0.5
) -> tuple[float, float]:
    """Precision and recall of an attack, from its scores of members and of other examples.

    The two groups count equally, whatever their sizes. Precision is nan where nothing is called a
    member.
    """
    recall, false_rate = float((members > threshold).mean()), float((others > threshold).mean())
    total = recall + false_rate
    return (recall / total if total else float("nan")), recall


def _logit(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, 1e-12, 1 - 1e-12)
    logit: np.ndarray = np.log(p) - np.log1p(-p)
    return logit


@dataclass(frozen=True)
class Table:
    """One row of the papers' table, in percent except auc.

    `attack` is the accuracy of the membership attack itself.
    """

    forget: float
    retain: float
    test: float
    mia: float
    auc: float
    attack: float

    def gap(self, reference: Table) -> float:
        """Average gap: the mean absolute difference of the first four columns, in points."""
        return float(
            np.mean(
                [
                    abs(getattr(self, k) - getattr(reference, k))
                    for k in ("forget", "retain", "test", "mia")
                ]
            )
        )


def measure(
    module: nn.Module,
    data: Labelled,
    forget: Tensor,
    retain: Tensor,
    test: Labelled,
    *,
    test_rows: Tensor | None = None,
    signal: Signal = "confidence",
    seed: int = 0,
) -> Table:
    """Measure a classifier's row of the table.

    The AUC compares the forgotten examples with the test examples of the same classes.

    Args:
        test_rows: the test examples to use; default all. For a forgotten class, give the rows of
            the other classes: Acc_Dt is then the accuracy on the remaining classes.
    """
    outputs = {"forget": predict(module, data, forget), "retain": predict(module, data, retain)}
    all_rows = torch.arange(len(test))
    test_outputs = predict(module, test, all_rows if test_rows is None else test_rows)
    same_classes = all_rows[torch.isin(test.labels, data.labels[forget])]
    mia, attack = membership(outputs["retain"], test_outputs, outputs["forget"], signal, seed=seed)
    trace = (
        auc(outputs["forget"], predict(module, test, same_classes))
        if len(same_classes)
        else float("nan")
    )
    forget_accuracy, retain_accuracy, test_accuracy = (
        100 * float(o.correct.mean()) for o in (outputs["forget"], outputs["retain"], test_outputs)
    )
    return Table(
        forget=forget_accuracy,
        retain=retain_accuracy,
        test=test_accuracy,
        mia=100 * mia,
        auc=trace,
        attack=100 * attack,
    )


def intervals(
    module: nn.Module, sets: Mapping[str, tuple[Labelled, Tensor]]
) -> dict[str, dict[str, float]]:
    """Accuracy with its Wilson interval on each named set."""
    results = {}
    for name, (data, rows) in sets.items():
        correct = predict(module, data, rows).correct
        interval = wilson(int(correct.sum()), len(correct))
        results[name] = {
            "value": interval.value,
            "low": interval.low,
            "high": interval.high,
            "n": interval.n,
        }
    return results
