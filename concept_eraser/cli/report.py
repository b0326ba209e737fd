"""concept-eraser report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from concept_eraser.errors import UserError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="evaluated run folders: one, or several to stand side by side")],
    attacks: Annotated[Optional[list[Path]], typer.Option(help="a folder with more attacks on these runs (default: attacks/ in each run folder); may be given several times")] = None,
    suite: Annotated[Optional[str], typer.Option(help="with one run: suite to use (default: the one it was evaluated with)")] = None,
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="where to write (default: RUN/report.html; of several runs ./report.html)")] = None,
    show_sensitive: Annotated[bool, typer.Option("--show-sensitive", help="do not blur the pictures of suites about nudity or marked sensitive")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:  # fmt: skip
    """Write the HTML report of a run again, or one page about several. Pictures come from the cache, or are made again from
    their seeds.

    [bold]Examples[/bold]

      concept-eraser report runs/tiny_star_munba --output star.html

      concept-eraser report runs/tiny_star_munba runs/tiny_star_esd -o both.html
    """
    from concept_eraser import api
    from concept_eraser.cli.show_progress import bars

    somebodys = not any((runs[0] / name).is_file() for name in ("recipe.yaml", "model_index.json"))
    if len(runs) > 1 or (somebodys and suite is None and (runs[0] / "evaluation.json").is_file()):
        # a folder of numbers without a model, as of somebody's checkpoint: the page of several finds the models by their names
        if suite is not None:
            raise UserError("--suite goes with one run; several are reported as they were evaluated")
        with bars(quiet) as progress:
            where = api.overview(runs, output or "report.html", attacks=attacks or (), show_sensitive=show_sensitive, progress=progress)  # fmt: skip
    else:
        where = _single(runs[0], attacks or [], suite, output, show_sensitive, quiet)
    typer.echo(f"report: {where}")


def _single(run: Path, attacks: list[Path], suite: str | None, output: Path | None, show_sensitive: bool, quiet: bool) -> Path:  # fmt: skip
    """The report of one run, which is measured again by the suite it was evaluated with."""
    from concept_eraser import api
    from concept_eraser.cli.show_progress import bars
    from concept_eraser.evaluation import entries, pages
    from concept_eraser.evaluation import suite as suites
    from concept_eraser.reporting import require_prompted

    require_prompted(run)
    place = run if suite is None else entries.place_for(run, suites.load(suite), Path(suite).stem)
    where = output or place / "report.html"
    pages.require_ours(where)
    protocol: str | dict | None = suite
    before = None
    if protocol is None:
        content = entries.read_evaluation(run)
        before = content["models"]["before"].rsplit(" (", 1)[0]  # the original that it was measured against
        protocol = {**content["protocol"], "sensitive": content.get("sensitive", False)}
    with bars(quiet) as progress:
        found = api.evaluate(str(run), protocol, before=before, progress=progress)
        if suite is None and found.models != content["models"]:
            raise UserError(f"{run} was measured as {content['models']}, but what is there now is {found.models}; evaluate it again")  # fmt: skip
        return api.report(found, where, run=run, attacks=attacks, show_sensitive=show_sensitive, progress=progress)  # fmt: skip
