"""Run small problems that the papers used, as results of the study `papers`
(studies/result_tables.py).

    python -m studies.paper_problems [--only eq24,mini_unlearning] [--seeds 0,1,2] [--seconds 600]

`python -m studies.render_results` renders eval/results/papers.md and its figure. A problem with
`run` is measured at once. A problem with `cells` is measured run by run: finished runs are not
computed again, and `--seconds` says when no further run begins. A finished run that the problem's
`is_current` refuses, such as one with an earlier grid, is computed again and never summarised.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from typing import Any

from concept_eraser.utils import provenance
from studies.result_tables import Results

PROBLEMS = (
    "eq24",
    "hyper_cleaning",
    "bilevel_eq24",
    "bilevel_cleaning",
    "bilevel_time",
    "natural_gradient",
    "ngd_time",
    "ngd_tradeoff",
    "mini_unlearning",
    "mini_table",
    "curvature_cost",
)
STUDY = "papers"


def measure(problem: Any, name: str, seeds: list[int], seconds: float) -> dict[str, Any] | None:
    """Return the result of a problem, or of its finished runs; None if no run is finished."""
    if not hasattr(problem, "cells"):
        result: dict[str, Any] = problem.run(seeds)
        return result
    runs, begin, left = Results(f"{STUDY}/{name}"), time.monotonic(), 0
    is_current = getattr(problem, "is_current", lambda run: True)
    for key, compute in problem.cells(seeds).items():
        if key in runs and is_current(runs[key]):
            continue
        if time.monotonic() - begin > seconds:
            left += 1
            continue
        runs[key] = compute()
    if left:
        print(f"{name}: {left} runs are left; run the command again")
    current_runs = {key: run for key, run in runs.items() if is_current(run)}
    return problem.summary(current_runs) if current_runs else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PROBLEMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    seeds = [int(s) for s in args.seeds.split(",")]
    for name in args.only.split(","):
        if name not in PROBLEMS:
            print(f"unknown problem {name!r}; available: {', '.join(PROBLEMS)}", file=sys.stderr)
            return 2
        problem = importlib.import_module(f"studies.papers.{name}")
        start = time.monotonic()
        result = measure(problem, name, seeds, args.seconds)
        if result is None:
            continue
        Results(STUDY)[name] = {
            "problem": name,
            "about": " ".join((problem.__doc__ or "").split()),
            "seeds": seeds,
            **result,
            "environment": provenance.describe(),
        }
        print(f"{name}: {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
