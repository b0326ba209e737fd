"""Run the papers' own small problems and write what came out: eval/results/papers/<name>.json and .png.

    python -m tools.paper_problems [--only eq24,mini_unlearning] [--seeds 0,1,2]

`python -m tools.render_results` makes eval/results/papers.md of them. About five minutes on one core in all.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from concept_eraser import environment
from concept_eraser.evaluation.suite import dumps

PROBLEMS = ("eq24", "hyper_cleaning", "natural_gradient", "mini_unlearning", "curvature_cost")
FOLDER = Path(__file__).parent.parent / "eval" / "results" / "papers"


def main() -> int:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PROBLEMS))
    parser.add_argument("--seeds", default="0,1,2")
    args = parser.parse_args()
    seeds = [int(s) for s in args.seeds.split(",")]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in args.only.split(","):
        if name not in PROBLEMS:
            print(f"unknown problem {name!r}; available: {', '.join(PROBLEMS)}", file=sys.stderr)
            return 2
        problem = importlib.import_module(f"tools.papers.{name}")
        began = time.monotonic()
        result = {"problem": name, "about": " ".join((problem.__doc__ or "").split()), "seeds": seeds, **problem.run(seeds), "environment": environment.describe()}  # fmt: skip
        (FOLDER / f"{name}.json").write_text(dumps(result))
        figure, axes = pyplot.subplots(figsize=(6, 4), dpi=120, layout="constrained")
        problem.plot(result, axes)
        figure.savefig(FOLDER / f"{name}.png", metadata={"Software": None})
        pyplot.close(figure)
        print(f"{name}: {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
