"""One run of a study: a recipe at one setting and one training seed, trained and evaluated."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from concept_eraser import api
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.suite import PromptEvaluation, dumps
from concept_eraser.models import run_base
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils.errors import UserError
from studies.never_learned_change import NeverLearnedChange


def run_one(
    entry: dict, point: dict, seed: int, suite: Any, n: int, folder: Path, watch: dict | None = None
) -> tuple[dict, PromptEvaluation | None]:
    """Train a recipe at one setting and seed, and evaluate it.

    Returns:
        The result, and the evaluation with images. The evaluation is None for an earlier result.
    """
    recipe = recipe_of(entry, point, seed, watch)
    clear(folder, recipe)
    result_file = folder / f"result_{n}.json"
    if result_file.exists():
        content = json.loads(result_file.read_text())
        is_of_judge = content["evaluation"].get("judge") == suite.build_judge().fingerprint
        if is_of_judge and has_protocol(content["evaluation"], suite, n):
            # with another judge or protocol the run is evaluated again; its images are cached
            return content, None
    start = time.monotonic()
    run = api.erase(recipe, output=folder, resume=True)
    evaluation = api.evaluate(model_of(run), suite, before=recipe.model, n=n)
    result = {
        "recipe": recipe.resolved(),
        "point": point,
        "seed": seed,
        "run": json.loads((folder / "done.json").read_text()),
        "size_mb": round(size(folder) / 1e6, 2),
        "evaluation": evaluation.as_dict(),
    }
    result_file.write_text(dumps(result))
    # the LoRA or weights.safetensors is enough to load it again
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
    """Return the recipe of an entry at one setting and one training seed.

    The key `change` of an entry has the options of a forget loss that only a study has
    (studies/never_learned_change.py).
    """
    overrides = {**entry.get("set", {}), **point, "training.seed": seed} | (
        {"watch": watch} if watch else {}
    )
    recipe = recipes.load(entry["recipe"], [f"{k}={json.dumps(v)}" for k, v in overrides.items()])
    if "change" not in entry:
        return recipe
    content = recipe.resolved()
    change = entry["change"]
    content["forget"]["loss"] = NeverLearnedChange(
        tuple(change["conditional"]), tuple(change["unconditional"])
    )
    return recipes.load(content)


def same(older: dict, recipe: recipes.Recipe, *, with_watch: bool = True) -> bool:
    """Return whether a result has this recipe. Older results may lack fields with defaults.

    Args:
        older: The result.
        recipe: The recipe.
        with_watch: Whether the evaluations during the training must be the same too.
    """
    content = {key: value for key, value in older["recipe"].items() if with_watch or key != "watch"}
    try:
        return recipes.validate(content, older["entry"]).fingerprint == recipe.fingerprint
    except UserError:
        return False


def has_protocol(evaluation: dict, suite: Any, n: int | None) -> bool:
    """Return whether an evaluation has the protocol and the prompts of a suite.

    The description of the suite may differ. The weights of the judge are not compared.

    Args:
        evaluation: The stored evaluation.
        suite: The suite.
        n: The largest number of images of a group; None for that of the suite.
    """
    expected = suite.with_at_most(n)
    protocols = [
        evaluation.get("protocol", {}),
        json.loads(dumps(expected.model_dump(mode="json"))),
    ]
    stored, own = ({**protocol, "about": ""} for protocol in protocols)
    return stored == own and all(
        evaluation["prompt_hashes"].get(name) == suites.group_prompts(expected, name).hash
        for name in expected.groups
    )


def clear(folder: Path, recipe: recipes.Recipe) -> None:
    """Remove the folder of a run with another recipe."""
    recipe_file = folder / "recipe.yaml"
    try:
        is_other = (
            recipe_file.exists()
            and recipes.load(str(recipe_file)).fingerprint != recipe.fingerprint
        )
    except UserError:
        is_other = True
    if is_other:
        shutil.rmtree(folder)


def size(folder: Path) -> int:
    """Return the bytes of a run's result: of its LoRA, or of the changed tensors."""
    lora_files = list((folder / "lora").glob("*.safetensors"))
    return sum(path.stat().st_size for path in lora_files or [folder / "weights.safetensors"])


def model_of(run: api.Run) -> Any:
    """Return the erased model of a run, from memory or else from its folder.

    It has the name of its original, as `erased_model` gives it.
    """
    if run.model is None:
        return erased_model(run)
    run.model.source = run.recipe.model
    return run.model


def erased_model(run: api.Run) -> Any:
    """Return the erased model, from the LoRA or the changed tensors of a finished run.

    It has the name of its original: a result names no folder of a machine.
    """
    if not (run.folder / "weights.safetensors").is_file():
        model = api.load(run.folder)
        model.source = run.recipe.model
        return model
    model = api.load(run.recipe.model)
    run_base.apply_changed_tensors(run.folder, model)
    return model


def after(result: dict, metric: str, group: str) -> float:
    """Return the value of a metric on a group after the erasure."""
    return next(
        r["after"]["value"]
        for r in result["evaluation"]["results"]
        if (r["metric"], r["group"]) == (metric, group)
    )


def score(result: dict) -> float:
    """Return the retain accuracy minus the concept rate."""
    attribute = next(iter(result["evaluation"]["protocol"]["concept"]))
    return after(result, f"accuracy_{attribute}", "retained") - after(
        result, "concept_rate", "direct"
    )


def suite_name(study: dict, entry: dict) -> str:
    """Return the suite of an entry, by default that of the study."""
    return entry["suite"] if "suite" in entry else study["suite"]


def suite_of(study: dict, entry: dict, image_seed: int | None) -> Any:
    """Return the suite of an entry with the numbers of images of the study.

    `image_seed` selects other images.
    """
    suite = suites.load(suite_name(study, entry))
    image_counts = study.get("images", {})
    sizes = {
        name: group.model_copy(update={"n": image_counts.get(name, group.n)})
        for name, group in suite.groups.items()
    }
    suite = suite.model_copy(update={"groups": sizes})
    return suite if image_seed is None else suite.model_copy(update={"seed": image_seed})
