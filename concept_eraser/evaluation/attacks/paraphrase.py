"""Paraphrases from a prompt set: synonyms, other wordings and translations, one after the other.

The attack is ours. The benchmark HUB (arXiv 2410.05664) translates its prompts into Spanish,
French, German, Italian and Portuguese, and measures each language without a search.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from concept_eraser.data import prompts
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
class Paraphrase(Attack):
    """Replace each attacked prompt by texts of a prompt set, in a seeded order, none twice.

    Args:
        prompts: A prompt set by name or file, e.g. tiny_star_synonyms.
        tries: The number of texts for each prompt.
    """

    title: ClassVar[str] = "Paraphrases from a list"
    source: ClassVar[str] = "HUB's axes, arXiv 2410.05664"
    family: ClassVar[Family] = "typed prompts"
    access: ClassVar[Access] = "queries"
    needs_words: ClassVar[bool] = False

    prompts: str  # there is no list that fits every concept
    tries: int = 20

    def __post_init__(self) -> None:
        require_positive(tries=self.tries)

    def lists(self) -> dict[str, str]:
        return {self.prompts: prompts.load(self.prompts).hash}

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        rows = prompts.load(self.prompts)
        count = min(self.tries, len(rows))
        texts = [  # of each prompt, none twice
            rows.take(count, derive_seed(scene.root, "paraphrase", prompt, seed)).texts
            for prompt, seed in zip(scene.prompts, scene.seeds, strict=True)
        ]
        for i in range(count):
            live = scene.live
            yield Round(live, texts=[texts[j][i] for j in live.tolist()])


PLUGIN = Paraphrase
