"""Run small problems that the papers used, as results of the study `papers`
(studies/result_tables.py).

    python -m studies.paper_problems [--only eq24,mini_unlearning] [--seeds 0,1,2] [--seconds 600]
    python -m studies.paper_problems --only ngd_tradeoff --data mnist:data
    python -m studies.paper_problems --only hyper_cleaning --data mnist:data,fashion_mnist:fashion

`python -m studies.render_results` renders eval/results/papers.md and its figure. A problem with
`run` is measured at once. A problem with `cells` is measured run by run: finished runs are not
computed again, and `--seconds` says when no further run begins. A finished run that the problem's
`is_current` refuses, such as one with an earlier grid, is computed again and never summarised.

The problems of OTHER_DATA run on scikit-learn's digits, or on the sources of `--data`
(studies/papers/samples.py). Their results then have the name of the data too. hyper_cleaning and
bilevel_cleaning take one source or two.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from typing import Any

from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from studies.papers.samples import kind_of
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
# the problems with other data, and the largest number of sources
OTHER_DATA = {
    "hyper_cleaning": 2,
    "bilevel_cleaning": 2,
    "mini_unlearning": 1,
    "mini_table": 1,
    "ngd_time": 1,
    "ngd_tradeoff": 1,
}
STUDY = "papers"


def measure(
    problem: Any, name: str, seeds: list[int], seconds: float, sources: tuple[str, ...] = ()
) -> dict[str, Any] | None:
    """Return the result of a problem, or of its finished runs; None if no run is finished.

    Args:
        problem: Its module.
        name: The name of its result.
        seeds: The seeds.
        seconds: After them no further run begins.
        sources: The data, in place of the problem's own.
    """
    data = (sources,) if sources else ()
    if not hasattr(problem, "cells"):
        result: dict[str, Any] = problem.run(seeds, *data)
        return result
    runs, begin, left = Results(f"{STUDY}/{name}"), time.monotonic(), 0
    is_current = getattr(problem, "is_current", lambda run: True)
    for key, compute in problem.cells(seeds, *data).items():
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
    parser.add_argument("--data", default="", help="sources in place of digits, e.g. mnist:data")
    args = parser.parse_args()
    sources = tuple(source for source in args.data.split(",") if source)
    try:
        kinds = [kind_of(source) for source in sources]
    except ValueError as error:
        parser.error(f"--data: {error}")
    seeds = [int(s) for s in args.seeds.split(",")]
    for name in args.only.split(","):
        if name not in PROBLEMS:
            print(f"unknown problem {name!r}; available: {', '.join(PROBLEMS)}", file=sys.stderr)
            return 2
        if len(sources) > OTHER_DATA.get(name, 0):
            print(
                f"--data: {name} takes {OTHER_DATA.get(name, 0)} sources; give --only with some of "
                f"{', '.join(OTHER_DATA)}",
                file=sys.stderr,
            )
            return 2
        key = "_".join([name, *kinds])
        problem = importlib.import_module(f"studies.papers.{name}")
        start = time.monotonic()
        try:
            result = measure(problem, key, seeds, args.seconds, sources=sources)
        except UserError as error:  # such as missing files of a source
            print(f"error: {error}", file=sys.stderr)
            return 2
        if result is None:
            continue
        Results(STUDY)[key] = {
            "problem": name,
            "about": " ".join((problem.__doc__ or "").split()),
            "seeds": seeds,
            **result,
            "environment": provenance.describe(),
        }
        print(f"{key}: {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
