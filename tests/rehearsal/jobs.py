"""Small jobs for the rehearsal device, with the settings of the golden set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import concept_eraser
from concept_eraser.api import Run
from tests import golden
from tests.small_model import small_sd


def two_steps(content: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of the golden set with two steps, on the device that the package finds."""
    recipe = golden.merged(content, *changes)
    if recipe.get("model") == "tiny-sd" and recipe.get("target", "denoiser") == "denoiser":
        recipe["model"] = small_sd()
    if "training" in recipe:
        recipe["training"] = {k: v for k, v in recipe["training"].items() if k != "device"}
        if "steps" in recipe["training"]:
            recipe["training"]["steps"] = 2
    return recipe


def on_digits(change: dict[str, Any], folder: Path) -> Run:
    """Run a recipe on a classifier of digits, whose training was recorded on the CPU."""
    history = folder / "history" if "k" in change.get("method", {}) else None
    recipe = two_steps(golden.CLASSIFIER, change)
    if history:
        history.mkdir(parents=True)
        recipe = golden.merged(recipe, {"method": {"history": str(history)}})
    classifier = golden.classifier(history)
    return concept_eraser.erase(recipe, model=classifier, output=folder / "run")
