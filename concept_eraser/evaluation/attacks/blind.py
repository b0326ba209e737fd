"""Attacks that never see the victim: what they find fits every model with the same text encoder, and is kept.

Each prompt is searched on its own, with randomness of its own, against the original's text encoder. Texts found for one
victim are read from the memory for the next; the encoder calls that they cost count for each victim all the same.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from concept_eraser.data.generate import keep
from concept_eraser.environment import derive_seed, fingerprint
from concept_eraser.evaluation.attacks.base import Attack, Round, Scene
from concept_eraser.storage.cache import append_row, read_rows


@dataclass(frozen=True)
class Offer:
    """A text for one prompt, the loss of the search, and the encoder calls since the last one."""

    text: str
    loss: float
    calls: int


class BlindAttack(Attack):
    """Its `goals` depend on the texts and the original's text encoder alone."""

    @abstractmethod
    def goals(self, scene: Scene) -> Tensor:
        """What each prompt's text shall be encoded to, [n, ...]."""

    @abstractmethod
    def pursue(self, scene: Scene, goal: Tensor, generator: torch.Generator) -> Iterator[Offer]:
        """Ever better texts for one goal, until the budget is spent."""

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        weights = _fingerprint(scene.original.parts["text_encoder"])
        told = [type(self).__name__, asdict(self), weights, scene.root, scene.concept, sorted(set(scene.corpus))]  # type: ignore[call-overload]
        hunts = [self._hunt(scene, goal, fingerprint([*told, *texts])) for goal, *texts in zip(self.goals(scene), scene.prompts, scene.wanted, strict=True)]  # fmt: skip
        while True:
            offers = [next(hunts[i], None) for i in scene.live.tolist()]
            found = [offer for offer in offers if offer is not None]
            if len(found) < len(offers):
                return
            scene.spend("encoder calls", sum(offer.calls for offer in found))
            yield Round(scene.live, texts=[offer.text for offer in found], loss=sum(o.loss for o in found) / len(found))

    def _hunt(self, scene: Scene, goal: Tensor, key: str) -> Iterator[Offer]:
        path = scene.memory / f"{key}.jsonl" if scene.memory else None
        return recalled(path, lambda: self.pursue(scene, goal, torch.Generator().manual_seed(derive_seed(scene.root, key))))  # fmt: skip


def recalled(path: Path | None, search: Callable[[], Iterator[Offer]]) -> Iterator[Offer]:
    """What a deterministic search yields: from the file what it has, then searched from the start, and written down."""
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
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:24]
