"""Run a study: several recipes under one protocol, each at its best setting of a stated grid, over several seeds.

    python -m tools.study eval/studies/tiny_star.yaml [--entries munba,sum] [--seeds 0] [--work runs/studies]

For each entry every point of its grid is trained on the selection seeds and scored on a small evaluation; the best
one is trained on the reported seeds and evaluated in full. Score: retained accuracy of the concept's attribute
minus the concept's share for direct prompts. Every run is kept, so an interrupted study goes on where it stopped.
One JSON a reported run goes to eval/results/<study>/; `python -m tools.render_results` makes the tables.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from safetensors.torch import load_file

from concept_eraser import api, registry
from concept_eraser import recipe as recipes
from concept_eraser.evaluation import plots
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.suite import Evaluation, dumps

RESULTS = Path(__file__).parent.parent / "eval" / "results"


def run_one(
    entry: dict, point: dict, seed: int, suite: Any, n: int, folder: Path, watch: dict | None = None
) -> tuple[dict, Evaluation | None]:
    """Train one recipe at one point and seed, evaluate it; (its JSON, the evaluation with pictures if just made)."""
    done = folder / f"result_{n}.json"
    if done.exists():
        kept = json.loads(done.read_text())
        if kept["evaluation"].get("judge") == registry.load("judge", suite.judge)().fingerprint:
            return kept, None  # a run seen by another judge is looked at again; its pictures are cached
    asked = {**entry.get("set", {}), **point, "training.seed": seed} | ({"watch": watch} if watch else {})
    changes = [f"{k}={json.dumps(v)}" for k, v in asked.items()]
    recipe = recipes.load(entry["recipe"], changes)
    began = time.monotonic()
    run = api.erase(recipe, output=folder, resume=True)
    found = api.evaluate(run.model or erased_model(run), suite, before=recipe.model, n=n)
    result = {
        "recipe": recipe.resolved(),
        "point": point,
        "seed": seed,
        "run": json.loads((folder / "done.json").read_text()),
        "size_mb": round(size(folder) / 1e6, 2),
        "evaluation": found.as_dict(),
    }
    done.write_text(dumps(result))
    shutil.rmtree(folder / "pipeline", ignore_errors=True)  # weights.safetensors is enough to make it again
    print(f"{folder}: trained {run.seconds:.0f} s, in all {time.monotonic() - began:.0f} s, score {score(result):.3f}", flush=True)  # fmt: skip
    return result, found


def size(folder: Path) -> int:
    """Bytes of a run's result: a LoRA's factors where there are some, else the changed tensors."""
    factors = list((folder / "lora").glob("*.safetensors"))
    return sum(path.stat().st_size for path in factors or [folder / "weights.safetensors"])


def erased_model(run: api.Run) -> Any:
    """The erased model, from the changed tensors of a finished run."""
    model = api.load(run.recipe.model)
    changed = load_file(run.folder / "weights.safetensors")
    found = model.parts[run.recipe.target].load_state_dict(changed, strict=False)
    if found.unexpected_keys:
        raise SystemExit(f"{run.folder}: weights.safetensors is not of {run.recipe.target}, e.g. {found.unexpected_keys[0]}")  # fmt: skip
    return model


def _after(result: dict, metric: str, group: str) -> float:
    return next(r["after"]["value"] for r in result["evaluation"]["results"] if (r["metric"], r["group"]) == (metric, group))  # fmt: skip


def score(result: dict) -> float:
    attribute = next(iter(result["evaluation"]["protocol"]["concept"]))
    return _after(result, f"accuracy_{attribute}", "retained") - _after(result, "concept_share", "direct")


def run_entry(study: dict, name: str, entry: dict, work: Path, results: Path, seeds: list[int]) -> None:
    """Choose the entry's point, then train, evaluate and write the reported seeds that are not there yet."""
    suite = suite_of(study, entry, study.get("picture_seed"))
    judge = registry.load("judge", suite.judge)().fingerprint
    paths = {seed: results / f"{name}_seed{seed}.json" for seed in seeds}
    missing = [seed for seed, path in paths.items() if not _is_current(path, judge)]
    if not missing:
        return
    scores = _known_scores(results, name, judge) or chosen_elsewhere(study, entry, work, results, judge)
    scores = scores or select(study, name, entry, work)
    best = max(scores, key=lambda row: row["score"])["point"] if scores else {}
    for seed in missing:
        folder = work / name / f"report_{seed}"
        watch = (
            {"suite": _suite_name(study, entry), **study["watch"]}
            if "watch" in study and entry.get("watch", True)
            else None
        )
        result, found = run_one(entry, best, seed, suite, entry.get("n", study["n"]), folder, watch)
        content = {
            "entry": name,
            "label": entry.get("label", name),
            "task": entry.get("task", ""),
            "grid": scores,
            "conflict": conflict(folder / "log.jsonl"),
            "cpu_seconds": cpu_seconds(folder / "log.jsonl"),
            **result,
        }
        results.mkdir(parents=True, exist_ok=True)
        paths[seed].write_text(dumps(content))
        if found and seed == seeds[0]:
            groups = [found.groups[g] for g in ("direct", "synonyms", "retained")]
            sheet = plots.grid(_rows(groups, "before"), _rows(groups, "after"), 16, zoom=1)
            (results / f"{name}.jpg").write_bytes(smaller(sheet))


def smaller(png: bytes) -> bytes:
    """A contact sheet as JPEG: a fifth of the size, and still to be judged by eye."""
    kept = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(kept, "JPEG", quality=88, subsampling=0)
    return kept.getvalue()


def _suite_name(study: dict, entry: dict) -> str:
    return entry.get("suite", study["suite"])


def suite_of(study: dict, entry: dict, picture_seed: int | None) -> Any:
    """The entry's suite, with the study's numbers of pictures, drawing others where a seed is given."""
    suite = suites.load(_suite_name(study, entry))
    asked = study.get("pictures", {})
    sizes = {name: group.model_copy(update={"n": asked.get(name, group.n)}) for name, group in suite.groups.items()}
    suite = suite.model_copy(update={"groups": sizes})
    return suite if picture_seed is None else suite.model_copy(update={"seed": picture_seed})


def chosen_elsewhere(study: dict, entry: dict, work: Path, results: Path, judge: str) -> list[dict]:
    """The grid of the entry that this one takes its setting from: `like: entry`, or `like: study/entry`; [] if none."""
    if "like" not in entry:
        return []
    *other, name = entry["like"].split("/")
    if other:
        scores = _known_scores(RESULTS / other[0], name, judge)
        if not scores:
            raise SystemExit(f"like: {entry['like']}: eval/results holds no grid of it; run that study first")
        return scores
    return _known_scores(results, name, judge) or select(study, name, study["entries"][name], work)


def select(study: dict, name: str, entry: dict, work: Path) -> list[dict]:
    """The score of every point of the entry's grid on the selection seeds; [] where there is nothing to choose.

    Selection has training seeds and picture seeds of its own, so that nothing reported was chosen by its own pictures.
    """
    suite = suite_of(study, entry, study["select"]["picture_seed"])
    asked = {
        name: group for name, group in suite.groups.items() if name in ("direct", "retained")
    }  # what a score needs
    suite = suite.model_copy(update={"groups": asked})
    points = study["grids"][entry["grid"]] if entry.get("grid") else []
    scores = []
    for point in points:
        folder = work / name / ("select_" + "_".join(str(v) for v in point.values()))
        runs = [run_one(entry, point, s, suite, study["select"]["n"], Path(f"{folder}_{s}"))[0] for s in study["select"]["seeds"]]  # fmt: skip
        share = [_after(run, "concept_share", "direct") for run in runs]
        scores.append({"point": point, "score": sum(map(score, runs)) / len(runs), "share": share})
    return scores


def _is_current(path: Path, judge: str) -> bool:
    return path.exists() and json.loads(path.read_text())["evaluation"].get("judge") == judge


def _known_scores(results: Path, name: str, judge: str) -> list[dict]:
    """The grid of a result written earlier, perhaps on another machine."""
    known = [p for p in sorted(results.glob(f"{name}_seed*.json")) if _is_current(p, judge)]
    return json.loads(known[0].read_text())["grid"] if known else []


def conflict(path: Path) -> dict:
    """How the two gradients got on over a run, from its log; an edit in closed form has none."""
    if not path.exists():
        return {"steps": 0}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cosines = [row["cosine"] for row in rows if row.get("cosine") is not None]
    return {
        "steps": len(rows),
        "mean_cosine": sum(cosines) / len(cosines) if cosines else None,
        "share_negative": sum(c < 0 for c in cosines) / len(cosines) if cosines else None,
        "clamped": sum(row.get("clamped", 0) for row in rows),
        "degenerate": sum(row.get("degenerate", 0) for row in rows),
    }


def cpu_seconds(path: Path) -> list[float]:
    """What a run had taken after each of its steps, in seconds of its own process: other work beside it does not count."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [round(total, 2) for total in itertools.accumulate(row["cpu_seconds"] for row in rows)]


def _rows(groups: list, when: str) -> Any:
    import torch

    return torch.cat([group.pictures[when][:16] for group in groups])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--entries", default="", help="only these, by name, in this order")
    parser.add_argument("--work", type=Path, default=Path("runs/studies"))
    parser.add_argument("--seeds", default="", help="only these of the reported seeds, e.g. 0 for a first look")
    args = parser.parse_args()
    study = yaml.safe_load(args.study.read_text())
    chosen = args.entries.split(",") if args.entries else list(study["entries"])
    for name in chosen:
        entry = study["entries"][name]
        seeds = [s for s in entry.get("seeds", study["seeds"]) if not args.seeds or str(s) in args.seeds.split(",")]
        run_entry(study, name, entry, args.work / args.study.stem, RESULTS / args.study.stem, seeds)


if __name__ == "__main__":
    main()
