"""Mini-Unlearning and rewind on softmax regression (scikit-learn's digits): the share of the
distance to retraining that is left after the last k of 420 iterations, with the paper's settings
and with contracting ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concept_eraser.methods.history import History
from concept_eraser.methods.mini_unlearning import MiniUnlearning, rewind
from studies.papers.samples import DIGITS, load

SETTINGS = {
    "the paper's (eta .01, l2 .005)": (0.01, 0.005),
    "contracting (eta .5, l2 .2)": (0.5, 0.2),
}
KS = (1, 5, 10, 30, 140, 420)
TRAIN, BATCH, EPOCHS = 1400, 100, 30


class Regression:
    def __init__(self, seed: int, lr: float, ridge: float, source: str = DIGITS) -> None:
        rng = np.random.default_rng(seed)
        samples = load(source)
        order = rng.permutation(len(samples.labels))[:TRAIN]
        self.x, self.y = samples.flat[order].double(), samples.labels[order]
        self.lr, self.ridge = lr, ridge
        self.w = torch.zeros(self.x.shape[1], 10, dtype=torch.float64, requires_grad=True)
        self.batches = [
            batch
            for _ in range(EPOCHS)
            for batch in np.split(rng.permutation(TRAIN), TRAIN // BATCH)
        ]

    def loss(self, indices: Sequence[int]) -> Tensor:
        rows = list(indices)
        return (
            torch.nn.functional.cross_entropy(self.x[rows] @ self.w, self.y[rows])
            + self.ridge / 2 * self.w.square().sum()
        )

    def train(self, forgotten_rows: set[int], history: History | None = None) -> Tensor:
        with torch.no_grad():
            self.w.zero_()
        for batch in self.batches:
            if history:
                history.record(batch.tolist(), self.lr)
            rows = [j for j in batch.tolist() if j not in forgotten_rows]
            gradient = torch.autograd.grad(self.loss(rows), self.w)[0]
            with torch.no_grad():
                self.w -= self.lr * gradient
        return self.w.detach().clone()

    def accuracy(self, rows: list[int]) -> float:
        return float(((self.x[rows] @ self.w).argmax(1) == self.y[rows]).double().mean())


def one(
    seed: int, lr: float, ridge: float, what: str, source: str = DIGITS
) -> list[dict[str, Any]]:
    job = Regression(seed, lr, ridge, source)
    rng = np.random.default_rng(seed + 1000)
    forget_rows = (
        set((job.y == 3).nonzero()[:, 0].tolist())
        if what == "one class"
        else set(rng.permutation(TRAIN)[: TRAIN // 10].tolist())
    )
    forget_list = sorted(forget_rows)
    target = job.train(forget_rows)
    accuracy = {"retrained": job.accuracy(forget_list)}
    history = History((job.w,), KS[-1])
    final = job.train(set(), history)
    accuracy["original"] = job.accuracy(forget_list)
    rows = []
    for k in KS:
        for name in ("mini", "rewind"):
            with torch.no_grad():
                job.w.copy_(final)
            if name == "mini":
                MiniUnlearning(k=k).apply(history, job.loss, forget_rows)  # type: ignore[arg-type]
            else:
                rewind(history, job.loss, forget_rows, k)  # type: ignore[arg-type]
            distance_share = float((job.w.detach() - target).norm() / (final - target).norm())
            rows.append(
                {
                    "k": k,
                    "method": name,
                    "left": distance_share,
                    "forgotten": job.accuracy(forget_list),
                    **accuracy,
                }
            )
    return rows


def run(seeds: list[int], sources: Sequence[str] = (DIGITS,)) -> dict[str, Any]:
    table = []
    for setting, (lr, ridge) in SETTINGS.items():
        for what in ("random 10 %", "one class"):
            results = [one(seed, lr, ridge, what, *sources) for seed in seeds]
            for rows in zip(*results, strict=True):
                mean = {
                    key: float(np.mean([r[key] for r in rows]))
                    for key in ("left", "forgotten", "original", "retrained")
                }
                table.append(
                    {
                        "setting": setting,
                        "deleted": what,
                        "k": rows[0]["k"],
                        "method": rows[0]["method"],
                        "share of the gap left": mean["left"],
                        "accuracy on the deleted samples": mean["forgotten"],
                        "... original model": mean["original"],
                        "... retrained model": mean["retrained"],
                    }
                )
    return {
        "settings": {
            "train": TRAIN,
            "batch": BATCH,
            "epochs": EPOCHS,
            "iterations": EPOCHS * TRAIN // BATCH,
        },
        "table": table,
    }


def plot(result: dict[str, Any], axes: Any) -> None:
    for (setting, what, method), rows in _groups(result["table"]).items():
        colour = f"C{2 * (what == 'one class') + setting.startswith('contracting')}"
        axes.semilogx(
            [r["k"] for r in rows],
            [r["share of the gap left"] for r in rows],
            "o-" if method == "mini" else "x--",
            color=colour,
            label=f"{method}, {what}, {setting.split(' (')[0]}",
        )
    axes.set_xlabel("k, iterations used (of 420)")
    axes.set_ylabel("share of the gap to retraining left")
    axes.legend(fontsize=6)


def _groups(table: list[dict]) -> dict[tuple, list[dict]]:
    groups: dict[tuple, list[dict]] = {}
    for row in table:
        groups.setdefault((row["setting"], row["deleted"], row["method"]), []).append(row)
    return groups
