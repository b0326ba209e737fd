"""Erase shapes from the small CLIP, and generate images with its text tower.

    python -m studies.clip studies/configs/clip.yaml [--tasks one] [--methods munba]

The accuracies are zero-shot: on images of the forget set, the retain set and the test set, and for
labels that the training never used (colour, style). Papers use ImageNet labels for the latter. For
methods with `plug: true` the text tower goes into tiny-sd, which generates `images` of each shape.
Each task is a result of the study (studies/result_tables.py).
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from concept_eraser import api, registry
from concept_eraser.data import generate
from concept_eraser.data.labelled import Labelled, choose, rest_of
from concept_eraser.evaluation.labelled.classification import predict
from concept_eraser.evaluation.statistics import frechet_of_features
from concept_eraser.models.families.clip import Clip
from concept_eraser.models.loading import load_part
from concept_eraser.tiny.painter import SHAPES
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from studies import grids, tasks
from studies.classifiers import seeded, with_passes

OTHER = ("color", "style")  # labels for generalisation
SAMPLING = generate.Sampling(8, 5.0, 64, "bf16")


def painted_data(study: dict, split: str, label: str = "shape", seed: int = 0) -> Labelled:
    return _painted_data(study["data"]["n"], split, label, seed)


@cache
def _painted_data(n: int, split: str, label: str, seed: int) -> Labelled:
    return registry.build("dataset", "painted", {"n": n, "label": label, "seed": seed}).load(split)


def accuracies(
    clip: Clip, study: dict, classes: list[str], seed: int = 0
) -> dict[str, dict[str, float]]:
    """Return accuracy and n on the forget, retain and test images, and for other labels.

    Args:
        clip: The model.
        study: The configuration.
        classes: The classes to forget. The test images are of the other classes.
        seed: The seed of the test images. Selection uses another seed than the report.
    """
    train, test = painted_data(study, "train"), painted_data(study, "test", seed=seed)
    forget = choose(train, classes=classes)
    net = clip.zero_shot(train.names, study["templates"])
    sets = {
        "forget": (train, forget),
        "retain": (train, rest_of(train, forget)),
        "test": (test, rest_of(test, choose(test, classes=classes))),
    }
    correct_by_set = {name: predict(net, data, rows).correct for name, (data, rows) in sets.items()}
    # the test images, which have no forgotten shape, with templates that have none either
    for label in OTHER:
        data = painted_data(study, "test", label, seed)
        correct_by_set[label] = predict(
            clip.zero_shot(data.names, study["other_templates"]), data, sets["test"][1]
        ).correct
    return {
        name: {"value": float(correct.mean()), "n": len(correct)}
        for name, correct in correct_by_set.items()
    }


def generated_rates(clip_run: Any, study: dict, base: int = 9000) -> dict[str, Any]:
    """Generate images with tiny-sd and the text tower of a CLIP.

    Returns:
        The rate of each shape with its no-object rate, and features [shapes, n, d].
    """
    model = api.plug("tiny-sd", clip_run)
    judge = registry.load("judge", "tiny")()
    rates, features = {}, []
    for i, shape in enumerate(SHAPES):
        prompts = [f"a picture of a {shape}"] * study["images"]
        images = generate.generate(model, prompts, generate.seeds_for(prompts, base + i), SAMPLING)
        labels = judge.classify(images)["shape"]
        rates[shape] = {
            "shown": float((labels == shape).mean()),
            "none": float((labels == "none").mean()),
            "n": len(labels),
        }
        features.append(torch.from_numpy(judge.features(images)))
    return {"rates": rates, "features": torch.stack(features)}


def erase(
    spec: dict, study: dict, classes: list[str], point: float | dict, seed: int, folder: Path
) -> api.Run:
    """Erase classes from the CLIP with a method at one setting.

    The setting is a learning rate, or options as in `method.alpha: 5`.
    """
    train = painted_data(study, "train")
    forgotten = len(choose(train, classes=classes))
    settings: dict[str, Any] = {
        "method": with_passes(
            seeded(spec["method"], seed), forgotten, len(train) - forgotten, study["batch_size"]
        ),
        "training": {
            "steps": study["steps"],
            "batch_size": study["batch_size"],
            "seed": seed,
            "device": "cpu",
            "save_every": 10**6,
        },
        "trainable": {
            "select": "text_attention",
            "saliency": spec.get("saliency"),
            "reinitialise": spec.get("reinitialise"),
        },
    }
    settings["training"] |= spec.get("training", {})  # a paper's optimiser, as in a recipe
    for key, value in grids.named(point).items():
        section, name = key.split(".")
        settings[section] = {**settings[section], name: value}
    return api.erase(
        model="tiny-sd",
        target="clip",
        templates=study["templates"],
        forget={
            "data": "painted",
            "options": study["data"],
            "classes": classes,
            "loss": spec["forget"],
            "scale": spec.get("scale", 1.0),
        },
        retain={
            "data": "rest",
            "loss": "data",
            "l1": spec.get("l1", 0.0),
            "distill": spec.get("distill", 0.0),
        },
        output=folder,
        **settings,
    )


def run_task(study: dict, name: str, methods: list[str], work: Path) -> dict[str, Any]:
    """Return the result of a task."""
    classes = study["tasks"][name]["classes"]
    original = load_part("tiny-sd", "clip")
    assert isinstance(original, Clip)
    before = generated_rates(original, study)
    retained_rows = [i for i, shape in enumerate(SHAPES) if shape not in classes]

    def distance(after: dict[str, Any]) -> float:
        one, two = (
            f["features"][retained_rows].flatten(0, 1).double().numpy() for f in (after, before)
        )
        return frechet_of_features(one, two)

    def row(run: api.Run, seed: int, plug: bool) -> dict[str, Any]:
        result: dict[str, Any] = {
            "seed": seed,
            "seconds": run.seconds,
            "accuracy": accuracies(cast(Clip, run.model), study, classes),
        }
        if plug:
            after = generated_rates(run.model, study)
            result |= {"drawn": after["rates"], "fid_to_original": distance(after)}
        return result

    # the original against itself with other seeds
    floor = distance(generated_rates(original, study, base=9500))
    rows: list[dict[str, Any]] = [
        {
            "method": "original",
            "label": "original",
            "runs": [
                {
                    "accuracy": accuracies(original, study, classes),
                    "drawn": before["rates"],
                    "fid_to_original": floor,
                }
            ],
        }
    ]
    failures: dict[str, str] = {}
    for method in methods:
        spec, start = study["methods"][method], time.monotonic()
        try:
            best, grid = choose_setting(study, spec, classes, work / method)
            runs = [
                row(
                    erase(
                        spec,
                        study,
                        classes=classes,
                        point=best,
                        seed=seed,
                        folder=work / f"{method}_report_{seed}",
                    ),
                    seed,
                    spec.get("plug", False),
                )
                for seed in study["seeds"]
            ]
        except UserError as error:  # the other methods still run
            failures[spec["label"]] = str(error)
            continue
        rows.append(
            {
                "method": method,
                "label": spec["label"],
                "point": grids.named(best),
                "grid": grid,
                "runs": runs,
            }
        )
        print(
            (
                f"{name} {method}: "
                f"{[round(r['accuracy']['forget']['value'], 3) for r in runs]} "
                f"({time.monotonic() - start:.0f} s)"
            ),
            flush=True,
        )
    return {
        "task": name,
        "label": study["tasks"][name]["label"],
        "classes": classes,
        "seeds": study["seeds"],
        "settings": {
            k: study[k]
            for k in (
                "data",
                "templates",
                "other_templates",
                "select",
                "steps",
                "batch_size",
                "images",
            )
        },
        "rows": rows,
        "failed": failures,
        "environment": provenance.describe(),
    }


def choose_setting(
    study: dict, spec: dict, classes: list[str], work: Path
) -> tuple[dict, list[dict[str, Any]]]:
    """Return the best setting of the grid, and all with their scores.

    The score is the test accuracy minus the accuracy on the forget set, on the training seed and
    test images of selection.
    """
    grid: list[dict[str, Any]] = []
    for i, point in enumerate(grids.points(spec["grid"])):
        try:
            run = erase(
                spec,
                study,
                classes=classes,
                point=point,
                seed=study["select"]["seeds"][0],
                folder=work.with_name(f"{work.name}_{i}"),
            )
        except UserError as error:  # the loss diverged at this setting
            grid.append(
                {"point": grids.named(point), "score": None, "failed": str(error).split(";")[0]}
            )
            continue
        values = accuracies(run.model, study, classes, seed=1)  # type: ignore[arg-type]
        grid.append(
            {
                "point": grids.named(point),
                "score": values["test"]["value"] - values["forget"]["value"],
            }
        )
    finite = [s for s in grid if s["score"] is not None]
    if not finite:
        raise UserError(f"every setting failed: {grid[-1]['failed']}")
    return max(finite, key=lambda s: s["score"])["point"], grid


def main() -> None:
    tasks.main(__doc__, run_task)


if __name__ == "__main__":
    main()
