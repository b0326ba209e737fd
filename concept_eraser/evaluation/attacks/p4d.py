"""P4D: hard prompts by projected embeddings that reproduce the original model's prediction.

Chin et al., "Prompting4Debugging: Red-Teaming Text-to-Image Diffusion Models by Finding Problematic
Prompts", ICML 2024, arXiv 2309.06135, with the optimiser of PEZ (arXiv 2302.03668). The free tokens
have continuous embeddings. The forward pass replaces each by the nearest embedding (cosine) of the
vocabulary. The gradient there updates the continuous ones.

    min E || eps*(x_t, t, adversarial prompt) - eps_original(x_t, t, concept prompt) ||^2
    with t ~ U[0, T)

    variant N   `tokens` free tokens and nothing else
    variant K   the prompt is kept; one free token before it and one after every `spacing` of its
                tokens, n // spacing + 1 for a prompt of n tokens

The authors' code is joycenerd/P4D, prompt_optimization/optimize_n.py and optimize_k.py. The places
of the variant K are those of optimize_k.py, lines 26 and 39.

Differences: an image is judged after each `every` steps, and the first one with the concept ends
the prompt's search. The code keeps the best by CLIP (optimize_n.py, lines 257-286). Prompts of a
batch share one generator of time steps, not their tokens. Tokens are those that a text of one token
gives again (the code: all, a third of which are no ends of words). After the end the code's search
has the token "!" and the latents are sampled from the VAE. The attack that UnlearnDiffAtk's
repository calls P4D is a different one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.evaluation.attacks.base import (
    Access,
    Attack,
    Family,
    Round,
    Scene,
    require_positive,
    soft_embed,
)
from concept_eraser.models.base import Condition, Model
from concept_eraser.models.vocabulary import Slots


class UsableTokens:
    """The tokens that a prompt can have, and the directions of their embeddings.

    Args:
        table: The embeddings of all tokens, [V, width].
        usable: Whether a prompt can have each of them, [V] bool.
    """

    def __init__(self, table: Tensor, usable: Tensor) -> None:
        self.ids = usable.to(table.device).nonzero()[:, 0]
        self.directions = F.normalize(table[self.ids], dim=-1)

    def nearest(self, rows: Tensor) -> Tensor:
        """The token with the largest cosine to each embedding: [..., width] -> [...]."""
        return self.ids[(rows @ self.directions.T).argmax(-1)]


@dataclass(frozen=True)
class P4D(Attack):
    """Learn tokens with which the victim predicts what the original predicts.

    The defaults of `steps`, `lr` and `weight_decay` are the paper's.

    Args:
        variant: N for free tokens alone, K for the prompt with free tokens in between.
        tokens: The number of free tokens of the variant N.
        spacing: The variant K has a free token before the prompt and after each such number of its
            tokens.
        steps: The number of steps of the optimiser.
        every: Each prompt gets an image after this number of steps.
        lr: The learning rate.
        weight_decay: The weight decay.
    """

    title: ClassVar[str] = "P4D"
    source: ClassVar[str] = "arXiv 2309.06135"
    family: ClassVar[Family] = "typed prompts"
    access: ClassVar[Access] = "white box"

    variant: Literal["N", "K"] = "N"
    tokens: int = 16
    spacing: int = 3
    steps: int = 3000
    every: int = 50
    lr: float = 0.1
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        require_positive(
            tokens=self.tokens, spacing=self.spacing, steps=self.steps, every=self.every, lr=self.lr
        )
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(
                f"weight_decay must be at least 0 and finite, found {self.weight_decay}"
            )

    def _slots(self, scene: Scene) -> list[Slots]:
        """The slots of each prompt. Under K the number of free tokens depends on the prompt's
        length.
        """
        words, device = scene.victim.words, scene.victim.device
        if self.variant == "N":
            return [words.slots([""], self.tokens).to(device) for _ in scene.prompts]
        return [words.free_token_every(prompt, self.spacing).to(device) for prompt in scene.prompts]

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        words, table = scene.victim.words, scene.victim.table.detach()
        usable = UsableTokens(table, words.usable)
        slots = self._slots(scene)
        generator = scene.generator("p4d")
        pool = words.usable.nonzero()[:, 0]
        starts = [
            pool[torch.randint(len(pool), s.places.shape, generator=generator)].to(table.device)
            for s in slots
        ]
        soft = [table[start].clone().requires_grad_(True) for start in starts]
        optimizer = torch.optim.AdamW(soft, self.lr, weight_decay=self.weight_decay)
        concept_condition = scene.original.encode(scene.concept_prompts)
        for step in range(1, self.steps + 1):
            live = scene.live.tolist()
            t = torch.randint(0, scene.victim.timesteps, (len(live),), generator=generator).to(
                table.device
            )
            noisy, _ = scene.noised(scene.live, t, generator)
            with torch.no_grad():
                goal = scene.original.denoise(
                    noisy, t, concept_condition[scene.live.to(table.device)]
                )
            of_live = [soft[row] for row in live]
            condition = projected(scene.victim, [slots[row] for row in live], of_live, usable)
            prediction = scene.victim.denoise(noisy, t, condition)
            losses = (prediction - goal).square().flatten(1).mean(1)
            gradients = torch.autograd.grad(losses.sum(), of_live)
            for embeddings, gradient in zip(of_live, gradients, strict=True):
                embeddings.grad = gradient
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scene.spend("gradient steps", len(live))
            if step % self.every == 0 or step == self.steps:
                texts = [
                    words.texts(slots[r].fill(usable.nearest(soft[r].detach())))[0] for r in live
                ]
                yield Round(scene.live, texts=texts, loss=float(losses.detach().mean()))


def projected(
    model: Model, slots: Sequence[Slots], soft: Sequence[Tensor], usable: UsableTokens
) -> Condition:
    """Encode prompts whose free tokens are those nearest to `soft`, each [1, k, width].

    The gradient at the nearest tokens goes to `soft`. Prompts with the same number of free tokens
    are encoded together.

    Returns:
        The conditions in the order of the prompts.
    """
    table = model.table.detach()
    positions_by_length: dict[int, list[int]] = {}
    for position, embeddings in enumerate(soft):
        positions_by_length.setdefault(embeddings.shape[1], []).append(position)
    parts = []
    for positions in positions_by_length.values():
        rows = torch.cat([soft[position] for position in positions])
        tokens = usable.nearest(rows.detach())
        hard = rows + (table[tokens] - rows).detach()
        together = Slots(
            torch.cat([slots[position].ids for position in positions]),
            torch.cat([slots[position].places for position in positions]),
        )
        parts.append(soft_embed(model, together, tokens, hard))
    order = torch.tensor([p for positions in positions_by_length.values() for p in positions])
    back = order.argsort().to(table.device)
    return Condition(
        {name: torch.cat([part.tensors[name] for part in parts])[back] for name in parts[0].tensors}
    )


NAMED = {"p4d-n": {"variant": "N"}, "p4d-k": {"variant": "K"}}
PLUGIN = P4D
