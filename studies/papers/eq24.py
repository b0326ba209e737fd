"""FORUM's Eq. (24): two objectives over a quadratic lower level, and the distance to the optimal
set at each iteration.
"""

from __future__ import annotations

from typing import Any

import torch

from concept_eraser.methods.forum import Forum
from concept_eraser.training.closure import LossClosure

STARTS = {
    "(0, (0, 3))": (0.0, (0.0, 3.0)),
    "(2, (0, 3))": (2.0, (0.0, 3.0)),
    "(2, (3, 3))": (2.0, (3.0, 3.0)),
}
SETTINGS = {
    "rho_e": 0.15,
    "inner_steps": 50,
    "inner_lr": 0.05,
    "outer_lr": 0.3,
    "normalize": False,
}  # the paper's mu .3, eta .05, T 50, rho .3
STEPS = 1000


def closure_at(start: tuple[float, tuple[float, float]]) -> LossClosure:
    """Return the losses of Eq. (24) with (alpha, omega) at a start."""
    alpha = torch.tensor(start[0], dtype=torch.float64, requires_grad=True)
    omega = torch.tensor(start[1], dtype=torch.float64, requires_grad=True)

    def upper(first: float) -> torch.Tensor:
        return (omega[0] - first) ** 2 + (omega[1] - alpha) ** 2

    losses = {
        "first": [lambda: upper(1.0)],
        "second": [lambda: upper(2.0)],
        "attack": [lambda: ((omega - alpha) ** 2).sum()],
    }
    return LossClosure((alpha, omega), losses, inner=[1])


def trajectory(start: tuple[float, tuple[float, float]], **options: Any) -> dict[str, list[float]]:
    closure = closure_at(start)
    alpha, omega = closure.params
    method = Forum(**{**SETTINGS, **options})
    curves: dict[str, list[float]] = {"distance": [], "q": [], "kkt": []}
    for step in range(STEPS):
        closure.step = step
        direction = method.direction(closure)
        with torch.no_grad():
            alpha -= 0.3 * direction.vec[0]
            omega -= direction.vec[1]
        z = torch.stack([alpha.detach(), *omega.detach()])
        curves["distance"].append(float((z - z.mean().clamp(1, 2)).norm()))
        curves["q"].append(max(float(direction.notes["q"]), 0.0))
        curves["kkt"].append(float(direction.notes["kkt"]))
    return curves


def run(seeds: list[int]) -> dict[str, Any]:
    """Run the three starts of the paper, with warm and cold lower levels. Nothing is random."""
    runs = {
        f"{kind}, start {name}": trajectory(start, warm=kind == "warm")
        for kind in ("warm", "cold")
        for name, start in STARTS.items()
    }
    at = (64, 256, 1000)
    # the theorem says that this does not grow
    rate = {name: [min(r["kkt"][:k]) * k**0.25 for k in at] for name, r in runs.items()}
    steps = [*range(100), *range(100, STEPS, 20)]
    return {
        "settings": {**SETTINGS, "outer": "SGD 0.3", "steps": STEPS},
        "table": [
            {
                "run": name,
                "distance, step 100": r["distance"][99],
                "distance, step 1000": r["distance"][-1],
                "q, step 1000": r["q"][-1],
                "min kkt x K^1/4 at K = 64, 256, 1000": rate[name],
            }
            for name, r in runs.items()
        ],
        "curves": {
            name: {"step": steps, "distance": [r["distance"][k] for k in steps]}
            for name, r in runs.items()
        },
    }


def plot(result: dict[str, Any], axes: Any) -> None:
    for name, curve in result["curves"].items():
        axes.semilogy(
            curve["step"],
            [max(d, 1e-17) for d in curve["distance"]],
            label=name,
            linestyle="-" if name.startswith("warm") else "--",
        )
    axes.set_xlabel("iteration")
    axes.set_ylabel("distance to the optimal set")
    axes.legend(fontsize=7)
