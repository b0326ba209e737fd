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
            help="licence of the weights, as the hub spells it (default: the card asks for it)"
        ),
    ] = "other",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the file at --output")
    ] = False,
) -> None:
    """Write the model card of a run.

    It states what was erased and how, every number with its interval, the attacks and the limits.

    [bold]Examples[/bold]

      concept-eraser card runs/tiny_star_munba

      concept-eraser card runs/mine --repo me/no-star --license openrail++ -o README.md
    """
    from concept_eraser import api
    from concept_eraser.storage.writers import probe, write_text

    if output is not None:
        if output.is_file() and not overwrite:
            raise UserError(f"{output} exists already; give another --output, or --overwrite")
        probe(output)
    text = api.card(run, repository=repository, license=license)
    if output is None:
        typer.echo(text, nl=False)
        return
    write_text(output, text, overwrite=overwrite)
    typer.echo(f"written: {output}")
