"""What building an eraser needs: the recipe, the loaded model, and where to say how far it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concept_eraser.models.base import Loaded
from concept_eraser.progress import Progress, silent
from concept_eraser.recipe import Recipe


@dataclass(frozen=True)
class Request:
    """objects: what the recipe can only name because it lives in memory: data sets of sides, a judge. only: with
    training.offload, called with the parts of the model that are asked next; the others leave the device."""

    recipe: Recipe
    model: Loaded
    progress: Progress = silent
    cache: Path | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    only: Callable[[Sequence[str]], None] | None = None
