"""The end of `concept-eraser erase CONCEPT`: the files, the evaluation and the next commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from concept_eraser.cli.next_step import loading_call, permissions
from concept_eraser.utils.commands import shell_command
from concept_eraser.utils.errors import UserError, is_out_of_memory

SHORT_ATTACK = ("-n", 8, "--set", "times=10")  # a fifth of the budget


def show(run: Any, *, measure: bool, quiet: bool, allow_pickle: bool = False) -> None:
    """Print the files of a run, evaluate it by the suites in its folder, and print next commands.

    Args:
        run: The finished run.
        measure: Evaluate it. Without it only the files and commands are printed.
        quiet: Show no progress bars.
        allow_pickle: Also load a pickled original, and permit it in the printed commands.
    """
    from concept_eraser.runs import suite_matching

    folder = run.folder
    suites = suite_matching.own_suites(folder)
    permitted = permissions(allow_pickle=allow_pickle)
    _print_files(run, allow_pickle)
    if measure:
        for suite in suites:
            _evaluate(run, Path(suite), quiet, allow_pickle)
    typer.echo(f"next:     {_commands(run, suites, measure, permitted)}")


def _evaluate(run: Any, suite: Path, quiet: bool, allow_pickle: bool) -> None:
    """Evaluate a run by one suite and print its verdict, or why it was not evaluated."""
    from concept_eraser.cli.evaluate import evaluate_run
    from concept_eraser.reporting import write
    from concept_eraser.reporting.single_run import verdict

    permitted = permissions(allow_pickle=allow_pickle)
    later = shell_command("evaluate", run.folder, "--suite", suite, *permitted)
    if not _can_sample(run):
        typer.echo(f"not evaluated: this takes long without a GPU; for later: {later}")
        return
    if run.model is not None:
        run.model.to("cpu")  # the evaluation loads both models anew
    try:
        evaluation, place = evaluate_run(run.folder, suite, quiet=quiet, allow_pickle=allow_pickle)
    except UserError as error:
        typer.echo(f"not evaluated: {error}")
        return
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        typer.echo(f"not evaluated: not enough memory; try again with: {later}")
        return
    images = write.save_before_after(evaluation, place / "before_after.png")
    typer.secho(verdict(evaluation), bold=True)
    typer.echo(f"images:   {images}\nreport:   {place / 'report.html'}")


def _can_sample(run: Any) -> bool:
    """Whether many images of a run take minutes at most. Weights are read only if need be."""
    from concept_eraser.models import loading
    from concept_eraser.runs import concept_job

    model = run.model or loading.outline(str(run.folder)) or run.load()
    return concept_job.can_sample(model)


def _print_files(run: Any, allow_pickle: bool) -> None:
    folder = run.folder
    if run.recipe.method.adds_gate:  # no other program could load it
        typer.echo(f"gate:     {folder / 'weights.safetensors'}")
        return
    lora, pipeline = folder / "lora", folder / "pipeline"
    if lora.is_dir():
        typer.echo(f"LoRA:     {lora} (diffusers); {_kohya(folder, allow_pickle)}")
    if pipeline.is_dir():
        typer.echo(f"pipeline: {pipeline}    {loading_call(pipeline)}")
    else:
        permitted = permissions(allow_pickle=allow_pickle)
        export_command = shell_command("export", folder, "--to", "diffusers", *permitted)
        typer.echo(f"pipeline: {export_command}    (writes it)")


def _kohya(folder: Path, allow_pickle: bool) -> str:
    """Write the LoRA for A1111 and ComfyUI, if it is not there, and say where it is."""
    from concept_eraser import api

    place = folder / "exports" / f"{folder.resolve().name}-kohya.safetensors"
    notes = ""
    try:
        if not place.exists():
            ignored = api.export(folder, "kohya", allow_pickle=allow_pickle).ignored
            notes = "".join(f"\n          {finding.sentence()}" for finding in ignored)
    except UserError as error:
        return f"no file for A1111 and ComfyUI ({error})"
    return f"{place} (kohya, for A1111 and ComfyUI){notes}"


def _commands(run: Any, suites: list[str], measure: bool, permitted: list[str]) -> str:
    """Return at most three commands, and none that would refuse the run."""
    folder = run.folder
    suite = ["--suite", suites[0]] if len(suites) > 1 else []
    words = [*suite, *permitted]
    commands = [] if measure else [shell_command("evaluate", folder, *words)]
    commands.append(shell_command("attack", folder, *words, *SHORT_ATTACK))
    if not run.recipe.method.adds_gate:  # it has no other format
        if _has_single_file(run):
            commands.append(shell_command("export", folder, "--to", "single-file", *permitted))
        commands.append(shell_command("push", folder, "owner/name"))
    return "\n          ".join(commands[:3])


def _has_single_file(run: Any) -> bool:
    """Whether the model of a run can be written as one file."""
    from concept_eraser.models import loading, single_file

    model = run.model or loading.outline(str(run.folder))
    return model is not None and single_file.has_layout(model.family)
