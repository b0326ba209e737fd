"""The second judge of the bundled data: another network, with "none" for every attribute.

It differs from the judge `tiny` in architecture, seed and training images, and its CLIP score is of
a CLIP that no pipeline contains. It only reports. No setting is selected by it, and no loss or
attack may use it, so that its numbers stay independent of what was optimised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from concept_eraser.evaluation.features.base import device
from concept_eraser.evaluation.judges.tiny import TinyJudge
from concept_eraser.tiny.clip2 import load_clip2, tokenize
from concept_eraser.tiny.judge2 import CLASSES, load_judge2
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError

BATCH = 256


@dataclass(frozen=True)
class SecondTinyJudge(TinyJudge):
    """concept_eraser/tiny/weights/judge2.json and clip2.json hold its accuracy on new images."""

    classes = CLASSES
    name: ClassVar[str] = "tiny2"
    only_reports: ClassVar[bool] = True

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        return _hash(_part("judge2"))

    @cached_property
    def net(self) -> Any:
        return load_judge2(_part("judge2"))

    @cached_property
    def _clip(self) -> tuple[Any, Any]:
        return load_independent_clip()

    def caption_settings(self) -> Mapping[str, Any]:
        return {"model": "tiny2", "weights": clip_fingerprint()}

    def probability(self, images: Tensor, attribute: str, value: str) -> Tensor:
        """Raise UserError: a loss or an attack on this judge would make its numbers dependent."""
        raise UserError(
            f"the judge {self.name} only reports, so that no loss and no attack is fitted to it; "
            "use the judge tiny"
        )

    def clip_scores(self, images: Tensor, captions: Sequence[str]) -> np.ndarray:
        return independent_clip_scores(self._clip, self._scale(images), captions)


def _part(name: str) -> Path:
    """Return the folder of a part of the bundled weights. Raises UserError if it is missing."""
    folder = resources.tiny_weights() / name
    if not (folder / "model.safetensors").is_file():
        raise UserError(
            f"the weights {name} are not in this copy of the package; train them with: "
            f"python -m concept_eraser.tiny.build --only {name}"
        )
    return folder


def load_independent_clip() -> tuple[Any, Any]:
    """Load the second CLIP and the tokenizer. Raises UserError if the weights are missing."""
    from transformers import CLIPTokenizer

    clip = load_clip2(_part("clip2"))
    folder = resources.tiny_weights() / "tiny-sd" / "tokenizer"
    return clip, CLIPTokenizer.from_pretrained(folder)


def clip_fingerprint() -> str:
    """Return a short hash of the second CLIP's weights. Raises UserError if they are missing."""
    return _hash(_part("clip2"))


def _hash(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


@torch.no_grad()
def independent_clip_scores(
    parts: tuple[Any, Any], images: Tensor, captions: Sequence[str]
) -> np.ndarray:
    """Return the cosine of each image with its own caption, [n].

    Args:
        parts: as `load_independent_clip`.
        images: [n, 3, 64, 64] in [-1, 1].
        captions: n texts.
    """
    clip, tokenizer = parts[0].to(device()), parts[1]
    scores = []
    for start in range(0, len(captions), BATCH):
        ids, mask = tokenize(tokenizer, captions[start : start + BATCH])
        text = clip.embed_ids(ids.to(device()), mask.to(device()))
        image = clip.embed_images(images[start : start + BATCH].to(device()))
        scores.append((image * text).sum(1).cpu())
    return torch.cat(scores).numpy()


PLUGIN = SecondTinyJudge
