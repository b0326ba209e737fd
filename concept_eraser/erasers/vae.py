"""Training a VAE: any module with encode and decode, ours or diffusers' AutoencoderKL.

Losses of a side's examples x, with q(z|x) = N(mu, sigma^2) the encoder and z = mu + sigma eps, a mean over examples:

* data     -log p(x|z) + kl KL(q(z|x) || N(0, I)), p a Bernoulli or a unit Gaussian, up to a constant (nats an example)
* ascent   the negative of it
* anchor   data, with each picture's own mean colour as what is to be reconstructed: the picture comes out blank
* distill  ||decode(z) - decode*(z*)||^2 / 2 with the teacher's own code: keep what the model draws
* histogram  d_KL(p || 1 - alpha), p the mean probability by a judge that prior samples do not show the class: UNO's
             hat versions (arXiv 2506.04712), on freshly decoded z ~ N(0, I)

Batch norm: see erasers/base.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser.data.labelled import Labelled
from concept_eraser.erasers.base import BatchNorm, Part, Teacher, one_each
from concept_eraser.errors import UserError, first_line
from concept_eraser.losses import bernoulli_divergence
from concept_eraser.models.base import moments, pictures

Likelihood = Literal["bernoulli", "gaussian"]


@dataclass(frozen=True)
class Side:
    """One player: which examples of which data, and its loss. kl: weight of the KL term."""

    data: Labelled
    rows: Tensor
    loss: str
    scale: float = 1.0
    kl: float = 1.0
    teacher: Teacher = "frozen"
    shows: Callable[[Tensor], Tensor] | None = None  # histogram: probability that pictures show the class
    alpha: float = 1e-8


@dataclass(frozen=True)
class Draw:
    """One micro-batch: inputs [b, ...] and unit noise of the code's shape [b, ...]."""

    inputs: Tensor
    noise: Tensor

    @property
    def terms(self) -> int:
        return len(self.inputs)


class Vae(Part):
    """See the module's docstring. Raises UserError where encode and decode do not fit each other and the data."""

    def __init__(self, module: nn.Module, sides: Mapping[str, Side], selected: Sequence[str], *, batchnorm: BatchNorm = "frozen", batch_size: int = 2) -> None:  # fmt: skip
        super().__init__(module, selected, list(sides), batchnorm=batchnorm, batch_size=batch_size)
        self.sides = sides
        self.likelihood: Likelihood = getattr(module, "likelihood", "gaussian")
        shapes = {name: code_shape(module, side.data, self.likelihood) for name, side in sides.items()}
        self.code_shape = next(iter(shapes.values()))
        if len(set(shapes.values())) > 1:
            raise UserError(f"the sides' pictures have codes of different shapes: {', '.join(f'{k} {list(v)}' for k, v in shapes.items())}; give pictures of one size")  # fmt: skip

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def draw(self, player: str, seeds: Sequence[int]) -> Draw:
        side = self.sides[player]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rows = one_each(side.rows, generators)
        noise = torch.cat([torch.randn((1, *self.code_shape), generator=g) for g in generators])
        inputs = side.data.inputs(rows.tolist())
        require_range(inputs, self.likelihood, side.data.about)
        return Draw(inputs.to(self.device), noise.to(self.device))

    def reconstruct(self, draw: Draw, *, teacher: Teacher | None = None) -> tuple[Tensor, Tensor]:
        """What comes out for what goes in, and KL(q(z|x) || N(0, I)) of each example [b]."""
        with self.batch_statistics() if teacher is None else nullcontext():
            mean, log_variance = moments(self.ask("encode", draw.inputs, teacher=teacher))
            kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).flatten(1).sum(1)
            return pictures(self.ask("decode", mean + (0.5 * log_variance).exp() * draw.noise, teacher=teacher)), kl

    def settle(self, player: str, draw: Draw) -> None:
        if self.batchnorm == "train" and self.sides[player].loss != "histogram":  # prior samples are no data
            with torch.no_grad(), self.batch_statistics(moving=True):
                mean, log_variance = moments(self.ask("encode", draw.inputs))
                self.ask("decode", mean + (0.5 * log_variance).exp() * draw.noise)

    def fidelity(self, shown: Tensor, wanted: Tensor) -> Tensor:
        """-log p(wanted | shown) of each example, up to a constant: [b]."""
        if self.likelihood == "bernoulli":
            if not bool(torch.isfinite(shown).all()):  # the loss would raise; a step that is not finite is skipped
                return shown.flatten(1).sum(1) * float("nan")
            with torch.autocast(shown.device.type, enabled=False):  # which refuses this loss
                return F.binary_cross_entropy(shown.float(), wanted.reshape(shown.shape).float(), reduction="none").flatten(1).sum(1)  # fmt: skip
        return 0.5 * (shown.float() - wanted.reshape(shown.shape)).square().flatten(1).sum(1)

    def loss(self, player: str, draw: Draw) -> Tensor:
        side = self.sides[player]
        return side.scale * LOSSES[side.loss](self, draw, side)


def require_range(inputs: Tensor, likelihood: Likelihood, about: str) -> None:
    """Raise UserError where a Bernoulli is asked for the probability of something outside [0, 1]."""
    if likelihood == "bernoulli" and not 0 <= float(inputs.min()) <= float(inputs.max()) <= 1:
        raise UserError(f"a VAE with Bernoulli outputs needs data in [0, 1]; {about} has values from {float(inputs.min()):.3g} to {float(inputs.max()):.3g}")  # fmt: skip


def code_shape(module: nn.Module, data: Labelled, likelihood: Likelihood) -> tuple[int, ...]:
    """The shape of one code, found by encoding an example. Raises UserError where the way back or the values do not fit."""
    example = data.inputs(range(min(2, len(data)))).to(next(module.parameters()).device)
    require_range(example, likelihood, data.about)
    with torch.no_grad():
        try:
            mean, log_variance = moments(module.encode(example))  # type: ignore[operator]
            back = pictures(module.decode(mean))  # type: ignore[operator]
        except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, IndexError) as error:
            raise UserError(f"the VAE cannot take an example of {data.about}, {list(example.shape[1:])} ({first_line(error)}); it needs encode(x) -> (mean, log variance) and decode(z)") from error  # fmt: skip
    if mean.shape != log_variance.shape or back.numel() != example.numel() or len(back) != len(example):
        raise UserError(f"the VAE returns wrong shapes: for an input {list(example.shape)} a mean {list(mean.shape)}, a log variance {list(log_variance.shape)} and a picture {list(back.shape)}")  # fmt: skip
    if likelihood == "bernoulli" and not 0 <= float(back.min()) <= float(back.max()) <= 1:
        raise UserError(f"a VAE with Bernoulli outputs must decode to values in [0, 1] (a last sigmoid), found {float(back.min()):.3g} to {float(back.max()):.3g}")  # fmt: skip
    return tuple(mean.shape[1:])


def _data(model: Vae, draw: Draw, side: Side) -> Tensor:
    shown, kl = model.reconstruct(draw)
    return (model.fidelity(shown, draw.inputs) + side.kl * kl).mean()


def _ascent(model: Vae, draw: Draw, side: Side) -> Tensor:
    return -_data(model, draw, side)


def _anchor(model: Vae, draw: Draw, side: Side) -> Tensor:
    shown, kl = model.reconstruct(draw)
    places = tuple(range(2, draw.inputs.ndim)) or (1,)
    blank = draw.inputs.mean(places, keepdim=True).expand_as(draw.inputs)
    return (model.fidelity(shown, blank) + side.kl * kl).mean()


def _distill(model: Vae, draw: Draw, side: Side) -> Tensor:
    before, _ = model.reconstruct(draw, teacher=side.teacher)
    return 0.5 * (model.reconstruct(draw)[0] - before).square().flatten(1).sum(1).mean()


def _histogram(model: Vae, draw: Draw, side: Side) -> Tensor:
    assert side.shows is not None  # the recipe's section of this name brings a judge
    with model.batch_statistics():
        shown = pictures(model.ask("decode", draw.noise))
    return bernoulli_divergence(1 - side.shows(shown).mean(), side.alpha)


LOSSES: dict[str, Callable[[Vae, Draw, Side], Tensor]] = {
    "data": _data,
    "ascent": _ascent,
    "anchor": _anchor,
    "distill": _distill,
    "histogram": _histogram,
}
