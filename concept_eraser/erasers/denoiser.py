"""Training the denoiser (UNet or transformer) of a text-to-image model.

The frozen teacher is not a second model: only the original values of the selected tensors are kept, and the
teacher's prediction is a functional call of the same module with those values in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from concept_eraser.data.batches import Batch, Examples
from concept_eraser.errors import UserError
from concept_eraser.losses import LOSSES, Draw, Settings, Teacher, no_grad_prediction
from concept_eraser.models.base import Condition, Model


@dataclass(frozen=True)
class Side:
    """One player: its examples, its loss, its batch size, and the range of time steps it is asked at."""

    examples: Examples
    loss: str
    settings: Settings = Settings()  # noqa: RUF009 - frozen, so one for all is fine
    scale: float = 1.0
    timesteps: tuple[int, int] = (0, 1000)
    free_steps: int = 20  # data-free: steps of the partial sampler
    free_guidance: float = 3.0


@dataclass
class Denoiser:
    """The denoiser of `model`, of which the tensors named in `selected` are trained."""

    model: Model
    sides: Mapping[str, Side]  # in the order of the players
    selected: Sequence[str]
    originals: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        parameters = dict(self.module.named_parameters())
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        for name in self.selected:
            parameters[name].requires_grad_(True)
        self.originals = {name: parameters[name].detach().clone() for name in self.selected}
        for name, side in self.sides.items():
            if side.examples.latents is None and LOSSES[side.loss].needs_target:
                allowed = sorted(k for k, v in LOSSES.items() if not v.needs_target)
                raise UserError(f"{name}: the loss {side.loss!r} needs images, so it cannot be data-free; data-free losses: {', '.join(allowed)}")  # fmt: skip

    @property
    def module(self) -> nn.Module:
        return self.model.denoiser

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(self.sides)

    def trainable(self) -> dict[str, nn.Parameter]:
        parameters = dict(self.module.named_parameters())
        return {name: parameters[name] for name in self.selected}

    def draw(self, player: str, seeds: Sequence[int]) -> Draw:
        """Choose examples, time steps and noise of one micro-batch, one seed an example.

        Each example draws from a generator of its own, so that the same examples come out however they are dealt
        to micro-batches and ranks.
        """
        side, device = self.sides[player], self.model.device
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        batch = side.examples.draw(generators, device)
        noise = torch.cat([torch.randn((1, *self.model.latent_shape()), generator=g) for g in generators]).to(device)
        if batch.latents is None:
            return self._draw_free(side, batch, noise, generators[0])
        low, high = side.timesteps
        high = min(high, self.model.timesteps)
        t = torch.cat([torch.randint(low, high, (1,), generator=g) for g in generators]).to(device)
        noisy = self.model.corrupt(batch.latents, noise, t)
        return Draw(noisy, t, batch.condition, batch.anchor, batch.null, self.model.target(batch.latents, noise, t))

    def _draw_free(self, side: Side, batch: Batch, noise: Tensor, generator: torch.Generator) -> Draw:
        """x_t by sampling from the model itself up to a random step within the side's range (as in ESD).

        The whole micro-batch stands at the same time step, the one its first example draws.
        """
        low, high = (int((1 - bound / self.model.timesteps) * side.free_steps) for bound in reversed(side.timesteps))
        stop = int(torch.randint(max(0, low), max(low + 1, min(high, side.free_steps)), (1,), generator=generator))
        weights = self.originals if side.settings.teacher == "frozen" else None
        noisy, t = self.model.partial(noise, batch.condition, batch.null, stop=stop, steps=side.free_steps, guidance=side.free_guidance, weights=weights)  # fmt: skip
        return Draw(
            noisy, torch.full((len(batch),), t, device=noisy.device), batch.condition, batch.anchor, batch.null, None
        )

    def predict(self, draw: Draw, condition: Condition | None = None, *, teacher: Teacher | None = None) -> Tensor:
        """The prediction for a draw, by the model in training or (without gradients) by a teacher."""
        given = draw.condition if condition is None else condition
        if teacher is None:
            return self.model.denoise(draw.noisy, draw.t, given)
        weights = self.originals if teacher == "frozen" else None
        return no_grad_prediction(lambda: self.model.denoise(draw.noisy, draw.t, given, weights))

    def loss(self, player: str, draw: Draw) -> Tensor:
        side = self.sides[player]
        return side.scale * LOSSES[side.loss].compute(self, draw, side.settings)
