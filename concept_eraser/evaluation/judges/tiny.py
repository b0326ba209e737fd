"""The judge of the bundled data: a small network for shape, colour, style and background.

Each attribute may be "none".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation.base import Judge
from concept_eraser.evaluation.features.base import device
from concept_eraser.models.families.clip import load_bundled_clip
from concept_eraser.tiny import painter
from concept_eraser.tiny.judge import CLASSES, load_judge
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError


@dataclass(frozen=True)
class TinyJudge(Judge):
    """concept_eraser/tiny/weights/tiny.json holds its accuracy on painted and on garbage images."""

    classes = CLASSES
    name: ClassVar[str] = "tiny"
    references: ClassVar[str] = "painted images of the same prompts"

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        weights = (resources.tiny_weights() / "judge" / "model.safetensors").read_bytes()
        return hashlib.sha256(weights).hexdigest()[:16]

    @cached_property
    def net(self) -> Any:
        return load_judge(resources.tiny_weights() / "judge")

    @cached_property
    def _clip(self) -> tuple[Any, Any]:
        from transformers import CLIPTokenizer

        weights = resources.tiny_weights()
        return load_bundled_clip(weights), CLIPTokenizer.from_pretrained(
            weights / "tiny-sd" / "tokenizer"
        )

    def caption_settings(self) -> Mapping[str, Any]:
        return {"model": "tiny CLIP"}

    def _scale(self, images: Tensor) -> Tensor:
        if images.shape[1:] != (painter.SIZE, painter.SIZE, 3):
            raise UserError(
                f"the judge {self.name} needs images of 64x64 pixels of the bundled data set, "
                f"found {tuple(images.shape[1:3])}"
            )
        return images.permute(0, 3, 1, 2).float().div(127.5).sub(1)

    def _batches(self, images: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield the network, and parts of images [n, h, w, 3] uint8 as its input, on one device."""
        for part in self._scale(images).split(256):
            yield self.net.to(device()), part.to(device())

    def probability(self, images: Tensor, attribute: str, value: str) -> Tensor:
        if value not in CLASSES.get(attribute, ()):
            raise UserError(
                f"the judge {self.name} cannot detect {attribute} {value!r}; it knows "
                f"{', '.join(CLASSES)}"
            )
        logits: Tensor = self.net.to(images.device)(images)[attribute]
        return logits.float().softmax(1)[:, CLASSES[attribute].index(value)]

    @torch.no_grad()
    def classify(self, images: Tensor) -> dict[str, np.ndarray]:
        parts = [net(part) for net, part in self._batches(images)]
        best = {
            name: torch.cat([part[name] for part in parts]).argmax(1).cpu().numpy()
            for name in self.classes
        }
        return {name: np.array(self.classes[name])[index] for name, index in best.items()}

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> dict[str, np.ndarray]:
        parts = [net(part) for net, part in self._batches(images)]
        return {
            name: torch.cat([part[name].softmax(1) for part in parts]).cpu().numpy()
            for name in self.classes
        }

    @torch.no_grad()
    def features(self, images: Tensor) -> np.ndarray:
        parts = [net.features(part) for net, part in self._batches(images)]
        return torch.cat(parts).cpu().numpy()

    def clip_scores(self, images: Tensor, captions: Sequence[str]) -> np.ndarray:
        clip, tokenizer = self._clip
        return _cosine_scores(clip, tokenizer, self._scale(images), list(captions)).numpy()

    def reference_images(self, rows: Sequence[Prompt], seed: int) -> Tensor:
        """Paint new images of the scenes that the prompts describe.

        An attribute that a prompt does not state is random.
        """
        rng = np.random.default_rng([seed, 77])
        images = []
        for row in rows:
            scene = painter.random_scene(rng)
            attributes = {
                k: v
                for k, v in row.fields.items()
                if k in ("shape", "color", "style", "background")
            }
            images.append(painter.paint(painter.PaintedScene(**{**vars(scene), **attributes}), rng))
        return torch.from_numpy(np.stack(images))

    def reference_features(self, rows: Sequence[Prompt], seed: int) -> np.ndarray:
        return self.features(self.reference_images(rows, seed))


@torch.no_grad()
def _cosine_scores(clip: Any, tokenizer: Any, images: Tensor, captions: list[str]) -> Tensor:
    """Cosine of each image [n, 3, 64, 64] in [-1, 1] with its own caption: [n].

    A caption counts up to the tokenizer's length, which is 77 tokens.
    """
    scores, clip = [], clip.to(device())
    for start in range(0, len(captions), 256):
        ids = tokenizer(
            captions[start : start + 256], padding=True, truncation=True, return_tensors="pt"
        ).input_ids
        text = clip.text_projection(clip.text_model(ids.to(device())).pooler_output)
        part = images[start : start + 256].to(device())
        image = clip.visual_projection(clip.vision_model(part).pooler_output)
        scores.append((F.normalize(image, dim=-1) * F.normalize(text, dim=-1)).sum(1).cpu())
    return torch.cat(scores)


PLUGIN = TinyJudge
