"""The first loading of a pipeline, whose imports and tables forked commands inherit.

It saves each of them half a second. With several OpenMP threads nothing is loaded: a fork of a
process in which they have worked would wait for them for ever.
"""

from __future__ import annotations

import os

if os.environ.get("OMP_NUM_THREADS") == "1":
    from concept_eraser.models.loading import load

    load("tiny-sd")
