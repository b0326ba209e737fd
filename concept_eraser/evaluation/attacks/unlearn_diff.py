"""UnlearnDiffAtk: distributions of tokens with which the erased model denoises the concept.

Zhang et al., "To Generate or Not? Safety-Driven Unlearned Diffusion Models Are Still Easy To
Generate Unsafe Images ... For Now", ECCV 2024, arXiv 2310.11868, the objective it names
UnlearnDiffAtk. Each prompt has k free tokens with one distribution each, P [k, V]:

    min_P E ||target - eps*(x_t, t, tokens ~ P)||^2

where x_t is a noised image of the concept by the original model. Adam updates P with
straight-through gradients: the forward pass uses a hard sample, and its gradient goes to P, clipped
to [-1, 1]. Each row is then projected onto the simplex. t ascends through the schedule, with
`iterations` steps at each. After each t the likeliest tokens become text and are tokenised again.
The judge decides on the image. Only the erased model is used.

The authors' code is OPTML-Group/Diffusion-MU-Attack, src/attackers/text_grad_.py: the search in
lines 206-233, the hard sample and the clipped gradient in lines 240-255.

Differences: the projection is exact where the authors' code bisects (lines 20-66).
Prompts are attacked in batches, each with its own P, Adam state and noise. The suite's sampler
replaces the code's (LMS, src/tasks/classifier_.py, line 66).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from concept_eraser.evaluation.attacks.base import (
    Access,
    Attack,
    Family,
    Round,
    Scene,
    require_positive,
    slots_of,
    soft_embed,
)
from concept_eraser.models.vocabulary import Where

STRIDE = 16  # every such entry estimates where the projection begins
ROUNDING = 8  # units in the last place of a sum that count as none
ENTRIES = 1024  # with fewer entries an estimate saves nothing


def onto_simplex(rows: Tensor) -> Tensor:
    """The nearest points of the probability simplex: rows [..., V] -> [..., V].

    max(a - mu, 0) with the mu at which they sum to 1. That sum is convex and piecewise linear in
    mu, so Newton's method is exact after finitely many steps (Michelot 1986). It begins with the mu
    of every STRIDE-th entry, which saves half of its passes over a whole vocabulary.
    """
    size = rows.shape[-1]
    if size < ENTRIES:
        return _newton(rows, _least_mu(rows, 1.0), 1.0)[1]
    some = rows[..., ::STRIDE].contiguous()
    mu, _ = _newton(some, _least_mu(some, 1 / STRIDE), 1 / STRIDE)
    return _newton(rows, mu, 1.0)[1]


def _least_mu(rows: Tensor, total: float) -> Tensor:
    """The mu of all entries, which is at most that of the projection."""
    return (rows.sum(-1, keepdim=True) - total) / rows.shape[-1]


def _newton(rows: Tensor, mu: Tensor, total: float) -> tuple[Tensor, Tensor]:
    """Return the mu at which max(a - mu, 0) sums to `total` up to rounding, and these values.

    The first step may begin on either side of the result and ends below it, by convexity. All
    others rise, and rounding may not bring an entry back.
    """
    values, count = torch.empty_like(rows), None
    rounding = ROUNDING * torch.finfo(rows.dtype).eps * total
    while True:
        torch.sub(rows, mu, out=values).clamp_(min=0)
        surplus = values.sum(-1, keepdim=True) - total
        if bool((surplus.abs() <= rounding).all()):
            return mu, values
        above = values.sign().sum(-1, keepdim=True)  # count_nonzero takes eight times as long
        # equal_nan: a row that is not finite ends too
        if count is not None and torch.allclose(above, count, rtol=0, atol=0, equal_nan=True):
            return mu, values
        step = mu + surplus / above.clamp(min=1)
        mu = step if count is None else torch.maximum(mu, step)
        count = above


def sampled_tokens(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return one token of each distribution, by inversion: [..., V] and [...] in [0, 1) -> [...].

    On a CPU a token of probability 0 is never sampled. A GPU's cumulative sum may fall by rounding,
    and then it can be. A distribution that is not finite gives the last token. One pass over the
    vocabulary takes a seventh of the time of `torch.multinomial`, and nothing of the size of the
    vocabulary leaves the device.
    """
    cumulative = probabilities.cumsum(-1)
    total = cumulative[..., -1:]
    least = torch.minimum(uniform[..., None] * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, least, right=True).squeeze(-1)
    return tokens.clamp_(max=probabilities.shape[-1] - 1)


class _Straight(torch.autograd.Function):
    """Straight-through estimator of the embeddings of sampled tokens.

    The forward pass returns the tokens' rows of the table, as their one-hot rows times the table.
    The backward pass gives the gradient of these one-hot rows, clipped to [-1, 1], to the
    probabilities.
    """

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return table[tokens]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (table,) = ctx.saved_tensors
        return (gradients[0] @ table.T).clamp_(-1, 1), None, None


def schedule(times: int, timesteps: int) -> list[int]:
    """`times` evenly spaced time steps in ascending order: for 50 of 1000 they are 10, 30, ...,
    990.
    """
    return [int((i + 0.5) * timesteps / times) for i in range(times)]


@dataclass(frozen=True)
class UnlearnDiffAtk(Attack):
    """Optimise token distributions on the simplex.

    Args:
        k: The number of free tokens (the paper: 5 for nudity, 3 for styles and objects).
        where: The place of the tokens: before, behind or in the middle of the prompt, or spread
            evenly (insert).
        times: The number of time steps. Each prompt gets an image after each.
        iterations: The number of gradient steps at each time step.
        lr: The learning rate.
        weight_decay: The weight decay.
    """

    title: ClassVar[str] = "UnlearnDiffAtk"
    source: ClassVar[str] = "arXiv 2310.11868"
    family: ClassVar[Family] = "typed prompts"
    access: ClassVar[Access] = "white box"

    k: int = 5
    where: Where = "prefix"
    times: int = 50
    iterations: int = 40
    lr: float = 0.01
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        require_positive(k=self.k, times=self.times, iterations=self.iterations, lr=self.lr)
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(
                f"weight_decay must be at least 0 and finite, found {self.weight_decay}"
            )

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        slots = slots_of(scene.victim, scene.prompts, self.k, self.where)
        table = scene.victim.table.detach()
        n, size = len(scene.prompts), len(table)
        free = torch.full((n, self.k, size), 1 / size, device=table.device, requires_grad=True)
        # one pass over the vocabulary in place of ten, where torch has it
        fused = table.device.type in ("cpu", "cuda")
        optimizer = torch.optim.Adam([free], self.lr, weight_decay=self.weight_decay, fused=fused)
        noise = scene.generator("unlearn_diff")
        for t in schedule(self.times, scene.victim.timesteps):
            for _ in range(self.iterations):
                loss = self._step(
                    scene, slots, free=free, optimizer=optimizer, t=t, generator=noise
                )
            live = scene.live
            best = free.detach()[live.to(free.device)].argmax(-1)
            yield Round(
                live,
                texts=scene.victim.words.texts(slots[live.to(free.device)].fill(best)),
                loss=float(loss),
            )

    def _step(
        self,
        scene: Scene,
        slots: object,
        free: Tensor,
        optimizer: torch.optim.Optimizer,
        t: int,
        generator: torch.Generator,
    ) -> Tensor:
        """One step of all live prompts; their mean loss."""
        live = scene.live
        rows = live.to(free.device)
        all_live = len(live) == len(free)
        probabilities = free if all_live else free[rows]
        uniform = torch.rand(len(live), self.k, generator=generator).to(free.device)
        tokens = sampled_tokens(probabilities.detach(), uniform)
        table = scene.victim.table.detach()
        embeddings = _Straight.apply(probabilities, tokens, table)  # type: ignore[no-untyped-call]
        condition = soft_embed(scene.victim, slots[rows], tokens, embeddings)  # type: ignore[index]
        times = torch.full((len(live),), t, device=free.device)
        noisy, target = scene.noised(live, times, generator)
        losses = (
            (scene.victim.denoise(noisy, times, condition) - target).square().flatten(1).mean(1)
        )
        (free.grad,) = torch.autograd.grad(losses.sum(), [free])
        # Adam also updates rows without a gradient; rows of successful prompts stay unchanged
        before = None if all_live else free.detach().clone()
        optimizer.step()
        with torch.no_grad():
            if before is None:
                free.copy_(onto_simplex(free))
            else:
                before[rows] = onto_simplex(free[rows])
                free.copy_(before)
        scene.spend("gradient steps", len(live))
        return losses.detach().mean()


PLUGIN = UnlearnDiffAtk
