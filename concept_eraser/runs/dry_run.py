"""Two steps of a recipe, or its edit, as a dry run: does the recipe run, and how long will it take?

If the model is available, two steps run at the recipe's own batch size on a few quickly sampled
images, and are timed. If not, a tiny random pipeline of its family replaces it. That finds mistakes
in losses, method, selection and prompts, but gives no time.

If a named data set is not available, random images of its shape replace it, a few of each class.
The recipe's classes and positions are first checked against the set's true size. Everything happens
in a temporary folder, and nothing is downloaded.
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
from concept_eraser.utils.devices import find_gpu, gpu_module
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import silent

STEPS = 2
SMALL = 50_000_000  # weights of a denoiser for which a CPU takes seconds
MUCH = 10**9  # weights x examples for which an edit takes minutes
COARSE = 8  # width and height in pixels of the images of a classifier's replacement
FEW = 2  # examples per objective with a replacement, or per class and objective of random images


@dataclass(frozen=True)
class DryRunPlan:
    """The recipe, the model and the data of a dry run.

    Attributes:
        recipe: The recipe. If images are replaced, it has the positions of the replacements.
        model: The model, or its replacement.
        objects: The labelled data of the objectives.
        reasons: A sentence for each replacement; none if everything is available.
        hollow: Whether the model is a replacement.
        options: The options of the replacement's family.
    """

    recipe: Recipe
    model: Loaded
    objects: Mapping[str, Labelled] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    hollow: bool = False
    options: Mapping[str, float] = field(default_factory=dict)
    folder: Any = field(default=None, repr=False)  # kept while the model is used


def load(
    recipe: Recipe,
    *,
    allow_pickle: bool = False,
    allow_code: bool = False,
    two_steps: bool | None = True,
) -> DryRunPlan:
    """Load a recipe's model and data, or their replacements.

    two_steps: whether two steps follow; None if they do where `worth_trying`. Of a diffusers folder
    no weights are read where none follow.

    Raises UserError if neither can be loaded, or if the recipe names classes or positions that its
    data do not have.
    """
    plan = _with_data(recipe)
    if not two_steps and recipe.target in PROMPTED and isinstance(recipe.model, str):
        outlined_model = loading.outline_of_files(recipe.model)
        if outlined_model is not None:
            outlined_model.configure(recipe.model_options)
            outlined_plan = replace(plan, model=outlined_model)
            if two_steps is False or not worth_trying(outlined_plan):
                return outlined_plan
    try:
        model = loading.load_part(
            recipe.model, recipe.target, allow_pickle=allow_pickle, allow_code=allow_code
        )
    except UserError as error:
        if (
            Path(recipe.model).exists()
            or ":" in recipe.model
            or recipe.model.startswith((".", "/", "~"))
        ):  # the name is a path, so the model should be here
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
        model.source = recipe.model  # the name in error messages
        model.configure(families.options(family))
        changes |= {"model": model, "options": families.options(family), "folder": folder}
        which = f"a tiny random pipeline of the family {family}"
    return replace(
        plan,
        reasons=(f"{recipe.model} is not on this machine; {which} stands in", *plan.reasons),
        **changes,
    )


def _classifier(plan: DryRunPlan) -> Loaded:
    """Return one linear layer of the data's shape, on a coarse version of large images."""
    ((data, rows), *_) = labelled_data.select_rows(plan.recipe, plan.objects).values()
    shape = data.inputs([int(rows[0])]).shape[1:]
    coarse = [nn.AdaptiveAvgPool2d(COARSE)] if len(shape) == 3 and min(shape[1:]) > COARSE else []
    width = shape[0] * COARSE**2 if coarse else shape.numel()
    return loading.load_part(
        nn.Sequential(*coarse, nn.Flatten(), nn.Linear(width, len(data.names))), "classifier"
    )


def _with_data(recipe: Recipe) -> DryRunPlan:
    """Return a plan with its objectives' labelled data, and without a model yet."""
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
    """Return an objective's data and "", or random images in their place and the reason for them.

    Nothing is downloaded.
    """
    if objective.data not in registry.names("dataset"):
        return labelled_data.open_named(objective.data, objective.options, "train"), ""
    dataset = registry.build("dataset", str(objective.data), objective.options)
    downloads = getattr(dataset, "download", False)
    try:
        return (replace(dataset, download=False) if downloads else dataset).load("train"), ""
    except NotHere:
        facts = dataset.known_facts().reaching(*labelled_data.named_parts(objective))
        later = "; a run downloads it" if downloads else ""
        return facts.examples(
            dataset.title
        ), f"{dataset.title} is not on this machine (looked in {dataset.root}{later})"


def _choose_rows(recipe: Recipe, data: dict[str, Labelled]) -> dict[str, tuple[Labelled, Tensor]]:
    """Return the objectives' positions in data of the true size.

    Raises UserError for classes and positions that the data do not have. The class of a position is
    unknown. So if a recipe has both, each is checked alone, and the class is used.
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
    """Return the recipe on a few examples of each class and objective."""
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
    """Return the recipe with two steps on a few quick images.

    It has its own batch size if nothing is replaced. Else it has fewer examples, and fewer steps of
    an attack inside a step.
    """
    recipe = plan.recipe
    examples = min(FEW, recipe.training.batch_size) if plan.reasons else recipe.training.batch_size
    examples = FEW if plan.reasons and recipe.target in PROMPTED else examples
    # so that each concept has its turn
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
    if content.get("attack", {}).get("warmup"):  # its steps are without an attack
        content["attack"]["warmup"] = 0
    if content["training"]["milestones"]:  # all could lie after the last step, an error
        content["training"]["milestones"] = [1]
    # unseen examples may be of another shape than data that stand in, and nothing is downloaded
    if recipe.rewinding and (plan.reasons or recipe.rewinding.options.get("download")):
        content.pop("rewinding")
    if recipe.method.name == "stereo":  # a step of each kind
        content["method"] |= {"rounds": 1, "erase_steps": 1, "inner_steps": 1}
        content["training"]["steps"] = 3
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
            *(
                content[name]
                for name in ("retain", "replace", "relearn", "attack")
                if name in content
            ),
        ):
            objective["n"] = examples
            if objective.get("elastic"):  # the number of gradients before the first step
                objective["elastic"]["n"] = min(examples, objective["elastic"]["n"])
    return recipes.validate(content, "the recipe")


def run(plan: DryRunPlan) -> float:
    """Run two steps or the edit, and restore the model. Returns seconds.

    They are the seconds of one step after the first, or of the edit. With replacements they have no
    meaning. Raises UserError if the recipe does not run.
    """
    short_recipe = plan.recipe if edits(plan.recipe) else shorten(plan)
    if plan.hollow:
        short_recipe = recipes.validate(
            short_recipe.model_dump(exclude_none=True) | {"model_options": dict(plan.options)},
            "the recipe",
        )
    with _quiet(), tempfile.TemporaryDirectory(prefix="concept-eraser-") as folder:
        job = jobs.Job(
            recipe=short_recipe,
            model=plan.model,
            folder=Path(folder),
            progress=silent,
            cache=Path(folder) / "cache",
            objects=plan.objects,
        )
        return _edit(job) if edits(short_recipe) else _two_steps(job)


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
            "the losses of both steps are not finite; lower training.lr or use precision fp32"
        )
    return float(rows[-1]["seconds"])


def _edit(job: jobs.Job) -> float:
    part = job.model.parts[job.recipe.target]
    before = {
        name: value.detach().to("cpu", copy=True) for name, value in part.state_dict().items()
    }
    try:
        outcome = job.run(resume=False)
        outcome.eraser.restore()
        return outcome.seconds
    finally:
        part.load_state_dict(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings inside the context.

    The run itself warns once of prompts that are cut off.
    """
    log = logging.getLogger("concept_eraser")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def image_count(recipe: Recipe) -> int:
    """Return how many images are generated for the objectives of a recipe, if none is cached."""
    if recipe.target not in PROMPTED or edits(recipe):
        return 0
    count = sum(
        objective.n
        for objective in recipe.objective_specs.values()
        if objective.images == "generate" and images_of(recipe.target, objective.loss) is not None
    )
    return count + (recipe.attack.n if recipe.attack else 0)


def a_image(recipe: Recipe, model: Model) -> float:
    """Return the seconds of one image as the recipe generates it.

    They are extrapolated from two short samplings to the recipe's number of steps.
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
    model.sample(words, steps=1, **options)  # the first one is slower
    took = []
    for steps in (1, 3):
        began = time.monotonic()
        model.sample(words, steps=steps, **options)
        took.append(time.monotonic() - began)
    step = max(0.0, (took[1] - took[0]) / 2)
    return (took[0] + step * (settings.steps - 1)) / n


def worth_trying(plan: DryRunPlan) -> bool:
    """Whether two steps, or an edit, take seconds here.

    They do on a GPU, or with a small model. An edit of a classifier uses all its data.
    """
    weights = sum(p.numel() for part in plan.model.parts.values() for p in part.parameters())
    if plan.objects and edits(plan.recipe):
        return weights * max(map(len, plan.objects.values())) < MUCH
    return find_gpu() is not None or weights < SMALL


def edits(recipe: Recipe) -> bool:
    """Whether the method edits the model without training steps."""
    return recipe.method.edits


def describe(plan: DryRunPlan) -> str:
    """Describe how long the recipe will take on this machine, from two steps and a few images.

    With replacements, the text only says that they ran.
    """
    recipe, model, edit = plan.recipe, plan.model, edits(plan.recipe)
    try:
        measurement = run(plan)
    except UserError as error:
        if not (edit and plan.reasons and isinstance(error.__cause__, ValueError)):
            raise
        return (
            "the edit of this recipe began on the replacements, but failed with their numbers, "
            f"which says little of the true ones: {error}"
        )
    if plan.reasons:
        return (
            f"{'the edit' if edit else 'two steps'} of this recipe ran on the replacements, "
            "which give no estimate of the time"
        )
    gpu = gpu_module()
    device = gpu.get_device_name() if gpu else f"{torch.get_num_threads()} CPU threads"
    if edit:
        return f"time (the edit ran on {device} and was undone): about {_long(measurement)}"
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
