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
            metavar="OWNER/NAME", help="the repository on the hub; made where it is not there"
        ),
    ],
    kind: Annotated[str, typer.Option("--as", help="pipeline, lora or both")] = "pipeline",
    private: Annotated[
        bool, typer.Option("--private", help="make the repository a private one")
    ] = False,
    revision: Annotated[
        Optional[str], typer.Option(help="upload to this branch; made where it is not there")
    ] = None,
    license: Annotated[
        str,
        typer.Option(
            help="of the weights, as the hub spells it (default: the card says to fill it in)"
        ),
    ] = "other",
    token: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "of the hub (default: $HF_TOKEN, or hf auth login; better there than here, "
                "where others may see it)"
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
    width = max(len(one.name) for one in result.uploads)
    for one in result.uploads:
        typer.echo(f"  {one.name:<{width}}  {one.size:>13,} bytes")
    typer.echo(
        f"  {len(result.uploads)} files, {sum(one.size for one in result.uploads):,} bytes; "
        "nothing was sent"
    )
    if result.left_out:
        typer.echo(
            "  left out, for they are hidden or of no kind that models are saved as: "
            f"{', '.join(result.left_out)}"
        )
