"""concept-eraser verify"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from concept_eraser.utils.errors import UserError


def verify(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help=(
                "a folder that concept-eraser wrote: a run, a model, an evaluation, an "
                "attack, images"
            ),
        ),
    ],
    accept: Annotated[
        bool,
        typer.Option(
            "--accept", help="record the files as they are now; later checks compare with these"
        ),
    ] = False,
) -> None:
    """Check every file of a run against the SHA-256 that was recorded when it was written.

    Exit code 0 where all are what was written, else 2. Files of your own are counted and left
    alone.

    [bold]Examples[/bold]

      concept-eraser verify runs/tiny_star_munba

      concept-eraser verify runs/tiny_star_munba --accept    (after a change that you made yourself)
    """
    from concept_eraser.storage import locks, manifest, output_folder

    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the folder of a run")
    states = manifest.verify(folder)
    if accept:
        with locks.hold_lock(folder, "verify"):
            accepted_files = output_folder.accept(folder)
        for name in accepted_files:
            typer.echo(f"  recorded   {name}")
        typer.echo(f"{folder}: {len(accepted_files)} of {len(states)} records are renewed")
        return
    words = {"intact": 0, "growing": 0, "changed": 0, "missing": 0, "link": 0}
    for one in states:
        words[one.state] += 1
        if one.state not in ("intact", "growing"):
            typer.echo(f"  {one.state:<10} {one.name}")
    other_files = len(manifest.unlisted_files(folder))
    unsealed_files = (
        f", {words['growing']} without a digest (the run is not finished)"
        if words["growing"]
        else ""
    )
    typer.echo(
        f"{folder}: {words['intact']} of {len(states)} files are what was "
        f"written{unsealed_files}; {other_files} other files"
    )
    mismatches = words["changed"] + words["missing"] + words["link"]
    if mismatches:
        raise UserError(
            f"{mismatches} of {len(states)} files of {folder} are not what was written: they "
            "are damaged, or somebody changed them. Make them again, or accept them as "
            "they are with --accept"
        )
