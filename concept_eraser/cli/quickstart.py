"""concept-eraser quickstart"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    output: Annotated[Path, typer.Option("--output", "-o", help="run folder")] = Path("runs/quickstart"),
    n: Annotated[int, typer.Option("-n", min=2, help="pictures of each prompt group")] = 96,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:
    """Erase "star" from the bundled model, measure it, and write a report: a few minutes on two cores.

    [bold]Example[/bold]

      concept-eraser quickstart
    """
    import time

    from concept_eraser import api
    from concept_eraser.cli.evaluate import summarise
    from concept_eraser.cli.show_progress import bars
    from concept_eraser.evaluation import plots

    began = time.monotonic()
    with bars(quiet) as progress:
        run = api.erase("tiny_star_munba", output=output, resume=True, command=f"concept-eraser erase tiny_star_munba --output {output}", progress=progress)  # fmt: skip
        erased = time.monotonic()
        found = api.evaluate(str(run.folder), "tiny_star", n=n, progress=progress)
    measured = time.monotonic()
    found.save(output / "evaluation.json")
    path = api.report(found, output / "report.html", run=output)
    for group in found.groups.values():
        plots.save(plots.grid(group.pictures["before"][:12], group.pictures["after"][:12], 12), output / f"grid_{group.name}.png")  # fmt: skip
    summarise(found)
    typer.echo(f"\nerasing {erased - began:.0f} s (training {run.seconds:.0f} s), measuring {measured - erased:.0f} s")
    typer.echo(f"report: {path.resolve()}")
