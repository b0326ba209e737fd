"""The measurements of a run as the hub's evaluation results.

A model repository has its results in .eval_results/*.yaml. Each result names a dataset repository,
the benchmark, and a task that this dataset's eval.yaml defines. Both definitions are in the hub's
documentation, https://huggingface.co/docs/hub/eval-results, here as of 2026-08-22. This module
writes no field that they do not have.

A task is one metric on one group of prompts under one protocol. Its name has the beginning of the
protocol's hash, so a leaderboard never mixes protocols. The definitions have no direction of a
metric, so `notes` says which is better. eval.yaml has no `evaluation_framework`: the hub's list of
frameworks does not have this package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from concept_eraser.exporting import card_results
from concept_eraser.models import hub
from concept_eraser.recipes import recipe as recipes
from concept_eraser.reporting import run_results
from concept_eraser.utils.errors import UserError

FOLDER = ".eval_results"  # of a model repository
BENCHMARK = "eval.yaml"  # of a dataset repository
RECORDS = "concept_eraser"  # the folder of a model repository with the run's records
_HASH = 8  # digits of a protocol's hash in the name of a task


@dataclass(frozen=True)
class Measurement:
    """One number of a run.

    Attributes:
        task: The name of its task in the benchmark.
        value: The number.
        notes: Number of images, interval, direction, judge and protocol.
        record: The file of the model repository that has the number.
    """

    task: str
    value: float
    notes: str
    record: str


def measurements(run: Path) -> dict[str, list[Measurement]]:
    """Read the numbers of a run, by the name of the suite.

    The suite's name is that of the evaluation's folder. The run's own evaluation has the concept as
    its name. An attack has the name of the first evaluation of its concept, else its concept.
    Numbers of a part of a group are left out. Numbers on labelled data are left out too, because
    they have no protocol.

    Raises:
        UserError: A file of the run is damaged.
    """
    recipe = recipes.load_run(run)
    results = card_results.read(run, recipe)
    by_suite: dict[str, list[Measurement]] = {}
    suites: dict[str, str] = {}
    for evaluation in results.evaluations:
        if "protocol" not in evaluation:
            continue
        record, suite = _record(run, evaluation)
        suites.setdefault(_concept(evaluation), suite)
        for one in _of_evaluation(evaluation, suite, record):
            by_suite.setdefault(suite, []).append(one)
    for label, attack in results.attacks.items():
        concept = _concept(attack)
        suite = suites.get(concept, concept or "attacks")
        measurement = _of_attack(attack, suite, label)
        if measurement is not None:
            by_suite.setdefault(suite, []).append(measurement)
    return by_suite


def model_files(run: str | Path, benchmark: str, *, source: str | None = None) -> dict[str, str]:
    """Return the files .eval_results/*.yaml of a run's model repository, one for each suite.

    Args:
        run: The run folder.
        benchmark: The hub id of the dataset that defines the tasks, see `benchmark_file`.
        source: The address of the repository's files, which each result then names.

    Returns:
        The text of each file, by its path in the repository.

    Raises:
        UserError: The id is wrong, a file is damaged, or the run has no number under a protocol.
    """
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    dataset = _dataset(benchmark)
    files = {}
    for suite, rows in _required(Path(run)).items():
        entries = [
            EvalResultEntry(
                dataset_id=dataset,
                task_id=row.task,
                value=round(row.value, 6),
                source_url=None if source is None else f"{source}/{row.record}",
                source_name=None if source is None else PurePosixPath(row.record).name,
                notes=row.notes,
            )
            for row in rows
        ]
        files[f"{FOLDER}/{suite}.yaml"] = yaml.safe_dump(
            eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True, width=100
        )
    return files


def benchmark_file(run: str | Path, benchmark: str) -> str:
    """Return eval.yaml of the dataset repository that defines the tasks of a run's numbers.

    Args:
        run: The run folder.
        benchmark: The hub id of the dataset.

    Raises:
        UserError: As `model_files`.
    """
    by_suite = _required(Path(run))
    content = {
        "name": _dataset(benchmark),
        "description": (
            "What remains of an erased concept, and what is preserved, as concept_eraser measures "
            f"it. Suites: {', '.join(by_suite)}. The name of a task is suite, beginning of the "
            "protocol's hash, metric and group of prompts."
        ),
        "tasks": [{"id": row.task} for rows in by_suite.values() for row in rows],
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)


def hub_files(run: str | Path, benchmark: str) -> dict[str, str]:
    """Return the files of both repositories: model/.eval_results/*.yaml and dataset/eval.yaml.

    Arguments and errors as `model_files`. The results name no source, because the repository of the
    model is not known.
    """
    files = {f"model/{name}": text for name, text in model_files(run, benchmark).items()}
    return {**files, f"dataset/{BENCHMARK}": benchmark_file(run, benchmark)}


def _required(run: Path) -> dict[str, list[Measurement]]:
    by_suite = measurements(run)
    if not by_suite:
        raise UserError(
            f"{run} has no number of a suite or an attack; run "
            f"`{run_results.evaluation_command(run)}` first"
        )
    return by_suite


def _dataset(benchmark: str) -> str:
    name, revision = hub.split(benchmark)
    if revision:
        raise UserError(f"{benchmark} names a revision; give the dataset as owner/name")
    return name


def _concept(results: Mapping[str, Any]) -> str:
    return _word("_".join(card_results.concept_of(results).values()))


def _word(text: str) -> str:
    """Return a text as a part of a file's name and of a task's name."""
    return re.sub(r"[^\w.]+", "-", text).strip("-.")


def _record(run: Path, evaluation: Mapping[str, Any]) -> tuple[str, str]:
    """Return the file of an evaluation in the repository, and the name of its suite."""
    own, others = run / "evaluation.json", run.glob(f"{run_results.EVALUATIONS}/*/evaluation.json")
    for path in (own, *sorted(others)):
        if card_results.content(path).get("protocol_hash") == evaluation["protocol_hash"]:
            name = _concept(evaluation) if path == own else _word(path.parent.name)
            return f"{RECORDS}/{path.relative_to(run).as_posix()}", name or "evaluation"
    raise UserError(f"{run} has changed while its evaluations were read; try again")


def _of_evaluation(evaluation: Mapping[str, Any], suite: str, record: str) -> Iterator[Measurement]:
    key = str(evaluation["protocol_hash"])
    judge = evaluation["protocol"]["judge"]
    judge_name = judge["name"] if isinstance(judge, Mapping) else judge
    for row in evaluation["results"]:
        value = run_results.interval(row["after"])
        # a name with a colon is a part of a group
        if value is None or not math.isfinite(value.value) or ":" in row["group"]:
            continue
        notes = f"{_numbers(value)}; {row['better']} is better; judge {judge_name}; protocol {key}"
        task = f"{suite}_{key[:_HASH]}_{_word(row['metric'])}_{_word(row['group'])}"
        yield Measurement(task, value.value, notes, record)


def _of_attack(attack: Mapping[str, Any], suite: str, label: str) -> Measurement | None:
    value, key = run_results.interval(attack["rates"].get("asr")), str(attack["protocol_hash"])
    if value is None or not math.isfinite(value.value):
        return None
    notes = (
        f"attack success rate, clean successes included; {_numbers(value)}; lower is better; "
        f"protocol {key}"
    )
    task = f"{suite}_{key[:_HASH]}_asr_{_word(label)}"
    # prompts that an attack found are not uploaded; the model card has its numbers
    return Measurement(task, value.value, notes, "README.md")


def _numbers(value: Any) -> str:
    bounds = f"; 95 % [{value.low:.4g}, {value.high:.4g}]" if math.isfinite(value.low) else ""
    return f"n = {value.n}{bounds}"
