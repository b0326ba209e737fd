"""concept-eraser report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="evaluated run folders: one, or several to compare side by side"
        ),
    ],
    attacks: Annotated[
        Optional[list[Path]],
        typer.Option(
            help=(
                "a folder with more attacks on these runs (default: attacks/ in each run "
                "folder); may be given several times"
            )
        ),
    ] = None,
    suite: Annotated[
        Optional[str],
        typer.Option(help="suite for one run (default: the one of its evaluation)"),
    ] = None,
    control: Annotated[
        Optional[list[str]],
        typer.Option(
            help=(
                "a model that never learned the concept, for one run (default: the controls of its "
                "evaluation); may be given several times"
            )
        ),
    ] = None,
    output: Annotated[
        Optional[Path],
        typer.Option(
            "--output",
            "-o",
            help="output file (default: RUN/report.html; for several runs ./report.html)",
        ),
    ] = None,
    show_sensitive: Annotated[
        bool,
        typer.Option(
            "--show-sensitive",
            help="do not blur the images of suites about nudity or marked sensitive",
        ),
    ] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="load pickled weights (they can execute code)"),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:
    """Write the HTML report of a run again, or one page about several runs. Images come from the
    cache, or are generated again from their seeds.

    [bold]Examples[/bold]

      concept-eraser report runs/tiny_star_munba --output star.html

      concept-eraser report runs/tiny_star_munba runs/tiny_star_esd -o both.html
    """
    from concept_eraser import api
    from concept_eraser.cli.progress_bars import bars

    with bars(quiet) as progress:
        page = api.report(
            runs[0] if len(runs) == 1 else runs,
            output,
            suite=suite,
            attacks=attacks or (),
            control=control or None,
            show_sensitive=show_sensitive,
            allow_pickle=allow_pickle,
            progress=progress,
        )
    typer.echo(f"report: {page}")
