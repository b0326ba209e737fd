"""The first loading of a pipeline, whose imports and tables forked commands inherit.

It saves each of them half a second. With several OpenMP threads nothing is loaded: a fork of a
process in which they have worked would wait for them for ever.

What is the same in every command is read once: the names of the plug-ins, the usual prompt sets,
and the options of the commands. The figure of a short log is drawn. The tokenizer is also read as
runs write it, with the padding of its last use.
"""

from __future__ import annotations

import functools
import os
import tempfile

import typer.main

from concept_eraser import registry
from concept_eraser.cli.application import app
from concept_eraser.data import prompts
from tests import shared_drawing

PROMPT_SETS = (
    "general",
    "general_held_out",
    "tiny_rest",
    "tiny_star",
    "tiny_star_neighbours",
    "tiny_star_synonyms",
)

for kind in registry.KINDS:
    registry.builtin(kind)
    registry.named(kind)
for prompt_set in PROMPT_SETS:
    prompts.load(prompt_set)
typer.main.get_params_from_function = functools.cache(typer.main.get_params_from_function)
typer.main.get_command(app)
shared_drawing.draw_first()
if os.environ.get("OMP_NUM_THREADS") == "1":
    from concept_eraser.models.loading import load

    model = load("tiny-sd")
    for _ in range(2):  # the second time transformers also writes what it read of the padding
        model.encode(["a star"])
        with tempfile.TemporaryDirectory() as folder:
            model.pipeline.save_pretrained(folder)  # type: ignore[attr-defined]
            model = load(folder)
    del model
