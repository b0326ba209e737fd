"""The judge's own features: what a suite's judge sees, the default. Comparable within one judge only."""

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
    """judge: its name, or (from Python) the judge itself."""

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

    def prepare(self, picture: np.ndarray) -> Tensor:
        return torch.tensor(picture)

    def embed(self, batch: Tensor) -> Tensor:
        return torch.from_numpy(self._judge.features(batch.cpu()))

    def extract(self, pictures: Tensor | Iterable[np.ndarray]) -> np.ndarray:
        """A suite's pictures go to the judge as they are: it is quicker than the memory is."""
        return self._judge.features(pictures) if isinstance(pictures, Tensor) else super().extract(pictures)


PLUGIN = JudgeFeatures
