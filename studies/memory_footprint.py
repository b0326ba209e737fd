"""Measure the memory of training steps, in a process of its own.

    python -m studies.memory_footprint RECIPE.json OUT.json

RECIPE.json holds a resolved recipe. Three of its steps run with its batches, on few images from few
sampling steps. The result is the process's peak memory during these steps, above the memory once
model and examples are loaded. Freed memory (a saliency mask needs all gradients before the first
step) goes back to the system first. Otherwise steps that use it again would seem to need none.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

from concept_eraser import api
from concept_eraser.evaluation.suite import dumps
from concept_eraser.recipes import recipe as recipes
from concept_eraser.training.log import peak_memory, reset_peak_memory
from concept_eraser.utils import provenance

STEPS = 3
EXAMPLES = 16


def shorten(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with few steps and images.

    Batches, parameters and method are unchanged. A method that searches for attacks before its
    training has one step of each kind a round.
    """
    short = json.loads(json.dumps(recipe))
    names = ("forget", "retain", "replace", "relearn", "attack")
    objectives = [short[key] for key in names if key in short]
    for objective in (
        one for some in objectives for one in (some if isinstance(some, list) else [some])
    ):
        objective["n"] = EXAMPLES
        if "elastic" in objective:
            objective["elastic"]["n"] = EXAMPLES
    short["training"]["steps"], short["generation"]["steps"] = STEPS, 2
    method = short.get("method", {})
    if method.get("name") == "stereo":
        method |= {"erase_steps": 1, "inner_steps": 1}
        short["training"]["steps"] += 2 * method["rounds"]
    for key in ("watch", "finish"):
        short.pop(key, None)
    return short


def measure(recipe: dict[str, Any], folder: Path) -> dict[str, float]:
    """Return in MB the memory before the first step, and the peak of the steps above it."""
    readings: list[float] = []

    def on_step(step: int, seconds: float) -> None:
        if step == 0:
            give_back()
        readings.append(reset_peak_memory() if step == 0 else peak_memory())

    api.erase(recipes.validate(shorten(recipe), "the recipe"), output=folder, on_step=on_step)
    return {"before_mb": round(readings[0], 1), "steps_mb": round(max(readings) - readings[0], 1)}


def give_back() -> None:
    """Return freed memory to the system. This does nothing with a C library other than glibc."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        footprint = measure(json.loads(args.recipe.read_text()), Path(work) / "run")
    args.out.write_text(dumps({**footprint, "steps": STEPS, "environment": provenance.describe()}))


if __name__ == "__main__":
    main()
