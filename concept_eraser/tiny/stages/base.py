"""The settings of a stage of the build, and how its weights are stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from concept_eraser.tiny.trainer import step_rng
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError

WIDTH = 64  # of the text embeddings
# SD's scale of latents; the latents here are whitened to have the same scale
SCALING = 0.18215


@dataclass(frozen=True)
class Stage:
    folder: Path  # the folder of checkpoints and results of the build
    seed: int
    say: Callable[[str], None]
    shrink: float = 1.0  # < 1 shortens every stage, for tests
    save_every: int = 250  # steps between two checkpoints

    def steps(self, n: int) -> int:
        return max(4, round(n * self.shrink))

    def images(self, n: int) -> int:
        """Return how many images are scored: n, or fewer in a shortened build; a multiple of 40."""
        return max(1, round(n * min(1.0, self.shrink) / 40)) * 40

    def rng(self, name: str) -> np.random.Generator:
        return step_rng(self.seed, name, 2**31)  # a seed that no training step uses


def require_same_settings(path: Path, settings: dict[str, Any]) -> None:
    """Store the settings of a training beside its checkpoint, or compare them with the stored ones.

    Raises UserError if they differ, since the checkpoint and the results are then of another
    training.
    """
    if not path.exists():
        path.write_text(json.dumps(settings, indent=1) + "\n")
        return
    changes = provenance.differences(json.loads(path.read_text()), settings)
    if changes:
        raise UserError(
            f"{path.parent} holds a training with other settings ({', '.join(changes)}); "
            "give another --work folder, or remove this one"
        )


def save_half(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = {
        k: (v.detach().half() if v.is_floating_point() else v.detach()).contiguous()
        for k, v in tensors.items()
    }
    save_file(half, path, metadata={"format": "pt"})
