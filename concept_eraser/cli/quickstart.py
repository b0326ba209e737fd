"""concept-eraser quickstart"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Optional

import typer

from concept_eraser.utils import limits

RECIPE = "tiny_star_munba_lora"
# Fewer steps of the sampler for the training images, and fewer training steps, than the recipe has
# (12 and 100). With two seeds the concept rate, the no-object rates and the accuracies stayed the
# same within their intervals. With 50 training steps the no-object rate was 30 to 45 %.
FEWER_STEPS = ["generation.steps=6", "training.steps=80"]


def quickstart(
    overrides: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="overrides of its recipe, e.g. training.steps=20 for less time",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="run folder")] = Path(
        "runs/quickstart"
    ),
    n: Annotated[
        int, typer.Option("-n", min=2, max=limits.IMAGES, help="images of each prompt group")
    ] = 96,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:
    """Erase "star" from the bundled model, measure it, and write a report. This takes a few minutes
    on two cores.

    It uses no more threads than cores are idle. OMP_NUM_THREADS sets another number.

    [bold]Example[/bold]

      concept-eraser quickstart
    """
    import os
    import time

    from concept_eraser import api
    from concept_eraser.cli.evaluate import summarise
    from concept_eraser.cli.progress_bars import bars
    from concept_eraser.cli.threads import use_idle_cores
    from concept_eraser.evaluation.suite import dumps
    from concept_eraser.recipes.defaults import fast_precision
    from concept_eraser.reporting import write
    from concept_eraser.reporting.single_run import verdict
    from concept_eraser.storage.writers import write_text
    from concept_eraser.utils.commands import shell_command

    use_idle_cores()
    words = [RECIPE, *FEWER_STEPS, *fast_precision(), *(overrides or ())]
    was_finished = (output / "done.json").is_file()
    start = time.monotonic()
    with bars(quiet) as progress:
        run = api.erase(
            RECIPE,
            overrides=words[1:],
            output=output,
            resume=True,
            command=shell_command("erase", *words, "--output", output),
            progress=progress,
        )
        erase_end = time.monotonic()
        evaluation = api.evaluate(str(run.folder), "tiny_star", n=n, progress=progress)
    measure_end = time.monotonic()
    evaluation.save(output / "evaluation.json")
    evaluation.save_outcomes(output / "evaluation.csv.xz")
    path = api.report(evaluation, output / "report.html", run=output)
    write.save_before_after(evaluation, output / "before_after.png")
    seconds = {
        "erasing": erase_end - start,
        "training": run.seconds,
        "measuring": measure_end - erase_end,
    }
    if os.environ.get("INSTALL_SECONDS", "").isdigit():  # set by make
        seconds["installing"] = float(os.environ["INSTALL_SECONDS"])
    facts = {
        "recipe": RECIPE,
        "verdict": verdict(evaluation),
        "seconds": seconds,
        "evaluation": evaluation.as_dict(),
    }
    write_text(output / "quickstart.json", dumps(facts))
    summarise(evaluation)
    measuring = f"measuring {seconds['measuring']:.0f} s"
    installing = (
        f"; installing took {seconds['installing']:.0f} s, once" if "installing" in seconds else ""
    )
    typer.echo(f"\n{_erasing_text(seconds, was_finished)}, {measuring}{installing}")
    typer.echo(f"images: {output / 'before_after.png'}")
    typer.echo(f"report:   {path.resolve()}")


def _erasing_text(seconds: Mapping[str, float], was_finished: bool) -> str:
    """Return what the erasure took, which may have been finished or begun by an earlier call."""
    training = f"training {seconds['training']:.0f} s"
    if was_finished:
        return f"erased before ({training})"
    if seconds["erasing"] < seconds["training"]:
        return f"erasing {seconds['erasing']:.0f} s after an interruption ({training} in all)"
    return f"erasing {seconds['erasing']:.0f} s (of which {training})"
