"""Run small problems that the papers used, as results of the study `papers`
(studies/result_tables.py).

    python -m studies.paper_problems [--only eq24,mini_unlearning] [--seeds 0,1,2]

`python -m studies.render_results` renders eval/results/papers.md and its figure. All problems take
about five minutes on one core.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time

from concept_eraser.utils import provenance
from studies.result_tables import Results

PROBLEMS = ("eq24", "hyper_cleaning", "natural_gradient", "mini_unlearning", "curvature_cost")
STUDY = "papers"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PROBLEMS))
    parser.add_argument("--seeds", default="0,1,2")
    args = parser.parse_args()
    seeds = [int(s) for s in args.seeds.split(",")]
    for name in args.only.split(","):
        if name not in PROBLEMS:
            print(f"unknown problem {name!r}; available: {', '.join(PROBLEMS)}", file=sys.stderr)
            return 2
        problem = importlib.import_module(f"studies.papers.{name}")
        start = time.monotonic()
        Results(STUDY)[name] = {
            "problem": name,
            "about": " ".join((problem.__doc__ or "").split()),
            "seeds": seeds,
            **problem.run(seeds),
            "environment": provenance.describe(),
        }
        print(f"{name}: {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
