"""`concept-eraser erase CONCEPT`: from the words of the command line to the run and its results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from concept_eraser.cli.next_step import permissions, with_next_step
from concept_eraser.utils.commands import erase_command
from concept_eraser.utils.errors import UserError


def concepts_among(names: list[str]) -> list[str]:
    """Return the names if they are concepts, or [] if they are recipes.

    Raises UserError for a mixture.
    """
    if not names:
        return []
    from concept_eraser.concepts.plan import is_concept

    concepts = [name for name in names if is_concept(name)]
    if concepts and len(concepts) < len(names):
        recipes = [name for name in names if name not in concepts]
        raise UserError(
            f"give concepts ({', '.join(concepts)}) or a recipe ({', '.join(recipes)}), not both"
        )
    return concepts


def anchor_word(text: str) -> str:
    """Read the anchor of a concept: `shape=circle` is its value, all else is the text itself."""
    from concept_eraser.recipes import overrides

    anchor = overrides.anchor(text)
    return anchor if isinstance(anchor, str) else next(iter(anchor.values()))


@dataclass(frozen=True)
class ConceptRequest:
    """Concepts to erase, with what the user chose about them."""

    names: list[str]
    model: str | None
    kind: str | None
    anchors: list[str]
    images: int | None
    overrides: list[str]


def run(
    request: ConceptRequest,
    output: Path | None,
    *,
    measure: bool,
    quiet: bool,
    allow_pickle: bool,
    **options: Any,
) -> None:
    """Erase concepts, evaluate the run, and print where everything is."""
    from concept_eraser import api
    from concept_eraser.cli import concept_result
    from concept_eraser.cli.progress_bars import bars
    from concept_eraser.concepts.plan import BUNDLED, make_plan
    from concept_eraser.utils import distributed

    kind: Any = request.kind  # checked by the plan
    plan = make_plan(
        request.names,
        model=request.model or BUNDLED,
        kind=kind,
        anchors=request.anchors,
        images=request.images,
    )
    folder = output or Path("runs") / plan.folder_name
    permitted = permissions(allow_pickle=allow_pickle)
    with bars(quiet) as progress, with_next_step(folder, permitted):
        finished_run = api.erase(
            request.names,
            model=request.model,
            kind=kind,
            anchor=request.anchors or None,
            images=request.images,
            overrides=request.overrides,
            output=folder,
            command=erase_command(folder),
            progress=progress,
            notify=typer.echo,
            allow_pickle=allow_pickle,
            **options,
        )
    if not distributed.is_first():
        return
    note = "" if finished_run.model else " (finished before; --overwrite repeats it)"
    typer.echo(f"trained in {finished_run.seconds:.0f} s{note}")
    concept_result.show(finished_run, measure=measure, quiet=quiet, allow_pickle=allow_pickle)


def dry_run(
    request: ConceptRequest, output: Path | None, *, allow_pickle: bool, two_steps: bool | None
) -> None:
    """Print the plan, then what `--dry-run` prints of its recipe."""
    from concept_eraser.cli import dry_run as dry_run_report
    from concept_eraser.concepts.plan import BUNDLED, make_plan
    from concept_eraser.recipes import recipe as recipes
    from concept_eraser.runs import concept_job

    plan = make_plan(
        request.names,
        model=request.model or BUNDLED,
        kind=request.kind,
        anchors=request.anchors,
        images=request.images,
    )
    folder = output or Path("runs") / plan.folder_name
    job = recipes.load(concept_job.recipe_content(plan, {}, request.overrides))
    typer.echo("\n".join(concept_job.plan_lines(plan, job)))
    typer.echo("more neighbours are chosen by the model's text encoder when the run starts")
    for name, text in concept_job.suite_texts(plan, folder).items():
        typer.echo(f"\n# {folder / name}\n{text}")
    dry_run_report.show(
        job,
        folder,
        allow_pickle=allow_pickle,
        two_steps=two_steps,
        allow_code=request.model is not None,
    )
