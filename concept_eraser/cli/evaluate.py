"""concept-eraser evaluate, concept-eraser compare"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from concept_eraser import limits, ranks
from concept_eraser.errors import UserError


def evaluate(
    model: Annotated[str, typer.Argument(help="what to measure: a run folder, a diffusers folder, a hub id; or a LoRA, denoiser or text encoder, with --before")],
    suite: Annotated[Optional[str], typer.Option(help="evaluation suite by name or file (default: the one named like the run's forget set); see `concept-eraser list suites`")] = None,
    before: Annotated[Optional[str], typer.Option(help="the model before (default: the one the run's recipe names)")] = None,
    n: Annotated[Optional[int], typer.Option("-n", min=2, max=limits.IMAGES, help="at most so many pictures a group")] = None,
    guard: Annotated[Optional[str], typer.Option(help="sample under a safeguard, kind:text: negative:, sld-weak:, sld-medium:, sld-strong: or sld-max:")] = None,
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="folder of evaluation.json and report.html (default: the run folder; evaluations/SUITE in it where it holds another suite's)")] = None,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="also load weights stored as pickles, which can execute code")] = False,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="labelled data: call a model that the run's recipe names as package.module:function")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:  # fmt: skip
    """Measure a model against the one before it, on the same prompts and seeds; write numbers and a report.

    [bold]Examples[/bold]

      concept-eraser evaluate runs/tiny_star_munba

      concept-eraser evaluate ./somebodys-erased-sd --before tiny-sd --suite tiny_star -n 100 --output check

      concept-eraser evaluate somebodys_lora.safetensors --before tiny-sd --suite tiny_star
    """
    from concept_eraser import api, matching
    from concept_eraser.cli.show_progress import bars
    from concept_eraser.evaluation import entries
    from concept_eraser.evaluation import suite as suites
    from concept_eraser.reporting import is_labelled
    from concept_eraser.storage import output_folder

    ours = (Path(model) / "recipe.yaml").is_file() and not guard  # a safeguard is no part of the run
    run = Path(model) if ours else None
    if is_labelled(Path(model)):
        if suite or n:
            raise UserError(f"{model} erased from labelled data, which no suite of prompts measures; leave out --suite and -n")  # fmt: skip
        _measure(Path(model), before, output or Path(model), allow_code)
        return
    folder, inside = output or Path("evaluation"), None  # nobody else's folder is written to
    if run is not None and output is None:
        protocol = suites.load(suite or matching.suite_of(model))
        folder, inside = entries.place_for(run, protocol, Path(suite).stem if suite else "_".join(protocol.concept.values())), run  # fmt: skip
    first = ranks.is_first()  # of several processes one writes
    names = ("evaluation.json", "report.html")
    with output_folder.results(folder, "evaluation", names, inside=inside) if first else nullcontext():
        with bars(quiet) as progress:
            found = api.evaluate(model, suite, before=before, n=n, guard=guard, allow_pickle=allow_pickle, progress=progress)  # fmt: skip
        if not first:
            return
        output_folder.claim(folder, "evaluation", inside=inside)
        found.save(folder / "evaluation.json")
        path = api.report(found, folder / "report.html", run=run)
    summarise(found)
    if inside is not None and folder != run:
        typer.echo(f"{inside / 'evaluation.json'} is of another suite and stays; this one is kept beside it")
    typer.echo(f"numbers: {folder / 'evaluation.json'}\nreport:  {path}")


def _measure(run: Path, before: str | None, folder: Path, allow_code: bool) -> None:
    """Accuracies and membership attack of a run on a classifier or CLIP model, or what a VAE still reconstructs."""
    from concept_eraser import measuring
    from concept_eraser.storage import output_folder

    with output_folder.results(folder, "evaluation", ["evaluation.json"]):
        found = measuring.measure(run, before=before, allow_code=allow_code)
        output_folder.claim(folder, "evaluation")
        measuring.save(found, folder / "evaluation.json")
    _show_measured(found)
    typer.echo(f"numbers: {folder / 'evaluation.json'}")


def _show_measured(found: Any) -> None:
    """A table of what labelled data say."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in ("measure", "set", *found["results"], "n"):
        table.add_column(column)
    shown = found["results"]["after"]
    key, title, factor = ("psnr", "PSNR dB", 1) if "psnr" in shown else ("accuracy", "accuracy %", 100)
    for name, one in shown[key].items():
        cells = [when[key][name] for when in found["results"].values()]
        table.add_row(title, name, *(f"{factor * c['value']:.1f} [{factor * c['low']:.1f}, {factor * c['high']:.1f}]" for c in cells), str(one["n"]))  # fmt: skip
    if "table" in shown:
        table.add_row("MIA AUC", "", *(f"{when['table']['auc']:.2f}" for when in found["results"].values()), "")
    for name in shown.get("membership", {}):
        cells = [when["membership"][name] for when in found["results"].values()]
        table.add_row("MIA %", name, *(f"{c['mia']:.1f} ({c['attack']:.0f})" for c in cells), "")
    Console().print(table)
    if found["too_few"]:
        typer.echo(f"fewer than two examples, so left out: {', '.join(found['too_few'])}")
    if "table" in shown:
        typer.echo("MIA: share of forgotten examples that a membership attack calls non-members (its own accuracy on\nmembers and test examples; 50: it knows nothing); AUC: forgotten against test examples of their classes, 0.5: no trace.")  # fmt: skip


def summarise(found: Any) -> None:
    """The verdict and a table of the groups' numbers."""
    from rich.console import Console
    from rich.table import Table

    from concept_eraser.evaluation.base import is_share
    from concept_eraser.evaluation.report import show, verdict

    table = Table(box=None, header_style="bold")
    for column in ("metric", "group", "before", "after", "n"):
        table.add_column(column, no_wrap=column == "metric")
    for result in found.results:
        if ":" in result.group:
            continue
        percent = is_share(result.metric)
        table.add_row(result.metric + (" %" if percent else ""), result.group, show(result.before, percent), show(result.after, percent), str(result.after.n))  # fmt: skip
    console = Console()
    console.print(table)
    for name, reason in found.refused.items():
        console.print(f"not measured: {name}: {reason}", highlight=False, soft_wrap=True)
    console.print(verdict(found), highlight=False, style="bold", soft_wrap=True)


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="evaluation.json or attack.json files, or the folders that hold them")
    ],
) -> None:
    """Put the numbers of several models side by side, if they were measured by one protocol; else say what differs.

    [bold]Example[/bold]

      concept-eraser compare runs/tiny_star_munba runs/tiny_star_esd
    """
    from rich.console import Console
    from rich.table import Table

    from concept_eraser.evaluation import compare as comparing

    if len(runs) < 2:
        raise UserError("give at least two evaluations or attacks to compare")
    read = [comparing.read(path) for path in runs]
    contents = {str(path): content for path, content in read}
    if len(contents) < len(runs):
        raise UserError("one of the files is given twice")
    shown = Table(box=None, header_style="bold")
    for column in ("", *(path.parent.name or str(path) for path, _ in read)):
        shown.add_column(column)
    for row in comparing.table(contents):
        shown.add_row(*row)
    Console().print(shown)
