"""A dry run's two steps, or its edit: does the recipe run, and how long will it take?

Where its model is at hand, two steps are made at the recipe's own batch size on a few quickly
sampled images, and timed. Where it is not, a tiny pipeline of its family with random weights
stands in: that finds what is wrong with losses, method, selection and prompts, and says nothing
about time. Where a named data set is not at hand, random images of its shape stand in, a few of
each class, once the recipe's classes and positions have been looked for in the set's true size. All
of it happens in a temporary folder; nothing is downloaded.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser import registry
from concept_eraser.data.labelled import Labelled, rest_of
from concept_eraser.data.stand_in import NotHere, a_few, only
from concept_eraser.models import loading
from concept_eraser.models.base import Loaded, Model
from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.objective_fields import PROMPTED, ObjectiveSpec
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.runs import job as jobs
from concept_eraser.targets import labelled_data
from concept_eraser.targets.plan import images_of
from concept_eraser.tiny import families, published
from concept_eraser.training import log as logs
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import silent

STEPS = 2
SMALL = 50_000_000  # weights of a denoiser that a CPU tries in seconds
MUCH = 10**9  # weights x examples that an edit takes minutes for
COARSE = 8  # pixels a side of what a classifier's stand-in sees
FEW = 2  # examples per objective of a stand-in, or a class and objective of random images


@dataclass(frozen=True)
class DryRunPlan:
    """What a recipe is tried on. recipe: where images stand in, the same with their positions;
    objects: the labelled data of the objectives; reasons: a sentence for each thing that stands in,
    none where all is at hand. hollow: whether the model is one of them, and options are then those
    of its family.
    """

    recipe: Recipe
    model: Loaded
    objects: Mapping[str, Labelled] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    hollow: bool = False
    options: Mapping[str, float] = field(default_factory=dict)
    folder: Any = field(default=None, repr=False)  # kept while the model is used


def load(recipe: Recipe, *, allow_pickle: bool = False, allow_code: bool = False) -> DryRunPlan:
    """A recipe's model and data, or what stands in for them. Raises UserError where neither can be
    had, and where the recipe names classes or positions that its data do not have."""
    plan = _with_data(recipe)
    try:
        model = loading.load_part(
            recipe.model, recipe.target, allow_pickle=allow_pickle, allow_code=allow_code
        )
    except UserError as error:
        if (
            Path(recipe.model).exists()
            or ":" in recipe.model
            or recipe.model.startswith((".", "/", "~"))
        ):  # it is here, or should be
            raise
        return _stand_in(plan, error)
    model.configure(recipe.model_options)
    return replace(plan, model=model)


def _stand_in(plan: DryRunPlan, error: UserError) -> DryRunPlan:
    recipe = plan.recipe
    changes: dict[str, Any] = {"hollow": True}
    family = published.family_of(recipe.model)
    if recipe.target == "clip":
        changes["model"], which = loading.load_part("tiny-sd", "clip"), "the bundled tiny CLIP"
    elif recipe.target == "classifier":
        changes["model"], which = _classifier(plan), "one linear layer"
    elif family is None or recipe.target not in PROMPTED:
        raise error
    elif family == "sd":
        changes["model"], which = loading.load("tiny-sd"), "the bundled tiny pipeline"
    else:
        folder = tempfile.TemporaryDirectory(prefix="concept-eraser-")
        model = loading.load(families.build(family, Path(folder.name)))
        model.source = recipe.model  # what errors speak of
        model.configure(families.options(family))
        changes |= {"model": model, "options": families.options(family), "folder": folder}
        which = f"a tiny random pipeline of the family {family}"
    return replace(
        plan,
        reasons=(f"{recipe.model} is not on this machine; {which} stands in", *plan.reasons),
        **changes,
    )


def _classifier(plan: DryRunPlan) -> Loaded:
    """One linear layer of the data's shape, on a coarse view of large images."""
    ((data, rows), *_) = labelled_data.select_rows(plan.recipe, plan.objects).values()
    shape = data.inputs([int(rows[0])]).shape[1:]
    coarse = [nn.AdaptiveAvgPool2d(COARSE)] if len(shape) == 3 and min(shape[1:]) > COARSE else []
    width = shape[0] * COARSE**2 if coarse else shape.numel()
    return loading.load_part(
        nn.Sequential(*coarse, nn.Flatten(), nn.Linear(width, len(data.names))), "classifier"
    )


def _with_data(recipe: Recipe) -> DryRunPlan:
    """A trial with its objectives' labelled data, and no model yet."""
    nothing = loading.load_part(nn.Flatten(), "classifier")
    data, absent = {}, {}
    for name, objective in recipe.objective_specs.items():
        if objective.data not in (None, "rest"):
            data[name], absent[name] = _open(objective)
    if not any(absent.values()):
        return DryRunPlan(recipe, nothing, data)
    recipe, data = _thin(recipe, data)
    count = Counter({text: 0 for text in absent.values() if text})
    for name, text in absent.items():
        count[text] += len(data[name]) if text else 0
    reasons = [
        f"{text}; {n} random images of its shape stand in" for text, n in count.items() if text
    ]
    return DryRunPlan(recipe, nothing, data, tuple(reasons))


def _open(objective: ObjectiveSpec) -> tuple[Labelled, str]:
    """An objective's data and "", or random images in their place and the reason for them.

    Nothing is downloaded.
    """
    if objective.data not in registry.names("dataset"):
        return labelled_data.open_named(objective.data, objective.options, "train"), ""
    named = registry.build("dataset", str(objective.data), objective.options)
    downloads = getattr(named, "download", False)
    try:
        return (replace(named, download=False) if downloads else named).load("train"), ""
    except NotHere:
        facts = named.known_facts().reaching(*labelled_data.named_parts(objective))
        later = "; a run downloads it" if downloads else ""
        return facts.examples(
            named.title
        ), f"{named.title} is not on this machine (looked in {named.root}{later})"


def _choose_rows(recipe: Recipe, data: dict[str, Labelled]) -> dict[str, tuple[Labelled, Tensor]]:
    """The objectives' positions in data of the true size. Raises UserError for classes and
    positions that these do not have.

    Which class a position is of is not known: where a recipe gives both, each is looked for alone,
    and the class is taken.
    """
    objectives = {name: getattr(recipe, name) for name in data}
    if not (
        any(objective.indices for objective in objectives.values())
        and any(objective.classes for objective in objectives.values())
    ):
        return labelled_data.select_rows(recipe, data)
    rows = {}
    for name, objective in objectives.items():
        for key in ("indices", "classes"):
            if getattr(objective, key):
                alone = objective.model_copy(
                    update={"indices": None, "classes": None, key: getattr(objective, key)}
                )
                rows[name] = (
                    data[name],
                    labelled_data.select_own(alone, data[name], recipe.generation.seed),
                )
    for name in recipe.objectives:
        if name not in rows and name in recipe.objective_specs:
            rows[name] = (data["forget"], rest_of(*rows["forget"]))
    return rows


def _thin(
    recipe: Recipe, data_by_objective: dict[str, Labelled]
) -> tuple[Recipe, dict[str, Labelled]]:
    """The recipe on a few examples of each class and objective."""
    content = recipe.model_dump(exclude_none=True)
    few = {
        name: a_few(data, rows, FEW)
        for name, (data, rows) in _choose_rows(recipe, data_by_objective).items()
    }
    small = {}
    for name, data in data_by_objective.items():
        sharing = [
            other
            for other in few
            if other == name or (name == "forget" and content[other]["data"] == "rest")
        ]
        rows = sorted({row for other in sharing for row in few[other]})
        small[name] = only(data, rows)
        content[name] = {**content[name], "indices": [rows.index(row) for row in few[name]]}
        for key in ("classes", "share"):
            content[name].pop(key, None)
    return recipes.validate(content, "the recipe"), small


def shorten(plan: DryRunPlan) -> Recipe:
    """The recipe with two steps on a few quick images, at its own batch size where nothing stands
    in; where something does, with fewer examples, and with fewer steps of an attack inside a step.
    """
    recipe = plan.recipe
    examples = min(FEW, recipe.training.batch_size) if plan.reasons else recipe.training.batch_size
    examples = FEW if plan.reasons and recipe.target in PROMPTED else examples
    # so that each is asked
    steps = max(STEPS, len(recipe.forgotten)) if recipe.concepts == "rotate" else STEPS
    content = recipe.model_dump(exclude_none=True)
    content["training"] |= {
        "steps": steps,
        "micro_batches": 1,
        "batch_size": examples,
        "save_every": 10**6,
        "tracker": [],
        "shard": "none",
    }
    content["generation"] |= {"steps": 1, "batch_size": min(examples, recipe.generation.batch_size)}
    content.pop("watch", None)
    if (
        plan.hollow
        and recipe.method.options.get("inner_steps", 0) > FEW
        and not recipe.method.is_object
    ):
        content["method"]["inner_steps"] = FEW
    if recipe.target in PROMPTED:
        objectives = (
            content["forget"] if isinstance(content["forget"], list) else [content["forget"]]
        )
        for objective in (
            *objectives,
            *(content[name] for name in ("retain", "replace", "attack") if name in content),
        ):
            objective["n"] = examples
            if objective.get("elastic"):  # as many gradients before the first step
                objective["elastic"]["n"] = min(examples, objective["elastic"]["n"])
    return recipes.validate(content, "the recipe")


def run(plan: DryRunPlan) -> float:
    """Seconds of one step on this machine, after the first, or of an edit; the model is then put
    back. Where something stands in the time says nothing. Raises UserError where the recipe does
    not run."""
    trial_recipe = plan.recipe if edits(plan.recipe) else shorten(plan)
    if plan.hollow:
        trial_recipe = recipes.validate(
            trial_recipe.model_dump(exclude_none=True) | {"model_options": dict(plan.options)},
            "the recipe",
        )
    with _quiet(), tempfile.TemporaryDirectory(prefix="concept-eraser-") as folder:
        job = jobs.Job(
            trial_recipe, plan.model, Path(folder), silent, Path(folder) / "cache", plan.objects
        )
        return _edit(job) if edits(trial_recipe) else _two_steps(job)


def _two_steps(job: jobs.Job) -> float:
    method: Any = job.recipe.method.build()
    engine = job.train(method, resume=False)
    job.finish(engine)
    rows = logs.read(job.folder / "log.jsonl")
    engine.eraser.restore()
    if not any(
        value is not None for row in rows for value in row["losses"].values()
    ) or engine.skipped == len(rows):
        raise UserError(
            "the losses of the two steps tried are not finite; lower training.lr or use "
            "precision fp32"
        )
    return float(rows[-1]["seconds"])


def _edit(job: jobs.Job) -> float:
    part = job.model.parts[job.recipe.target]
    before = {
        name: value.detach().to("cpu", copy=True) for name, value in part.state_dict().items()
    }
    try:
        return job.run(resume=False).seconds
    finally:
        part.load_state_dict(before)


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


def image_count(recipe: Recipe) -> int:
    """How many images are generated for the objectives of a recipe, where none is cached."""
    if recipe.target not in PROMPTED or edits(recipe):
        return 0
    count = sum(
        objective.n
        for objective in recipe.objective_specs.values()
        if objective.images == "generate" and images_of(recipe.target, objective.loss) is not None
    )
    return count + (recipe.attack.n if recipe.attack else 0)


def a_image(recipe: Recipe, model: Model) -> float:
    """Seconds of one image as the recipe generates them: two short samplings, drawn out to its
    number of steps.
    """
    settings = recipe.generation
    n = min(settings.batch_size, 8)
    text, autocast = (
        recipe.forgotten[0].prompts,
        torch.bfloat16 if settings.precision == "bf16" else None,
    )
    words = [text[0] if isinstance(text, list) else "a"] * n
    options: dict[str, Any] = {
        "seeds": range(n),
        "guidance": settings.guidance,
        "autocast": autocast,
    }
    model.sample(words, steps=1, **options)  # the first one warms up
    took = []
    for steps in (1, 3):
        began = time.monotonic()
        model.sample(words, steps=steps, **options)
        took.append(time.monotonic() - began)
    step = max(0.0, (took[1] - took[0]) / 2)
    return (took[0] + step * (settings.steps - 1)) / n


def worth_trying(plan: DryRunPlan) -> bool:
    """Whether two steps, or an edit, take seconds here: on a GPU, or with a small model; an edit of
    a classifier reads all its data."""
    weights = sum(p.numel() for part in plan.model.parts.values() for p in part.parameters())
    if plan.objects and edits(plan.recipe):
        return weights * max(map(len, plan.objects.values())) < MUCH
    return torch.cuda.is_available() or weights < SMALL


def edits(recipe: Recipe) -> bool:
    """Whether the method changes the model in one go, without steps."""
    return recipe.method.edits


def describe(plan: DryRunPlan) -> str:
    """How long the recipe will take on this machine, from two steps and a few images; or that
    what stands in ran.
    """
    recipe, model, edit = plan.recipe, plan.model, edits(plan.recipe)
    try:
        measurement = run(plan)
    except UserError as error:
        if not (edit and plan.reasons and isinstance(error.__cause__, ValueError)):
            raise
        return (
            "the edit of this recipe began on what stands in, whose numbers it cannot take, "
            f"which says little of the true ones: {error}"
        )
    if plan.reasons:
        return (
            f"{'the edit' if edit else 'two steps'} of this recipe ran on what stands in; "
            "nothing is said of time"
        )
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{torch.get_num_threads()} CPU threads"
    )
    if edit:
        return f"time (the edit was tried on {device} and taken back): about {_long(measurement)}"
    steps, images = recipe.training.steps, image_count(recipe)
    parts = [f"{_long(measurement * recipe.training.micro_batches * steps)} for {steps} steps"]
    if images and isinstance(model, Model):
        parts.append(
            f"{_long(a_image(recipe, model) * images)} for generating {images} images "
            "(fewer where they are cached)"
        )
    return f"time (from two steps on {device}): about {' + about '.join(parts)}"


def _long(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
