"""The judge of the bundled world: a small network that names shape, colour, style, background, or "none"."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concept_eraser import resources
from concept_eraser.data.prompts import Prompt
from concept_eraser.errors import UserError
from concept_eraser.evaluation.base import Judge
from concept_eraser.tiny import painter
from concept_eraser.tiny.clip import cosine_scores, load_clip
from concept_eraser.tiny.judge import CLASSES, JudgeNet, load_judge


@dataclass(frozen=True)
class TinyJudge(Judge):
    """See concept_eraser/tiny/tiny.json for its accuracy on painted and on garbage pictures."""

    classes = CLASSES

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        weights = (resources.tiny_weights() / "judge" / "model.safetensors").read_bytes()
        return hashlib.sha256(weights).hexdigest()[:16]

    @cached_property
    def net(self) -> JudgeNet:
        return load_judge(resources.tiny_weights() / "judge")

    @cached_property
    def _clip(self) -> tuple[Any, Any]:
        from transformers import CLIPTokenizer

        weights = resources.tiny_weights()
        return load_clip(weights), CLIPTokenizer.from_pretrained(weights / "tiny-sd" / "tokenizer")

    def _scaled(self, pictures: Tensor) -> Tensor:
        if pictures.shape[1:] != (painter.SIZE, painter.SIZE, 3):
            raise UserError(f"the tiny judge looks at pictures of 64x64 pixels of the bundled world, found {tuple(pictures.shape[1:3])}")  # fmt: skip
        return pictures.permute(0, 3, 1, 2).float().div(127.5).sub(1)

    def probability(self, images: Tensor, attribute: str, value: str) -> Tensor:
        if value not in CLASSES.get(attribute, ()):
            raise UserError(f"the tiny judge cannot see {attribute} {value!r}; it knows {', '.join(CLASSES)}")
        return self.net.to(images.device)(images)[attribute].softmax(1)[:, CLASSES[attribute].index(value)]

    @torch.no_grad()
    def look(self, pictures: Tensor) -> dict[str, np.ndarray]:
        parts = [self.net(part) for part in self._scaled(pictures).split(256)]
        best = {name: torch.cat([part[name] for part in parts]).argmax(1).numpy() for name in CLASSES}
        return {name: np.array(CLASSES[name])[index] for name, index in best.items()}

    @torch.no_grad()
    def features(self, pictures: Tensor) -> np.ndarray:
        return torch.cat([self.net.features(part) for part in self._scaled(pictures).split(256)]).numpy()

    def clip_scores(self, pictures: Tensor, captions: Sequence[str]) -> np.ndarray:
        clip, tokenizer = self._clip
        return cosine_scores(clip, tokenizer, self._scaled(pictures), list(captions)).numpy()

    def reference_pictures(self, rows: Sequence[Prompt], seed: int) -> Tensor:
        """Freshly painted pictures of the scenes that the prompts describe; what a prompt leaves open is random."""
        rng = np.random.default_rng([seed, 77])
        pictures = []
        for row in rows:
            drawn = painter.random_scene(rng)
            named = {k: v for k, v in row.fields.items() if k in ("shape", "color", "style", "background")}
            pictures.append(painter.paint(painter.Scene(**{**vars(drawn), **named}), rng))
        return torch.from_numpy(np.stack(pictures))

    def reference_features(self, rows: Sequence[Prompt], seed: int) -> np.ndarray:
        return self.features(self.reference_pictures(rows, seed))


PLUGIN = TinyJudge
