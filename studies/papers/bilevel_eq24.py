"""FORUM, MOML, MoCo and BOME on FORUM's Eq. (24): the distance to the optimal set at each
iteration, from the three starts of the paper and with its settings."""

from __future__ import annotations

from typing import Any

import torch

from studies.papers.bilevel import METHODS, build, train
from studies.papers.eq24 import STARTS, closure_at

STEPS, INNER = 200, 50  # mu .3, eta .05, T 50, rho .3 are the paper's


def distances(name: str, start: tuple[float, tuple[float, float]]) -> list[float]:
    """Return the distance to the optimal set after each iteration."""
    closure = closure_at(start)
    alpha, omega = closure.params
    method = build(name, steps=INNER, inner_lr=0.05, outer_lr=0.3, rho=0.3)
    values = []
    for _ in train(closure, method, 0.3, STEPS):
        z = torch.stack([alpha.detach(), *omega.detach()])
        values.append(float((z - z.mean().clamp(1, 2)).norm()))
    return values


def run(seeds: list[int]) -> dict[str, Any]:
    """Run each method from each start. Nothing is random."""
    runs = {(name, start): distances(name, STARTS[start]) for name in METHODS for start in STARTS}
    steps = list(range(STEPS))
    return {
        "settings": {"T": INNER, "eta": 0.05, "alpha": "SGD 0.3", "rho": 0.3, "steps": STEPS},
        "table": [
            {
                "method": name,
                "start": start,
                **{f"distance, step {k}": values[k - 1] for k in (10, 50, STEPS)},
            }
            for (name, start), values in runs.items()
        ],
        "curves": {
            f"{name}, start {start}": {"step": steps, "distance": [values[k] for k in steps]}
            for (name, start), values in runs.items()
        },
    }


def plot(result: dict[str, Any], axes: Any) -> None:
    for name, curve in result["curves"].items():
        method, _, start = name.partition(", start ")
        style = {"(0, (0, 3))": "-", "(2, (0, 3))": "--", "(2, (3, 3))": ":"}[start]
        axes.semilogy(
            curve["step"],
            [max(d, 1e-17) for d in curve["distance"]],
            style,
            color=f"C{METHODS.index(method)}",
            label=method if style == "-" else None,
        )
    axes.set_xlabel("iteration")
    axes.set_ylabel("distance to the optimal set")
    axes.legend(fontsize=7)
