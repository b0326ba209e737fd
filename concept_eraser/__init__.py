"""concept_eraser: make generative models forget a concept while everything else stays as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from concept_eraser.errors import Interrupted, UserError

if TYPE_CHECKING:
    from concept_eraser.api import (
        Run,
        attack,
        card,
        erase,
        evaluate,
        export,
        load,
        measure,
        merge,
        overview,
        plug,
        push_to_hub,
        report,
    )

__all__ = [
    "Interrupted",
    "Run",
    "UserError",
    "attack",
    "card",
    "erase",
    "evaluate",
    "export",
    "load",
    "measure",
    "merge",
    "overview",
    "plug",
    "push_to_hub",
    "report",
]


def __getattr__(name: str) -> Any:
    """Load the working parts (torch, diffusers) when they are first asked for."""
    if name in __all__:
        from concept_eraser import api

        return getattr(api, name)
    raise AttributeError(f"module 'concept_eraser' has no attribute {name!r}")
