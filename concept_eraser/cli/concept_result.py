"""The end of `concept-eraser erase CONCEPT`: the evaluation, the files and the next commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from concept_eraser.cli.next_step import loading_call
from concept_eraser.utils.errors import UserError


def show(run: Any, *, measure: bool, quiet: bool) -> None:
    """Evaluate a run by the suites in its folder, and print verdicts, files and next commands.

    Args:
        run: The finished run.
        measure: Evaluate it. Without it only the files and commands are printed.
        quiet: Show no progress bars.
    """
    from concept_eraser.runs import suite_matching

    folder = run.folder
    suites = suite_matching.own_suites(folder)
    if measure:
        for suite in suites:
            _evaluate(run, Path(suite), quiet)
    _print_files(folder, run)
    typer.echo(f"next:     {_commands(folder, suites, measure)}")


def _evaluate(run: Any, suite: Path, quiet: bool) -> None:
    """Evaluate a run by one suite and print its verdict, or why it was not evaluated."""
    from concept_eraser.cli.evaluate import evaluate_run
    from concept_eraser.reporting import write
    from concept_eraser.reporting.single_run import verdict
    from concept_eraser.runs import concept_job

    model = run.load()
    if not concept_job.can_sample(model):
        typer.echo("not evaluated: this takes long without a GPU")
        return
    try:
        evaluation, place = evaluate_run(run.folder, suite, quiet=quiet)
    except UserError as error:
        typer.echo(f"not evaluated: {error}")
        return
    images = write.save_before_after(evaluation, place / "before_after.png")
    typer.secho(verdict(evaluation), bold=True)
    typer.echo(f"images:   {images}\nreport:   {place / 'report.html'}")


def _print_files(folder: Path, run: Any) -> None:
    lora, pipeline = folder / "lora", folder / "pipeline"
    if lora.is_dir():
        typer.echo(f"LoRA:     {lora} (diffusers); {_kohya(folder)}")
    if pipeline.is_dir():
        typer.echo(f"pipeline: {pipeline}    {loading_call(pipeline)}")
    else:
        typer.echo(f"pipeline: concept-eraser export {folder} --to diffusers    (writes it)")


def _kohya(folder: Path) -> str:
    """Write the LoRA for A1111 and ComfyUI, if it is not there, and say where it is."""
    from concept_eraser import api

    place = folder / "exports" / f"{folder.name}-kohya.safetensors"
    notes = ""
    try:
        if not place.exists():
            ignored = api.export(folder, "kohya").ignored
            notes = "".join(f"\n          {finding.sentence()}" for finding in ignored)
    except UserError as error:
        return f"no file for A1111 and ComfyUI ({error})"
    return f"{place} (kohya, for A1111 and ComfyUI){notes}"


def _commands(folder: Path, suites: list[str], measure: bool) -> str:
    suite = f" --suite {suites[0]}" if len(suites) > 1 else ""
    commands = [
        f"concept-eraser attack {folder}{suite} -n 8 --set times=10",  # a fifth of the budget
        f"concept-eraser export {folder} --to single-file",
        f"concept-eraser push {folder} owner/name",
    ]
    if not measure:
        commands[0:1] = [f"concept-eraser evaluate {folder}{suite}", commands[0]]
    return "\n          ".join(commands[:3])
