"""Run a study: several recipes under one protocol, each at its best setting of a grid, over several
training seeds.

    python -m studies.study studies/configs/tiny_star.yaml [--entries munba,sum] [--seeds 0] [--work
    runs/studies]

For each entry, every setting of its grid is trained on the selection seeds and scored on a small
evaluation (studies/selection.py). The best one is trained on the reported seeds and evaluated in
full. An interrupted study continues where it stopped. Each reported run is a result of the study
(studies/result_tables.py). `python -m studies.render_results` renders the page.

A run also writes a contact sheet of its first seed. It is a figure of the page if the study's
`figures` name the entry. Otherwise it goes to <work>/<study>/<entry>/sheet.webp. `--sheets` writes
only the sheets, of existing results.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from concept_eraser import api
from concept_eraser.evaluation.suite import PromptEvaluation
from concept_eraser.reporting import plots
from studies.result_tables import Results, figure_path
from studies.runs import (
    clear,
    has_protocol,
    model_of,
    recipe_of,
    run_one,
    same,
    suite_name,
    suite_of,
)
from studies.selection import choose_grid, is_current
from studies.tasks import parse_names


def watch_of(study: dict, entry: dict) -> dict | None:
    """Return how reported runs of an entry are evaluated while they train, or None."""
    is_watched = "watch" in study and entry.get("watch", True)
    return {"suite": suite_name(study, entry), **study["watch"]} if is_watched else None


def run_entry(
    study: dict, name: str, entry: dict, work: Path, results: Results, seeds: list[int]
) -> None:
    """Choose the setting of an entry, then train and evaluate the reported seeds.

    Seeds with a result at this setting and under this protocol are left as they are.
    """
    suite, n = suite_of(study, entry, study.get("image_seed")), entry.get("n", study["n"])
    judge = suite.build_judge().fingerprint
    scores = choose_grid(study, name, entry=entry, work=work, results=results, judge=judge)
    best = max(scores, key=lambda row: row["score"])["point"] if scores else {}
    watch = watch_of(study, entry)
    for seed in seeds:
        key, folder = f"{name}_seed{seed}", work / name / f"report_{seed}"
        previous = results.get(key)
        if (
            previous is not None
            and is_current(previous, judge)
            and has_protocol(previous["evaluation"], suite, n)
            and same(previous, recipe_of(entry, best, seed, watch))
        ):
            if previous["grid"] != scores:
                results[key] = {**previous, "grid": scores}
            continue
        result, evaluation = run_one(
            entry,
            point=best,
            seed=seed,
            suite=suite,
            n=n,
            folder=folder,
            watch=watch,
        )
        results[key] = {
            "entry": name,
            "label": entry.get("label", name),
            "task": entry.get("task", ""),
            "grid": scores,
            "conflict": conflict(folder / "log.jsonl"),
            "cpu_seconds": cpu_seconds(folder / "log.jsonl"),
            **result,
        }
        if evaluation and seed == seeds[0]:
            write_sheet(evaluation, sheet_path(study, name, work, results))


def draw_sheet(study: dict, name: str, work: Path, results: Results, seed: int) -> None:
    """Write the contact sheet of an existing result.

    The model is trained again if the work folder does not have it.
    """
    entry, report, folder = (
        study["entries"][name],
        results.get(f"{name}_seed{seed}"),
        work / name / f"report_{seed}",
    )
    if report is None:
        raise SystemExit(
            f"{results.name}: there is no result {name}_seed{seed}; run the entry without --sheets"
        )
    recipe = recipe_of(entry, report["point"], seed, watch_of(study, entry))
    clear(folder, recipe)
    run = api.erase(recipe, output=folder, resume=True)
    suite = suite_of(study, entry, study.get("image_seed"))
    model = model_of(run)
    evaluation = api.evaluate(model, suite, before=recipe.model, n=entry.get("n", study["n"]))
    write_sheet(evaluation, sheet_path(study, name, work, results))
    # weights.safetensors is enough to load it again
    shutil.rmtree(folder / "pipeline", ignore_errors=True)


def sheet_path(study: dict, name: str, work: Path, results: Results) -> Path:
    """Return the path of an entry's contact sheet: a figure of the page, or in the work folder."""
    on_page = name in study.get("figures", [])
    return figure_path(results.study, f"{name}.webp") if on_page else work / name / "sheet.webp"


def write_sheet(evaluation: PromptEvaluation, path: Path) -> None:
    """Write 16 images of each group, before above after, as WebP."""
    groups = [evaluation.groups[group] for group in ("direct", "synonyms", "retained")]
    sheet = plots.grid(_rows(groups, "before"), _rows(groups, "after"), 16, zoom=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(io.BytesIO(sheet)).convert("RGB").save(path, "WEBP", quality=80, method=6)


def conflict(path: Path) -> dict:
    """Return the cosines of the two gradients over a run, from its log. A closed form has none."""
    if not path.exists():
        return {"steps": 0}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cosines = [row["cosine"] for row in rows if row.get("cosine") is not None]
    return {
        "steps": len(rows),
        "mean_cosine": sum(cosines) / len(cosines) if cosines else None,
        "share_negative": sum(c < 0 for c in cosines) / len(cosines) if cosines else None,
        "clamped": sum(row.get("clamped", 0) or row.get("opposed", 0) for row in rows),
        "degenerate": sum(row.get("degenerate", 0) for row in rows),
    }


def cpu_seconds(path: Path) -> list[float]:
    """Return the process seconds of a run after each of its steps."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [round(total, 2) for total in itertools.accumulate(row["cpu_seconds"] for row in rows)]


def _rows(groups: list, when: str) -> Any:
    import torch

    return torch.cat([group.images[when][:16] for group in groups])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--entries", default="", help="only these, by name, in this order")
    parser.add_argument("--work", type=Path, default=Path("runs/studies"))
    parser.add_argument("--seeds", default="", help="only these of the reported seeds, e.g. 0")
    parser.add_argument(
        "--sheets", action="store_true", help="write only the contact sheets, of the first seed"
    )
    args = parser.parse_args()
    study, results = yaml.safe_load(args.study.read_text()), Results(args.study.stem)
    for name in parse_names(parser, "entries", args.entries, study["entries"]):
        entry = study["entries"][name]
        seeds = [
            s
            for s in entry.get("seeds", study["seeds"])
            if not args.seeds or str(s) in args.seeds.split(",")
        ]
        if args.sheets:
            draw_sheet(
                study, name, work=args.work / args.study.stem, results=results, seed=seeds[0]
            )
        else:
            run_entry(
                study,
                name,
                entry=entry,
                work=args.work / args.study.stem,
                results=results,
                seeds=seeds,
            )


if __name__ == "__main__":
    main()
