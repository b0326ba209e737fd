"""The base class of attacks: a search that offers candidates in rounds until the concept returns.

An attack does not judge images. It yields rounds. `evaluation/attacks/runner.py` generates an image
of each remaining prompt with the victim's own sampler, asks the judge, and marks the successful
prompts. All prompts of a batch are attacked together. Later rounds leave out the successful prompts
(`scene.alive`).

An attack without text changes how the victim samples, so it samples the images itself
(`evaluation/attacks/trajectory.py`), and a round holds the images.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from concept_eraser.data.generate import Sampling
from concept_eraser.models.base import Condition, Model
from concept_eraser.models.vocabulary import Slots, Where
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.provenance import derive_seed

# what the attacker needs from the victim; "sampling": to choose how it samples, without gradients
Access = Literal["white box", "text encoder", "queries", "sampling", "weights"]
# what an attack changes; success rates of different families answer different questions
Family = Literal[
    "typed prompts",
    "embeddings",
    "adaptive",
    "without text",
    "fine-tuning on the concept",
    "fine-tuning on unrelated data",
    "control",
    "other",
]
FAMILIES: tuple[str, ...] = get_args(Family)


@dataclass
class Scene:
    """One batch of prompts under attack.

    Args:
        prompts: the attacked texts, [n].
        concept_prompts: the prompts of the images of the concept (often the same).
        concept: its name as a word, e.g. "star".
        targets: latents [n, c, h, w] of images of the concept by the original model.
        seed: of this batch.
        root: of the whole attack, for values that must not depend on a prompt's batch.
        corpus: the concept prompts of all batches.
        memory: a folder for results that apply to other victims too, None for none.
        sampling: the suite's settings of the sampler, with the prompts' own guidance if they state
            one.
        others: prompts of unrelated images, those of the suite's retain groups.
    """

    victim: Model
    original: Model
    prompts: Sequence[str]
    concept_prompts: Sequence[str]
    concept: str
    seeds: Sequence[int]
    targets: Tensor
    seed: int = 0
    root: int = 0
    corpus: Sequence[str] = ()
    memory: Path | None = None
    sampling: Sampling = field(default_factory=Sampling)
    others: Sequence[str] = ()
    alive: Tensor = field(init=False)  # [n] bool: prompts without a success so far
    cost: dict[str, int] = field(default_factory=dict)
    rewards: Tensor | None = None  # rewards of the last round's images, [m], if it has rewards

    def __post_init__(self) -> None:
        self.alive = torch.ones(len(self.prompts), dtype=torch.bool)

    @property
    def live(self) -> Tensor:
        """Positions of the prompts without a success so far."""
        return self.alive.nonzero()[:, 0]

    def spend(self, what: str, n: int = 1) -> None:
        """Count a cost of the attack: gradient steps, encoder calls or images, per prompt."""
        self.cost[what] = self.cost.get(what, 0) + n

    def generator(self, *names: str | int) -> torch.Generator:
        """Return a random generator on the CPU, a different one for each name."""
        return torch.Generator().manual_seed(derive_seed(self.seed, *names))

    def noised(self, rows: Tensor, t: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """x_t and the training target of some targets with new noise; t: time steps [b]."""
        latents = self.targets[rows.to(self.targets.device)]
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        t = t.to(latents.device)
        return self.victim.corrupt(latents, noise, t), self.victim.target(latents, noise, t)


@dataclass(frozen=True)
class Round:
    """Candidates for the prompts `rows` [m], given by position.

    A candidate is a text (tokenised again before it counts), a condition, or an image that the
    attack sampled from the victim, [m, h, w, 3] uint8. `seeds` are given where they are not the
    prompts' own.
    """

    rows: Tensor
    texts: Sequence[str] | None = None
    condition: Condition | None = None
    images: Tensor | None = None
    seeds: Sequence[int] | None = None
    loss: float | None = None  # the loss of the search, for its curve
    # the search needs the agreement of each image with its concept prompt (CLIP score)
    has_rewards: bool = False

    def __post_init__(self) -> None:
        candidates = (self.texts, self.condition, self.images)
        counts = [len(some) for some in candidates if some is not None]
        if counts != [len(self.rows)]:
            raise ValueError(
                "a round needs one text, condition or image for each row, found "
                f"{', '.join(map(str, counts)) or 'none'} for {len(self.rows)} rows"
            )


class Attack(ABC):
    """An attack, which searches candidates that recover the concept.

    It is a frozen dataclass whose fields are its options. A file of attacks/ holds one attack,
    named PLUGIN.
    """

    title: ClassVar[str]
    source: ClassVar[str]
    family: ClassVar[Family] = "other"
    access: ClassVar[Access]
    # needs the tokens of a single text encoder
    needs_words: ClassVar[bool] = True
    # one search for all prompts of a batch, so that it is weaker with fewer prompts
    learns_from_batch: ClassVar[bool] = False
    # needs the agreement of images with their prompts (CLIP score)
    needs_captions: ClassVar[bool] = False
    # samples by itself, so that a safeguard of the victim would not count
    samples_itself: ClassVar[bool] = False
    # measures the concept rate of every round: it also runs on prompts that show the concept
    # without an attack, and goes on when all prompts succeeded
    measures_rate: ClassVar[bool] = False

    @property
    def is_shared(self) -> bool:
        """Whether one search or training serves all prompts of a batch."""
        return self.learns_from_batch or self.access == "weights"

    def lists(self) -> dict[str, str]:
        """Hashes of the prompt lists of this attack. Attacks with different lists are not
        comparable.
        """
        return {}

    @property
    def finetuning_steps(self) -> int | None:
        """The number of training steps of an attack that fine-tunes the victim, else None."""
        return None

    def steps_after(self, round: int) -> int:
        """Return the number of training steps before the images of a round, counted from 1.

        Only of an attack with `finetuning_steps`.
        """
        raise NotImplementedError(f"{type(self).__name__} trains no weights")

    @abstractmethod
    def search(self, scene: Scene) -> Generator[Round, None, None]:
        """Yield rounds of candidates until the budget is spent. `scene.alive` may shrink between
        rounds.
        """


def slots_of(model: Model, prompts: Sequence[str], k: int, where: Where) -> Slots:
    return model.words.slots(prompts, k, where).to(model.device)


def soft_embed(model: Model, slots: Slots, tokens: Tensor, rows: Tensor) -> Condition:
    """Embed prompts with free tokens [b, k], whose embeddings [b, k, width] are differentiable."""
    ids = slots.fill(tokens)
    fixed = model.table.detach()[ids]
    where = slots.places[..., None].expand(*slots.places.shape, fixed.shape[-1])
    return model.embed(Condition({"ids": ids}), rows=fixed.scatter(1, where, rows.to(fixed)))


def require_positive(**values: float) -> None:
    """Raise ValueError for an option that is not positive and finite."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive, found {value}")


def require_word(scene: Scene) -> None:
    """Raise UserError if the concept's word is missing from a concept prompt."""
    without = [text for text in scene.concept_prompts if scene.concept not in text]
    if without:
        raise UserError(
            f"this attack replaces the word {scene.concept!r}, which the prompt "
            f"{without[0]!r} does not have; give --word"
        )
