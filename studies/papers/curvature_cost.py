"""The cost of products with the Fisher and with the Hessian: perceptrons 64-h-h-10 on digits, batch
32. A Fisher product is one pass in forward mode and one in reverse, or curvlinops' operator. All
are timed in turn in one run. Only their ratios are comparable between runs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from concept_eraser.methods.fisher import Fisher, Risk
from concept_eraser.methods.mini_unlearning import hessian_product
from concept_eraser.methods.vectors import Vec

WIDTHS, REPEATS, BATCH = (64, 128, 256, 512), 30, 32
MEASURED = ("Fisher", "operator", "Hessian")


def times(width: int, seed: int) -> dict[str, float]:
    """Return the median milliseconds of each product and of a gradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    x, y = load_digits(return_X_y=True)
    batch = torch.from_numpy(x[:BATCH] / 16).float(), torch.from_numpy(y[:BATCH])
    risk = Risk(model)
    fisher, v = Fisher(risk, [batch]), tuple(torch.randn_like(p) for p in risk.params)

    def loss(rows: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def gradient() -> Vec:
        return torch.autograd.grad(loss(None), risk.params)

    products = {
        "Fisher": lambda: fisher.product(v),
        "operator": lambda: fisher._operator @ list(v),
        "Hessian": lambda: hessian_product(loss, [0], risk.params, v),
        "gradient": gradient,
    }
    durations: dict[str, list[float]] = {name: [] for name in products}
    for i in range(REPEATS + 5):
        for name, product in products.items():
            start = time.perf_counter()
            product()
            if i >= 5:  # the first ones warm up
                durations[name].append(1000 * (time.perf_counter() - start))
    return {name: float(np.median(values)) for name, values in durations.items()}


def run(seeds: list[int]) -> dict[str, Any]:
    table = []
    for width in WIDTHS:
        rows = [times(width, seed) for seed in seeds]
        ratios = {
            f"{a} / {b}": [f[a] / f[b] for f in rows]
            for a, b in (
                ("Fisher", "Hessian"),
                ("operator", "Hessian"),
                ("Fisher", "gradient"),
                ("Hessian", "gradient"),
            )
        }
        table.append(
            {
                "hidden width": width,
                **{k: [float(np.mean(v)), float(np.std(v, ddof=1))] for k, v in ratios.items()},
                **{f"{name}, ms": float(np.mean([f[name] for f in rows])) for name in MEASURED},
            }
        )
    return {
        "settings": {"batch": BATCH, "repeats": REPEATS, "threads": torch.get_num_threads()},
        "table": table,
    }


def plot(result: dict[str, Any], axes: Any) -> None:
    rows = result["table"]
    for key in (
        "Fisher / gradient",
        "Hessian / gradient",
        "Fisher / Hessian",
        "operator / Hessian",
    ):
        means, spreads = zip(*(row[key] for row in rows), strict=True)
        axes.errorbar(
            [row["hidden width"] for row in rows], means, spreads, marker="o", capsize=3, label=key
        )
    axes.set(xscale="log", xlabel="hidden width", ylabel="ratio of times")
    axes.legend(fontsize=8)
