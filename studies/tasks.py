"""The command line of a study with tasks and methods, and one result for each task.

A call for some methods leaves the rows of the others as they are.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from concept_eraser.evaluation.suite import dumps
from studies.result_tables import Results

# study, task, methods, work folder -> its content
RunTask = Callable[[dict, str, list[str], Path], dict[str, Any]]


def main(doc: str | None, run_task: RunTask) -> None:
    """Read the command line and run the tasks.

    The rows of a task have the order of the study. Rows without a method come first.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--tasks", default="", help="only these, by name")
    parser.add_argument("--methods", default="", help="only these, by name")
    args = parser.parse_args()
    study = yaml.safe_load(args.study.read_text())
    selection = {
        key: parse_names(parser, key, getattr(args, key), study[key])
        for key in ("tasks", "methods")
    }
    results = Results(args.study.stem)
    for name in selection["tasks"]:
        previous = others_of(results.get(name, {"rows": []}), study, selection["methods"])
        if differing := differing_settings(previous, study):
            parser.error(
                f"--methods: the stored rows of {name} have other settings "
                f"({', '.join(differing)}); run all methods"
            )
        with tempfile.TemporaryDirectory() as work:
            rows = run_task(study, name, selection["methods"], Path(work))
        results[name] = {
            **rows,
            "rows": merge_rows(
                rows_with_environment(previous), rows_with_environment(rows), list(study["methods"])
            ),
            "failed": {**previous.get("failed", {}), **rows.get("failed", {})},
        }


def others_of(
    content: dict[str, Any], study: dict[str, Any], methods: Sequence[str]
) -> dict[str, Any]:
    """Return a stored result without the rows and the failures of methods that run again."""
    labels = {study["methods"][name]["label"] for name in methods}
    failures = content.get("failed", {})
    return {
        **content,
        "rows": [row for row in content["rows"] if row["method"] not in methods],
        "failed": {label: why for label, why in failures.items() if label not in labels},
    }


def differing_settings(content: dict[str, Any], study: dict[str, Any]) -> list[str]:
    """Return the stored settings that the study does not have any more.

    The result is [] if no row of a method of the study is stored.
    """
    if not any(row["method"] in study["methods"] for row in content["rows"]):
        return []
    settings = {"seeds": content["seeds"], **content["settings"]}
    return [key for key, value in settings.items() if value != json.loads(dumps(study.get(key)))]


def rows_with_environment(content: dict[str, Any]) -> list[dict]:
    """Return the rows of a task, each with the environment of its call."""
    return [{"environment": content["environment"], **row} for row in content["rows"]]


def merge_rows(old: list[dict], new: list[dict], methods: list[str]) -> list[dict]:
    """Return new rows in place of old ones of the same method, in the order of the study."""
    rows = {row["method"]: row for row in [*old, *new]}
    first = [name for name in rows if name not in methods]  # original, retrain
    return [rows[name] for name in [*first, *methods] if name in rows]


def parse_names(
    parser: argparse.ArgumentParser, key: str, text: str, choices: Collection[str]
) -> list[str]:
    """Return the names of an option, separated by commas; all choices if it is empty."""
    names = [name for name in text.split(",") if name] or list(choices)
    unknown_names = [name for name in names if name not in choices]
    if unknown_names:
        parser.error(f"--{key}: the study has no {unknown_names[0]!r}; it has {', '.join(choices)}")
    return names
