"""Natural-gradient unlearning on softmax regression (four digits): error of the step against the
number of deleted samples, its certificate, and what the certified noise would cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from concept_eraser.methods.fisher import Risk
from concept_eraser.methods.gaussian_mechanism import expected_length, noise_scale, sensitivity
from concept_eraser.methods.natural_gradient import NaturalGradient
from concept_eraser.methods.vectors import norm

RIDGE = 0.02
DELETED = (4, 8, 16, 32, 64, 128)


def train(x: Tensor, y: Tensor) -> Tensor:
    """scikit-learn's minimiser of the same risk [4, d]."""
    regression = LogisticRegression(
        C=1 / (len(x) * RIDGE), fit_intercept=False, tol=1e-12, max_iter=5000, solver="newton-cg"
    ).fit(x, y)
    return torch.from_numpy(regression.coef_)


def risk_at(weights: Tensor) -> Risk:
    model = nn.Linear(weights.shape[1], 4, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(weights)
    return Risk(model, ridge=RIDGE)


def one(seed: int, m: int) -> dict[str, float]:
    x, y = load_digits(n_class=4, return_X_y=True)
    x, y = torch.from_numpy(np.c_[x / 16, np.ones(len(x))]), torch.from_numpy(y)
    rng = np.random.default_rng(seed)
    zeros = rng.permutation((y == 0).nonzero()[:, 0].numpy())
    forget_mask = torch.zeros(len(x), dtype=torch.bool)
    forget_mask[torch.from_numpy(zeros[:m])] = True
    start, target = train(x, y), train(x[~forget_mask], y[~forget_mask])
    errors = {"nothing": float((start - target).norm())}
    methods = {
        "F(R)": NaturalGradient(),
        "F(S)": NaturalGradient(fisher_on="all"),
        "diagonal": NaturalGradient(solver="diagonal"),
    }
    for name, method in methods.items():
        risk = risk_at(start)
        method.apply(risk, [(x[forget_mask], y[forget_mask])], [(x[~forget_mask], y[~forget_mask])])
        errors[name] = float((risk.params[0].detach() - target).norm())
        if name == "F(R)":
            errors["certificate"] = risk.certificate([(x[~forget_mask], y[~forget_mask])], RIDGE)
    lipschitz = float(2**0.5 * x.norm(dim=1).max() + RIDGE * norm((start,)))
    gamma = sensitivity(
        len(x),
        m,
        convexity=RIDGE,
        lipschitz=lipschitz,
        hessian_lipschitz=float(x.norm(dim=1).max() ** 3),
    )
    errors["noise for (1, 1e-5)"] = expected_length(noise_scale(gamma, 1.0, 1e-5), start.numel())
    errors["weights"] = float(start.norm())
    return errors


def run(seeds: list[int]) -> dict[str, Any]:
    table, means = [], {}
    for m in DELETED:
        results = [one(seed, m) for seed in seeds]
        means[m] = {key: float(np.mean([f[key] for f in results])) for key in results[0]}
        table.append({"deleted samples of one class": m, **means[m]})
    slopes = {
        key: float(np.polyfit(np.log(DELETED), np.log([means[m][key] for m in DELETED]), 1)[0])
        for key in ("nothing", "F(R)", "F(S)", "diagonal")
    }
    return {
        "settings": {"samples": 720, "ridge": RIDGE, "solver": "cg"},
        "table": table,
        "log-log slopes": slopes,
    }


def plot(result: dict[str, Any], axes: Any) -> None:
    rows = result["table"]
    for key in ("nothing", "diagonal", "F(S)", "F(R)", "certificate"):
        slope = result["log-log slopes"].get(key)
        axes.loglog(
            [r["deleted samples of one class"] for r in rows],
            [r[key] for r in rows],
            marker="o",
            label=key + (f" (slope {slope:.2f})" if slope else ""),
        )
    axes.set_xlabel("deleted samples of one class")
    axes.set_ylabel("distance to the retrained weights")
    axes.legend(fontsize=7)
