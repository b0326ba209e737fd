"""concept-eraser evaluate, concept-eraser compare"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from concept_eraser.utils import distributed, limits
from concept_eraser.utils.errors import UserError


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help=(
                "what to measure: a run folder, a diffusers folder, a hub id; or a LoRA, "
                "denoiser or text encoder, with --before"
            )
        ),
    ],
    suite: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "evaluation suite by name or file (default: the suite.yaml in the run folder, or "
                "the suite with the name of its forget set); see `concept-eraser list suites`"
            )
        ),
    ] = None,
    before: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "the original model (default: the one that the run's recipe names; without a "
                "recipe tiny-sd, for models of its architecture only)"
            )
        ),
    ] = None,
    n: Annotated[
        Optional[int],
        typer.Option(
            "-n",
            min=2,
            max=limits.IMAGES,
            help="largest number of images per group (default: the suite's numbers)",
        ),
    ] = None,
    second_judge: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "label the images by a second judge too, such as tiny2, and report where the two "
                "judges differ (default: the suite's second judge, if it has one)"
            )
        ),
    ] = None,
    guard: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "sample under a safeguard, kind:text: negative:, sld-weak:, sld-medium:, "
                "sld-strong:, sld-max:, adavd:, adavd-adaptive:, safree:, safree-validated:, "
                "semantic-surgery:, or spm-gate:, spm-gate-clip: and spm-gate-tokens: with "
                "CONCEPT@RUN"
            )
        ),
    ] = None,
    control: Annotated[
        Optional[list[str]],
        typer.Option(
            help=(
                "a model that never learned the concept; the result shows how far the erased model "
                "is from it; may be given several times, for several training seeds"
            )
        ),
    ] = None,
    output: Annotated[
        Optional[Path],
        typer.Option(
            "--output",
            "-o",
            help=(
                "folder of evaluation.json and report.html (default: the run folder, or "
                "evaluations/SUITE in it if it holds the evaluation of another suite; for other "
                "models evaluation, which must not hold that of another model)"
            ),
        ),
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle", help="also load weights stored as pickles, which can execute code"
        ),
    ] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help=(
                "labelled data: call a model that the run's recipe names as package.module:function"
            ),
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:
    """Measure an erased model against the original on the same prompts and seeds. Write the numbers
    and a report.

    [bold]Examples[/bold]

      concept-eraser evaluate runs/tiny_star_munba

      concept-eraser evaluate ./somebodys-erased-sd --before tiny-sd --suite tiny_star -n 100
      --output check

      concept-eraser evaluate somebodys_lora.safetensors --before tiny-sd --suite tiny_star

      concept-eraser evaluate runs/heart --control tiny-sd-without-heart
    """
    from concept_eraser import api
    from concept_eraser.reporting.write import is_labelled

    if is_labelled(model):
        if second_judge is not None:
            raise UserError(
                f"{model} is a run on labelled data, which is measured without a judge; leave out "
                "--second-judge"
            )
        folder = output or Path(model)
        controls: Any = control or None
        numbers = api.evaluate(
            model,
            suite,
            before=before,
            n=n,
            guard=guard,
            control=controls,
            output=folder,
            allow_pickle=allow_pickle,
            allow_code=allow_code,
        )
        if distributed.is_first():
            _show_labelled(numbers)
            typer.echo(f"numbers: {folder / 'evaluation.json'}")
        return
    evaluation, folder = evaluate_run(
        model,
        suite,
        before=before,
        n=n,
        second_judge=second_judge,
        guard=guard,
        control=control,
        output=output,
        allow_pickle=allow_pickle,
        quiet=quiet,
    )
    if not distributed.is_first():
        return
    summarise(evaluation)
    if output is None and not guard and folder not in (Path(model), Path("evaluation")):
        other = Path(model) / "evaluation.json"
        typer.echo(f"{other} is of another suite and was not replaced")
    typer.echo(f"numbers: {folder / 'evaluation.json'}\nreport:  {folder / 'report.html'}")


def evaluate_run(
    model: str | Path,
    suite: str | Path | None = None,
    *,
    before: str | None = None,
    n: int | None = None,
    second_judge: str | None = None,
    guard: str | None = None,
    control: list[str] | None = None,
    output: Path | None = None,
    allow_pickle: bool = False,
    quiet: bool = False,
) -> tuple[Any, Path]:
    """Evaluate a model, and write evaluation.json and report.html.

    Only the first of several processes writes.

    Args:
        model: As in `evaluate`, like the other arguments.
        suite: The suite; None for the run's own.
        before: The original model.
        n: The largest number of images of a group.
        second_judge: A second judge, in place of the suite's.
        guard: A safeguard while sampling.
        control: Models that never learned the concept.
        output: The folder of the results. None for the run folder, or a folder in it.
        allow_pickle: Also load pickled weights.
        quiet: Show no progress bars.

    Returns:
        The evaluation, and the folder of its files.

    Raises:
        UserError: As `api.evaluate`. Or the folder holds an evaluation of other models or by
            another suite. A run folder may hold one that compares with another original model.
    """
    from concept_eraser import api
    from concept_eraser.cli.progress_bars import bars
    from concept_eraser.cli.threads import use_idle_cores
    from concept_eraser.evaluation import suite as suites
    from concept_eraser.reporting import run_results
    from concept_eraser.runs import suite_matching
    from concept_eraser.storage import output_folder
    from concept_eraser.storage.base_model import BUNDLED

    # an evaluation under a safeguard does not belong to the run
    is_run = (Path(model) / "recipe.yaml").is_file() and not guard
    run = Path(model) if is_run else None
    # results go into run folders only, not into other people's model folders
    folder, inside = output or Path("evaluation"), None
    protocol = suites.load(suite or suite_matching.suite_of(model))
    if run is not None and output is None:
        name = Path(suite).stem if suite else "_".join(protocol.concept.values())
        folder, inside = run_results.place_for(run, protocol, name), run
    use_idle_cores()
    first = distributed.is_first()
    names = ("evaluation.json", "evaluation.csv.xz", "report.html")
    lock = output_folder.results(folder, "evaluation", names, inside=inside)
    with lock if first else nullcontext():
        if inside is None:
            recipe = suite_matching.recipe_of(model)
            run_results.require_same(
                folder,
                protocol,
                before=before or (recipe.model if recipe else BUNDLED),
                after=str(model),
                guard=guard,
            )
        elif before is not None:
            run_results.require_same_original(folder, before)
        if first and not control:
            _tell_lost_controls(folder)
        with bars(quiet) as progress:
            evaluation = api.evaluate(
                model,
                suite or suite_matching.suite_of(model),
                before=before,
                second_judge=second_judge,
                n=n,
                guard=guard,
                control=control or None,
                allow_pickle=allow_pickle,
                progress=progress,
            )
        if first:
            output_folder.claim(folder, "evaluation", inside=inside)
            evaluation.save(folder / "evaluation.json")
            evaluation.save_outcomes(folder / "evaluation.csv.xz")
            api.report(evaluation, folder / "report.html", run=run)
    return evaluation, folder


def _tell_lost_controls(folder: Path) -> None:
    """Print a note if the evaluation in a folder has controls, which a new one without replaces."""
    from concept_eraser.reporting.run_results import read_record

    recorded = read_record(folder, "evaluation.json").get("control")
    names = recorded.get("models") if isinstance(recorded, dict) else None
    if names:
        typer.echo(
            f"note: {folder / 'evaluation.json'} compares with {', '.join(map(str, names))}; this "
            "evaluation replaces it and has no --control",
            err=True,
        )


def _show_labelled(evaluation: Any) -> None:
    """Print a table of the numbers on labelled data."""
    from rich.console import Console
    from rich.table import Table

    measurements = evaluation.measurements
    table = Table(box=None, header_style="bold")
    for column in ("measure", "set", *measurements, "n"):
        table.add_column(column)
    after = measurements["after"]
    key, title, factor = "accuracy", "accuracy %", 100
    if "psnr" in after:
        key, title, factor = "psnr", "PSNR dB", 1
    for name, value in after[key].items():
        cells = [_interval(when[key][name], factor) for when in measurements.values()]
        table.add_row(title, name, *cells, str(value["n"]))
    if "table" in after:
        cells = [f"{when['table']['auc']:.2f}" for when in measurements.values()]
        table.add_row("MIA AUC", "", *cells, "")
    for name in after.get("membership", {}):
        rates = [when["membership"][name] for when in measurements.values()]
        cells = [f"{rate['mia']:.1f} ({rate['attack']:.0f})" for rate in rates]
        table.add_row("MIA %", name, *cells, "")
    Console(markup=False, emoji=False).print(table)
    if evaluation.too_few:
        typer.echo(f"fewer than two examples, so left out: {', '.join(evaluation.too_few)}")
    for name, reason in evaluation.refused.items():
        typer.echo(f"not measured: {name}: {reason}")
    if "table" in after:
        typer.echo(
            "MIA: share of forgotten examples that a membership attack classifies as "
            "non-members (in brackets its accuracy on\nmembers and test examples; 50 is "
            "chance). AUC: forgotten examples against test examples of the same classes; 0.5 "
            "is chance."
        )


def _interval(value: Any, factor: int) -> str:
    low, high = factor * value["low"], factor * value["high"]
    return f"{factor * value['value']:.1f} [{low:.1f}, {high:.1f}]"


def summarise(evaluation: Any) -> None:
    """Print the numbers of the groups as a table, and the verdict."""
    from rich.console import Console
    from rich.table import Table

    from concept_eraser.evaluation.base import is_share
    from concept_eraser.evaluation.statistics import interval_text
    from concept_eraser.reporting.single_run import verdict

    table = Table(box=None, header_style="bold")
    for column in ("metric", "group", "before", "after", "n"):
        table.add_column(column, no_wrap=column == "metric")
    for result in evaluation.results:
        if ":" in result.group:
            continue
        percent = is_share(result.metric)
        cells = [interval_text(value, percent) for value in (result.before, result.after)]
        title = result.metric + (" %" if percent else "")
        table.add_row(title, result.group, *cells, str(result.after.n))
    console = Console(markup=False, emoji=False)
    console.print(table)
    if evaluation.second_opinion is not None:
        attribute = next(iter(evaluation.suite.concept))
        for row in evaluation.second_opinion.agreements:
            if row.group == "all" and row.attribute == attribute:
                share, kappa = row.texts()
                console.print(
                    f"two judges agree on the {attribute}, {row.stage}: {share} %, kappa {kappa}",
                    highlight=False,
                    soft_wrap=True,
                )
    for name, reason in evaluation.refused.items():
        console.print(f"not measured: {name}: {reason}", highlight=False, soft_wrap=True)
    console.print(verdict(evaluation), highlight=False, style="bold", soft_wrap=True)
    if evaluation.control is not None:
        _show_gap(evaluation.control)


def _show_gap(gap: Any) -> None:
    """Print how far the erased model is from the models that never learned the concept."""
    from rich.console import Console
    from rich.table import Table

    from concept_eraser.reporting.control_tables import gap_tables

    console = Console(markup=False, emoji=False)
    for name in gap.models:
        console.print(f"control: {name}", highlight=False, soft_wrap=True)
    for rows in gap_tables(gap.as_dict()):
        table = Table(title=rows.title, title_justify="left", box=None, header_style="bold")
        for column in rows.columns:
            table.add_column(column)
        for row in rows.rows:
            table.add_row(*row)
        console.print(table)
    for name, reason in gap.refused.items():
        console.print(f"not measured: {name}: {reason}", highlight=False, soft_wrap=True)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="evaluation.json or attack.json files, or the folders that hold them"),
    ],
) -> None:
    """Compare the numbers of several models side by side. If their protocols differ, say how.

    [bold]Example[/bold]

      concept-eraser compare runs/tiny_star_munba runs/tiny_star_esd
    """
    from rich.console import Console
    from rich.table import Table

    from concept_eraser.reporting import compare as comparing
    from concept_eraser.reporting import run_results

    if len(runs) < 2:
        raise UserError("give at least two evaluations or attacks to compare")
    evaluations = [comparing.read(path) for path in runs]
    contents = {str(path): content for path, content in evaluations}
    if len(contents) < len(runs):
        raise UserError("one of the files is given twice")
    grid = Table(box=None, header_style="bold")
    paths = [path for path, _ in evaluations]
    folders = [path.parent for path in paths]
    one_each = len({folder.resolve() for folder in folders}) == len(folders)
    for column in ("", *run_results.names_of(folders if one_each else paths)):
        grid.add_column(column)
    for row in comparing.table(contents):
        grid.add_row(*row)
    Console(markup=False, emoji=False).print(grid)
