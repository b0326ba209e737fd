"""FORUM, MOML, MoCo and BOME on hyper-cleaning (the problem `hyper_cleaning`), for lower levels of
16 to 128 steps: the last accuracy, and its curve."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from studies.papers.bilevel import METHODS, build, train
from studies.papers.hyper_cleaning import closure_of, names_of, start
from studies.papers.samples import DIGITS

STEPS = 400  # the paper: 1200
INNER = (16, 32, 64, 128)
EVERY = 20


def one(name: str, inner: int, seed: int, sources: Sequence[str] = (DIGITS,)) -> dict[str, Any]:
    """Return the test accuracies of the two tasks along a training."""
    data, net = start(seed, sources)
    method = build(name, steps=inner, inner_lr=0.3, outer_lr=0.3, rho=0.5)
    begin, curve = time.perf_counter(), []
    for step, _ in enumerate(train(closure_of(data, net), method, 10, STEPS), 1):
        if step % EVERY == 0:
            curve.append(net.accuracy(data))
    return {
        "method": name,
        "T": inner,
        "seed": seed,
        "tasks": names_of(sources),
        "curve": curve,
        "seconds": time.perf_counter() - begin,
    }


def cells(
    seeds: list[int], sources: Sequence[str] = (DIGITS,)
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the runs by their keys, the cheap ones first."""
    return {
        f"{name}_{inner}_{seed}": partial(one, name, inner, seed=seed, sources=sources)
        for inner in INNER
        for seed in seeds
        for name in METHODS
    }


def summary(runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the table and the curves of the finished runs."""
    table, curves = [], {}
    # older runs are of digits, and do not say so
    names = next(iter(runs.values())).get("tasks", names_of((DIGITS,)))
    first, second = (f"test accuracy, {name}" for name in names)
    for inner in INNER:
        for name in METHODS:
            some = [r for r in runs.values() if (r["method"], r["T"]) == (name, inner)]
            if not some:
                continue
            values = np.array([r["curve"] for r in some])  # [seeds, points, tasks]
            curves[f"{name}, T = {inner}"] = values.mean(axis=(0, 2)).tolist()
            spread = values.std(axis=0, ddof=1)[-1] if len(some) > 1 else [float("nan")] * 2
            table.append(
                {
                    "method": name,
                    "T": inner,
                    "seeds": len(some),
                    first: [float(values[:, -1, 0].mean()), float(spread[0])],
                    second: [float(values[:, -1, 1].mean()), float(spread[1])],
                }
            )
    return {
        "settings": {
            "K": STEPS,
            "eta": 0.3,
            "alpha": "SGD 10",
            "omega": "SGD 0.3",
            "rho": 0.5,
            "net": "64 hidden, a head of 10 for each task",
        },
        "table": table,
        "curves": curves,
    }


def plot(result: dict[str, Any], axes: Any) -> None:
    for name, values in result["curves"].items():
        method, _, inner = name.partition(", T = ")
        axes.plot(
            [EVERY * (i + 1) for i in range(len(values))],
            values,
            ["-", "--", "-.", ":"][INNER.index(int(inner))],
            color=f"C{METHODS.index(method)}",
            label=name,
        )
    axes.set(xlabel="iteration", ylabel="mean test accuracy of both tasks")
    axes.legend(fontsize=6)
