"""Losses on labelled examples, of classifiers and of VAEs, all to be minimised.

For a classifier, or any model with one logit per class, with f the model in training, f* its
teacher and (x, y) the examples:

* data cross-entropy of f(x) to y
* ascent the negative of `data`
* relabel cross-entropy to a random other class, drawn anew at every step (random labels: MUNBa,
  arXiv 2411.15537, section 4.2; SalUn, arXiv 2310.12508)
* anchor cross-entropy to one given class
* boundary cross-entropy to the nearest other class: the one that the teacher predicts after one
  FGSM step away from y, of a tenth of the range of the data (boundary shrink, arXiv 2303.11570);
  where the step does not cross a boundary, the likeliest other class
* expand cross-entropy to one more class, whose output is also trained and is discarded at the end
  (boundary expanding, arXiv 2303.11570); for models whose last layer is linear
* distill KL(softmax f*(x) || softmax f(x)): preserve the model's predictions
* diverge the negative of `distill`: predict something else than the teacher (SCRUB's max-steps,
  arXiv 2302.09880). At the teacher its gradient is 0, so the first step is that of the other losses
* npo -(2/beta) log sigmoid(-beta log(p(y | x) / p*(y | x))): negative preference optimisation
  (arXiv 2404.05868), with the label y in place of an answer. Its gradient is that of `ascent` times
  2 p^beta / (p^beta + p*^beta) for each example. This factor is 1 at the teacher (and anywhere for
  beta -> 0) and goes to 0 as the example is forgotten. The paper's NPO is this alone; its NPO+RT
  has a retain set with the loss `data`

No single paper defines data, ascent, anchor and distill of a classifier.

For a VAE, with q(z|x) = N(mu, sigma^2) the encoder and z = mu + sigma eps, as means over examples:

* data -log p(x|z) + kl KL(q(z|x) || N(0, I)), p a Bernoulli or a unit Gaussian, up to a constant
  (nats per example)
* ascent the negative of `data`
* anchor `data`, with each image's own mean colour as the target of its reconstruction: the image
  becomes blank
* distill ||decode(z) - decode*(z*)||^2 / 2 with the teacher's own code: preserve what the model
  generates
* histogram d_KL(p || 1 - alpha), p the mean probability by a judge that prior samples do not show
  the class: UNO's hat versions (arXiv 2506.04712), on freshly decoded z ~ N(0, I)

No single paper defines data, ascent, anchor and distill of a VAE. UNO's paper calls ascent A.

Differences from the papers and their code:
* relabel: the code of SalUn (OPTML-Group/Unlearn-Saliency, Classification/unlearn/RL.py, line 125)
  and of MUNBa (JingWu321/MUNBa, Classification/unlearn/MUNBa.py, line 181) draws the label from all
  classes, so it can be the true one. Here it is another class.
* boundary: SalUn's code has it in Classification/unlearn/boundary_sh.py, lines 39-52 and 86-99. Its
  step is 0.1 for images in [0, 1]. Data may have other values here, so the step is 0.1 of their
  range, which is measured once, on the forgotten examples. SalUn's code clips the attacked image to
  [0, 1] and rounds it to 8 bits. Where the step crosses no boundary its target is the true class.
  The paper's own code has the same.
* expand: SalUn's code (boundary_ex.py beside it, lines 34-67 and 95-99) keeps the further output.
* diverge and distill: SCRUB's code (meghdadk/SCRUB, thirdparty/repdistiller/helper/loops.py, lines
  241-244) divides the logits by a temperature. Here there is none.
* npo: the paper is about answers of a language model, whose probability is a product over tokens.
  In its experiment with a classifier beta is 1 (licong-lin/negative-preference-optimization,
  synthetic/unlearn.py, line 47).
* histogram: UNO's code (pinakm9/forget, modules/mnist/vae_loss.py, lines 147-170) has the
  divergence from a uniform distribution over the other nine classes. Here there are two classes:
  the concept, and everything else. The code draws z once, and here each step draws it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.losses.base import (
    Formula,
    Loss,
    LossSettings,
    Teacher,
    bernoulli_divergence,
    preference,
)
from concept_eraser.models.base import to_pixels


@dataclass(frozen=True)
class ClassifierDraw:
    """One micro-batch: inputs [b, ...], labels [b], other labels [b]."""

    inputs: Tensor
    labels: Tensor
    others: Tensor

    @property
    def terms(self) -> int:
        """The number of terms in the mean of a loss on this draw."""
        return len(self.labels)


@dataclass(frozen=True)
class VaeDraw:
    """One micro-batch: inputs [b, ...] and unit noise of the code's shape [b, ...]."""

    inputs: Tensor
    noise: Tensor

    @property
    def terms(self) -> int:
        return len(self.inputs)


class ExtraClass(Protocol):
    """One more class, whose output is also trained (erasers/expansion.py)."""

    def logits(self, compute: Callable[[], Tensor], /) -> Tensor: ...


class Labeller(Protocol):
    """The classifier in training with its teacher. `ask` calls a method of the classifier."""

    @property
    def expansion(self) -> ExtraClass | None: ...
    def logits(self, draw: ClassifierDraw, *, teacher: Teacher | None = None) -> Tensor: ...
    def ask(
        self, method: str, *inputs: Tensor, teacher: Teacher | None = None, gradients: bool = False
    ) -> Any: ...


class Autoencoder(Protocol):
    """The VAE in training with its teacher. `ask` calls a method of the VAE."""

    def reconstruct(
        self, draw: VaeDraw, *, teacher: Teacher | None = None
    ) -> tuple[Tensor, Tensor]: ...
    def fidelity(self, reconstruction: Tensor, target: Tensor) -> Tensor: ...
    def batch_statistics(self) -> AbstractContextManager[None]: ...
    def ask(self, method: str, *inputs: Tensor, teacher: Teacher | None = None) -> Any: ...


def data(model: Labeller, draw: ClassifierDraw, settings: LossSettings) -> Tensor:
    return F.cross_entropy(model.logits(draw), draw.labels)


def ascent(model: Labeller, draw: ClassifierDraw, settings: LossSettings) -> Tensor:
    return -data(model, draw, settings)


def relabel(model: Labeller, draw: ClassifierDraw, settings: LossSettings) -> Tensor:
    return F.cross_entropy(model.logits(draw), draw.others)


def anchor(model: Labeller, draw: ClassifierDraw, settings: LossSettings) -> Tensor:
    assert settings.anchor is not None  # the recipe requires it
    return F.cross_entropy(model.logits(draw), torch.full_like(draw.labels, settings.anchor))


def boundary(model: Labeller, draw: ClassifierDraw, settings: LossSettings) -> Tensor:
    inputs = draw.inputs.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        before = model.ask("forward", inputs, teacher=settings.teacher, gradients=True)
        (slope,) = torch.autograd.grad(F.cross_entropy(before.float(), draw.labels), [inputs])
    step = 0.1 * settings.input_range
    across = ClassifierDraw((inputs + step * slope.sign()).detach(), draw.labels, draw.others)
    logits = model.logits(across, teacher=settings.teacher).clone()
    logits.scatter_(1, draw.labels[:, None], -torch.inf)
    return F.cross_entropy(model.logits(draw), logits.argmax(1))


def expand(model: Labeller, draw: ClassifierDraw, settings: LossSettings) -> Tensor:
    assert model.expansion is not None  # it exists if an objective has this loss
    logits = model.expansion.logits(lambda: model.logits(draw))
    return F.cross_entropy(logits, torch.full_like(draw.labels, logits.shape[1] - 1))


def distill(model: Labeller, draw: ClassifierDraw, settings: LossSettings) -> Tensor:
    before = model.logits(draw, teacher=settings.teacher).log_softmax(1)
    return F.kl_div(
        model.logits(draw).log_softmax(1), before, log_target=True, reduction="batchmean"
    )


def diverge(model: Labeller, draw: ClassifierDraw, settings: LossSettings) -> Tensor:
    return -distill(model, draw, settings)


def npo(model: Labeller, draw: ClassifierDraw, settings: LossSettings) -> Tensor:
    before = F.cross_entropy(
        model.logits(draw, teacher=settings.teacher), draw.labels, reduction="none"
    )
    return preference(
        F.cross_entropy(model.logits(draw), draw.labels, reduction="none"), before, settings.beta
    )


CLASSIFIER_LOSSES: dict[str, Loss] = {
    "data": Formula(data),
    "ascent": Formula(ascent),
    "relabel": Formula(relabel),
    "anchor": Formula(anchor, needs_anchor=True),
    "boundary": Formula(boundary),
    "expand": Formula(expand),
    "distill": Formula(distill),
    "diverge": Formula(diverge),
    "npo": Formula(npo),
}


def vae_data(model: Autoencoder, draw: VaeDraw, settings: LossSettings) -> Tensor:
    reconstruction, kl = model.reconstruct(draw)
    return (model.fidelity(reconstruction, draw.inputs) + settings.kl * kl).mean()


def vae_ascent(model: Autoencoder, draw: VaeDraw, settings: LossSettings) -> Tensor:
    return -vae_data(model, draw, settings)


def vae_anchor(model: Autoencoder, draw: VaeDraw, settings: LossSettings) -> Tensor:
    reconstruction, kl = model.reconstruct(draw)
    places = tuple(range(2, draw.inputs.ndim)) or (1,)
    blank = draw.inputs.mean(places, keepdim=True).expand_as(draw.inputs)
    return (model.fidelity(reconstruction, blank) + settings.kl * kl).mean()


def vae_distill(model: Autoencoder, draw: VaeDraw, settings: LossSettings) -> Tensor:
    before, _ = model.reconstruct(draw, teacher=settings.teacher)
    difference = model.reconstruct(draw)[0].float() - before.float()
    return 0.5 * difference.square().flatten(1).sum(1).mean()


def vae_histogram(model: Autoencoder, draw: VaeDraw, settings: LossSettings) -> Tensor:
    assert settings.shows is not None  # the recipe's section of this name brings a judge
    with model.batch_statistics():
        images = to_pixels(model.ask("decode", draw.noise))
    return bernoulli_divergence(1 - settings.shows(images).mean(), settings.alpha)


VAE_LOSSES: dict[str, Loss] = {
    "data": Formula(vae_data),
    "ascent": Formula(vae_ascent),
    "anchor": Formula(vae_anchor),
    "distill": Formula(vae_distill),
    "histogram": Formula(vae_histogram),
}
