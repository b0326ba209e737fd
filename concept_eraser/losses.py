"""What forget and retain mean: losses of the denoiser's prediction, all to be minimised.

With eps(x_t, t, c) the prediction of the model in training, eps* that of the teacher (the model before training
by default), x_t a noised latent of an example, c its prompt, a its anchor prompt:

* data     ||eps(x_t, c) - target||^2                          the training loss of the model
* ascent   the negative of `data`                               gradient ascent
* anchor   ||eps(x_t, c) - eps*(x_t, a)||^2                     MUNBa section 4.1; concept ablation (arXiv 2303.13516)
* esd      ||eps(x_t, c) - (eps*(x_t, "") - eta (eps*(x_t, c) - eps*(x_t, "")))||^2      ESD (arXiv 2303.07345, Eq. 7)
* distill  ||eps(x_t, c) - eps*(x_t, c)||^2                     keep what the model says
* relabel  ||eps(x_t^a, c) - target||^2                         x_t^a from images of the anchor: UNO's L_1, SalUn
* histogram  d_KL(p || 1 - alpha) with p the mean probability, by a judge, that x_0 decoded from eps(x_t, c) does not
            show the concept: UNO's hat versions (arXiv 2506.04712)

For a v- or flow-prediction model "eps" is whatever it predicts. Differences from the papers: ESD noises x_t from the
model by partial sampling, which is what data-free training does here too; with images, x_t is a noised image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from concept_eraser.models.base import Condition

Teacher = Literal["frozen", "current"]


@dataclass(frozen=True)
class Draw:
    """One micro-batch with everything random already drawn; every question of a step sees the same draw."""

    noisy: Tensor  # [b, c, h, w]
    t: Tensor  # [b]
    condition: Condition
    anchor: Condition | None
    null: Condition
    target: Tensor | None  # None when there are no clean latents (data-free)
    attacked: bool = False  # whether the model in training (not its teacher) sees the prompt with an adversary's offset

    @property
    def terms(self) -> int:
        """How many numbers a loss on it is the mean of."""
        return self.noisy.numel()


class Predictor(Protocol):
    def predict(self, draw: Draw, condition: Condition | None = None, *, teacher: Teacher | None = None) -> Tensor: ...
    def picture(self, draw: Draw) -> Tensor: ...


def _mse(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction.float() - target.float()).square().mean()


def data(model: Predictor, draw: Draw, settings: Settings) -> Tensor:
    assert draw.target is not None  # data-free training refuses this loss beforehand
    return _mse(model.predict(draw), draw.target)


def ascent(model: Predictor, draw: Draw, settings: Settings) -> Tensor:
    return -data(model, draw, settings)


def anchor(model: Predictor, draw: Draw, settings: Settings) -> Tensor:
    return _mse(model.predict(draw), model.predict(draw, draw.anchor, teacher=settings.teacher))


def esd(model: Predictor, draw: Draw, settings: Settings) -> Tensor:
    free = model.predict(draw, draw.null, teacher=settings.teacher)
    given = model.predict(draw, teacher=settings.teacher)
    return _mse(model.predict(draw), free - settings.eta * (given - free))


def distill(model: Predictor, draw: Draw, settings: Settings) -> Tensor:
    return _mse(model.predict(draw), model.predict(draw, teacher=settings.teacher))


def histogram(model: Predictor, draw: Draw, settings: Settings) -> Tensor:
    assert settings.shows is not None  # the recipe's section of this name brings a judge
    retained = 1 - settings.shows(model.picture(draw)).mean()
    return bernoulli_divergence(retained.float(), settings.alpha)


def bernoulli_divergence(p: Tensor, alpha: float) -> Tensor:
    """p log(p / (1 - alpha)) + (1 - p) log((1 - p) / alpha): how far a share p of retained samples is from 1 - alpha."""
    tiny = 1e-6  # inside the logarithms only: at p = 0, where every sample shows the class, the slope must not vanish
    return p * (p.clamp(min=tiny) / (1 - alpha)).log() + (1 - p) * ((1 - p).clamp(min=tiny) / alpha).log()


@dataclass(frozen=True)
class Settings:
    """Options that some losses take: whose prediction is the target, ESD's negative guidance eta, and for `histogram`
    the judge's probability that images [b, 3, h, w] show the concept, and alpha."""

    teacher: Teacher = "frozen"
    eta: float = 1.0
    shows: Callable[[Tensor], Tensor] | None = None
    alpha: float = 1e-8


@dataclass(frozen=True)
class Loss:
    """A loss and what it needs. images: whose pictures are noised, the prompt's own or its anchor's."""

    compute: Callable[[Predictor, Draw, Settings], Tensor]
    images: Literal["own", "anchor"] = "own"
    needs_anchor: bool = False
    needs_target: bool = False


LOSSES: dict[str, Loss] = {
    "data": Loss(data, needs_target=True),
    "ascent": Loss(ascent, needs_target=True),
    "anchor": Loss(anchor, needs_anchor=True),
    "esd": Loss(esd),
    "distill": Loss(distill),
    "relabel": Loss(data, images="anchor", needs_anchor=True, needs_target=True),
    "histogram": Loss(histogram),
}


def describe(name: str) -> str:
    """The line of this module's docstring that defines a loss."""
    lines = (__doc__ or "").splitlines()
    return next((" ".join(line[2:].split()) for line in lines if line.startswith(f"* {name} ")), name)


def no_grad_prediction(predict: Callable[[], Tensor]) -> Tensor:
    """A teacher's prediction is a constant of the loss."""
    with torch.no_grad():
        return predict()
