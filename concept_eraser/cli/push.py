"""concept-eraser push"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run folder")],
    repository: Annotated[
        str,
        typer.Argument(
            metavar="OWNER/NAME", help="the repository on the hub; created if it does not exist"
        ),
    ],
    kind: Annotated[
        Optional[str],
        typer.Option(
            "--as",
            help=(
                "pipeline, lora or both (default: pipeline; lora if the run holds no pipeline and "
                "diffusers can load its LoRA)"
            ),
        ),
    ] = None,
    private: Annotated[
        bool,
        typer.Option(
            "--private", help="make a new repository private; upload nothing to a public one"
        ),
    ] = False,
    revision: Annotated[
        Optional[str],
        typer.Option(
            help="upload to this branch; created if it does not exist (default: the main branch)"
        ),
    ] = None,
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
            help=(
                "also upload the numbers as .eval_results/*.yaml, which the model's page shows; "
                "the dataset's eval.yaml has their tasks, see: concept-eraser card --help"
            ),
            show_default=False,
        ),
    ] = None,
    token: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "token of the hub (default: $HF_TOKEN, or hf auth login; both are safer than "
                "this option, which other users of the machine may see)"
            ),
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only show what would be uploaded; uses no network")
    ] = False,
) -> None:
    """Upload a run to the Hugging Face hub, with its model card.

    [bold]Examples[/bold]

      concept-eraser push runs/tiny_star_munba me/no-star --dry-run

      concept-eraser push runs/mine me/no-star --as both --private
    """
    from concept_eraser import api

    result = api.push_to_hub(
        run,
        repository,
        kind=kind,
        private=private,
        revision=revision,
        license=license,
        benchmark=benchmark,
        token=token,
        dry_run=dry_run,
    )
    for warning in result.warnings:
        typer.echo(f"warning: {warning} The card says so.", err=True)
    if result.url is not None:
        typer.echo(f"uploaded: {result.url}")
        return
    typer.echo(result.card)
    typer.echo(
        f"would upload to {result.repository}{f', branch {revision}' if revision else ''} "
        f"({'private' if private else 'public'}):"
    )
    width = max(len(upload.name) for upload in result.uploads)
    for upload in result.uploads:
        typer.echo(f"  {upload.name:<{width}}  {upload.size:>13,} bytes")
    typer.echo(
        f"  {len(result.uploads)} files, {sum(upload.size for upload in result.uploads):,} bytes; "
        "nothing was sent"
    )
    if result.left_out:
        typer.echo(
            "  left out, because they are hidden or not of a file type of models: "
            f"{', '.join(result.left_out)}"
        )
