"""Training the text encoder of a text-to-image model; the denoiser stays as it is.

With E(c) what the denoiser is conditioned on for a prompt c [tokens, width], E* that of the teacher, a the anchor prompt:

* anchor   ||E(c) - E*(a)||^2          no images and no denoiser needed: seconds instead of minutes
* distill  ||E(c) - E*(c)||^2
* data     ||eps(x_t, E(c)) - target||^2, the training loss through the frozen denoiser
* ascent   the negative of it
* relabel  data on images of the anchor, as the target of the prompt
* npo      of the examples' `data`, as for a denoiser (see losses.py)
* esd      ||eps(x_t, E(c)) - (eps(x_t, E*("")) - eta (eps(x_t, E*(c)) - eps(x_t, E*(""))))||^2; with an attack, the forget
           loss of AdvUnlearn (arXiv 2405.15234)

With a side named `attack` there is an adversary: one offset delta of the embeddings of the tokens [1, tokens, width],
added to the forgotten prompts where the encoder in training (never its teacher) reads them. Its loss is `data` on the
forgotten images under E(c + delta), plus c/2 ||delta||^2; the forget loss is then asked at delta and at 0, and added.
An offset of what the encoder says, as the denoiser's adversary has, could not be answered by an encoder. AdvUnlearn's
adversary is a prefix of one token or a few, and its forget loss is asked under attack alone; this one moves all tokens of the
prompt, start, end and padding included.

The result is a drop-in `text_encoder/` folder for every pipeline with the same encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from concept_eraser.erasers.base import Part, Teacher
from concept_eraser.errors import UserError
from concept_eraser.losses import each, preference
from concept_eraser.models.base import Condition, Model
from concept_eraser.models.lora import Adapter


@dataclass(frozen=True)
class Side:
    """One player. tokens, anchors: one row an example; latents [n, c, h, w] where the loss goes through the denoiser."""

    tokens: Condition
    loss: str
    anchors: Condition | None = None
    latents: Tensor | None = None
    scale: float = 1.0
    teacher: Teacher = "frozen"
    timesteps: tuple[int, int] = (0, 1000)
    beta: float = 0.1
    eta: float = 1.0
    decay: float = 0.0  # of an attack: the c in c/2 ||delta||^2


@dataclass(frozen=True)
class Draw:
    """One micro-batch: tokens, anchors, and for the losses through the denoiser x_t, t and the target."""

    tokens: Condition
    anchors: Condition | None
    noisy: Tensor | None = None
    t: Tensor | None = None
    target: Tensor | None = None
    terms: int = 1
    attacked: bool = False  # whether the encoder in training reads the tokens with an adversary's offset


class TextEncoder(Part):
    """See the module's docstring."""

    def __init__(self, model: Model, sides: Mapping[str, Side], selected: Sequence[str], *, adapter: Adapter | None = None, rotate: bool = False) -> None:  # fmt: skip
        super().__init__(model.parts["text_encoder"], selected, list(sides), adapter=adapter, rotate=rotate)
        self.model, self.sides = model, sides
        self.null = model.tokenize([""])
        if "attack" in sides:
            self.delta = nn.Parameter(torch.zeros_like(model.table[self.null.tensors["ids"]]))  # [1, tokens, width]
        for name, side in sides.items():
            if LOSSES[side.loss].through == "denoiser" and side.latents is None:
                raise UserError(f"{name}: the loss {side.loss!r} goes through the denoiser and needs images; losses on the embeddings need none: anchor, distill")  # fmt: skip

    def draw(self, player: str, seeds: Sequence[int]) -> Draw:
        side, device = self.sides[self.side_of(player)], self.model.device
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rows = torch.cat([torch.randint(len(side.tokens), (1,), generator=g) for g in generators])
        tokens = side.tokens[rows].to(device)
        anchors = side.anchors[rows].to(device) if side.anchors is not None else None
        if side.latents is None:
            width = self.module.config.hidden_size  # type: ignore[union-attr]
            return Draw(tokens, anchors, terms=tokens.tensors["ids"].numel() * int(width))  # type: ignore[arg-type]
        latents = side.latents[rows].to(device)
        noise = torch.cat([torch.randn((1, *self.model.latent_shape()), generator=g) for g in generators]).to(device)
        low, high = side.timesteps
        t = torch.cat([torch.randint(low, min(high, self.model.timesteps), (1,), generator=g) for g in generators]).to(device)  # fmt: skip
        noisy = self.model.corrupt(latents, noise, t)
        return Draw(tokens, anchors, noisy, t, self.model.target(latents, noise, t), noisy.numel())

    def embed(self, tokens: Condition | None, *, teacher: Teacher | None = None, attacked: bool = False) -> Condition:
        assert tokens is not None
        if teacher is None:
            rows = self.model.table[tokens.tensors["ids"]] + self.delta if attacked and self.delta is not None else None
            return self.model.embed(tokens, rows=rows)
        with torch.no_grad():
            return self.model.embed(tokens, self.originals if teacher == "frozen" else None)

    def loss(self, player: str, draw: Draw) -> Tensor:
        side = self.sides[self.side_of(player)]
        return self.under_attack(player, draw, side, lambda d: LOSSES[side.loss].compute(self, d, side))


def _apart(a: Condition, b: Condition) -> Tensor:
    """Mean squared difference of two conditions' embeddings."""
    parts = [(a.tensors[name].float() - b.tensors[name].float()).square().mean() for name in a.tensors]
    return torch.stack(parts).mean()


def _anchor(model: TextEncoder, draw: Draw, side: Side) -> Tensor:
    return _apart(model.embed(draw.tokens, attacked=draw.attacked), model.embed(draw.anchors, teacher=side.teacher))


def _distill(model: TextEncoder, draw: Draw, side: Side) -> Tensor:
    return _apart(model.embed(draw.tokens, attacked=draw.attacked), model.embed(draw.tokens, teacher=side.teacher))


def _data(model: TextEncoder, draw: Draw, side: Side) -> Tensor:
    assert draw.target is not None  # refused beforehand
    return (_through(model, draw, None).float() - draw.target).square().mean()


def _npo(model: TextEncoder, draw: Draw, side: Side) -> Tensor:
    assert draw.target is not None  # refused beforehand
    now, before = (each(_through(model, draw, teacher), draw.target) for teacher in (None, side.teacher))
    return preference(now, before, side.beta)


def _esd(model: TextEncoder, draw: Draw, side: Side) -> Tensor:
    nothing = replace(draw, tokens=model.null.to(model.model.device).repeat(len(draw.tokens)))
    free, given = (_through(model, asked, side.teacher).float() for asked in (nothing, draw))
    return (_through(model, draw, None).float() - (free - side.eta * (given - free))).square().mean()


def _through(model: TextEncoder, draw: Draw, teacher: Teacher | None) -> Tensor:
    """What the denoiser predicts for a draw's tokens, as the encoder in training or a teacher reads them."""
    assert draw.noisy is not None
    assert draw.t is not None
    with nullcontext() if teacher is None else torch.no_grad():
        read = model.embed(draw.tokens, teacher=teacher, attacked=draw.attacked)
        return model.model.denoise(draw.noisy, draw.t, read)


def _ascent(model: TextEncoder, draw: Draw, side: Side) -> Tensor:
    return -_data(model, draw, side)


@dataclass(frozen=True)
class Loss:
    compute: Callable[[TextEncoder, Draw, Side], Tensor]
    through: Literal["embedding", "denoiser"]
    images: Literal["own", "anchor"] = "own"


LOSSES = {
    "anchor": Loss(_anchor, "embedding"),
    "distill": Loss(_distill, "embedding"),
    "data": Loss(_data, "denoiser"),
    "ascent": Loss(_ascent, "denoiser"),
    "esd": Loss(_esd, "denoiser"),
    "npo": Loss(_npo, "denoiser"),
    "relabel": Loss(_data, "denoiser", images="anchor"),
}
