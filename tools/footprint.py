"""How much memory the steps of a training take, in a process of its own, which has done nothing else yet.

    python -m tools.footprint RECIPE.json OUT.json

RECIPE.json holds a resolved recipe. Three of its steps are made with its batches, on few and quickly made pictures; what is
told is the process's peak while they were made, above what it held when model and examples were ready. What was freed by then
(a saliency mask asks for all gradients before the first step) is given back first: steps that use it again would seem to need none.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

from concept_eraser import api, environment
from concept_eraser import recipe as recipes
from concept_eraser.evaluation.suite import dumps
from concept_eraser.training.log import peak_memory, reset_peak_memory

STEPS = 3
EXAMPLES = 16


def shortened(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with as few steps and pictures as show its memory; batches, weights and method are its own."""
    short = json.loads(json.dumps(recipe))
    asked = [short[key] for key in ("forget", "retain", "replace", "attack") if key in short]
    for side in (one for some in asked for one in (some if isinstance(some, list) else [some])):
        side["n"] = EXAMPLES
        if "elastic" in side:
            side["elastic"]["n"] = EXAMPLES
    short["training"]["steps"], short["generation"]["steps"] = STEPS, 2
    for key in ("watch", "finish"):
        short.pop(key, None)
    return short


def measured(recipe: dict[str, Any], folder: Path) -> dict[str, float]:
    """In MB: what was held before the first step, and the most above that until the last."""
    held: list[float] = []

    def look(step: int, seconds: float) -> None:
        if step == 0:
            give_back()
        held.append(reset_peak_memory() if step == 0 else peak_memory())

    api.erase(recipes.validate(shortened(recipe), "the recipe"), output=folder, look=look)
    return {"before_mb": round(held[0], 1), "steps_mb": round(max(held) - held[0], 1)}


def give_back() -> None:
    """Freed memory to the system, which malloc else keeps; a C library other than glibc is left as it is."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = measured(json.loads(args.recipe.read_text()), Path(work) / "run")
    args.out.write_text(dumps({**found, "steps": STEPS, "environment": environment.describe()}))


if __name__ == "__main__":
    main()
