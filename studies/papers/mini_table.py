"""Mini-Unlearning's comparison on softmax regression: retraining, DeltaGrad, certified removal,
amnesiac unlearning, Mini-Unlearning and rewind after random deletions, with the paper's settings.
The attacks are Shokri's with shadow models, and LiRA. The data are scikit-learn's digits, and
Covtype where scikit-learn's copy is on the disk; or another source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.datasets import fetch_covtype
from torch import Tensor, nn

from concept_eraser.evaluation.labelled.classification import (
    Outputs,
    likelihood_ratio,
    precision_and_recall,
    shadow_attack,
)
from concept_eraser.methods.amnesiac import Amnesiac
from concept_eraser.methods.base import EditRequest
from concept_eraser.methods.certified_removal import CertifiedRemoval
from concept_eraser.methods.deltagrad import DeltaGrad
from concept_eraser.methods.history import History
from concept_eraser.methods.mini_unlearning import MiniUnlearning, rewind
from studies.papers import samples

RETAINED = "accuracy on the retained samples"
LR, RIDGE, BATCH, EPOCHS, K = 0.01, 0.005, 100, 30, 10  # eta, l2 and k are the paper's
SHARES = (0.05, 0.1, 0.15)
SHADOWS = 4
METHODS = (
    "original",
    "retrained",
    "DeltaGrad",
    "certified removal",
    "amnesiac",
    "Mini-Unlearning",
    "rewind",
)


def covtype(rows: int = 2000) -> tuple[np.ndarray, np.ndarray] | None:
    """Return standardised samples of Covtype from scikit-learn's copy; None if there is none."""
    try:
        x, y = fetch_covtype(return_X_y=True, download_if_missing=False)
    except OSError:
        return None
    order = np.random.default_rng(0).permutation(len(x))[:rows]
    x, y = x[order], y[order] - 1
    return (x - x.mean(0)) / (x.std(0) + 1e-9), y


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples [n, d] and labels [n] of `covtype` or a source of samples.py."""
    if name == "covtype":
        data = covtype()
        if data is None:
            raise ValueError("scikit-learn has no copy of Covtype on this disk")
        return data
    data_set = samples.load(name)
    return data_set.flat.double().numpy(), data_set.labels.numpy()


class Regression:
    """Softmax regression of part of a data set, with the rest for tests."""

    def __init__(self, name: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, y = load(name)
        order = rng.permutation(len(x))
        self.x, self.y = torch.from_numpy(x[order]), torch.from_numpy(y[order]).long()
        self.n = len(x) * 3 // 4 // BATCH * BATCH
        self.w = torch.zeros(x.shape[1], int(y.max()) + 1).double().requires_grad_()
        self.batches = [
            batch.tolist()
            for _ in range(EPOCHS)
            for batch in np.split(rng.permutation(self.n), self.n // BATCH)
        ]

    def loss(self, indices: Sequence[int]) -> Tensor:
        rows = list(indices)
        fit = nn.functional.cross_entropy(self.x[rows] @ self.w, self.y[rows])
        return fit + RIDGE / 2 * self.w.square().sum()

    def train(self, forgotten: set[int], history: History | None = None) -> Tensor:
        with torch.no_grad():
            self.w.zero_()
        for batch in self.batches:
            if history:
                history.record(batch, LR)
            rows = [j for j in batch if j not in forgotten]
            (gradient,) = torch.autograd.grad(self.loss(rows), self.w)
            with torch.no_grad():
                self.w -= LR * gradient
        return self.w.detach().clone()

    def outputs(self, rows: Sequence[int]) -> Outputs:
        probabilities = (self.x[list(rows)] @ self.w).detach().softmax(1)
        return Outputs(probabilities.numpy(), self.y[list(rows)].numpy())

    def request(self, forgotten: set[int]) -> EditRequest:
        return EditRequest(
            model=_Logits(self.w),
            forget=tuple(sorted(forgotten)),
            retain=tuple(j for j in range(self.n) if j not in forgotten),
            ridge=RIDGE,
            batches=lambda rows: [(self.x[list(rows)], self.y[list(rows)])],
            loss=self.loss,
            params=(self.w,),
        )


class _Logits(nn.Module):
    """The logits x w of a regression, with the weights that it was given."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = w

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def forget(job: Regression, history: History, forgotten: set[int], name: str) -> None:
    """Apply a method to the weights of a regression that was trained on all samples."""
    if name == "retrained":
        job.train(forgotten)
    elif name == "DeltaGrad":
        DeltaGrad().apply(history, job.loss, sorted(forgotten))
    elif name == "certified removal":
        CertifiedRemoval(sigma=0.01).edit(job.request(forgotten))
    elif name == "amnesiac":
        Amnesiac().apply(history, sorted(forgotten))
    elif name == "Mini-Unlearning":
        MiniUnlearning(k=K).apply(history, job.loss, sorted(forgotten))
    elif name == "rewind":
        rewind(history, job.loss, sorted(forgotten), K)


def one(data: str, share: float, seed: int) -> list[dict[str, Any]]:
    """Return a row for each method."""
    job = Regression(data, seed)
    rng = np.random.default_rng(seed + 1000)
    lost = rng.permutation(job.n)[: int(share * job.n)].tolist()
    forgotten, test = set(lost), range(job.n, len(job.x))
    retained = [j for j in range(job.n) if j not in forgotten]
    shadows = _shadows(job, forgotten, rng)
    history = History((job.w,), len(job.batches))
    final = job.train(set(), history)
    target = Regression(data, seed).train(forgotten)
    rows = []
    for name in METHODS:
        with torch.no_grad():
            job.w.copy_(final)
        forget(job, history, forgotten, name)
        inside, outside, rest = (job.outputs(group) for group in (lost, test, retained))
        members, others = shadows["Shokri"]
        scores = {
            group: shadow_attack(members, others, outputs)
            for group, outputs in (("deleted", inside), ("unseen", outside), ("retained", rest))
        }
        precision, recall = precision_and_recall(scores["deleted"], scores["unseen"])
        retained_precision, retained_recall = precision_and_recall(
            scores["retained"], scores["unseen"]
        )
        ratio = likelihood_ratio(inside, *shadows["LiRA"])
        distance = float((job.w.detach() - target).norm() / (final - target).norm())
        rows.append(
            {
                "method": name,
                "test accuracy": float(outside.correct.mean()),
                "accuracy on the deleted samples": float(inside.correct.mean()),
                RETAINED: float(rest.correct.mean()),
                "share of the gap left": distance,
                "Shokri, precision": precision,
                "Shokri, recall": recall,
                "Shokri, precision on the retained": retained_precision,
                "Shokri, recall on the retained": retained_recall,
                "LiRA, called members": float((ratio > 0).mean()),
            }
        )
    return rows


def _shadows(job: Regression, forgotten: set[int], rng: Any) -> dict[str, Any]:
    """Train shadow models on halves of the training set, and return their outputs.

    For LiRA each deleted sample must be in some and out of others: half of the shadow models are
    trained with all deleted samples, half without.
    """
    members: list[Outputs] = []
    others: list[Outputs] = []
    inside: list[Outputs] = []
    outside: list[Outputs] = []
    lost, retained = sorted(forgotten), [j for j in range(job.n) if j not in forgotten]
    for i in range(SHADOWS):
        half = set(rng.permutation(retained)[: len(retained) // 2].tolist())
        excluded = set(retained) - half if i % 2 else (set(retained) - half) | forgotten
        job.train(excluded)
        members.append(job.outputs(sorted(half)))
        others.append(job.outputs(sorted(set(retained) - half)))
        (inside if i % 2 else outside).append(job.outputs(lost))
    return {"Shokri": (members, others), "LiRA": (inside, outside)}


def is_current(run: Mapping[str, Any]) -> bool:
    """Return whether a stored run has the columns of the retained samples."""
    return all(RETAINED in row for row in run["rows"])


def cells(
    seeds: list[int], sources: Sequence[str] = (samples.DIGITS,)
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the runs by their keys. Covtype is beside digits where it is on the disk."""
    has_covtype = tuple(sources) == (samples.DIGITS,) and covtype() is not None
    return {
        f"{data.partition(':')[0]}_{share}_{seed}": partial(_cell, data, share, seed)
        for data in [*sources, *(["covtype"] if has_covtype else [])]
        for seed in seeds
        for share in SHARES
    }


def _cell(data: str, share: float, seed: int) -> dict[str, Any]:
    return {
        "data": data.partition(":")[0],
        "share": share,
        "seed": seed,
        "rows": one(data, share, seed),
    }


def summary(runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the means of the finished runs over seeds."""
    groups: dict[tuple[str, float], list[list[dict[str, Any]]]] = {}
    for run in runs.values():
        groups.setdefault((run["data"], run["share"]), []).append(run["rows"])
    table = []
    for (data, share), many in sorted(groups.items()):
        for rows in zip(*many, strict=True):
            means = {
                key: float(np.mean([row[key] for row in rows]))
                for key in rows[0]
                if key != "method"
            }
            table.append(
                {
                    "data": data,
                    "deleted": f"{share:.0%}",
                    "method": rows[0]["method"],
                    "seeds": len(rows),
                    **means,
                }
            )
    return {
        "settings": {"eta": LR, "l2": RIDGE, "batch": BATCH, "epochs": EPOCHS, "k": K},
        "table": table,
    }


def plot(result: dict[str, Any], axes: Any) -> None:
    rows = [row for row in result["table"] if row["data"] != "covtype"]
    for name in METHODS:
        some = [row for row in rows if row["method"] == name]
        axes.plot(
            [row["deleted"] for row in some],
            [row["share of the gap left"] for row in some],
            "o-",
            label=name,
        )
    axes.set(xlabel="deleted samples", ylabel="share of the gap to retraining left", yscale="log")
    axes.legend(fontsize=7)
