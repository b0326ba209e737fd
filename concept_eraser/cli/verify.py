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

    The exit code is 0 if all files are as written, else 2. Your own files are counted and not
    touched.

    [bold]Examples[/bold]

      concept-eraser verify runs/tiny_star_munba

      concept-eraser verify runs/tiny_star_munba --accept    (after a change that you made yourself)
    """
    from concept_eraser.storage import locks, manifest, output_folder

    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a run")
    states = manifest.verify(folder)
    if accept:
        with locks.hold_lock(folder, "verify"):
            accepted_files = output_folder.accept(folder)
        for name in accepted_files:
            typer.echo(f"  recorded   {name}")
        typer.echo(f"{folder}: {len(accepted_files)} of {len(states)} records are renewed")
        return
    counts = {"intact": 0, "growing": 0, "changed": 0, "missing": 0, "link": 0}
    for file in states:
        counts[file.state] += 1
        if file.state not in ("intact", "growing"):
            typer.echo(f"  {file.state:<10} {file.name}")
    other_files = len(manifest.unlisted_files(folder))
    unsealed_files = (
        f", {counts['growing']} without a digest (the run is not finished)"
        if counts["growing"]
        else ""
    )
    typer.echo(
        f"{folder}: {counts['intact']} of {len(states)} files are as "
        f"written{unsealed_files}; {other_files} other files"
    )
    mismatches = counts["changed"] + counts["missing"] + counts["link"]
    if mismatches:
        raise UserError(
            f"{mismatches} of {len(states)} files of {folder} are not as written: they are "
            "damaged, or somebody changed them. Make them again, or accept them as they are "
            "with --accept"
        )
