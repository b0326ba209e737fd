"""Sampling of the trajectories that the loss `balance` is about."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from concept_eraser.data.batches import Batch
from concept_eraser.losses.base import TrajectoryTerms
from concept_eraser.losses.trajectory import TrajectorySteps, step_terms
from concept_eraser.models.base import Model, Weights
from concept_eraser.utils.devices import send


def steps_of(model: Model, count: int) -> list[tuple[int, int]]:
    """Return the steps of a sampler with `count` time steps: where each starts and ends.

    The last one ends at time step 0, as in EraseFlow's code. At clean latents p has no density.
    """
    grid = [max(0, t) for t in model.time_grid(count)]
    return [(t, following) for t, following in pairwise(grid) if following < t]


@torch.no_grad()
def sample_trajectories(
    model: Model,
    batch: Batch,
    noise: Tensor,
    *,
    generators: Sequence[torch.Generator],
    terms: TrajectoryTerms,
    weights: Weights | None,
) -> TrajectorySteps:
    """Sample one trajectory for each anchor of a batch, and return the steps of it that count.

    Args:
        model: The model that samples.
        batch: The examples.
        noise: The first states, [b, c, h, w].
        generators: For each example, what its noise and its choice of steps are drawn from.
        terms: The settings of the loss.
        weights: Replacements of some of the denoiser's parameters; see `Model.guide`.
    """
    assert batch.anchor is not None  # the loss needs one
    steps = steps_of(model, terms.steps)
    choices = torch.stack([_choose(len(steps), terms, g) for g in generators], dim=1)  # [K, b]
    times = send(torch.tensor(steps), noise.device)  # [steps, 2]
    states = [noise]
    for place in range(len(steps)):
        t, following = times[place, :1], times[place, 1:]
        prediction = model.guide(
            states[-1],
            t,
            condition=batch.anchor,
            null=batch.null,
            guidance=terms.guidance,
            weights=weights,
        ).float()
        step = model.ancestral(t, following)
        mean = step.state * states[-1] + step.prediction * prediction
        states.append(mean + step.sigma * _noise_like(noise, generators))
    path = torch.stack(states)
    places, rows = send(choices, noise.device), torch.arange(len(noise), device=noise.device)
    noisy, after = path[places, rows], path[places + 1, rows]  # [K, b, c, h, w]
    t, following = times[places, 0], times[places, 1]
    parts = [
        step_terms(model.ancestral(t[k], following[k]), noisy[k], after[k])
        for k in range(len(places))
    ]
    target, weight, offset = (torch.stack(part) for part in zip(*parts, strict=True))
    return TrajectorySteps(noisy, t, target=target, weight=weight, offset=offset)


def _choose(count: int, terms: TrajectoryTerms, generator: torch.Generator) -> Tensor:
    """Return which of `count` steps count: some of the early ones, and all late ones."""
    first_late = max(0, count - terms.late)
    early = torch.randperm(first_late, generator=generator)[: terms.early]
    return torch.cat([early, torch.arange(first_late, count)])


def _noise_like(noise: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw noise of the same shape and device, with one generator for each row."""
    rows = [torch.randn((1, *noise.shape[1:]), generator=g) for g in generators]
    return send(torch.cat(rows), noise.device)
