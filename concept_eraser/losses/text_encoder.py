"""Losses of a text encoder's states, all to be minimised. The denoiser does not change.

E(c) [tokens, width] is the condition of the denoiser for a prompt c, E* that of the teacher, and a
the anchor prompt:

* anchor ||E(c) - E*(a)||^2: no images and no denoiser needed, seconds instead of minutes
* distill ||E(c) - E*(c)||^2
* distill_prediction ||eps(x_t, E(c)) - eps(x_t, E*(c))||^2 through the frozen denoiser: the retain
  loss of AdvUnlearn (arXiv 2405.15234) and, for a prompt under attack, its attack's loss
  (OPTML-Group/AdvUnlearn, train-scripts/utils/get_loss.py, line 358, and attack_util.py beside it,
  line 203)
* data ||eps(x_t, E(c)) - target||^2: the training loss through the frozen denoiser
* ascent the negative of `data`
* relabel `data` on images of the anchor, as the target of the prompt
* npo of the examples' `data`, as for a denoiser (arXiv 2404.05868; losses/denoiser.py)
* esd ||eps(x_t, E(c)) - (eps(x_t, E*("")) - eta (eps(x_t, E*(c)) - eps(x_t, E*(""))))||^2: with an
  attack, the forget loss of AdvUnlearn (arXiv 2405.15234; get_loss.py, line 352)

No single paper defines anchor, distill, data, ascent and relabel of a text encoder. They are the
losses of the same names of losses/denoiser.py, through the encoder.

Differences from the papers:
* AdvUnlearn's code makes x_t by partial sampling of the model in training. Here x_t is a noised
  image.
* NPO (arXiv 2404.05868) is about likelihoods of texts: see losses/denoiser.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from concept_eraser.losses.base import Formula, Loss, LossSettings, Teacher, each, preference
from concept_eraser.models.base import Condition, Model


@dataclass(frozen=True)
class TextEncoderDraw:
    """One micro-batch: tokens and anchors.

    Losses through the denoiser also have x_t, t and the target.
    """

    tokens: Condition
    anchors: Condition | None
    noisy: Tensor | None = None
    t: Tensor | None = None
    target: Tensor | None = None
    terms: int = 1
    # whether the encoder in training reads the tokens with an adversary's offset
    is_attacked: bool = False


class TextReader(Protocol):
    """The encoder in training with its teacher.

    `model` is the whole pipeline, `null` the tokens of the empty prompt.
    """

    @property
    def model(self) -> Model: ...
    @property
    def null(self) -> Condition: ...
    def embed(
        self, tokens: Condition | None, *, teacher: Teacher | None = None, is_attacked: bool = False
    ) -> Condition: ...


def _apart(a: Condition, b: Condition) -> Tensor:
    """Return the mean squared difference of the embeddings of two conditions."""
    parts = [
        (a.tensors[name].float() - b.tensors[name].float()).square().mean() for name in a.tensors
    ]
    return torch.stack(parts).mean()


def anchor(model: TextReader, draw: TextEncoderDraw, settings: LossSettings) -> Tensor:
    target = model.embed(draw.anchors, teacher=settings.teacher)
    return _apart(model.embed(draw.tokens, is_attacked=draw.is_attacked), target)


def distill(model: TextReader, draw: TextEncoderDraw, settings: LossSettings) -> Tensor:
    target = model.embed(draw.tokens, teacher=settings.teacher)
    return _apart(model.embed(draw.tokens, is_attacked=draw.is_attacked), target)


def distill_prediction(model: TextReader, draw: TextEncoderDraw, settings: LossSettings) -> Tensor:
    before = _through(model, draw, settings.teacher).float()
    return (_through(model, draw, None).float() - before).square().mean()


def data(model: TextReader, draw: TextEncoderDraw, settings: LossSettings) -> Tensor:
    assert draw.target is not None  # refused beforehand
    return (_through(model, draw, None).float() - draw.target).square().mean()


def npo(model: TextReader, draw: TextEncoderDraw, settings: LossSettings) -> Tensor:
    assert draw.target is not None  # refused beforehand
    before, now = (
        each(_through(model, draw, teacher), draw.target) for teacher in (settings.teacher, None)
    )
    return preference(now, before, settings.beta)


def esd(model: TextReader, draw: TextEncoderDraw, settings: LossSettings) -> Tensor:
    nothing = replace(draw, tokens=model.null.to(model.model.device).repeat(len(draw.tokens)))
    free, conditional = (
        _through(model, request, settings.teacher).float() for request in (nothing, draw)
    )
    return (
        (_through(model, draw, None).float() - (free - settings.eta * (conditional - free)))
        .square()
        .mean()
    )


def _through(model: TextReader, draw: TextEncoderDraw, teacher: Teacher | None) -> Tensor:
    """Return the denoiser's prediction for a draw's tokens.

    The encoder in training or a teacher encodes the tokens.
    """
    assert draw.noisy is not None
    assert draw.t is not None
    with nullcontext() if teacher is None else torch.no_grad():
        read = model.embed(draw.tokens, teacher=teacher, is_attacked=draw.is_attacked)
        return model.model.denoise(draw.noisy, draw.t, read)


def ascent(model: TextReader, draw: TextEncoderDraw, settings: LossSettings) -> Tensor:
    return -data(model, draw, settings)


LOSSES: dict[str, Loss] = {
    "anchor": Formula(anchor, needs_anchor=True),
    "distill": Formula(distill),
    "distill_prediction": Formula(distill_prediction, needs_images=True),
    "data": Formula(data, needs_images=True),
    "ascent": Formula(ascent, needs_images=True),
    "esd": Formula(esd, needs_images=True),
    "npo": Formula(npo, needs_images=True),
    "relabel": Formula(data, images="anchor", needs_anchor=True, needs_images=True),
}
