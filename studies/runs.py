"""One run of a study: a recipe at one point of a grid and one training seed, trained and evaluated,
and kept.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from concept_eraser import api, registry
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.suite import PromptEvaluation, dumps
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils.errors import UserError


def run_one(
    entry: dict, point: dict, seed: int, suite: Any, n: int, folder: Path, watch: dict | None = None
) -> tuple[dict, PromptEvaluation | None]:
    """Train one recipe at one point and seed, evaluate it; (its JSON, the evaluation with images
    if just made).
    """
    recipe = recipe_of(entry, point, seed, watch)
    clear(folder, recipe)
    result_file = folder / f"result_{n}.json"
    if result_file.exists():
        content = json.loads(result_file.read_text())
        if content["evaluation"].get("judge") == registry.load("judge", suite.judge)().fingerprint:
            # a run seen by another judge is looked at again; its images are cached
            return content, None
    start = time.monotonic()
    run = api.erase(recipe, output=folder, resume=True)
    evaluation = api.evaluate(run.model or erased_model(run), suite, before=recipe.model, n=n)
    result = {
        "recipe": recipe.resolved(),
        "point": point,
        "seed": seed,
        "run": json.loads((folder / "done.json").read_text()),
        "size_mb": round(size(folder) / 1e6, 2),
        "evaluation": evaluation.as_dict(),
    }
    result_file.write_text(dumps(result))
    # weights.safetensors is enough to make it again
    shutil.rmtree(folder / "pipeline", ignore_errors=True)
    print(
        (
            f"{folder}: trained {run.seconds:.0f} s, in all {time.monotonic() - start:.0f} "
            f"s, score {score(result):.3f}"
        ),
        flush=True,
    )
    return result, evaluation


def recipe_of(entry: dict, point: dict, seed: int, watch: dict | None = None) -> recipes.Recipe:
    """An entry's recipe at one point of its grid and one training seed."""
    changes = {**entry.get("set", {}), **point, "training.seed": seed} | (
        {"watch": watch} if watch else {}
    )
    return recipes.load(entry["recipe"], [f"{k}={json.dumps(v)}" for k, v in changes.items()])


def same(older: dict, recipe: recipes.Recipe, *, with_watch: bool = True) -> bool:
    """Whether a result is of this recipe, also where it was written before the recipe's words had
    others beside them; watched: and was looked at in the same way meanwhile."""
    content = {key: value for key, value in older["recipe"].items() if with_watch or key != "watch"}
    try:
        return recipes.validate(content, older["entry"]).fingerprint == recipe.fingerprint
    except UserError:
        return False


def clear(folder: Path, recipe: recipes.Recipe) -> None:
    """Take away a run of another setting, chosen before or on another machine, or of a version
    whose recipes differ.
    """
    of = folder / "recipe.yaml"
    try:
        other = of.exists() and recipes.load(str(of)).fingerprint != recipe.fingerprint
    except UserError:
        other = True
    if other:
        shutil.rmtree(folder)


def size(folder: Path) -> int:
    """Bytes of a run's result: a LoRA's factors where there are some, else the changed tensors."""
    factors = list((folder / "lora").glob("*.safetensors"))
    return sum(path.stat().st_size for path in factors or [folder / "weights.safetensors"])


def erased_model(run: api.Run) -> Any:
    """The erased model, from the changed tensors of a finished run."""
    model = api.load(run.recipe.model)
    tensors = load_file(run.folder / "weights.safetensors")
    keys = model.parts[run.recipe.target].load_state_dict(tensors, strict=False)
    if keys.unexpected_keys:
        raise SystemExit(
            f"{run.folder}: weights.safetensors is not of {run.recipe.target}, e.g. "
            f"{keys.unexpected_keys[0]}"
        )
    return model


def after(result: dict, metric: str, group: str) -> float:
    return next(
        r["after"]["value"]
        for r in result["evaluation"]["results"]
        if (r["metric"], r["group"]) == (metric, group)
    )


def score(result: dict) -> float:
    attribute = next(iter(result["evaluation"]["protocol"]["concept"]))
    return after(result, f"accuracy_{attribute}", "retained") - after(
        result, "concept_rate", "direct"
    )


def suite_name(study: dict, entry: dict) -> str:
    return entry["suite"] if "suite" in entry else study["suite"]


def suite_of(study: dict, entry: dict, image_seed: int | None) -> Any:
    """The entry's suite, with the study's numbers of images, drawing others where a seed is
    given.
    """
    suite = suites.load(suite_name(study, entry))
    image_counts = study.get("images", {})
    sizes = {
        name: group.model_copy(update={"n": image_counts.get(name, group.n)})
        for name, group in suite.groups.items()
    }
    suite = suite.model_copy(update={"groups": sizes})
    return suite if image_seed is None else suite.model_copy(update={"seed": image_seed})
