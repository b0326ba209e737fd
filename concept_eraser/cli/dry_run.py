"""The report of `concept-eraser erase --dry-run` about a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from concept_eraser.storage.readers import size_text
from concept_eraser.utils import resources
from concept_eraser.utils.devices import find_gpu
from concept_eraser.utils.errors import UserError

HOLES_FROM = 2 * 2**30  # bytes; below, they do not matter
# benchmarks/README.md, Stable Diffusion 1.4 at 256 and 512 px
HOLES = (
    "  on a CPU up to half more, for the holes of the C library's heap; with "
    "MALLOC_MMAP_THRESHOLD_=1048576 in the environment there are few, and the steps are slower"
)


def show(
    recipe: Any, folder: Path, *, allow_pickle: bool, two_steps: bool | None, allow_code: bool
) -> None:
    """Check data and model, count weights and memory, make two steps and estimate the time."""
    from shlex import quote

    from concept_eraser.models import hub
    from concept_eraser.recipes import recipe as recipes

    hub.go_offline()  # only the run itself downloads gigabytes
    lines = report(recipe, allow_pickle, two_steps, allow_code, folder=folder)
    typer.echo(
        recipes.dump(recipe, f"concept-eraser erase <this file> --output {quote(str(folder))}")
    )
    typer.echo("\n".join(lines) + f"\nwould write {folder}; nothing was trained")


def report(
    recipe: Any,
    allow_pickle: bool,
    two_steps: bool | None,
    allow_code: bool = False,
    folder: Path = Path("runs"),
) -> list[str]:
    """Report the objectives, trainable parameters, memory, disk space and time of a recipe.

    Args:
        recipe: The recipe.
        allow_pickle: Also load pickled weights.
        two_steps: Whether to make two steps. None: only if they take seconds.
        allow_code: Also call a model that is named as package.module:function.
        folder: The run folder.
    """
    from concept_eraser.recipes.recipe import PROMPTED

    return (_describe_prompts if recipe.target in PROMPTED else _describe_labelled)(
        recipe, allow_pickle, two_steps, allow_code, folder=folder
    )


def _describe_prompts(
    recipe: Any, allow_pickle: bool, two_steps: bool | None, allow_code: bool, folder: Path
) -> list[str]:
    from concept_eraser.runs import dry_run, memory_estimate
    from concept_eraser.targets import cross_attention_edit
    from concept_eraser.tiny import published

    lines = _objective_lines(recipe)
    if dry_run.edits(recipe):
        cross_attention_edit.refuse_ignored(recipe)
    plan = dry_run.load(
        recipe, allow_pickle=allow_pickle, allow_code=allow_code, two_steps=two_steps
    )
    full_size_model: Any = plan.model
    if plan.hollow:  # count the weights and the memory at full size
        full_size_model = published.hollow(recipe.model)
        full_size_model.configure(recipe.model_options)
    lines.append(_weights(recipe, full_size_model))
    if not dry_run.edits(recipe):
        saved = recipe.weights_to_save(has_name=not allow_pickle)
        estimate = memory_estimate.estimate(recipe, full_size_model, saved=saved)
        lines += estimate.lines()
        if estimate.on_cpu > HOLES_FROM and find_gpu() is None:
            lines.append(HOLES)
    lines += _disk(recipe, full_size_model, folder, allow_pickle, in_fp32=plan.hollow)
    return [*lines, *_describe_steps(plan, two_steps)]


def _disk(
    recipe: Any, model: Any, folder: Path, allow_pickle: bool, *, in_fp32: bool = False
) -> list[str]:
    """Describe the disk space of a run, and whether it is free.

    in_fp32: the precision of the checkpoint is not known, so its size is that in fp32.
    """
    from concept_eraser.runs import disk_estimate, dry_run

    saved = recipe.weights_to_save(has_name=not allow_pickle)
    estimate = disk_estimate.estimate(recipe, model, saved)
    lines = estimate.lines(folder)
    if in_fp32 and saved == "pipeline":
        lines.append("  (the pipeline in fp32; of a checkpoint in half precision it is half of it)")
    if count := dry_run.image_count(recipe):
        size = size_text(count * 3 * model.image_width() ** 2)
        lines.append(
            f"  beside it up to {size} for {count} images in the cache {resources.cache()}"
        )
    try:
        disk_estimate.require_space(estimate, folder, recipe, saved)
    except UserError as error:
        lines.append(f"not enough disk space: {error}")
    return lines


def _objective_lines(recipe: Any) -> list[str]:
    from concept_eraser.data import prompts

    lines, sets = (
        [],
        {name: prompts.load(spec.prompts) for name, spec in recipe.objective_specs.items()},
    )
    for name in sorted(sets, key=lambda objective: objective == "retain"):
        if name.startswith("forget") and "retain" in sets:
            prompts.require_disjoint(sets[name], sets["retain"])
        lines.append(f"{name}: {len(sets[name])} prompts, e.g. {sets[name].texts[0]!r}")
        if name.startswith("forget") and (anchor := recipe.objective_specs[name].anchor):
            lines.append(f"  anchor: {sets[name].prompts[0].anchor_prompt(anchor)!r}")
    return lines + prompts.slips(
        {name: spec.anchor for name, spec in recipe.objective_specs.items()}, sets
    )


def _weights(recipe: Any, model: Any) -> str:
    from concept_eraser.recipes.selections import select
    from concept_eraser.targets import gate_edit
    from concept_eraser.targets.adapter import add_adapter, file_megabytes

    part = model.parts[recipe.target]
    parameters = dict(part.named_parameters())
    names = select(parameters, recipe.trainable.select)
    count, total = (
        sum(parameters[name].numel() for name in names),
        sum(p.numel() for p in parameters.values()),
    )
    if recipe.method.adds_gate:
        return (
            f"trains a gate of {gate_edit.count(recipe, parameters, names):,} numbers on "
            f"{len(names)} layers, beside {total:,} weights"
        )
    whole, half = (file_megabytes(recipe, part, dtype) for dtype in ("fp32", "fp16"))
    adapter = add_adapter(recipe, part, names)
    if adapter is None:
        return f"trains {count:,} of {total:,} weights in {len(names)} tensors"
    lora_count, layers = (
        sum(part.get_parameter(name).numel() for name in adapter.tensors),
        len(adapter.layers),
    )
    adapter.remove()
    return (
        f"trains a LoRA of {lora_count:,} numbers on {layers} layers, beside {total:,} weights; "
        f"its file has about {whole:.3g} MB, and {half:.3g} MB after export --dtype fp16"
    )


def _describe_labelled(
    recipe: Any, allow_pickle: bool, two_steps: bool | None, allow_code: bool, folder: Path
) -> list[str]:
    """Describe the examples of each objective, the trainable parameters, and two steps."""
    from concept_eraser.runs import dry_run
    from concept_eraser.targets.build import build_eraser
    from concept_eraser.targets.context import Context
    from concept_eraser.targets.labelled_data import select_rows

    plan = dry_run.load(recipe, allow_pickle=allow_pickle, allow_code=allow_code)
    lines: list[str] = []
    if plan.recipe is recipe:  # else a few images replace the data, so their number says nothing
        rows_by_objective = select_rows(plan.recipe, plan.objects)
        lines = [
            f"{name}: {len(rows)} of {len(data)} examples of {data.about}"
            for name, (data, rows) in rows_by_objective.items()
        ]
    if not plan.hollow:
        eraser = build_eraser(Context(plan.recipe, plan.model, objects=plan.objects))
        counts = (
            sum(p.numel() for p in eraser.trainable().values()),
            sum(p.numel() for p in eraser.module.parameters()),
        )
        lines.append(
            f"trains {counts[0]:,} of {counts[1]:,} weights in {len(eraser.trainable())} tensors"
        )
        lines += _disk(recipe, plan.model, folder, allow_pickle)
    return [*lines, *_describe_steps(plan, two_steps)]


def _describe_steps(model: Any, two_steps: bool | None) -> list[str]:
    from concept_eraser.runs import dry_run

    if two_steps is False or (
        two_steps is None and not model.hollow and not dry_run.worth_trying(model)
    ):
        slow = (
            " (two steps would take minutes here; make them with --two-steps)"
            if two_steps is None
            else ""
        )
        return [*model.reasons, "time: not measured" + slow]
    return [*model.reasons, dry_run.describe(model)]
