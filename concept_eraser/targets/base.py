"""What building an eraser needs: the recipe, the loaded model, and where to say how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concept_eraser.models.base import Loaded
from concept_eraser.progress import Progress, silent
from concept_eraser.recipe import Recipe


@dataclass(frozen=True)
class Request:
    """objects: what the recipe can only name because it lives in memory: data sets of sides, a judge."""

    recipe: Recipe
    model: Loaded
    progress: Progress = silent
    cache: Path | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
