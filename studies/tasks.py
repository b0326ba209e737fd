"""The command line of a study with tasks and methods, and one result for each task.

A call for some methods leaves the rows of the others as they are.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

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
        with tempfile.TemporaryDirectory() as work:
            rows = run_task(study, name, selection["methods"], Path(work))
        previous = results.get(name, {"rows": []})
        results[name] = {
            **rows,
            "rows": merge_rows(
                rows_with_environment(previous), rows_with_environment(rows), list(study["methods"])
            ),
        }


def rows_with_environment(content: dict[str, Any]) -> list[dict]:
    """Return the rows of a task, each with the environment of its call."""
    return [{"environment": content["environment"], **row} for row in content["rows"]]


def merge_rows(old: list[dict], new: list[dict], methods: list[str]) -> list[dict]:
    """Return new rows in place of old ones of the same method, in the order of the study."""
    rows = {row["method"]: row for row in [*old, *new]}
    first = [name for name in rows if name not in methods]  # original, retrain
    return [rows[name] for name in [*first, *methods] if name in rows]


def parse_names(parser: argparse.ArgumentParser, key: str, text: str, choices: dict) -> list[str]:
    """Return the names of an option, separated by commas; all choices if it is empty."""
    names = text.split(",") if text else list(choices)
    unknown_names = [name for name in names if name not in choices]
    if unknown_names:
        parser.error(f"--{key}: the study has no {unknown_names[0]!r}; it has {', '.join(choices)}")
    return names
