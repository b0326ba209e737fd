"""What an attack is: a search that offers candidates, round after round, until the concept shows again.

An attack never judges and never draws the pictures that count. It yields rounds; `evaluation/attacking.py` draws a
picture of each prompt that still holds with the victim's own sampler, asks the judge, and marks which prompts fell. All
prompts of a batch are attacked at once; those that fell are left out of what follows (`scene.alive`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from concept_eraser.environment import derive_seed
from concept_eraser.errors import UserError
from concept_eraser.models.base import Condition, Model
from concept_eraser.models.words import Slots, Where

Access = Literal["white box", "text encoder", "queries", "weights"]  # what the attacker needs of the victim


@dataclass
class Scene:
    """One batch of prompts under attack.

    prompts: what is attacked, [n] texts; wanted: what the pictures of the concept were asked for with (often the same).
    concept: its name as a word, e.g. "star". targets: latents of pictures that show it, [n, c, h, w], by the original.
    seed: of this batch; root: of the whole attack, for what must not depend on the batch a prompt is in. corpus: the
    wanted prompts of all batches. memory: a folder for what attacks find that fits other victims too, None for none.
    """

    victim: Model
    original: Model
    prompts: Sequence[str]
    wanted: Sequence[str]
    concept: str
    seeds: Sequence[int]
    targets: Tensor
    seed: int = 0
    root: int = 0
    corpus: Sequence[str] = ()
    memory: Path | None = None
    alive: Tensor = field(init=False)  # [n] bool: prompts that have not fallen
    cost: dict[str, int] = field(default_factory=dict)
    rewards: Tensor | None = None  # of the last round's pictures, [m], where it asked for them

    def __post_init__(self) -> None:
        self.alive = torch.ones(len(self.prompts), dtype=torch.bool)

    @property
    def live(self) -> Tensor:
        """Positions of the prompts that have not fallen."""
        return self.alive.nonzero()[:, 0]

    def spend(self, what: str, n: int = 1) -> None:
        """Count what an attack costs: gradient steps, encoder calls, pictures, each of one prompt."""
        self.cost[what] = self.cost.get(what, 0) + n

    def generator(self, *names: str | int) -> torch.Generator:
        """Randomness of its own for each name, on the CPU."""
        return torch.Generator().manual_seed(derive_seed(self.seed, *names))

    def noised(self, rows: Tensor, t: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """x_t and the training target of some targets with fresh noise; t: time steps [b]."""
        latents = self.targets[rows.to(self.targets.device)]
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        t = t.to(latents.device)
        return self.victim.corrupt(latents, noise, t), self.victim.target(latents, noise, t)


@dataclass(frozen=True)
class Round:
    """Candidates for the prompts `rows` [m], by position: texts (tokenised anew before they count) or conditions, and
    seeds other than the prompts' own."""

    rows: Tensor
    texts: Sequence[str] | None = None
    condition: Condition | None = None
    seeds: Sequence[int] | None = None
    loss: float | None = None  # of the search, for its curve
    rewarded: bool = False  # wants to know how well each picture agrees with its wanted prompt (CLIP score)

    def __post_init__(self) -> None:
        given = len(self.texts) if self.texts is not None else len(self.condition) if self.condition is not None else -1
        if given != len(self.rows):
            raise ValueError(f"a round needs one text or condition a row, found {given} for {len(self.rows)} rows")


class Attack(ABC):
    """A plug-in of attacks/, named PLUGIN; its fields are its options."""

    title: ClassVar[str]
    source: ClassVar[str]
    access: ClassVar[Access]
    needs_words: ClassVar[bool] = True  # writes or shifts tokens of the one encoder that reads the prompt
    needs_captions: ClassVar[bool] = False  # asks how well pictures agree with their prompts (CLIP score)

    def lists(self) -> dict[str, str]:
        """Hashes of the prompt lists that it reads: two attacks with other lists are not comparable."""
        return {}

    @abstractmethod
    def search(self, scene: Scene) -> Generator[Round, None, None]:
        """Rounds of candidates until the budget is spent. Between two rounds `scene.alive` may shrink."""


def slots_of(model: Model, prompts: Sequence[str], k: int, where: Where) -> Slots:
    return model.words.slots(prompts, k, where).to(model.device)


def soft_embed(model: Model, slots: Slots, tokens: Tensor, rows: Tensor) -> Condition:
    """Prompts with free tokens [b, k], whose embeddings [b, k, width] are given and differentiable."""
    ids = slots.filled(tokens)
    fixed = model.table.detach()[ids]
    where = slots.places[..., None].expand(*slots.places.shape, fixed.shape[-1])
    return model.embed(Condition({"ids": ids}), rows=fixed.scatter(1, where, rows.to(fixed)))


def require_positive(**values: float) -> None:
    """Raise ValueError for an option that is not positive and finite."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive, found {value}")


def require_word(scene: Scene) -> None:
    """Raise UserError where the concept's word is missing from a prompt's wanted text."""
    without = [text for text in scene.wanted if scene.concept not in text]
    if without:
        raise UserError(f"this attack replaces the word {scene.concept!r}, which the prompt {without[0]!r} does not have; give --word")  # fmt: skip
