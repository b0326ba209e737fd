"""Training the denoiser (UNet or transformer) of a text-to-image model.

With an objective named `attack` there is an adversary: one offset delta of the text embedding [1,
tokens, width]. It is added to the forgotten prompts of the model in training, never of its teacher.
The attack's loss is the training loss on the forgotten images under e_c + delta, plus c/2
||delta||^2. So it regenerates the concept. With `attack.loss: prediction` it is `distill` under
that condition in place of the training loss. The forget loss is then the sum of its values at delta
and at 0, or that at delta alone (`attack.forget`). For examples without their prompt
(`empty_prompts`), delta is added to the empty one.

With `attack.both_branches` there are two offsets [2, tokens, width], that of the prompts and that
of the empty prompt, as in the attack soft_prompt_both. A loss under attack is then the sum of its
values for the prompts at the first, and for the empty prompt at the second. So the attack
regenerates the concept by both predictions of guidance. The forget loss preserves the unconditional
prediction under the second offset: its target is the teacher's, without the offset.

A search (`AttackTerms.search`) keeps several offsets, delta [K, tokens, width]. In round r the
forgotten prompts are under the offset of round r - 1 (none in the first), and the attack learns
that of round r. After the last round the weights have their original values again, and each
forgotten example has one of the K offsets, or none.

With the loss `balance` an objective has a scalar log Z, which is trained beside the weights and
discarded at the end. Its draws are trajectories that its teacher samples for the anchors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from concept_eraser.data.batches import Batch, Examples
from concept_eraser.erasers.base import NO_TERMS, AttackTerms, Inseparable, Part
from concept_eraser.erasers.elastic import fisher, penalty
from concept_eraser.erasers.trajectories import sample_trajectories
from concept_eraser.losses import LossSettings, Teacher, find
from concept_eraser.losses.denoiser import LOSSES, DenoiserDraw, no_grad_prediction
from concept_eraser.models.base import Condition, Model
from concept_eraser.models.lora import Adapter
from concept_eraser.registry import Plugin
from concept_eraser.utils.devices import send
from concept_eraser.utils.errors import UserError

Answers = dict[tuple[Teacher, int], Tensor]  # see SharedPrediction
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
        is_start_token_trained: Whether gradients pass the keys and values of a prompt's first
            token in cross-attention.

    Raises:
        UserError: The model does not have what an objective or an argument needs.
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
        is_start_token_trained: bool = True,
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
        self.round = 0  # of a search for attacks
        # of the objectives that hold the weights elastically
        self.fisher: dict[str, list[Tensor]] = {}
        require_supported(model, objectives, is_start_token_trained=is_start_token_trained)
        if "attack" in objectives:
            one = objectives["attack"].examples.null.tensors[EMBEDDING]
            kept = (2 if attack.both_branches else max(1, attack.kept), *one.shape[1:])
            self.delta = nn.Parameter(torch.zeros(kept, dtype=torch.float32, device=model.device))
        self.log_z: dict[str, nn.Parameter] = {}
        for name, objective in objectives.items():
            if objective.loss == "balance":
                value = torch.tensor(objective.settings.trajectory.log_z, dtype=torch.float32)
                self.log_z[name] = nn.Parameter(send(value, model.device))
            if objective.examples.latents is None and find(LOSSES, objective.loss).needs_images:
                image_free_losses = sorted(k for k, v in LOSSES.items() if not v.needs_images)
                raise UserError(
                    f"{name}: the loss {objective.loss!r} needs images, so it cannot be "
                    f"data-free; data-free losses: {', '.join(image_free_losses)}"
                )
            if objective.loss == "slider" and not objective.examples.mixture:
                raise UserError(
                    f"{name}: the loss 'slider' needs a mixture, the prompts and factors of its "
                    "target"
                )
        self._hooks: list[RemovableHandle] = []
        if not is_start_token_trained:
            self._hooks = model.detach_start_token()

    def restore(self) -> None:
        self._remove_hooks()
        super().restore()

    def absorb(self) -> None:
        self._remove_hooks()
        super().absorb()

    def finish(self) -> dict[str, Tensor]:
        self._remove_hooks()
        return super().finish()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def scratch(self) -> dict[str, nn.Parameter]:
        """The log Z of each objective with the loss `balance`."""
        return {f"log_z.{name}": value for name, value in self.log_z.items()}

    def turn(self, step: int | None) -> dict[str, str]:
        """Begin a step. The weights have their original values again after a search."""
        self.round = self.attack.round_of(0 if step is None else step)
        self.begins_anew = step is not None and self.attack.begins_anew(step)
        if self.begins_anew:
            with torch.no_grad():
                for name, parameter in self.trainable().items():
                    parameter.copy_(self.originals[name])
        return super().turn(step)

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
        )
        noise = send(noise, device)
        if objective.loss == "balance" and batch.latents is None:
            return self._draw_trajectories(objective, batch, noise, generators)
        if batch.latents is None:
            return self._draw_free(objective, batch, noise, generators[0])
        low, high = objective.timesteps
        high = min(high, self.model.timesteps)
        t = torch.cat([torch.randint(low, high, (1,), generator=g) for g in generators])
        t = send(t, device)
        attacks = self._attacks(objective_name, generators)
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
            mixture=batch.mixture,
            attacks=None if attacks is None else send(attacks, device),
        )

    def _attacks(self, objective_name: str, generators: Sequence[torch.Generator]) -> Tensor | None:
        """Return the number of the attack on each example, 0 for none; None without a search."""
        kept, count = self.attack.kept, len(generators)
        if not kept or objective_name not in ("attack", "forget"):
            return None
        if objective_name == "attack":
            return torch.full((count,), min(self.round + 1, kept))
        if self.round < kept:
            return torch.full((count,), self.round)
        return torch.cat([torch.randint(kept + 1, (1,), generator=g) for g in generators])

    def _draw_free(
        self, objective: DenoiserObjective, batch: Batch, noise: Tensor, generator: torch.Generator
    ) -> DenoiserDraw:
        """Make x_t by sampling from the model up to a random step within the objective's range.

        This is the sampling of ESD. The whole micro-batch has one time step, which its first
        example draws.
        """
        stops = steps_within(objective.timesteps, self.model.timesteps, steps=objective.free_steps)
        stop = int(torch.randint(stops.start, stops.stop, (1,), generator=generator))
        with self.weights_of(objective.settings.teacher) as weights:
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
            mixture=batch.mixture,
        )

    def _draw_trajectories(
        self,
        objective: DenoiserObjective,
        batch: Batch,
        noise: Tensor,
        generators: Sequence[torch.Generator],
    ) -> DenoiserDraw:
        """Sample a trajectory for each anchor by the teacher."""
        with self.weights_of(objective.settings.teacher) as weights:
            trajectory = sample_trajectories(
                self.model,
                batch,
                noise,
                generators=generators,
                terms=objective.settings.trajectory,
                weights=weights,
            )
        return DenoiserDraw(
            trajectory.noisy[0],
            trajectory.t[0],
            condition=batch.condition,
            anchor=batch.anchor,
            null=batch.null,
            target=None,
            trajectory=trajectory,
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
            is_shifted = (draw.is_attacked or draw.attacks is not None) and condition is None
            model_condition = (
                self._attack_condition(own_condition, draw.attacks) if is_shifted else own_condition
            )
            return self.model.denoise(draw.noisy, draw.t, model_condition)
        return self._teach(draw.noisy, draw.t, own_condition, teacher)

    def _teach(self, noisy: Tensor, t: Tensor, condition: Condition, teacher: Teacher) -> Tensor:
        with self.weights_of(teacher) as weights:
            return no_grad_prediction(lambda: self.model.denoise(noisy, t, condition, weights))

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

    def attacked_conditions(self, draw: DenoiserDraw) -> Sequence[Condition]:
        """Return the prompts of a draw under none and under each of the attacks of a search.

        They are constants. There are none during the search, and without one.
        """
        kept = self.attack.kept
        if not kept or self.round < kept:
            return ()
        with torch.no_grad():
            return tuple(
                self._attack_condition(draw.condition, torch.full_like(draw.t, k).long())
                for k in range(kept + 1)
            )

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
        if name in self.log_z:
            settings = replace(settings, log_z=self.log_z[name])
        if self.attack.kept:
            value = objective.scale * loss.compute(self, draw, settings)
            if objective_name == "attack" and self.delta is not None:
                value = value + 0.5 * objective.decay * self.delta.square().sum()
        else:
            value = self.under_attack(
                objective_name, draw, objective, lambda d: loss.compute(self, d, settings)
            )
        if name not in self.fisher:
            return value
        weights = list(self.trainable().values())
        return value + objective.elastic * penalty(
            weights, list(self.originals.values()), self.fisher[name]
        )

    def attacked_loss(
        self, draw: DenoiserDraw, compute: Callable[[DenoiserDraw], Tensor]
    ) -> Tensor:
        """Return a loss under attack, with `both_branches` the sum over the two branches."""
        if not self.attack.both_branches:
            return compute(draw)
        anchor = None if draw.anchor is None else draw.null
        prompts, empty = draw, replace(draw, condition=draw.null, anchor=anchor)
        if draw.is_attacked:
            first = torch.ones_like(draw.t).long()
            prompts, empty = replace(prompts, attacks=first), replace(empty, attacks=2 * first)
        return compute(prompts) + compute(empty)

    @property
    def module_in_use(self) -> nn.Module:
        """The model's denoiser. With training.shard: weights it is a second tree of layers."""
        denoiser: nn.Module = self.model.denoiser
        return denoiser

    @property
    def positions(self) -> int:
        """The positions of one example's latents, height x width."""
        _channels, height, width = self.model.latent_shape()
        return height * width

    def losses(self, draws: Mapping[str, DenoiserDraw]) -> dict[str, Tensor]:
        """Return the loss of each objective, from one prediction for all of them.

        The teachers' predictions that built-in losses need are also computed at once.

        Raises:
            Inseparable: There is an adversary or an elastic penalty, or a loss needs more than the
                denoiser's prediction for the own prompt at one time step.
        """
        if self.delta is not None or self.fisher:
            raise Inseparable(
                "the losses depend on an adversary or an elastic penalty, not on predictions alone"
            )
        if self.log_z:
            raise Inseparable("the loss 'balance' has predictions at many time steps")
        answers = self._teachers(draws)  # before any activations are stored
        rows = list(draws.values())
        prediction = self.model.denoise(
            torch.cat([draw.noisy for draw in rows]),
            torch.cat([draw.t for draw in rows]),
            _joined([draw.condition for draw in rows]),
        )
        parts = prediction.split([len(draw.t) for draw in rows])
        losses = {}
        for (name, draw), part in zip(draws.items(), parts, strict=True):
            objective = self.objective_by_name[self.objective_of(name)]
            loss = find(LOSSES, objective.loss)
            shared = SharedPrediction(self, draw, part, answers[name])
            losses[name] = objective.scale * loss.compute(shared, draw, objective.settings)
        return losses

    def _teachers(self, draws: Mapping[str, DenoiserDraw]) -> dict[str, Answers]:
        """Return the teachers' predictions of the losses, for each objective.

        They are by the teacher and the identity of the condition. Each teacher predicts once.
        """
        requests: dict[Teacher, list[tuple[str, Condition]]] = {}
        for name, draw in draws.items():
            objective = self.objective_by_name[self.objective_of(name)]
            wanted = find(LOSSES, objective.loss).teacher_conditions(objective.settings)
            conditions = {
                "own": [draw.condition],
                "anchor": [] if draw.anchor is None else [draw.anchor],
                "null": [draw.null],
                "mixture": [condition for _, condition in draw.mixture],
            }
            requests.setdefault(objective.settings.teacher, []).extend(
                (name, condition) for kind in wanted for condition in conditions[kind]
            )
        answers: dict[str, Answers] = {name: {} for name in draws}
        for teacher, some in requests.items():
            if not some:
                continue
            rows = [draws[name] for name, _ in some]
            prediction = self._teach(
                torch.cat([draw.noisy for draw in rows]),
                torch.cat([draw.t for draw in rows]),
                _joined([condition for _, condition in some]),
                teacher,
            )
            parts = prediction.split([len(draw.t) for draw in rows])
            for (name, condition), part in zip(some, parts, strict=True):
                answers[name][teacher, id(condition)] = part
        return answers

    def _attack_condition(self, condition: Condition, attacks: Tensor | None = None) -> Condition:
        """Return a condition under the offset, or under the offset of each example's number."""
        assert self.delta is not None
        states = condition.tensors[EMBEDDING]
        offset: Tensor = self.delta
        if attacks is not None:
            offset = torch.cat([torch.zeros_like(self.delta[:1]), self.delta])[attacks]
        return Condition({**condition.tensors, EMBEDDING: states + offset.to(states.dtype)})


def steps_within(bounds: tuple[int, int], timesteps: int, *, steps: int) -> range:
    """Return the numbers of a sampler's steps after which its time step is within bounds.

    At least one is returned, also where no time step of the sampler is within them.

    Args:
        bounds: The smallest time step, and the first one above the largest.
        timesteps: The number of time steps of the noise schedule.
        steps: The number of steps of the sampler, the noisiest first.
    """
    first, end = ((timesteps - bound) * steps // timesteps for bound in reversed(bounds))
    first = max(first, 0)
    return range(first, max(first + 1, min(end, steps)))


def require_supported(
    model: Model,
    objectives: Mapping[str, DenoiserObjective],
    *,
    is_start_token_trained: bool = True,
) -> None:
    """Raise UserError if the model lacks what an objective or the start token needs.

    It reads no images, so it can be called before they are made.

    Args:
        model: The text-to-image model, whose denoiser is trained.
        objectives: The objectives by name. Their examples need no latents.
        is_start_token_trained: See `Denoiser`.
    """
    if "attack" in objectives and EMBEDDING not in objectives["attack"].examples.null.tensors:
        raise model.lacks("an adversary on the text's embedding")
    for name, objective in objectives.items():
        if objective.loss == "balance":
            first = torch.zeros(1, dtype=torch.long)
            model.ancestral(first + 1, first)  # some families have no such step
        if objective.loss == "resteer":
            _require_attention(model, f"{name}: the loss 'resteer'")
    if not is_start_token_trained:
        _require_attention(model, "trainable.start_token: frozen")


def _require_attention(model: Model, what: str) -> None:
    """Raise UserError, with the name of what needs it, if the model has no cross-attention."""
    if not model.attention_layers():
        raise UserError(
            f"{what} needs a UNet's cross-attention with the text, as in Stable Diffusion 1, 2 "
            f"and XL; {model.source} ({model.family}) has none"
        )


def _joined(conditions: Sequence[Condition]) -> Condition:
    """Return the rows of all conditions in one."""
    return Condition(
        {
            key: torch.cat([condition.tensors[key] for condition in conditions])
            for key in conditions[0].tensors
        }
    )


@dataclass(frozen=True)
class SharedPrediction:
    """What the loss of one objective reads, if one prediction serves several objectives.

    It has the interface of `losses.denoiser.Predictor`.

    Attributes:
        eraser: The eraser.
        draw: The micro-batch of the objective.
        prediction: The prediction of the model in training for it, [b, c, h, w].
        answers: Predictions of teachers, by the teacher and the identity of the condition.

    Raises:
        Inseparable: The loss asks the model in training for something else.
    """

    eraser: Denoiser
    draw: DenoiserDraw
    prediction: Tensor
    answers: Answers

    def predict(
        self,
        draw: DenoiserDraw,
        condition: Condition | None = None,
        *,
        teacher: Teacher | None = None,
    ) -> Tensor:
        own_condition = draw.condition if condition is None else condition
        is_own_draw = draw is self.draw
        if teacher is not None:
            answer = self.answers.get((teacher, id(own_condition))) if is_own_draw else None
            return (
                self.eraser.predict(draw, condition, teacher=teacher) if answer is None else answer
            )
        if not is_own_draw or own_condition is not draw.condition:
            raise Inseparable("a loss needs further predictions of the model in training")
        return self.prediction

    def image(self, draw: DenoiserDraw) -> Tensor:
        model = self.eraser.model
        return model.decode(model.clean(draw.noisy, draw.t, self.predict(draw)))

    def attacked_conditions(self, draw: DenoiserDraw) -> Sequence[Condition]:
        raise Inseparable("a loss needs the attacks of a search")

    def attention(self, draw: DenoiserDraw) -> Sequence[Tensor]:
        raise Inseparable("a loss needs the cross-attention of the model in training")
