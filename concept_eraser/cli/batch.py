"""concept-eraser batch"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from concept_eraser.utils.errors import Interrupted, UserError

WORKERS = 1024  # the most local processes


def batch(
    table: Annotated[
        Path,
        typer.Argument(
            help=(
                "CSV with a column `concept` or `recipe`, and optionally name, kind, anchor, model "
                "and settings such as training.seed"
            )
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="folder of the run folders and summary.csv")
    ],
    model: Annotated[
        Optional[str], typer.Option(help="the model of rows that name none (default: tiny-sd)")
    ] = None,
    worker: Annotated[
        Optional[str],
        typer.Option(
            metavar="INDEX/COUNT",
            help="erase only the rows of one worker, e.g. 0/8; for the job array of a scheduler",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            max=WORKERS,
            help="processes on this machine; each has its own GPU, or its part of the CPU's cores",
        ),
    ] = 1,
    measure: Annotated[
        bool,
        typer.Option(
            "--evaluate/--no-evaluate",
            help="evaluate each concept afterwards; a row with a recipe is not evaluated",
        ),
    ] = True,
    summary: Annotated[
        bool, typer.Option("--summary", help="erase nothing, only write summary.csv")
    ] = False,
) -> None:
    """Erase many concepts from a table, each into a run folder of its own.

    The same command continues where it stopped: finished rows are not repeated, and an interrupted
    training resumes. A row that fails does not stop the others. A finished row whose recipe or
    prompt file was edited since is an error. `summary.csv` has the state of every row, and the
    numbers of those that were evaluated.

    [bold]Examples[/bold]

      concept-eraser batch concepts.csv -o runs/batch

      concept-eraser batch concepts.csv --model ./my-sd15 --workers 4 -o runs/batch

      concept-eraser batch concepts.csv --worker $SLURM_ARRAY_TASK_ID/32 -o runs/batch   (in a job
      array with the indices 0 to 31)

      concept-eraser batch concepts.csv --summary -o runs/batch
    """
    from concept_eraser.runs import job_table

    if worker is not None and workers > 1:
        raise UserError("give --worker for one part of the table, or --workers for all, not both")
    share = job_table.read_share(worker) if worker is not None else job_table.Share()
    jobs = job_table.read(table, model)
    job_table.prepare(output)
    failed: list[str] = []
    if not summary:
        job_table.require_unchanged(share.of(jobs), output)
        if workers > 1:
            _run_workers(workers, table, output, model=model, measure=measure)
            states = {job.name: job_table.state(job, output, evaluated=measure) for job in jobs}
        else:
            options = [] if measure else [job_table.NO_EVALUATION]
            states = job_table.run(share.of(jobs), output, report=typer.echo, options=options)
        failed = [name for name, state in states.items() if state != "finished"]
    typer.echo(f"summary: {job_table.write_summary(jobs, output)}")
    if failed:
        raise UserError(
            f"not finished: {', '.join(failed[:10])}{' and others' if len(failed) > 10 else ''}; "
            f"{output / job_table.STATUS} has what each printed; the same command tries again"
        )


def _run_workers(
    count: int, table: Path, output: Path, *, model: str | None, measure: bool
) -> None:
    """Run this command for each worker in a process of its own, and wait for all."""
    from concept_eraser.runs import job_table

    words = [sys.executable, "-m", "concept_eraser", "batch", str(table), "--output", str(output)]
    words += ["--model", model] if model else []
    words += [] if measure else [job_table.NO_EVALUATION]
    processes = [
        subprocess.Popen([*words, "--worker", f"{index}/{count}"], env={**os.environ, **variables})
        for index, variables in enumerate(job_table.environments(count))
    ]
    try:
        for process in processes:
            process.wait()
    except KeyboardInterrupt:  # the terminal interrupts the workers too
        for process in processes:
            process.wait()
        raise Interrupted("stopped; the same command continues") from None
