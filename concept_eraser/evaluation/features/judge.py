"""The features of the suite's own judge, which are the default.

Distances are comparable for one judge only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from concept_eraser import registry
from concept_eraser.evaluation.base import Judge
from concept_eraser.evaluation.features.base import Features


@dataclass(frozen=True)
class JudgeFeatures(Features):
    """Features of a judge.

    Args:
        judge: The name of the judge, or the judge itself (from Python).
    """

    title: ClassVar[str] = "judge features"
    backend: ClassVar[str] = "judge"
    batch: ClassVar[int] = 256
    judge: str | Judge = "tiny"

    @cached_property
    def _judge(self) -> Judge:
        return registry.load("judge", self.judge)() if isinstance(self.judge, str) else self.judge

    @property
    def fingerprint(self) -> str:
        return self._judge.fingerprint

    @property
    def protocol(self) -> dict[str, Any]:
        return {"model": type(self._judge).__name__, "resize": "none", "input_size": "as given"}

    def prepare(self, image: np.ndarray) -> Tensor:
        return torch.tensor(image)

    def embed(self, batch: Tensor) -> Tensor:
        return torch.from_numpy(self._judge.features(batch.cpu()))

    def extract(self, images: Tensor | Iterable[np.ndarray]) -> np.ndarray:
        """Pass a suite's images directly to the judge, which is faster than the cache."""
        return (
            self._judge.features(images) if isinstance(images, Tensor) else super().extract(images)
        )


PLUGIN = JudgeFeatures
