"""Figure 1 of the natural-gradient paper on four small networks: seconds until LiSSA's iterate
changes by less than a tolerance, with products of the Fisher (natural gradient) and of the Hessian
(Newton). Both recursions are the corrected ones, on the same batches. Only ratios of times are
comparable between runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from concept_eraser.methods.vectors import Vec, combine, norm, spectral_norm
from studies.papers.networks import NETWORKS, fit, split
from studies.papers.samples import DIGITS

TOLERANCES, LIMIT, BATCH, RIDGE = (0.1, 0.03, 0.01), 300, 32, 1e-6
Product = Callable[[Tensor, Tensor, Vec], Vec]


def fisher_product(model: nn.Module) -> Product:
    """Return the product of the Fisher of a batch, by one jvp and one vjp."""
    names = [name for name, _ in model.named_parameters()]
    params = tuple(p.detach() for p in model.parameters())

    def multiply(x: Tensor, y: Tensor, v: Vec) -> Vec:
        def logits(*values: Tensor) -> Tensor:
            return functional_call(model, dict(zip(names, values, strict=True)), (x,))

        products = jvp(logits, params, v)
        output, moved = products[0], products[1]
        p = output.softmax(1)
        covered = p * (moved - (p * moved).sum(1, keepdim=True))
        back = vjp(logits, *params)[1](covered / len(x))
        return combine([1.0, RIDGE], [back, v])

    return multiply


def hessian_product(model: nn.Module) -> Product:
    """Return the product of the Hessian of a batch, by double backward."""
    params = tuple(model.parameters())

    def multiply(x: Tensor, y: Tensor, v: Vec) -> Vec:
        loss = nn.functional.cross_entropy(model(x), y)
        gradient = torch.autograd.grad(loss, params, create_graph=True)
        slope = torch.stack([(g * part).sum() for g, part in zip(gradient, v, strict=True)]).sum()
        back = torch.autograd.grad(slope, params, materialize_grads=True)
        return combine([1.0, RIDGE], [back, v])

    return multiply


def seconds(
    multiply: Product, data: tuple[Tensor, Tensor], right: Vec, *, sigma: float, seed: int
) -> list[float]:
    """Return the seconds of LiSSA until each tolerance; inf where the limit came first."""
    x, y = data
    generator = torch.Generator().manual_seed(seed)
    reached, v, begin = [float("inf")] * len(TOLERANCES), right, time.perf_counter()
    for _ in range(LIMIT):
        rows = torch.randint(len(x), (BATCH,), generator=generator)
        change = combine([1.0, -1 / sigma], [right, multiply(x[rows], y[rows], v)])
        v = combine([1.0, 1.0], [v, change])
        relative = float(norm(change) / norm(v))
        for i, tolerance in enumerate(TOLERANCES):
            if relative <= tolerance and reached[i] == float("inf"):
                reached[i] = time.perf_counter() - begin
        if relative <= TOLERANCES[-1] or not np.isfinite(relative):
            break
    return reached


def one(name: str, seed: int, source: str = DIGITS) -> dict[str, list[float]]:
    """Return the seconds of both methods for one network."""
    data, _ = split(seed, 600, 0.2, source)
    x, y = data
    model = fit(name, data, seed=seed)
    loss = nn.functional.cross_entropy(model(x[:100]), y[:100])
    right = tuple(g.detach() for g in torch.autograd.grad(loss, tuple(model.parameters())))
    products = {"natural gradient": fisher_product(model), "Newton": hessian_product(model)}
    largest = max(
        spectral_norm(partial(multiply, x[rows], y[rows]), right, 8)
        for multiply in products.values()
        for rows in torch.arange(320).split(BATCH)[:4]
    )
    return {
        kind: seconds(multiply, data, right, sigma=3 * largest, seed=seed)
        for kind, multiply in products.items()
    }


def run(seeds: list[int], sources: Sequence[str] = (DIGITS,)) -> dict[str, Any]:
    table = []
    for name in NETWORKS:
        rows = [one(name, seed, *sources) for seed in seeds]
        for i, tolerance in enumerate(TOLERANCES):
            means = {k: float(np.mean([row[k][i] for row in rows])) for k in rows[0]}
            table.append(
                {
                    "network": name,
                    "tolerance": tolerance,
                    **{
                        f"{k}, s": value if np.isfinite(value) else "not reached"
                        for k, value in means.items()
                    },
                }
            )
    return {
        "settings": {"batch": BATCH, "ridge": RIDGE, "iterations at most": LIMIT, "forgotten": 100},
        "table": table,
    }


def plot(result: dict[str, Any], axes: Any) -> None:
    for i, name in enumerate(NETWORKS):
        rows = [row for row in result["table"] if row["network"] == name]
        for kind, style in (("natural gradient", "o-"), ("Newton", "x--")):
            points = [
                (row["tolerance"], row[f"{kind}, s"])
                for row in rows
                if row[f"{kind}, s"] != "not reached"
            ]
            if points:
                axes.loglog(
                    *zip(*points, strict=True), style, color=f"C{i}", label=f"{name}, {kind}"
                )
    axes.set(xlabel="relative change of the iterate", ylabel="seconds")
    axes.legend(fontsize=6)
