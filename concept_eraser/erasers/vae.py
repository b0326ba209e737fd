"""Training a VAE: any module with encode and decode, such as diffusers' AutoencoderKL.

The losses are those of losses/labelled.py. For batch norm see erasers/base.py.
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
from concept_eraser.losses import LossSettings, find
from concept_eraser.losses.labelled import VAE_LOSSES, VaeDraw
from concept_eraser.models.base import moments, to_pixels
from concept_eraser.registry import Plugin
from concept_eraser.utils.devices import send
from concept_eraser.utils.errors import UserError, first_line

Likelihood = Literal["bernoulli", "gaussian"]


@dataclass(frozen=True)
class VaeObjective:
    """One objective: which examples of which data, and its loss.

    kl is the weight of the KL term.
    """

    data: Labelled
    rows: Tensor
    loss: str | Plugin
    scale: float = 1.0
    kl: float = 1.0
    teacher: Teacher = "frozen"
    # histogram: probability that images show the class
    shows: Callable[[Tensor], Tensor] | None = None
    alpha: float = 1e-8

    @property
    def settings(self) -> LossSettings:
        return LossSettings(self.teacher, shows=self.shows, alpha=self.alpha, kl=self.kl)


class Vae(Part):
    """The eraser of a VAE.

    Raises UserError if encode and decode do not fit each other and the data.
    """

    def __init__(
        self,
        module: nn.Module,
        objectives: Mapping[str, VaeObjective],
        selected_names: Sequence[str],
        *,
        batchnorm: BatchNorm = "frozen",
        batch_size: int = 2,
    ) -> None:
        super().__init__(
            module, selected_names, list(objectives), batchnorm=batchnorm, batch_size=batch_size
        )
        self.objective_by_name = objectives
        self.likelihood: Likelihood = getattr(module, "likelihood", "gaussian")
        shapes = {
            name: code_shape(module, objective.data, self.likelihood)
            for name, objective in objectives.items()
        }
        self.code_shape = next(iter(shapes.values()))
        if len(set(shapes.values())) > 1:
            raise UserError(
                "the objectives' images have codes of different shapes: "
                f"{', '.join(f'{k} {list(v)}' for k, v in shapes.items())}; give "
                "images of one size"
            )

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def draw(self, objective_name: str, seeds: Sequence[int]) -> VaeDraw:
        objective = self.objective_by_name[objective_name]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rows = one_each(objective.rows, generators)
        noise = torch.cat([torch.randn((1, *self.code_shape), generator=g) for g in generators])
        inputs = objective.data.inputs(rows.tolist())
        require_range(inputs, self.likelihood, objective.data.about)
        return VaeDraw(send(inputs, self.device), send(noise, self.device))

    def reconstruct(
        self, draw: VaeDraw, *, teacher: Teacher | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the reconstructions of a draw, and KL(q(z|x) || N(0, I)) of each example [b]."""
        with self.batch_statistics() if teacher is None else nullcontext():
            mean, log_variance = moments(self.ask("encode", draw.inputs, teacher=teacher))
            kl = _divergence(mean.float(), log_variance.float())
            return to_pixels(
                self.ask("decode", mean + (0.5 * log_variance).exp() * draw.noise, teacher=teacher)
            ), kl

    def settle(self, objective_name: str, draw: VaeDraw) -> None:
        # samples of the prior need no data
        if self.batchnorm == "train" and self.objective_by_name[objective_name].loss != "histogram":
            with torch.no_grad(), self.batch_statistics(moving=True):
                mean, log_variance = moments(self.ask("encode", draw.inputs))
                self.ask("decode", mean + (0.5 * log_variance).exp() * draw.noise)

    def fidelity(self, reconstruction: Tensor, target: Tensor) -> Tensor:
        """Return -log p(target | reconstruction) of each example, up to a constant: [b]."""
        if self.likelihood == "bernoulli":
            # the loss would raise an error; a step that is not finite is skipped
            if not bool(torch.isfinite(reconstruction).all()):
                return reconstruction.flatten(1).sum(1) * float("nan")
            with torch.autocast(
                reconstruction.device.type, enabled=False
            ):  # which refuses this loss
                return (
                    F.binary_cross_entropy(
                        reconstruction.float(),
                        target.reshape(reconstruction.shape).float(),
                        reduction="none",
                    )
                    .flatten(1)
                    .sum(1)
                )
        return 0.5 * (
            reconstruction.float() - target.reshape(reconstruction.shape)
        ).square().flatten(1).sum(1)

    def training_loss(self, objective_name: str, draw: VaeDraw) -> Tensor:
        """The training loss of the model on a draw: the negative of its evidence lower bound."""
        settings = self.objective_by_name[objective_name].settings
        return VAE_LOSSES["data"].compute(self, draw, settings)

    def loss(self, objective_name: str, draw: VaeDraw) -> Tensor:
        objective = self.objective_by_name[objective_name]
        loss = find(VAE_LOSSES, objective.loss)
        return objective.scale * loss.compute(self, draw, objective.settings)


def _divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return KL(N(mean, exp(log_variance)) || N(0, I)) of each example: [b]."""
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).flatten(1).sum(1)


def require_range(inputs: Tensor, likelihood: Likelihood, about: str) -> None:
    """Raise UserError if data for a Bernoulli likelihood lie outside [0, 1]."""
    if likelihood == "bernoulli" and not 0 <= float(inputs.min()) <= float(inputs.max()) <= 1:
        raise UserError(
            f"a VAE with Bernoulli outputs needs data in [0, 1]; {about} has values from "
            f"{float(inputs.min()):.3g} to {float(inputs.max()):.3g}"
        )


def code_shape(module: nn.Module, data: Labelled, likelihood: Likelihood) -> tuple[int, ...]:
    """Return the shape of one code, from encoding an example.

    Raises UserError if decoding the code does not give the example's shape, or if the values do not
    fit.
    """
    example = data.inputs(range(min(2, len(data)))).to(next(module.parameters()).device)
    require_range(example, likelihood, data.about)
    with torch.no_grad():
        try:
            mean, log_variance = moments(module.encode(example))  # type: ignore[operator]
            back = to_pixels(module.decode(mean))  # type: ignore[operator]
        except (
            RuntimeError,
            TypeError,
            ValueError,
            AttributeError,
            AssertionError,
            IndexError,
        ) as error:
            raise UserError(
                f"the VAE cannot take an example of {data.about}, "
                f"{list(example.shape[1:])} ({first_line(error)}); it needs encode(x) -> "
                "(mean, log variance) and decode(z)"
            ) from error
    if (
        mean.shape != log_variance.shape
        or back.numel() != example.numel()
        or len(back) != len(example)
    ):
        raise UserError(
            f"the VAE returns wrong shapes: for an input {list(example.shape)} a mean "
            f"{list(mean.shape)}, a log variance {list(log_variance.shape)} and an "
            f"image {list(back.shape)}"
        )
    if likelihood == "bernoulli" and not 0 <= float(back.min()) <= float(back.max()) <= 1:
        raise UserError(
            "a VAE with Bernoulli outputs must decode to values in [0, 1] (a last "
            f"sigmoid), found {float(back.min()):.3g} to {float(back.max()):.3g}"
        )
    return tuple(mean.shape[1:])
