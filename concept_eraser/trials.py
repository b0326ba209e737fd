"""A dry run's two steps: does the recipe run, and how long will it take?

Where its model is at hand, two steps are made at the recipe's own batch size on a few quickly sampled pictures, and timed.
Where it is not, a tiny pipeline of its family with random weights stands in: that finds what is wrong with losses, method,
selection and prompts, and says nothing about time. All of it happens in a temporary folder; nothing is downloaded.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from concept_eraser import jobs, registry
from concept_eraser import recipe as recipes
from concept_eraser.errors import UserError
from concept_eraser.models import loading
from concept_eraser.models.base import Loaded, Model
from concept_eraser.progress import silent
from concept_eraser.recipe import Recipe
from concept_eraser.sections import PROMPTED
from concept_eraser.targets import labelled
from concept_eraser.targets.base import Request
from concept_eraser.tiny import families, published
from concept_eraser.training import log as logs

STEPS = 2
SMALL = 50_000_000  # weights of a denoiser that a CPU tries in seconds
FEW = 2  # examples a side of a stand-in


@dataclass(frozen=True)
class StandIn:
    """What takes the place of a model that is not at hand, and what to say about it."""

    model: Loaded
    options: dict[str, float]
    reason: str
    folder: Any = field(default=None, repr=False)  # kept while the model is used


def load(recipe: Recipe, *, allow_pickle: bool = False) -> Loaded | StandIn:
    """A recipe's model, or what stands in for it. Raises UserError where neither can be had."""
    try:
        found = loading.load_part(recipe.model, recipe.target, allow_pickle=allow_pickle)
    except UserError as error:
        return _stand_in(recipe, error)
    found.configure(recipe.model_options)
    return found


def _stand_in(recipe: Recipe, error: UserError) -> StandIn:
    short = f"{recipe.model} is not on this machine"
    if recipe.target == "clip":
        return StandIn(loading.load_part("tiny-sd", "clip"), {}, f"{short}; the bundled tiny CLIP stands in")
    if recipe.target == "classifier":
        return _classifier(recipe, short)
    family = published.family_of(recipe.model)
    if family is None or recipe.target not in PROMPTED:
        raise error
    if family == "sd":
        return StandIn(loading.load("tiny-sd"), {}, f"{short}; the bundled tiny pipeline stands in")
    folder = tempfile.TemporaryDirectory(prefix="concept-eraser-")
    model = loading.load(families.build(family, Path(folder.name)))
    model.source = recipe.model  # what errors speak of
    model.configure(families.options(family))
    return StandIn(model, families.options(family), f"{short}; a tiny random pipeline of the family {family} stands in", folder)  # fmt: skip


def _classifier(recipe: Recipe, short: str) -> StandIn:
    """One linear layer of the data's shape. Raises UserError where the data are not at hand either."""
    nothing = loading.load_part(nn.Flatten(), "classifier")
    ((data, rows), *_) = labelled.rows(Request(recipe, nothing)).values()
    shape = data.inputs([int(rows[0])]).shape[1:]
    layer = nn.Sequential(nn.Flatten(), nn.Linear(shape.numel(), len(data.names)))
    return StandIn(loading.load_part(layer, "classifier"), {}, f"{short}; one linear layer stands in")


def shortened(recipe: Recipe, examples: int, *, options: dict[str, float] | None = None) -> Recipe:
    """The recipe with two steps on a few quick pictures. options: of the model's family, where they are others."""
    content = recipe.model_dump(exclude_none=True)
    content["training"] |= {"steps": max(STEPS, len(recipe.forgotten)), "micro_batches": 1, "batch_size": examples, "save_every": 10**6, "tracker": [], "shard": "none"}  # fmt: skip
    content["generation"] |= {"steps": 1, "batch_size": min(examples, recipe.generation.batch_size)}
    content.pop("watch", None)
    if options is not None:
        content["model_options"] = options
    if recipe.target in PROMPTED:
        sides = content["forget"] if isinstance(content["forget"], list) else [content["forget"]]
        for side in (*sides, *(content[name] for name in ("retain", "replace", "attack") if name in content)):
            side["n"] = examples
    return recipes.validate(content, "the recipe")


def two_steps(recipe: Recipe, model: Loaded, *, options: dict[str, float] | None = None) -> float:
    """Seconds of one step of the recipe on this machine, after the first; the model is trained and then put back.

    options: given for a stand-in, which makes its steps with FEW examples and whose time says nothing.
    """
    size = recipe.training.batch_size if options is None else FEW
    asked = shortened(recipe, size if recipe.target in PROMPTED else min(size, recipe.training.batch_size), options=options)  # fmt: skip
    method: Any = registry.build("method", asked.method.name, asked.method.options)
    with _quiet(), tempfile.TemporaryDirectory(prefix="concept-eraser-") as folder:
        job = jobs.Job(asked, model, Path(folder), silent, cache=Path(folder) / "cache")
        if hasattr(method, "edit"):
            return job.run(resume=False).seconds
        engine = job.train(method, resume=False)
        rows = logs.read(Path(folder) / "log.jsonl")
        engine.eraser.restore()
    if not any(value is not None for row in rows for value in row["losses"].values()) or engine.skipped == len(rows):
        raise UserError("the losses of the two steps tried are not finite; lower training.lr or use precision fp32")
    return float(rows[-1]["seconds"]) * recipe.training.micro_batches


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, no warnings: prompts that are cut are named once, by the run itself."""
    log = logging.getLogger("concept_eraser")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def pictures(recipe: Recipe) -> int:
    """How many pictures are generated for the sides of a recipe, where none is cached."""
    if recipe.target not in PROMPTED or (recipe.target == "text_encoder" and not _drawn(recipe)):
        return 0
    made = sum(side.n for side in recipe.sides.values() if side.images == "generate")
    return made + (recipe.attack.n if recipe.attack else 0)


def _drawn(recipe: Recipe) -> bool:
    return any(side.loss in ("data", "ascent", "relabel") for side in recipe.sides.values())


def a_picture(recipe: Recipe, model: Model) -> float:
    """Seconds of one picture as the recipe generates them: two short samplings, drawn out to its number of steps."""
    settings = recipe.generation
    n = min(settings.batch_size, 8)
    text, autocast = recipe.forgotten[0].prompts, torch.bfloat16 if settings.precision == "bf16" else None
    words = [text[0] if isinstance(text, list) else "a"] * n
    told: dict[str, Any] = {"seeds": range(n), "guidance": settings.guidance, "autocast": autocast}
    model.sample(words, steps=1, **told)  # the first one warms up
    took = []
    for steps in (1, 3):
        began = time.monotonic()
        model.sample(words, steps=steps, **told)
        took.append(time.monotonic() - began)
    step = max(0.0, (took[1] - took[0]) / 2)
    return (took[0] + step * (settings.steps - 1)) / n


def worth_trying(model: Loaded) -> bool:
    """Whether two steps take seconds here: on a GPU, or with a small model."""
    return torch.cuda.is_available() or sum(p.numel() for part in model.parts.values() for p in part.parameters()) < SMALL  # fmt: skip


def edits(recipe: Recipe) -> bool:
    """Whether the method changes the model in one go, without steps."""
    return hasattr(registry.load("method", recipe.method.name), "edit")


def told(recipe: Recipe, model: Loaded) -> str:
    """How long the recipe will take on this machine, from two steps and a few pictures."""
    step, steps, made = two_steps(recipe, model), recipe.training.steps, pictures(recipe)
    parts = [f"{_long(step * steps)} for {steps} steps"]
    if made and isinstance(model, Model):
        parts.append(f"{_long(a_picture(recipe, model) * made)} for generating {made} pictures (fewer where they are cached)")  # fmt: skip
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    return f"time (from two steps on {device}): about {' + about '.join(parts)}"


def _long(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"  # fmt: skip
