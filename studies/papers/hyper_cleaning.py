"""FORUM's data hyper-cleaning. In each of two tasks the method weighs 500 training samples, of
which half are mislabelled. The weights minimise the loss on 200 clean samples. The tasks are
digits, and digits with permuted pixels and shifted labels. With two sources each gives one task, as
MNIST and FashionMNIST do in the paper. The baselines train on the noisy samples, and on the clean
samples alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concept_eraser.methods.forum import Forum
from concept_eraser.training.closure import LossClosure
from studies.papers.samples import DIGITS, kind_of, load

STEPS, INNER = 400, 16
RHOS = (0.0, 0.05, 0.25, 0.5)
ETA = 0.3  # the step size of the lower level
ETAS = (0.03, 0.1, 1.0)  # others, at RHO
RHO = 0.25


def names_of(sources: Sequence[str]) -> tuple[str, str]:
    """Return the names of both tasks."""
    first, *others = map(kind_of, sources)
    return first, others[0] if others else "permuted"


def tasks(seed: int, sources: Sequence[str] = (DIGITS,)) -> list[dict[str, Tensor]]:
    """Return the samples of both tasks.

    sources: Of the first task and of the second. One source gives both, the second with permuted
    pixels and shifted labels.
    """
    rng = np.random.default_rng(seed)
    result = []
    for kind in range(2):
        samples = load(sources[kind % len(sources)])
        d, changed = samples.flat.shape[1], kind == 1 and len(sources) == 1
        pixels, shift = (rng.permutation(d), 3) if changed else (np.arange(d), 0)
        order = rng.permutation(len(samples.labels))
        inputs = samples.flat[order][:, pixels]
        labels = (samples.labels[order] + shift) % 10
        noisy = labels[:500].clone()
        wrong_rows = torch.from_numpy(rng.permutation(500)[:250])
        noisy[wrong_rows] = (noisy[wrong_rows] + torch.from_numpy(rng.integers(1, 10, 250))) % 10
        result.append(
            {
                "x": inputs[:500],
                "y": noisy,
                "vx": inputs[500:700],
                "vy": labels[500:700],
                "tx": inputs[700:],
                "ty": labels[700:],
            }
        )
    return result


class Net:
    """One shared layer, and a linear head for each task."""

    def __init__(self, seed: int, width: int = 64, inputs: int = 64) -> None:
        g = torch.Generator().manual_seed(seed)
        shapes = [(inputs, width), (width,), (width, 10), (10,), (width, 10), (10,)]
        self.params = tuple(
            (torch.randn(s, generator=g) * (s[0] ** -0.5 if len(s) > 1 else 0)).requires_grad_()
            for s in shapes
        )

    def __call__(self, x: Tensor, task: int) -> Tensor:
        features = torch.relu(x @ self.params[0] + self.params[1])
        return features @ self.params[2 + 2 * task] + self.params[3 + 2 * task]

    def loss(self, data: list[dict], task: int, part: str, weights: Tensor | None = None) -> Tensor:
        losses = torch.nn.functional.cross_entropy(
            self(data[task][part + "x"], task), data[task][part + "y"], reduction="none"
        )
        return (losses * weights).sum() if weights is not None else losses.mean()

    def accuracy(self, data: list[dict]) -> list[float]:
        return [
            float((self(d["tx"], i).argmax(1) == d["ty"]).float().mean())
            for i, d in enumerate(data)
        ]


def start(seed: int, sources: Sequence[str]) -> tuple[list[dict[str, Tensor]], Net]:
    """Return the samples of both tasks, and a network for them."""
    data = tasks(seed, sources)
    return data, Net(seed, inputs=data[0]["x"].shape[1])


def plain(seed: int, part: str, sources: Sequence[str] = (DIGITS,)) -> list[float]:
    """Return accuracies after gradient descent on the noisy ("") or clean ("v") samples."""
    data, net = start(seed, sources)
    for _ in range(STEPS):
        grads = torch.autograd.grad(net.loss(data, 0, part) + net.loss(data, 1, part), net.params)
        with torch.no_grad():
            for p, g in zip(net.params, grads, strict=True):
                p -= 0.3 * g
    return net.accuracy(data)


def closure_of(data: list[dict], net: Net) -> LossClosure:
    """Return the losses of both tasks on clean samples, above the weighted loss on noisy ones."""
    alpha = torch.zeros(2, 500, requires_grad=True)

    def lower() -> Tensor:
        weights = alpha.softmax(1)
        return net.loss(data, 0, "", weights[0]) + net.loss(data, 1, "", weights[1])

    losses = {
        "first": [lambda: net.loss(data, 0, "v")],
        "second": [lambda: net.loss(data, 1, "v")],
        "attack": [lower],
    }
    return LossClosure((alpha, *net.params), losses, inner=range(1, 7))


def forum(
    seed: int, rho_e: float, sources: Sequence[str] = (DIGITS,), *, eta: float = ETA
) -> list[float]:
    """Return FORUM's accuracies of both tasks."""
    data, net = start(seed, sources)
    closure = closure_of(data, net)
    alpha = closure.params[0]
    method = Forum(rho_e=rho_e, inner_steps=INNER, inner_lr=eta, outer_lr=0.3, normalize=False)
    for step in range(STEPS):
        closure.step = step
        direction = method.direction(closure)
        with torch.no_grad():
            alpha -= 10 * direction.vec[0]
            for p, v in zip(net.params, direction.vec[1:], strict=True):
                p -= v
    return net.accuracy(data)


def run(seeds: list[int], sources: Sequence[str] = (DIGITS,)) -> dict[str, Any]:
    runs: dict[str, Any] = {
        "no cleaning": lambda s: plain(s, "", sources),
        "validation samples only": lambda s: plain(s, "v", sources),
    }
    runs |= {f"FORUM, rho_e = {rho}": (lambda s, rho=rho: forum(s, rho, sources)) for rho in RHOS}
    runs |= {
        f"FORUM, rho_e = {RHO}, eta = {eta}": (lambda s, eta=eta: forum(s, RHO, sources, eta=eta))
        for eta in ETAS
    }
    first, second = (f"test accuracy, {name}" for name in names_of(sources))
    table = []
    for name, train in runs.items():
        accuracies = np.array([train(seed) for seed in seeds])
        table.append(
            {
                "run": name,
                first: [
                    float(accuracies[:, 0].mean()),
                    float(accuracies[:, 0].std(ddof=1)),
                ],
                second: [
                    float(accuracies[:, 1].mean()),
                    float(accuracies[:, 1].std(ddof=1)),
                ],
            }
        )
    return {
        "settings": {
            "K": STEPS,
            "T": INNER,
            "eta": f"{ETA} if the row has no other",
            "alpha": "SGD 10",
            "omega": "SGD 0.3",
            "net": f"{len(tasks(0, sources)[0]['x'][0])}-64-(10, 10)",
        },
        "table": table,
    }


def plot(result: dict[str, Any], axes: Any) -> None:
    rows = result["table"]
    first, second = (key for key in rows[0] if key.startswith("test accuracy"))
    for shift, key in ((-0.2, first), (0.2, second)):
        axes.bar(
            [i + shift for i in range(len(rows))],
            [r[key][0] for r in rows],
            0.38,
            yerr=[r[key][1] for r in rows],
            label=key,
        )
    axes.set_xticks(
        range(len(rows)),
        [r["run"].replace(", ", "\n").replace(" only", "\nonly") for r in rows],
        fontsize=6,
    )
    axes.legend(fontsize=7, loc="lower right")
