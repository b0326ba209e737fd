"""Figure 2 of the natural-gradient paper on four small networks: the test accuracy, and the
membership score |P - 1/2| of a logistic regression that separates the losses of forgotten and of
unseen samples, after each epoch of Min/Max NGD, SCRUB and fine-tuning. A fifth of the labels are
wrong, so that the trained network has a trace to forget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from torch import Tensor, nn

from concept_eraser.methods.base import Method
from concept_eraser.methods.minmax_ngd import MinMaxNGD
from concept_eraser.methods.scrub import Scrub
from concept_eraser.methods.weighted import Weighted
from concept_eraser.training.closure import LossClosure
from studies.papers.networks import NETWORKS, fit, split
from studies.papers.samples import DIGITS

TRAIN, FORGET, NOISE, EPOCHS = 600, 100, 0.2, 6
RETAIN_BATCH, FORGET_BATCH = 128, 32  # the paper's
METHODS = ("Min/Max NGD", "SCRUB", "fine-tuning, NGD", "fine-tuning, SGD")
# learning rates of plain steps, for 4 epochs and a tenth of them after; all are reported
RATES = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5)


def membership_score(forgotten: Tensor, unseen: Tensor, seed: int) -> float:
    """Return |P - 1/2| for the cross-validated accuracy P on equal numbers of both losses.

    The score of a network that has diverged is nan.
    """
    if not bool(forgotten.isfinite().all() and unseen.isfinite().all()):
        return float("nan")
    rng = np.random.default_rng(seed)
    n = min(len(forgotten), len(unseen))
    groups = [rng.permutation(losses.numpy())[:n] for losses in (forgotten, unseen)]
    labels = np.repeat([1, 0], n)
    order = rng.permutation(2 * n)
    x = np.concatenate(groups)[:, None]
    accuracy = cross_val_score(LogisticRegression(), x[order], labels[order], cv=5).mean()
    return float(abs(accuracy - 0.5))


def losses_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    x, y = data
    return nn.functional.cross_entropy(model(x), y, reduction="none").detach()


def measure(
    model: nn.Module, forget: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seed: int
) -> dict[str, float]:
    x, y = test
    return {
        "accuracy": float((model(x).argmax(1) == y).float().mean()),
        "score": membership_score(losses_of(model, forget), losses_of(model, test), seed),
    }


def objectives(
    name: str,
    model: nn.Module,
    teacher: nn.Module,
    forget: tuple[Tensor, Tensor],
    retain: tuple[Tensor, Tensor],
) -> dict[str, Callable[[], Tensor]]:
    """Return the losses of a method on one batch of each set."""

    def divergence(data: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            target = teacher(data[0]).log_softmax(1)
        student = model(data[0]).log_softmax(1)
        return nn.functional.kl_div(student, target, log_target=True, reduction="batchmean")

    def data_loss(data: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(data[0]), data[1])

    if name == "SCRUB":
        return {
            "retain": lambda: data_loss(retain) + 0.5 * divergence(retain),
            "forget": lambda: -divergence(forget),
        }
    return {"retain": lambda: data_loss(retain), "forget": lambda: -data_loss(forget)}


def rule(name: str, forget_steps: int, retain_steps: int) -> Method:
    """Return the method: one pass over the forgotten and one over the retained samples an epoch."""
    if name == "SCRUB":
        return Scrub(forget_steps=forget_steps, retain_steps=retain_steps, rounds=EPOCHS)
    if name == "Min/Max NGD":
        return MinMaxNGD(forget_steps=forget_steps, retain_steps=retain_steps)
    if name == "fine-tuning, NGD":
        return MinMaxNGD(forget_steps=0, retain_steps=retain_steps)
    return Weighted(forget=0.0)


def unlearn(
    name: str,
    start: nn.Module,
    forget: tuple[Tensor, Tensor],
    retain: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    rate: float,
    seed: int,
) -> list[dict[str, float]]:
    """Return the measurements after each epoch. The fifth and sixth have a tenth of the rate."""
    model, teacher = copy.deepcopy(start), start
    params = tuple(model.parameters())
    turns = -(-len(forget[0]) // FORGET_BATCH), -(-len(retain[0]) // RETAIN_BATCH)
    method = rule(name, *turns)
    per_epoch = sum(turns) if not name.startswith("fine-tuning") else turns[1]
    generator = torch.Generator().manual_seed(seed)

    def batch(data: tuple[Tensor, Tensor], size: int) -> tuple[Tensor, Tensor]:
        rows = torch.randperm(len(data[0]), generator=generator)[:size]
        return data[0][rows], data[1][rows]

    rows = []
    for epoch in range(EPOCHS):
        lr = rate * (1.0 if epoch < 4 else 0.1)
        for i in range(per_epoch):
            some = batch(forget, FORGET_BATCH), batch(retain, RETAIN_BATCH)
            losses = objectives(name, model, teacher, *some)
            closure = LossClosure(
                params, {k: [v] for k, v in losses.items()}, step=epoch * per_epoch + i
            )
            direction = method.direction(closure)
            with torch.no_grad():
                for parameter, v in zip(params, direction.vec, strict=True):
                    parameter.sub_(lr * v)
        rows.append(measure(model, forget, test, seed))
    return rows


def one(network: str, seed: int, source: str = DIGITS) -> dict[str, Any]:
    """Return the curve of each method, and the points of the original and the retrained model."""
    (x, y), test = split(seed, TRAIN, NOISE, source)
    forget, retain = (x[:FORGET], y[:FORGET]), (x[FORGET:], y[FORGET:])
    start = fit(network, (x, y), seed=seed)
    curves = {
        "original": [measure(start, forget, test, seed)],
        "retrained": [measure(fit(network, retain, seed=seed), forget, test, seed)],
    }
    for name in METHODS:
        for rate in RATES:
            curves[f"{name}, {rate}"] = unlearn(
                name, start, forget=forget, retain=retain, test=test, rate=rate, seed=seed
            )
    return {"network": network, "seed": seed, "curves": curves}


def is_current(run: Mapping[str, Any]) -> bool:
    """Return whether a stored run has the present learning rates."""
    names = {f"{name}, {rate}" for name in METHODS for rate in RATES}
    return names | {"original", "retrained"} == set(run["curves"])


def cells(
    seeds: list[int], sources: Sequence[str] = (DIGITS,)
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the runs by their keys."""
    return {
        f"{network}_{seed}": partial(one, network, seed, *sources)
        for seed in seeds
        for network in NETWORKS
    }


def summary(runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the means of the last epochs, and the mean curves."""
    table, curves = [], {}
    for network in NETWORKS:
        some = [run["curves"] for run in runs.values() if run["network"] == network]
        for name in some[0] if some else ():
            values = np.array(
                [[[p["accuracy"], p["score"]] for p in run[name]] for run in some], dtype=float
            ).mean(0)  # a stored nan is None, which becomes nan again
            curves[f"{network}, {name}"] = [p for p in values.tolist() if np.isfinite(p).all()]
            score = float(values[-1, 1])
            table.append(
                {
                    "network": network,
                    "model": name,
                    "seeds": len(some),
                    "test accuracy": float(values[-1, 0]),
                    "|P - 1/2|": score if np.isfinite(score) else "diverged",
                }
            )
    return {
        "settings": {
            "train": TRAIN,
            "forgotten": FORGET,
            "wrong labels": NOISE,
            "epochs": EPOCHS,
            "batches": [RETAIN_BATCH, FORGET_BATCH],
            "learning rates": list(RATES),
        },
        "table": table,
        "curves": curves,
    }


def plot(result: dict[str, Any], axes: Any) -> None:
    names = ["original", "retrained", *METHODS]
    for label, points in result["curves"].items():
        network, _, model = label.partition(", ")
        name = model.rpartition(", ")[0] or model
        marker = "osD^"[list(NETWORKS).index(network)]
        scores, accuracies = [p[1] for p in points], [p[0] for p in points]
        axes.plot(
            scores,
            accuracies,
            f"{marker}-",
            ms=3,
            color=f"C{names.index(name)}",
            label=f"{network}, {name}" if model.endswith(str(RATES[0])) or name == model else None,
        )
    axes.set(xlabel="|P - 1/2|", ylabel="test accuracy")
    axes.legend(fontsize=5, ncols=2)
