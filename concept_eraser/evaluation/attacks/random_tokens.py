"""Random tokens before the prompt: the baseline that an attack must beat."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch

from concept_eraser.evaluation.attacks.base import (
    Access,
    Attack,
    Family,
    Round,
    Scene,
    require_positive,
    slots_of,
)
from concept_eraser.models.vocabulary import Where


@dataclass(frozen=True)
class RandomTokens(Attack):
    """Add usable tokens that are drawn uniformly, and again in each round.

    Args:
        k: The number of tokens.
        where: The place of the tokens: before, behind or in the middle of the prompt, or spread
            evenly (insert).
        tries: The number of rounds.
    """

    title: ClassVar[str] = "Random tokens"
    source: ClassVar[str] = "a control"
    family: ClassVar[Family] = "control"
    access: ClassVar[Access] = "queries"

    k: int = 5
    where: Where = "prefix"
    tries: int = 50

    def __post_init__(self) -> None:
        require_positive(k=self.k, tries=self.tries)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        slots = slots_of(scene.victim, scene.prompts, self.k, self.where)
        words = scene.victim.words
        usable = words.usable.nonzero()[:, 0]
        generator = scene.generator("random tokens")
        for _ in range(self.tries):
            tokens = usable[
                torch.randint(len(usable), (len(scene.prompts), self.k), generator=generator)
            ]
            live = scene.live
            texts = words.texts(slots.fill(tokens.to(slots.ids.device)))
            yield Round(live, texts=[texts[i] for i in live.tolist()])


PLUGIN = RandomTokens
