"""Python's cyclic garbage collector, set for programs that import large libraries."""

from __future__ import annotations

import gc

# Default: 700, 10, 10. torch, diffusers and transformers make a million objects, and reading one
# tokenizer makes 200,000. With the default the collector examines all of them again and again:
# 0.7 of the 3.7 seconds until the bundled model is loaded, and half of every later load.
THRESHOLDS = (50_000, 20, 20)


def collect_less_often() -> None:
    """Let the collector start once in 50,000 new objects.

    Only objects in reference cycles wait for the collector. Tensors of a training step are freed
    by their reference counts.
    """
    gc.set_threshold(*THRESHOLDS)
