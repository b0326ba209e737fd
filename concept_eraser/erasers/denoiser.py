"""Training the denoiser (UNet or transformer) of a text-to-image model.

With an objective named `attack` there is an adversary: one offset delta of the text embedding [1,
tokens, width]. It is added to the forgotten prompts of the model in training, never of its teacher.
The attack's loss is the training loss on the forgotten images under e_c + delta, plus c/2
||delta||^2. So it regenerates the concept. With `attack.loss: prediction` it is `distill` under
that condition in place of the training loss. The forget loss is then the sum of its values at delta
and at 0, or that at delta alone (`attack.forget`). For examples without their prompt
(`empty_prompts`), delta is added to the empty one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from concept_eraser.data.batches import Batch, Examples
from concept_eraser.erasers.base import NO_TERMS, AttackTerms, Part
from concept_eraser.erasers.elastic import fisher, penalty
from concept_eraser.losses import LossSettings, Teacher, find
from concept_eraser.losses.denoiser import LOSSES, DenoiserDraw, no_grad_prediction
from concept_eraser.models.base import Condition, Model
from concept_eraser.models.lora import Adapter
from concept_eraser.registry import Plugin
from concept_eraser.utils.errors import UserError

EMBEDDING = "states"  # the tensor of a condition that an attack may shift


@dataclass(frozen=True)
class DenoiserObjective:
    """One objective: its examples, its loss, its batch size, and the range of its time steps."""

    examples: Examples
    loss: str | Plugin
    settings: LossSettings = LossSettings()  # noqa: RUF009 - frozen, so one for all is fine
    scale: float = 1.0
    timesteps: tuple[int, int] = (0, 1000)
    free_steps: int = 20  # data-free: steps of the partial sampler
    free_guidance: float = 3.0
    decay: float = 0.0  # of an attack: the c in c/2 ||delta||^2
    # factor of a penalty on changing the weights that these examples depend on; see `hold`
    elastic: float = 0.0


class Denoiser(Part):
    """The eraser of a denoiser.

    Args:
        model: The text-to-image model, whose denoiser is trained.
        objectives: The objectives by name, in their order.
        selected: The names of the trained tensors.
        adapter, rotate, attack: See `Part`.
    """

    def __init__(
        self,
        model: Model,
        objectives: Mapping[str, DenoiserObjective],
        selected_names: Sequence[str],
        *,
        adapter: Adapter | None = None,
        rotate: bool = False,
        attack: AttackTerms = NO_TERMS,
    ) -> None:
        super().__init__(
            model.denoiser,
            selected_names,
            list(objectives),
            adapter=adapter,
            rotate=rotate,
            attack=attack,
        )
        self.model, self.objective_by_name = model, objectives
        # of the objectives that hold the weights elastically
        self.fisher: dict[str, list[Tensor]] = {}
        if "attack" in objectives:
            one = objectives["attack"].examples.null.tensors.get(EMBEDDING)
            if one is None:
                raise model.lacks("an adversary on the text's embedding")
            self.delta = nn.Parameter(
                torch.zeros_like(one, dtype=torch.float32, device=model.device)
            )
        for name, objective in objectives.items():
            if objective.examples.latents is None and find(LOSSES, objective.loss).needs_images:
                image_free_losses = sorted(k for k, v in LOSSES.items() if not v.needs_images)
                raise UserError(
                    f"{name}: the loss {objective.loss!r} needs images, so it cannot be "
                    f"data-free; data-free losses: {', '.join(image_free_losses)}"
                )
            if objective.loss == "resteer" and not model.attention_layers():
                raise UserError(
                    f"{name}: the loss 'resteer' needs a UNet's cross-attention with the "
                    f"text, as in Stable Diffusion 1, 2 and XL; {model.source} "
                    f"({model.family}) has none"
                )

    def draw(self, objective_name: str, seeds: Sequence[int]) -> DenoiserDraw:
        """Choose examples, time steps and noise of one micro-batch, with one seed for each example.

        Each example has its own generator. So the examples do not depend on how they are divided
        into micro-batches and ranks.
        """
        objective, device = (
            self.objective_by_name[self.objective_of(objective_name)],
            self.model.device,
        )
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        batch = objective.examples.draw(generators, device)
        noise = torch.cat(
            [torch.randn((1, *self.model.latent_shape()), generator=g) for g in generators]
        ).to(device)
        if batch.latents is None:
            return self._draw_free(objective, batch, noise, generators[0])
        low, high = objective.timesteps
        high = min(high, self.model.timesteps)
        t = torch.cat([torch.randint(low, high, (1,), generator=g) for g in generators]).to(device)
        noisy = self.model.corrupt(batch.latents, noise, t)
        target = self.model.target(batch.latents, noise, t)
        return DenoiserDraw(
            noisy,
            t,
            condition=batch.condition,
            anchor=batch.anchor,
            null=batch.null,
            target=target,
            positions=batch.positions,
        )

    def _draw_free(
        self, objective: DenoiserObjective, batch: Batch, noise: Tensor, generator: torch.Generator
    ) -> DenoiserDraw:
        """Make x_t by sampling from the model up to a random step within the objective's range.

        This is the sampling of ESD. The whole micro-batch has one time step, which its first
        example draws.
        """
        low, high = (
            int((1 - bound / self.model.timesteps) * objective.free_steps)
            for bound in reversed(objective.timesteps)
        )
        stop = int(
            torch.randint(
                max(0, low),
                max(low + 1, min(high, objective.free_steps)),
                (1,),
                generator=generator,
            )
        )
        weights = self.originals if objective.settings.teacher == "frozen" else None
        noisy, t = self.model.partial(
            noise,
            batch.condition,
            batch.null,
            stop=stop,
            steps=objective.free_steps,
            guidance=objective.free_guidance,
            weights=weights,
        )
        times = torch.full((len(batch),), t, device=noisy.device)
        return DenoiserDraw(
            noisy,
            t=times,
            condition=batch.condition,
            anchor=batch.anchor,
            null=batch.null,
            target=None,
            positions=batch.positions,
        )

    def predict(
        self,
        draw: DenoiserDraw,
        condition: Condition | None = None,
        *,
        teacher: Teacher | None = None,
    ) -> Tensor:
        """Return the prediction for a draw.

        It is that of the model in training, or that of a teacher without gradients.
        """
        own_condition = draw.condition if condition is None else condition
        if teacher is None:
            model_condition = (
                self._attack_condition(own_condition)
                if draw.is_attacked and condition is None
                else own_condition
            )
            return self.model.denoise(draw.noisy, draw.t, model_condition)
        weights = self.originals if teacher == "frozen" else None
        return no_grad_prediction(
            lambda: self.model.denoise(draw.noisy, draw.t, own_condition, weights)
        )

    def image(self, draw: DenoiserDraw) -> Tensor:
        """Return the images of a draw, decoded from one-step x_0: [b, 3, h, w]."""
        return self.model.decode(self.model.clean(draw.noisy, draw.t, self.predict(draw)))

    def attention(self, draw: DenoiserDraw) -> Sequence[Tensor]:
        """Return the attention of each layer from image positions to the prompt's tokens.

        The shape is [b, heads, positions, tokens] for each layer.
        """
        model_condition = (
            self._attack_condition(draw.condition) if draw.is_attacked else draw.condition
        )
        return self.model.attention(draw.noisy, draw.t, model_condition)

    def hold(self, seeds: Mapping[str, Sequence[int]]) -> None:
        """Measure how much the training loss depends on each trained weight.

        It is called once, at the original values and with one draw for each seed, also for a
        resumed run. The objectives' losses then have the penalty of elastic.py.
        """
        params = list(self.trainable().values())
        for name, some in seeds.items():
            draws = (self.draw(name, [seed]) for seed in some)
            self.fisher[name] = fisher(
                (LOSSES["data"].compute(self, draw, LossSettings()) for draw in draws), params
            )

    def training_loss(self, objective_name: str, draw: DenoiserDraw) -> Tensor:
        """The training loss of the model on a draw; without images the objective's own loss."""
        if draw.target is None:
            return self.loss(objective_name, draw)
        return LOSSES["data"].compute(self, draw, LossSettings())

    def loss(self, objective_name: str, draw: DenoiserDraw) -> Tensor:
        name = self.objective_of(objective_name)
        objective = self.objective_by_name[name]
        loss, settings = find(LOSSES, objective.loss), objective.settings
        value = self.under_attack(
            objective_name, draw, objective, lambda d: loss.compute(self, d, settings)
        )
        if name not in self.fisher:
            return value
        weights = list(self.trainable().values())
        return value + objective.elastic * penalty(
            weights, list(self.originals.values()), self.fisher[name]
        )

    def _attack_condition(self, condition: Condition) -> Condition:
        assert self.delta is not None
        states = condition.tensors[EMBEDDING]
        return Condition({**condition.tensors, EMBEDDING: states + self.delta.to(states.dtype)})
