"""Seconds of one step of FORUM, MOML, MoCo and BOME on hyper-cleaning, against the steps T of the
lower level and against the number p of its parameters. The methods are timed in turn in one run.
Only their ratios are comparable between runs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from studies.papers.bilevel import METHODS, build, train
from studies.papers.hyper_cleaning import Net, closure_of, tasks

INNER, WIDTHS, REPEATS = (16, 32, 64, 128), (32, 64, 256, 1024), 3


def seconds(inner: int, width: int, seed: int) -> dict[str, float]:
    """Return the median seconds of a step of each method."""
    data = tasks(seed)
    durations: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(REPEATS):
        for name in METHODS:
            method = build(name, steps=inner, inner_lr=0.1, outer_lr=0.1, rho=0.5)
            step = train(closure_of(data, Net(seed, width)), method, 1.0, 1)
            begin = time.perf_counter()
            next(step)
            durations[name].append(time.perf_counter() - begin)
    return {name: float(np.median(values)) for name, values in durations.items()}


def run(seeds: list[int]) -> dict[str, Any]:
    seconds(2, 32, seeds[0])  # warms up
    table = []
    for inner, width in [*((t, 64) for t in INNER), *((16, w) for w in WIDTHS if w != 64)]:
        rows = [seconds(inner, width, seed) for seed in seeds]
        parameters = sum(p.numel() for p in Net(0, width).params)
        mean = {name: float(np.mean([r[name] for r in rows])) for name in METHODS}
        table.append(
            {
                "T": inner,
                "p": parameters,
                **{f"{name}, ms": 1000 * value for name, value in mean.items()},
                "MOML / FORUM": mean["MOML"] / mean["FORUM"],
            }
        )
    return {
        "settings": {"repeats": REPEATS, "threads": torch.get_num_threads(), "hvp": "exact"},
        "table": table,
    }


def plot(result: dict[str, Any], axes: Any) -> None:
    rows = [row for row in result["table"] if row["p"] == result["table"][0]["p"]]
    for name in METHODS:
        axes.loglog(
            [row["T"] for row in rows], [row[f"{name}, ms"] for row in rows], "o-", label=name
        )
    axes.set(xlabel="T, steps of the lower level", ylabel="milliseconds of a step")
    axes.legend(fontsize=7)
