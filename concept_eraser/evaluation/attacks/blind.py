"""Attacks that do not use the victim: their texts apply to every model with the same text encoder.

Each prompt has its own search with its own randomness, against the original's text encoder. Texts
from one victim are read from the cache for the next one. Their encoder calls count for each victim
all the same.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from concept_eraser import registry
from concept_eraser.data.generate import keep
from concept_eraser.evaluation.attacks.base import Attack, Round, Scene
from concept_eraser.storage.cache import append_row, read_rows
from concept_eraser.utils.provenance import derive_seed, fingerprint


@dataclass(frozen=True)
class Offer:
    """A text for one prompt, the loss of the search, and the encoder calls since the last one."""

    text: str
    loss: float
    calls: int


class BlindAttack(Attack):
    """Its `goals` depend on the texts and the original's text encoder alone.

    Attributes:
        revision: A number that a change of the search increases, so that the cache has no texts of
            the search before.
    """

    revision: ClassVar[int] = 0

    @abstractmethod
    def goals(self, scene: Scene) -> Tensor:
        """The target encoding of each prompt's text, [n, ...]."""

    @abstractmethod
    def pursue(self, scene: Scene, goal: Tensor, generator: torch.Generator) -> Iterator[Offer]:
        """Yield better and better texts for one goal, until the budget is spent."""

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        weights = _fingerprint(scene.original.parts["text_encoder"])
        name = (
            type(self).__name__
            if type(self).__module__.startswith("concept_eraser.")
            else registry.memory_name(self)
        )
        facts = [
            name,
            asdict(self),  # type: ignore[call-overload]
            weights,
            scene.root,
            scene.concept,
            sorted(set(scene.corpus)),
            *([self.revision] if self.revision else []),
        ]
        hunts = [
            self._hunt(scene, goal, fingerprint([*facts, *texts]))
            for goal, *texts in zip(
                self.goals(scene), scene.prompts, scene.concept_prompts, strict=True
            )
        ]
        while True:
            offers = [next(hunts[i], None) for i in scene.live.tolist()]
            texts_found = [offer for offer in offers if offer is not None]
            if len(texts_found) < len(offers):
                return
            scene.spend("encoder calls", sum(offer.calls for offer in texts_found))
            yield Round(
                scene.live,
                texts=[offer.text for offer in texts_found],
                loss=sum(o.loss for o in texts_found) / len(texts_found),
            )

    def _hunt(self, scene: Scene, goal: Tensor, key: str) -> Iterator[Offer]:
        path = scene.memory / f"{key}.jsonl" if scene.memory else None
        return continue_search(
            path,
            lambda: self.pursue(
                scene, goal, torch.Generator().manual_seed(derive_seed(scene.root, key))
            ),
        )


def continue_search(path: Path | None, search: Callable[[], Iterator[Offer]]) -> Iterator[Offer]:
    """Yield a deterministic search's results: first those in the file, then new ones.

    The search starts from the beginning. Each new result is added to the file.
    """
    rows = {row["round"]: row for row in read_rows(path)} if path else {}
    number = 0
    while number in rows:
        if rows[number]["offer"] is None:  # the budget was spent here
            return
        yield Offer(**rows[number]["offer"])
        number += 1
    for offer in islice(search(), number, None):
        if path:
            keep(partial(append_row, path, {"round": number, "offer": asdict(offer)}))
        number += 1
        yield offer
    if path:
        keep(partial(append_row, path, {"round": number, "offer": None}))


def _fingerprint(part: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(part.state_dict().items()):
        stored = value.detach().cpu().contiguous().flatten().view(torch.uint8)  # bf16 too
        digest.update(name.encode() + stored.numpy().tobytes())
    return digest.hexdigest()[:24]
