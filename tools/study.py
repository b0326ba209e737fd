"""Run a study: several recipes under one protocol, each at its best setting of a stated grid, over several seeds.

    python -m tools.study eval/studies/tiny_star.yaml [--entries munba,sum] [--work runs/studies]

For each entry every point of its grid is trained on the selection seeds and scored on a small evaluation; the best
one is trained on the reported seeds and evaluated in full. Score: retained accuracy of the concept's attribute
minus the concept's share for direct prompts. Every run is kept, so an interrupted study goes on where it stopped.
One JSON a reported run goes to eval/results/<study>/; `python -m tools.render_results` makes the tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import api
from concept_eraser import recipe as recipes
from concept_eraser.evaluation import plots
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.suite import Evaluation, dumps

RESULTS = Path(__file__).parent.parent / "eval" / "results"


def grid_points(grid: dict[str, list]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def run_one(entry: dict, point: dict, seed: int, suite: Any, n: int, folder: Path) -> tuple[dict, Evaluation | None]:
    """Train one recipe at one point and seed, evaluate it; (its JSON, the evaluation with pictures if just made)."""
    done = folder / f"result_{n}.json"
    if done.exists():
        return json.loads(done.read_text()), None
    changes = [f"{k}={json.dumps(v)}" for k, v in {**entry.get("set", {}), **point, "training.seed": seed}.items()]
    recipe = recipes.load(entry["recipe"], changes)
    began = time.monotonic()
    run = api.erase(recipe, output=folder, resume=True)
    found = api.evaluate(run.load(), suite, before=recipe.model, n=n)
    result = {
        "recipe": recipe.resolved(),
        "point": point,
        "seed": seed,
        "run": json.loads((folder / "done.json").read_text()),
        "evaluation": found.as_dict(),
    }
    done.write_text(dumps(result))
    shutil.rmtree(folder / "pipeline", ignore_errors=True)  # weights.safetensors is enough to make it again
    print(f"{folder}: trained {run.seconds:.0f} s, in all {time.monotonic() - began:.0f} s, score {score(result):.3f}", flush=True)  # fmt: skip
    return result, found


def _after(result: dict, metric: str, group: str) -> float:
    return next(r["after"]["value"] for r in result["evaluation"]["results"] if (r["metric"], r["group"]) == (metric, group))  # fmt: skip


def score(result: dict) -> float:
    attribute = next(iter(result["evaluation"]["protocol"]["concept"]))
    return _after(result, f"accuracy_{attribute}", "retained") - _after(result, "concept_share", "direct")


def run_entry(study: dict, name: str, entry: dict, work: Path, results: Path) -> None:
    suite = suites.load(entry.get("suite", study["suite"]))
    points = grid_points(entry.get("grid", {}))
    scores: list[dict] = []
    if len(points) > 1:
        for point in points:
            label = "_".join(f"{v}" for v in point.values())
            found = [run_one(entry, point, s, suite, study["select"]["n"], work / name / f"select_{label}_{s}")[0] for s in study["select"]["seeds"]]  # fmt: skip
            scores.append({"point": point, "score": sum(map(score, found)) / len(found), "share": [_after(f, "concept_share", "direct") for f in found]})  # fmt: skip
        best = max(scores, key=lambda row: row["score"])["point"]
    else:
        best = points[0]
    for seed in entry.get("seeds", study["seeds"]):
        n = entry.get("n", study["n"])
        result, found = run_one(entry, best, seed, suite, n, work / name / f"report_{seed}")
        log = [json.loads(line) for line in (work / name / f"report_{seed}" / "log.jsonl").read_text().splitlines()]
        cosines = [row["cosine"] for row in log if row.get("cosine") is not None]
        conflict = {"steps": len(log), "mean_cosine": sum(cosines) / len(cosines) if cosines else None, "share_negative": sum(c < 0 for c in cosines) / len(cosines) if cosines else None, "clamped": sum(row.get("clamped", 0) for row in log), "degenerate": sum(row.get("degenerate", 0) for row in log)}  # fmt: skip
        content = {"entry": name, "label": entry.get("label", name), "task": entry.get("task", ""), "grid": scores, "conflict": conflict, **result}  # fmt: skip
        results.mkdir(parents=True, exist_ok=True)
        (results / f"{name}_seed{seed}.json").write_text(dumps(content))
        if found and seed == 0:
            pairs = [found.groups[g] for g in ("direct", "synonyms", "retained")]
            sheet = plots.grid(_rows(pairs, "before"), _rows(pairs, "after"), 16, zoom=1)
            (results / f"{name}.png").write_bytes(sheet)


def _rows(groups: list, when: str) -> Any:
    import torch

    return torch.cat([group.pictures[when][:16] for group in groups])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--entries", default="", help="only these, by name, in this order")
    parser.add_argument("--work", type=Path, default=Path("runs/studies"))
    args = parser.parse_args()
    study = yaml.safe_load(args.study.read_text())
    chosen = args.entries.split(",") if args.entries else list(study["entries"])
    for name in chosen:
        run_entry(study, name, study["entries"][name], args.work / args.study.stem, RESULTS / args.study.stem)


if __name__ == "__main__":
    main()
