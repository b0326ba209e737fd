"""Seed search: the same prompt with other seeds, the success of repetition alone."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from concept_eraser.evaluation.attacks.base import (
    Access,
    Attack,
    Family,
    Round,
    Scene,
    require_positive,
)
from concept_eraser.utils.provenance import derive_seed


@dataclass(frozen=True)
class SeedSearch(Attack):
    """Generate the same prompt with other seeds.

    Args:
        tries: The number of images for each prompt, each with its own seed.
    """

    title: ClassVar[str] = "Seed search"
    source: ClassVar[str] = "a control"
    family: ClassVar[Family] = "control"
    access: ClassVar[Access] = "queries"
    needs_words: ClassVar[bool] = False

    tries: int = 50

    def __post_init__(self) -> None:
        require_positive(tries=self.tries)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        for i in range(self.tries):
            live = scene.live
            seeds = [
                derive_seed(scene.seed, "seed search", scene.seeds[j], i) % 2**31
                for j in live.tolist()
            ]
            yield Round(live, texts=[scene.prompts[j] for j in live.tolist()], seeds=seeds)


PLUGIN = SeedSearch
