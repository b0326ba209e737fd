"""Training the text encoder of a text-to-image model. The denoiser does not change.

Its losses are those of losses/text_encoder.py.

With an objective named `attack` there is an adversary: one offset delta of the embeddings of the
tokens [1, tokens, width]. It is added to the forgotten prompts that the encoder in training reads,
never to those of its teacher. Its loss is `data` on the forgotten images under E(c + delta), plus
c/2 ||delta||^2; with `attack.loss: prediction` it is `distill_prediction` in place of `data`. The
forget loss is then the sum of its values at delta and at 0, or that at delta alone
(`attack.forget`).

The denoiser's adversary shifts the output of the text encoder. No training of the encoder could
counter such an offset, so here the offset is at its input. It shifts all tokens of the prompt,
start, end and padding included. With `attack.tokens` the adversary is AdvUnlearn's: the embeddings
of some tokens between the start token and the prompt, learned anew from random tokens in each step
(OPTML-Group/AdvUnlearn, train-scripts/utils/attack_util.py, lines 5-20 and 232-234, with its
options attack_type prefix_k and attack_init random).

The result is a drop-in `text_encoder/` folder for every pipeline with the same encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from concept_eraser.erasers.base import NO_TERMS, AttackTerms, Part, Teacher
from concept_eraser.losses import LossSettings, find
from concept_eraser.losses.text_encoder import LOSSES, TextEncoderDraw
from concept_eraser.models.base import Condition, Model
from concept_eraser.models.lora import Adapter
from concept_eraser.registry import Plugin
from concept_eraser.utils.devices import send
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.provenance import derive_seed


@dataclass(frozen=True)
class TextEncoderObjective:
    """One objective.

    tokens and anchors have one row for each example. Losses through the denoiser also need latents
    [n, c, h, w].
    """

    tokens: Condition
    loss: str | Plugin
    anchors: Condition | None = None
    latents: Tensor | None = None
    scale: float = 1.0
    teacher: Teacher = "frozen"
    timesteps: tuple[int, int] = (0, 1000)
    beta: float = 0.1
    eta: float = 1.0
    decay: float = 0.0  # of an attack: the c in c/2 ||delta||^2

    @property
    def settings(self) -> LossSettings:
        return LossSettings(self.teacher, self.eta, beta=self.beta)


class TextEncoder(Part):
    """The eraser of a text encoder."""

    def __init__(
        self,
        model: Model,
        objectives: Mapping[str, TextEncoderObjective],
        selected_names: Sequence[str],
        *,
        adapter: Adapter | None = None,
        rotate: bool = False,
        attack: AttackTerms = NO_TERMS,
    ) -> None:
        super().__init__(
            model.parts["text_encoder"],
            selected_names,
            list(objectives),
            adapter=adapter,
            rotate=rotate,
            attack=attack,
        )
        self.model, self.objective_by_name = model, objectives
        self.null = model.tokenize([""])
        if "attack" in objectives:
            # [1, tokens, width]
            offset = torch.zeros_like(model.table[self.null.tensors["ids"]])
            self.delta = nn.Parameter(
                offset[:, : attack.tokens].clone() if attack.tokens else offset
            )
            prompts = {name: objective.tokens for name, objective in objectives.items()}
            require_room(model, attack, prompts)
        for name, objective in objectives.items():
            if find(LOSSES, objective.loss).needs_images and objective.latents is None:
                raise UserError(
                    f"{name}: the loss {objective.loss!r} goes through the denoiser and "
                    "needs images; losses on the embeddings need none: anchor, distill"
                )

    def turn(self, step: int | None) -> dict[str, str]:
        """Begin a step. Learned tokens start from the embeddings of random ones at every step."""
        if self.delta is not None and self.attack.tokens and step is not None:
            usable = self.model.words.usable.nonzero()[:, 0]
            generator = torch.Generator().manual_seed(
                derive_seed(self.attack.seed, step, "attack tokens")
            )
            chosen = usable[torch.randint(len(usable), (self.attack.tokens,), generator=generator)]
            with torch.no_grad():
                self.delta.copy_(self.model.table[chosen.to(self.delta.device)][None])
        return super().turn(step)

    def draw(self, objective_name: str, seeds: Sequence[int]) -> TextEncoderDraw:
        objective, device = (
            self.objective_by_name[self.objective_of(objective_name)],
            self.model.device,
        )
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rows = torch.cat(
            [torch.randint(len(objective.tokens), (1,), generator=g) for g in generators]
        )
        tokens = objective.tokens[rows].to(device)
        anchors = objective.anchors[rows].to(device) if objective.anchors is not None else None
        if objective.latents is None:
            width = self.module.config.hidden_size  # type: ignore[union-attr]
            terms = tokens.tensors["ids"].numel() * int(width)  # type: ignore[arg-type]
            return TextEncoderDraw(tokens, anchors, terms=terms)
        latents = send(objective.latents[rows], device)
        noise = torch.cat(
            [torch.randn((1, *self.model.latent_shape()), generator=g) for g in generators]
        )
        noise = send(noise, device)
        low, high = objective.timesteps
        t = torch.cat(
            [
                torch.randint(low, min(high, self.model.timesteps), (1,), generator=g)
                for g in generators
            ]
        )
        t = send(t, device)
        noisy = self.model.corrupt(latents, noise, t)
        return TextEncoderDraw(
            tokens,
            anchors,
            noisy=noisy,
            t=t,
            target=self.model.target(latents, noise, t),
            terms=noisy.numel(),
        )

    def embed(
        self, tokens: Condition | None, *, teacher: Teacher | None = None, is_attacked: bool = False
    ) -> Condition:
        assert tokens is not None
        if teacher is None:
            if not is_attacked or self.delta is None:
                return self.model.embed(tokens)
            if self.attack.tokens:
                return self._embed_behind_learned_tokens(tokens)
            rows = self.model.table[tokens.tensors["ids"]] + self.delta
            return self.model.embed(tokens, rows=rows)
        with torch.no_grad(), self.weights_of(teacher) as weights:
            return self.model.embed(tokens, weights)

    def _embed_behind_learned_tokens(self, tokens: Condition) -> Condition:
        """Encode prompts with the learned tokens between the start token and the first own token.

        The same number of tokens is cut off at the end, where there is only padding.
        """
        assert self.delta is not None
        k = self.attack.tokens

        def insert(values: Tensor) -> Tensor:  # the inserted ids are replaced by rows
            return torch.cat(
                [values[:, :1], values[:, 1:2].expand(-1, k), values[:, 1 : values.shape[1] - k]], 1
            )

        shifted = Condition({name: insert(value) for name, value in tokens.tensors.items()})
        rows = self.model.table[shifted.tensors["ids"]]
        learned = self.delta.to(rows.dtype).expand(len(rows), -1, -1)
        rows = torch.cat([rows[:, :1], learned, rows[:, 1 + k :]], 1)
        return self.model.embed(shifted, rows=rows)

    def training_loss(self, objective_name: str, draw: TextEncoderDraw) -> Tensor:
        """The training loss of the model on a draw; without images the objective's own loss."""
        if draw.target is None:
            return self.loss(objective_name, draw)
        return LOSSES["data"].compute(self, draw, LossSettings())

    def loss(self, objective_name: str, draw: TextEncoderDraw) -> Tensor:
        objective = self.objective_by_name[self.objective_of(objective_name)]
        loss, settings = find(LOSSES, objective.loss), objective.settings
        return self.under_attack(
            objective_name, draw, objective, lambda d: loss.compute(self, d, settings)
        )


def require_room(model: Model, attack: AttackTerms, prompts: Mapping[str, Condition]) -> None:
    """Raise UserError if attacked prompts leave no room for the learned tokens of an attack.

    Args:
        model: The text-to-image model, whose text encoder is trained.
        attack: How the adversary enters the losses.
        prompts: The tokens of the prompts of each objective.
    """
    for name in ("forget", "attack") if attack.tokens else ():
        ids, end = prompts[name].tensors["ids"], model.words.end
        longest = int((ids == end).int().argmax(1).max()) + 1
        if longest + attack.tokens > ids.shape[1]:
            raise UserError(
                f"attack.tokens: {attack.tokens} do not fit before the prompts of {name}: the "
                f"longest has {longest} of {ids.shape[1]} tokens; use fewer or shorter prompts"
            )
