"""What a stage of the build is given, and how its weights are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from concept_eraser.tiny.trainer import step_rng

WIDTH = 64  # of the text embeddings
# what SD multiplies its latents with; ours are whitened so that the same number is right
SCALING = 0.18215


@dataclass(frozen=True)
class Stage:
    folder: Path  # where checkpoints and results of the build lie
    seed: int
    say: Callable[[str], None]
    shrink: float = 1.0  # < 1 shortens every stage, for tests of the machinery

    def steps(self, n: int) -> int:
        return max(4, round(n * self.shrink))

    def rng(self, name: str) -> np.random.Generator:
        return step_rng(self.seed, name, 2**31)  # a draw no training step makes


def save_half(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = {
        k: (v.detach().half() if v.is_floating_point() else v.detach()).contiguous()
        for k, v in tensors.items()
    }
    save_file(half, path, metadata={"format": "pt"})
