"""concept-eraser card"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from concept_eraser.utils.errors import UserError


def card(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run folder")],
    output: Annotated[
        Optional[Path], typer.Option("--output", "-o", help="where to write it (default: print it)")
    ] = None,
    repository: Annotated[
        str, typer.Option("--repo", help="the hub id in the code examples")
    ] = "owner/name",
    license: Annotated[
        str,
        typer.Option(
            help="licence of the weights, as the hub spells it (default: the card asks for it)",
            show_default=False,
        ),
    ] = "other",
    benchmark: Annotated[
        Optional[str],
        typer.Option(
            metavar="OWNER/DATASET",
            help="the dataset on the hub that is to have the numbers' tasks; with --results",
            show_default=False,
        ),
    ] = None,
    results: Annotated[
        Optional[Path],
        typer.Option(
            help=(
                "a folder for the numbers in the hub's form: model/.eval_results/*.yaml for the "
                "model's repository, dataset/eval.yaml for that of --benchmark"
            ),
            show_default=False,
        ),
    ] = None,
    control: Annotated[
        Optional[list[str]],
        typer.Option(
            help=(
                "a model that never learned the concept; the run's evaluation is repeated against "
                "it (default: the controls of the evaluation); may be given several times"
            )
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the files at --output and --results")
    ] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help=(
                "with --control, load pickled weights (they can execute code); the commands of "
                "the card permit it too"
            ),
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:
    """Write the model card of a run, or its numbers as the hub's evaluation results.

    The card states what was erased and how, every number with its interval, the attacks and the
    limits.

    [bold]Examples[/bold]

      concept-eraser card runs/tiny_star_munba

      concept-eraser card runs/mine --repo me/no-star --license openrail++ -o README.md

      concept-eraser card runs/mine --control tiny-sd-without-star

      concept-eraser card runs/mine --benchmark me/erasure --results hub_files
    """
    from concept_eraser import api
    from concept_eraser.cli.progress_bars import bars
    from concept_eraser.storage.writers import probe, write_text

    if (benchmark is None) != (results is None):
        raise UserError("--benchmark and --results belong together; give both, or neither")
    if control and results is not None and output is None:
        raise UserError("--control is for the card, and --results alone writes none; add --output")
    if output is not None:
        if output.is_file() and not overwrite:
            raise UserError(f"{output} exists already; give another --output, or --overwrite")
        probe(output)
    if benchmark is not None and results is not None:
        _write_results(run, benchmark, results, overwrite)
        if output is None:
            return
    with bars(quiet) as progress:
        text = api.card(
            run,
            repository=repository,
            license=license,
            control=control or None,
            allow_pickle=allow_pickle,
            progress=progress,
        )
    if output is None:
        typer.echo(text, nl=False)
        return
    write_text(output, text, overwrite=overwrite)
    typer.echo(f"written: {output}")


def _write_results(run: Path, benchmark: str, folder: Path, overwrite: bool) -> None:
    """Write the numbers of a run for the repositories of the model and of the benchmark."""
    from concept_eraser import api
    from concept_eraser.storage.writers import write_text

    files = api.hub_files(run, benchmark)
    for name in files:
        if (folder / name).is_file() and not overwrite:
            raise UserError(
                f"{folder / name} exists already; give another --results, or --overwrite"
            )
    for name, text in files.items():
        write_text(folder / name, text, overwrite=overwrite)
        typer.echo(f"written: {folder / name}")
    typer.echo(
        "eval.yaml names no evaluation_framework, because the hub's list does not have "
        "concept_eraser. The hub may refuse the file until its list does."
    )
