"""Record how the gradients of the forget and the retain loss lie to each other at every step of a
run: their cosine, their norms and their weights (MUNBa, arXiv 2411.15537, figure 1).

    python -m studies.conflict studies/configs/conflict.yaml [--runs paper_munba,paper_sum] [--work
    runs/conflict]
    python -m studies.conflict --logs runs/a runs/b

The first form trains each run of the configuration, and stores the numbers of its `log.jsonl` as a
result of the study `conflict` (studies/result_tables.py). Finished runs of the same recipe are not
trained again.
`python -m studies.render_results` renders the page and its figure. The second form stores nothing:
it prints the table of runs that exist, by their folders.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import api
from concept_eraser.training import log
from concept_eraser.utils import provenance
from studies.rendering import conflict as rendering
from studies.result_tables import Results
from studies.runs import clear, recipe_of, same
from studies.tasks import parse_names

OBJECTIVES = ("retain", "forget")
DIGITS = 6  # significant digits of a stored number


def steps_of(folder: Path) -> dict[str, Any]:
    """Return the cosines, norms and weights of the steps with two gradients, from a run's log.

    Args:
        folder: The run's folder.

    Returns:
        The number of all steps, and for the steps with a cosine `cosine`, `norms` and `weights`:
        lists of numbers, the last two by objective.

    Raises:
        ValueError: No step of the log has two gradients.
    """
    rows = log.read(folder / "log.jsonl")
    pairs = [
        row
        for row in rows
        if row.get("cosine") is not None
        and all(
            isinstance(row.get(kind, {}).get(objective), float)
            for kind in ("norms", "weights")
            for objective in OBJECTIVES
        )
    ]
    if not pairs:
        raise ValueError(f"{folder}: no step of log.jsonl has the gradients of both objectives")
    return {
        "steps": len(rows),
        "cosine": [_short(row["cosine"]) for row in pairs],
        **{
            kind: {
                objective: [_short(row[kind][objective]) for row in pairs]
                for objective in OBJECTIVES
            }
            for kind in ("norms", "weights")
        },
    }


def _short(value: float) -> float:
    """Return a number with a few significant digits, for a small table."""
    return float(f"{value:.{DIGITS}g}")


def measure(entry: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Train a run of the configuration with one seed, and return its result."""
    recipe = recipe_of(entry, {}, seed)
    clear(folder, recipe)
    run = api.erase(recipe, output=folder, resume=True)
    shutil.rmtree(folder / "pipeline", ignore_errors=True)  # only the log is used
    return {
        "label": entry["label"],
        "task": entry["task"],
        "seed": seed,
        "seconds": round(run.seconds, 1),
        **steps_of(folder),
        "settings": {"seed": seed, "recipe": recipe.resolved()},
        "environment": provenance.describe(),
    }


def is_current(result: dict[str, Any], entry: dict[str, Any], seed: int) -> bool:
    """Return whether a result has the recipe of a run of the configuration."""
    older = {"recipe": result["settings"]["recipe"], "entry": result["label"]}
    return same(older, recipe_of(entry, {}, seed))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--runs", default="", help="only these, by name, in this order")
    parser.add_argument("--work", type=Path, default=Path("runs/conflict"))
    parser.add_argument("--logs", type=Path, nargs="+", default=[], help="folders of runs")
    args = parser.parse_args()
    if bool(args.logs) == bool(args.config):
        parser.error("give either a configuration or --logs with the folders of runs")
    if args.logs:
        try:
            contents = [{"label": folder.name, **steps_of(folder)} for folder in args.logs]
        except (OSError, ValueError) as error:
            parser.error(str(error))
        print(rendering.distribution_table([(c["label"], [c]) for c in contents]))
        return
    study = yaml.safe_load(args.config.read_text())
    results = Results(args.config.stem)
    names = parse_names(parser, "runs", args.runs, study["runs"])
    for name in names:
        for seed in study["seeds"]:
            key = f"{name}_seed{seed}"
            if key in results and is_current(results[key], study["runs"][name], seed):
                continue
            results[key] = content = measure(study["runs"][name], seed, args.work / key)
            print(f"{key}: {content['steps']} steps, {content['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
