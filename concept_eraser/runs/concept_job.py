"""An erasing job that is given by concepts: its recipe, its suites, and a count in the original."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import registry
from concept_eraser.concepts.plan import SUITE, SUITES, WARNING, ErasurePlan, is_concept
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.suite import Suite
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.recipes import defaults, overrides
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.storage.readers import read_text
from concept_eraser.targets.adapter import file_megabytes
from concept_eraser.utils import distributed
from concept_eraser.utils.commands import shell_command
from concept_eraser.utils.devices import find_gpu
from concept_eraser.utils.errors import UserError, names_text
from concept_eraser.utils.progress import Progress, silent

_LOG = logging.getLogger(__name__)
RARE = 0.5  # a concept rate of the original below which an erasure changes little
SMALL = 50_000_000  # weights of a denoiser that a CPU samples from in seconds


def concept_names(
    recipe: Any,
    *,
    kind: str | None = None,
    anchor: str | Sequence[str] | None = None,
    images: int | None = None,
) -> list[str]:
    """The concepts that were given in place of a recipe; [] for a recipe.

    Raises:
        UserError: `kind`, `anchor` or `images` were given without concepts.
    """
    if isinstance(recipe, str) and is_concept(recipe):
        return [recipe]
    if isinstance(recipe, list | tuple) and recipe and all(isinstance(one, str) for one in recipe):
        return list(recipe)
    if any(value is not None for value in (kind, anchor, images)):
        raise UserError(
            "kind, anchor and images go with concepts; in a recipe the anchor is forget.anchor"
        )
    return []


def recipe_content(
    plan: ErasurePlan, keys: Mapping[str, Any], changes: Sequence[str]
) -> dict[str, Any]:
    """The content of the recipe: the plan, the user's settings, and the defaults for what is open.

    Args:
        plan: The plan.
        keys: Keys of a recipe with the user's values, as `api.erase` has them.
        changes: Overrides, such as "training.steps=50".

    Raises:
        UserError: A key is decided by the plan, or an override is malformed.
    """
    if plan_keys := sorted({"forget", "model"} & set(keys)):
        raise UserError(
            "give concepts or a recipe's keys for what to forget, not both: found "
            f"{names_text(plan_keys)}"
        )
    settings = {**plan.settings, **keys}
    lines, objects = [], []
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and key not in ("forget", "retain")
        pairs = (
            [((key, name), inner) for name, inner in value.items()] if nested else [((key,), value)]
        )
        for path, inner in pairs:
            text = _as_json(inner)
            if text is None and path in (("method",), ("finish",)):
                text = _method_text(inner)
            if text is None:
                objects.append((path, inner))
                # a method of the same kind in its place, by which the defaults are chosen
                stand_in = "uce" if hasattr(inner, "edit") else "munba"
                text = overrides.as_text(stand_in) if path == ("method",) else None
            if text is not None:
                lines.append(f"{'.'.join(path)}={text}")
    content: dict[str, Any] = {}
    for line in defaults.complete([*lines, *changes]):
        overrides.apply(content, line)
    for path, value in objects:
        place = content
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return content


def _as_json(value: Any) -> str | None:
    """The value as JSON; None for an object that only Python can hold."""
    try:
        return overrides.as_text(value)
    except (TypeError, ValueError):
        return None


def _method_text(value: Any) -> str | None:
    """The name and options of a method object as JSON; None if they do not describe it."""
    try:
        plugin = registry.read("method", value)
    except ValueError:
        return None  # loading the recipe reports what is wrong with it
    return None if plugin.value is not None else _as_json(plugin.describe())


def suite_texts(plan: ErasurePlan, folder: Path) -> dict[str, str]:
    """The suites as YAML, by their file names in the run folder."""
    return {
        name: f"# {shell_command('evaluate', folder, '--suite', folder / name)}\n"
        + yaml.safe_dump(_plain(suite), sort_keys=False, allow_unicode=True)
        for name, suite in plan.suites.items()
    }


def require_images(plan: ErasurePlan, folder: Path, images: int) -> None:
    """Check that the suites in a run folder have the number of images that was asked for.

    A suite that is there already stays, since a user may have edited it.

    Raises:
        UserError: A suite there has another number.
    """
    for path in (folder / name for name in plan.suites):
        groups = suites.load(path).groups if path.is_file() else {}
        others = sorted({group.n for group in groups.values()} - {images})
        if others:
            raise UserError(
                f"{path} has {', '.join(map(str, others))} images of each group, not {images}, and "
                "is not written again; change n of its groups there, and give: "
                f"{shell_command('evaluate', folder, '--suite', path)}"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def suites_beside(recipe: Any) -> dict[str, str]:
    """The suites that lie beside a recipe file, as text by file name. A run repeats with them."""
    path = Path(recipe) if isinstance(recipe, str | Path) else None
    if path is None or path.name != "recipe.yaml" or not path.is_file():
        return {}
    files = [path.parent / SUITE, *sorted((path.parent / SUITES).glob("*.yaml"))]
    return {
        file.relative_to(path.parent).as_posix(): read_text(file)
        for file in files
        if file.is_file()
    }


def require_text_encoder(model: Model) -> None:
    """Raise UserError for a model that is conditioned on classes, such as DiT."""
    if not model.readers:
        raise UserError(
            f"{model.source} ({model.family}) is conditioned on classes, not on prompts about a "
            "concept; give its class names as prompts: concept-eraser erase --model MODEL --forget "
            "FILE --retain FILE"
        )


def can_sample(model: Model) -> bool:
    """Whether many images take minutes at most: on a GPU, or of a small model.

    The model stays where it is. It may be an outline without weights.
    """
    if find_gpu() is not None or model.device.type not in ("cpu", "meta"):
        return True
    return sum(parameter.numel() for parameter in model.denoiser.parameters()) <= SMALL


def count_concept(
    model: Model, suite: Suite, *, cache: Path | None = None, progress: Progress = silent
) -> tuple[int, int]:
    """In how many images of the group "direct" the judge detects the concept, and of how many.

    The images are those of the later evaluation, which finds them in the cache.

    Raises:
        UserError: The judge is not available.
    """
    attribute, value = next(iter(suite.concept.items()))
    judge = suite.build_judge()
    images = suites.generate_group(model, suite, "direct", "before", cache=cache, progress=progress)
    labels = judge.classify(images)[attribute]
    return int((labels == value).sum()), len(labels)


def describe_count(name: str, count: int, n: int) -> str:
    """One sentence about how often the original generates the concept."""
    text = f"the model generates {name!r} in {count} of {n} images"
    return f"{text}; erasing it will change little" if count < RARE * n else text


def plan_lines(plan: ErasurePlan, job: Recipe) -> list[str]:
    """The lines of a plan, with the prompts and anchors that the recipe has after all overrides."""
    objectives = [
        objective.model_dump(include={"prompts", "anchor"}) for objective in job.forgotten
    ]
    if len(objectives) != len(plan.concepts) or any(one["prompts"] is None for one in objectives):
        return plan.lines()
    return plan.with_changes(objectives, job.retain and job.retain.prompts).lines()


def announce(
    plan: ErasurePlan,
    job: Recipe,
    *,
    model: Model,
    folder: Path,
    notify: Callable[[str], None] | None,
    progress: Progress,
    cache: Path | None,
) -> None:
    """Give the lines of a plan and the size of the LoRA, and count each concept in images.

    The images are those of the original.

    notify: called with each line. None: the lines are logged, and a rare concept is a warning.
    """

    def say(text: str, level: int = logging.INFO) -> None:
        if not distributed.is_first():
            return
        if notify is None:
            _LOG.log(level, "%s", text)
        else:
            notify(text)

    for line in plan_lines(plan, job):
        say(line, logging.WARNING if line.startswith(WARNING) else logging.INFO)
    size = file_megabytes(job, model.parts[job.target])
    if size is not None and job.trainable.lora is not None:
        say(f"LoRA:     rank {job.trainable.lora.rank}, a file of about {size:.3g} MB in fp32")
    files = ", ".join(str(folder / name) for name in ("recipe.yaml", *plan.suites))
    again = shell_command("erase", folder / "recipe.yaml", "--output", f"{folder}_again")
    say(f"files:    {files}; repeat with: {again}")
    if job.training.offload or job.training.shard != "none" or not can_sample(model):
        say("not checked whether the model generates it: this takes long here")
        return
    onto_gpu(model)
    for concept in plan.concepts:
        try:
            count, n = count_concept(
                model, suites.load(concept.suite), cache=cache, progress=progress
            )
        except UserError as error:
            say(f"not checked whether the model generates {concept.name!r}: {error}")
        else:
            level = logging.WARNING if count < RARE * n else logging.INFO
            say(describe_count(concept.name, count, n), level)
