"""Many erasures from one table, shared among workers.

Each row is one command `concept-eraser erase`, in a process of its own. So an erasure that fails
does not stop the others, and its memory is free afterwards. The folder of the table has a run
folder for each row, and in `status/` what the command printed and how it ended. A row that is
finished is not repeated.

The rows are dealt to the workers in turn: worker 0 of 3 takes rows 0, 3, 6 and so on. Workers may
run on different machines that see one folder.
"""

from __future__ import annotations

import csv
import difflib
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from concept_eraser.recipes import overrides
from concept_eraser.storage import output_folder
from concept_eraser.storage.readers import TABLE_BYTES, read_json, read_text
from concept_eraser.storage.writers import write_bytes, write_json, write_text
from concept_eraser.utils import limits
from concept_eraser.utils.commands import shell_command
from concept_eraser.utils.errors import Interrupted, UserError, names_text, quote

COLUMNS = ("name", "concept", "recipe", "kind", "anchor", "model")
STATUS, SUMMARY = "status", "summary.csv"
INTERRUPTED = 130  # the exit code after Ctrl-C
NO_EVALUATION = "--no-evaluate"
_NAME = re.compile(r"\w[\w.-]*")
_SUMMARY_COLUMNS = (
    "name",
    "state",
    "seconds",
    "concept",
    "concept rate before",
    "concept rate after",
    "retain accuracy before",
    "retain accuracy after",
    "message",
)

State = Literal["finished", "failed", "not finished"]


@dataclass(frozen=True)
class TableJob:
    """One row of a table.

    Attributes:
        name: The name of its run folder.
        words: The arguments of `concept-eraser erase`, without the output folder.
        overrides: Of a row with a recipe, the overrides that the arguments stand for. None for
            concepts.
    """

    name: str
    words: tuple[str, ...]
    overrides: tuple[str, ...] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Share:
    """The part of a table that one worker takes.

    Attributes:
        index: The number of the worker, from 0.
        count: The number of workers.
    """

    index: int = 0
    count: int = 1

    def of(self, jobs: Sequence[TableJob]) -> list[TableJob]:
        return list(jobs[self.index :: self.count])


def read_share(text: str) -> Share:
    """Read INDEX/COUNT, such as 0/8. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise UserError(
            f"--worker: found {quote(text)}; expected INDEX/COUNT with an index from 0, e.g. 0/8"
        )
    return Share(int(match[1]), int(match[2]))


def _guess(names: Sequence[str]) -> str:
    """Return what an unknown column may mean, as the end of a message."""
    for name in names:
        if close := difflib.get_close_matches(name[:200], COLUMNS, n=1):
            return f". For {quote(name)}, did you mean {close[0]!r}?"
    return ""


def read(path: Path, model: str | None = None) -> list[TableJob]:
    """Read a table of erasures: CSV with a head line.

    The columns are those of `COLUMNS`, and settings with a dot in their names, such as
    `training.seed`. Each row has a `concept` (several are joined by `;` and erased together) or a
    `recipe`. The other columns may be empty or missing. A row without a `name` has that of its
    concepts, as in `erase`, or of its recipe.

    Args:
        path: The file.
        model: The model of rows that name none.

    Raises:
        UserError: The file is no such table. The message names the line.
    """
    reader = csv.DictReader(io.StringIO(read_text(path, TABLE_BYTES), newline=""), strict=True)
    jobs: dict[str, TableJob] = {}
    try:
        columns = [name.strip() for name in reader.fieldnames or ()]
        unknown = [name for name in columns if name not in COLUMNS and "." not in name]
        if not columns or unknown:
            raise UserError(
                f"{path}: found the columns {names_text(columns) or 'none'}; expected "
                f"{', '.join(COLUMNS)} and settings such as training.seed{_guess(unknown)}"
            )
        if twice := [name for name in columns if columns.count(name) > 1]:
            raise UserError(f"{path} has the column {quote(twice[0])} twice; remove one")
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if None in row:  # cells without a column
                raise UserError(
                    f"{place}: the row has more cells than the {len(columns)} columns; put a "
                    "text with commas into quotes"
                )
            if len(jobs) >= limits.TABLE_ROWS:
                raise UserError(f"{path} has more than {limits.TABLE_ROWS:,} rows; split it")
            values = {key.strip(): (value or "").strip() for key, value in row.items()}
            job = _job({key: value for key, value in values.items() if value}, place, model)
            if job.name in jobs:
                raise UserError(
                    f"{place}: the name {job.name!r} is in an earlier row; give one of them "
                    "another name in the column `name`"
                )
            jobs[job.name] = job
    except csv.Error as error:
        raise UserError(f"{path} is no CSV table ({str(error)[:100]}); check its quotes") from None
    if not jobs:
        raise UserError(f"{path} has no rows; add a concept or a recipe in each")
    return list(jobs.values())


def _job(values: Mapping[str, str], place: str, model: str | None) -> TableJob:
    sources = [key for key in ("concept", "recipe") if key in values]
    if len(sources) != 1:
        raise UserError(
            f"{place}: found {' and '.join(sources) or 'neither a concept nor a recipe'}; give "
            "one of the columns concept and recipe"
        )
    text = values[sources[0]]
    if sources == ["concept"]:
        from concept_eraser.concepts.plan import slugs  # it imports torch

        names = [part.strip() for part in text.split(";") if part.strip()]
        usual_name = "_".join(slugs(names))[:80]
    else:
        names, usual_name = [text], Path(text).stem
    if not names or any(part.startswith("-") for part in names):
        raise UserError(
            f"{place}: found the {sources[0]} {quote(text)}; expected a name that does not begin "
            "with -"
        )
    name = values.get("name", usual_name)
    if not _NAME.fullmatch(name) or name in (STATUS, SUMMARY):
        raise UserError(
            f"{place}: found the name {quote(name)}; expected letters, digits and ._-, to name a "
            "folder"
        )
    options = {"--kind": values.get("kind"), "--anchor": values.get("anchor")}
    options["--model"] = values.get("model", model)
    settings = [f"{key}={value}" for key, value in values.items() if "." in key]
    words = [*names, *settings]
    words += [word for flag, value in options.items() if value for word in (flag, value)]
    if sources == ["concept"]:
        return TableJob(name, tuple(words))
    anchor = options["--anchor"] and overrides.anchor(options["--anchor"])
    replaced = {"model": options["--model"], "forget.anchor": anchor}
    flags = [f"{key}={overrides.as_text(value)}" for key, value in replaced.items() if value]
    return TableJob(name, tuple(words), (*flags, *settings))


def run(
    jobs: Sequence[TableJob],
    folder: Path,
    *,
    report: Callable[[str], None],
    options: Sequence[str] = (),
) -> dict[str, State]:
    """Erase the rows that are not finished, one after the other.

    Args:
        jobs: The rows of this worker.
        folder: The folder of the table.
        report: Called with one line before and after each row.
        options: Further arguments of every command.

    Returns:
        The state of each row.

    Raises:
        Interrupted: Ctrl-C. The training of the present row saved its state.
    """
    states: dict[str, State] = {}
    for job in jobs:
        states[job.name] = state(job, folder, evaluated=NO_EVALUATION not in options)
        if states[job.name] == "finished":
            report(f"{job.name}: finished before")
            continue
        report(f"{job.name}: {shell_command('erase', *job.words)}")
        code, seconds = _run_one(job, folder, options)
        if code == INTERRUPTED:
            raise Interrupted(f"stopped in {job.name}; the same command continues there")
        states[job.name] = "finished" if code == 0 else "failed"
        message = f": {last_line(folder, job.name)}" if code else _evaluation_note(folder, job.name)
        report(f"{job.name}: {states[job.name]} after {seconds:.0f} s{message}")
    return states


def _run_one(job: TableJob, folder: Path, options: Sequence[str]) -> tuple[int, float]:
    """Run the command of a row. Returns its exit code and seconds."""
    words = [sys.executable, "-m", "concept_eraser", "erase", *job.words]
    words += ["--output", str(folder / job.name), "--resume", "--quiet", *options]
    start = time.monotonic()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate()
        code = process.returncode
    except KeyboardInterrupt:  # the terminal interrupts the command too, which saves its state
        output, _ = process.communicate()
        code = INTERRUPTED
    seconds = time.monotonic() - start
    status = folder / STATUS / job.name
    if code < 0:
        text = f"error: the process was ended by the signal {-code}"
        output += f"\n{text}{'; often there is not enough memory' if code == -9 else ''}\n".encode()
    write_bytes(status.with_name(f"{job.name}.txt"), output, overwrite=True)
    if code != INTERRUPTED:
        content = {
            "words": list(job.words),
            "code": code,
            "seconds": round(seconds, 1),
        }
        write_json(status.with_name(f"{job.name}.json"), content, overwrite=True)
    return code, seconds


def state(job: TableJob, folder: Path, *, evaluated: bool = False) -> State:
    """Return the state of a row.

    Args:
        job: The row.
        folder: The folder of the table.
        evaluated: A row with concepts is finished only if it was evaluated too.

    Raises:
        UserError: The folder has the finished run of another command.
    """
    path = folder / STATUS / f"{job.name}.json"
    if not path.is_file():
        return "not finished"
    content = read_json(path)
    if not isinstance(content, dict) or not {"words", "code"} <= content.keys():
        raise UserError(f"{path} is damaged; remove it, and the row is erased again")
    if content["code"] != 0:
        return "failed"
    if content["words"] != list(job.words):
        raise UserError(
            f"the row {job.name!r} differs from the one that was erased as {folder / job.name}; "
            f"give it another name, or remove {path} and that folder"
        )
    run_folder = folder / job.name
    if evaluated and job.overrides is None and not any(_evaluation_files(run_folder)):
        return "not finished"
    return "finished" if (run_folder / "done.json").is_file() else "not finished"


def _evaluation_files(run_folder: Path) -> Iterator[Path]:
    """Yield the evaluations in a run folder, that of the run's first suite first."""
    own = run_folder / "evaluation.json"
    if own.is_file():
        yield own
    yield from run_folder.glob("evaluations/*/evaluation.json")


def require_unchanged(jobs: Sequence[TableJob], folder: Path) -> None:
    """Check that the finished rows were erased from the present recipes and prompt files.

    Raises:
        UserError: A row, its recipe or one of its prompt files was edited since, or cannot be read.
    """
    for job in jobs:
        if state(job, folder) == "finished" and (change := _change(job, folder / job.name)):
            raise UserError(
                f"the row {job.name!r} was erased before {change}; restore the file, give the row "
                f"another name, or remove {folder / STATUS / job.name}.json and "
                f"{folder / job.name}"
            )


def _change(job: TableJob, run_folder: Path) -> str:
    """Return which file of a finished row was edited, and how; "" if none was."""
    from concept_eraser.recipes import recipe as recipes
    from concept_eraser.runs import job as erasures  # it imports torch
    from concept_eraser.utils import provenance

    recipe = erased = recipes.load_run(run_folder)
    if job.overrides is not None:
        recipe = recipes.load(job.words[0], job.overrides)
    if recipe.fingerprint != erased.fingerprint:
        keys = provenance.differences(erased.resolved(), recipe.resolved())
        return f"{job.words[0]} was edited (it differs in {', '.join(keys) or 'nothing visible'})"
    edited = erasures.edited_input(run_folder, recipe)
    return edited and f"{edited} was edited"


def last_line(folder: Path, name: str) -> str:
    """Return the last line that the command of a row printed, shortened, or ""."""
    path = folder / STATUS / f"{name}.txt"
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    texts = [line.strip() for line in lines if line.strip()]
    errors = [line for line in texts if line.startswith("error:")] or texts
    return errors[-1][:200] if errors else ""


def _evaluation_note(folder: Path, name: str) -> str:
    """Return "; not evaluated: ..." with the reason that the command of a row printed, or ""."""
    path = folder / STATUS / f"{name}.txt"
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    notes = [line.strip() for line in lines if line.startswith("not evaluated:")]
    return f"; {notes[-1][:200]}" if notes else ""


def write_summary(jobs: Sequence[TableJob], folder: Path) -> Path:
    """Write the states and measured numbers of all rows as CSV. Returns its path.

    A run has a row for each suite that measured it.
    """
    output = io.StringIO()
    writer = csv.DictWriter(output, _SUMMARY_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for job in jobs:
        writer.writerows(_summary_rows(job, folder))
    path = folder / SUMMARY
    write_text(path, output.getvalue(), overwrite=True)
    return path


def _summary_rows(job: TableJob, folder: Path) -> Iterator[dict[str, Any]]:
    common: dict[str, Any] = {"name": job.name, "state": state(job, folder)}
    record = folder / STATUS / f"{job.name}.json"
    if record.is_file():
        common["seconds"] = read_json(record).get("seconds", "")
    if common["state"] == "failed":
        common["message"] = last_line(folder, job.name)
    evaluations = [read_json(path) for path in _evaluation_files(folder / job.name)]
    for evaluation in evaluations or [{}]:
        yield {**common, **_numbers(evaluation)}


def _numbers(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return concept, concept rate and retain accuracy of an evaluation, or {}."""
    concept = evaluation.get("protocol", {}).get("concept") or {}
    numbers: dict[str, Any] = {"concept": ", ".join(map(str, concept.values()))}
    results = evaluation.get("results")  # those of labelled data are a mapping
    for result in results if isinstance(results, list) else ():
        is_rate = (result["metric"], result["group"]) == ("concept_rate", "direct")
        is_accuracy = result["metric"].startswith("accuracy") and result["group"] == "retained"
        name = "concept rate" if is_rate else "retain accuracy" if is_accuracy else None
        if name is None or f"{name} after" in numbers:
            continue
        for when in ("before", "after"):
            if result.get(when):
                numbers[f"{name} {when}"] = f"{result[when]['value']:.4f}"
    return numbers


def environments(count: int) -> list[dict[str, str]]:
    """Return the variables of each local worker: its GPU, or its part of the CPU's threads."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if torch.cuda.is_available() and gpus:
        return [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(count)]
    threads = max(1, torch.get_num_threads() // count)
    return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}] * count


def prepare(folder: Path) -> None:
    """Make the folder of the table. Raises UserError if it holds something else."""
    output_folder.claim(folder, "table", alone=True)
