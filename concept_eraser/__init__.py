"""concept_eraser: make generative models forget a concept and preserve everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from concept_eraser.utils.errors import Interrupted, UserError

if TYPE_CHECKING:
    from concept_eraser.api import (
        Campaign,
        CascadeCampaign,
        Evaluation,
        LabelledEvaluation,
        PromptEvaluation,
        Run,
        attack,
        card,
        erase,
        evaluate,
        export,
        load,
        merge,
        plug,
        push_to_hub,
        report,
    )

__all__ = [
    "Campaign",
    "CascadeCampaign",
    "Evaluation",
    "Interrupted",
    "LabelledEvaluation",
    "PromptEvaluation",
    "Run",
    "UserError",
    "attack",
    "card",
    "erase",
    "evaluate",
    "export",
    "load",
    "merge",
    "plug",
    "push_to_hub",
    "report",
]

if not TYPE_CHECKING:  # a type checker takes the names from the imports above and rejects others

    def __getattr__(name):
        """Load the working parts (torch, diffusers) when a name is used for the first time."""
        if name in __all__:
            from concept_eraser import api

            return getattr(api, name)
        raise AttributeError(f"module 'concept_eraser' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})
