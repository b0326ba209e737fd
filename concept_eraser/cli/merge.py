"""concept-eraser merge"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from concept_eraser.cli.bounds import weights_of
from concept_eraser.cli.next_step import permissions


def merge(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help=(
                "run folders; or diffusers folders, LoRAs, tensors of a part, single-file "
                "checkpoints"
            ),
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder of the merged model")],
    weights: Annotated[
        Optional[str], typer.Option(help="one weight per run, e.g. 1,0.5 (default: all 1)")
    ] = None,
    before: Annotated[
        Optional[str],
        typer.Option(help="the original model (default: the one of the runs' recipes)"),
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="load pickled weights (they can execute code)")
    ] = False,
) -> None:
    """Add several erasures of one model, and write the whole model.

    W = W_0 + sum of weight x (W_run - W_0). The runs were trained separately, so evaluate the
    merged model.

    [bold]Examples[/bold]

      concept-eraser merge runs/star runs/moon -o runs/both

      concept-eraser merge runs/star runs/moon --weights 1,0.5 -o runs/both

      concept-eraser evaluate runs/both --suite tiny_star -o runs/both-tiny_star
    """
    factors = weights_of(weights, "--weights")
    from concept_eraser import api
    from concept_eraser.utils.commands import shell_command

    result = api.merge(
        *sources, output=output, weights=factors, before=before, allow_pickle=allow_pickle
    )
    lengths = ", ".join(f"{length:.3g}" for length in result.lengths)
    typer.echo(
        f"written: {result.path}; changes of length {lengths} add up to {result.length:.3g} (if "
        f"orthogonal: {result.apart:.3g}) in {result.tensors} tensors"
    )
    words = [result.path, "--before", result.before, "--suite", "SUITE"]
    # a merged folder is no run, so each evaluation needs a folder of its own
    words += ["--output", f"{result.path}-SUITE", *permissions(allow_pickle=allow_pickle)]
    evaluate_command = shell_command("evaluate", *words)
    typer.echo(f"next: {evaluate_command}    (once per concept, with its suite for SUITE)")
