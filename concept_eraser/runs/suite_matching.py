"""Which suite measures a run.

Its forget groups have a prompt of the run's forget set, and its retain groups have none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from concept_eraser.concepts.plan import SUITE, SUITES
from concept_eraser.data import prompts
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.suite import Suite
from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.storage.base_model import BUNDLED_MODELS
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError, quote


def recipe_of(model: Any) -> Recipe | None:
    """Return the recipe of a run folder; None for anything else."""
    path = Path(str(model)) / "recipe.yaml" if isinstance(model, str | Path) else None
    return recipes.load_run(path.parent) if path is not None and path.is_file() else None


def _overlap(recipe: Recipe, suite: Suite, role: str) -> str | None:
    """Return a prompt of the run's forget set that is in a group of that role; None if none is."""
    forget_texts = {
        text
        for objective in recipe.forgotten
        if objective.prompts
        for text in prompts.load(objective.prompts).texts
    }
    own_prompts = (
        text
        for group in suite.groups.values()
        if group.role == role
        for text in prompts.load(group.prompts).texts
    )
    return next((text for text in own_prompts if text in forget_texts), None)


def _measures(recipe: Recipe, suite: Suite) -> bool:
    """Whether a suite measures the concept of a run. False if its prompts are not available."""
    try:
        return (
            _overlap(recipe, suite, "forget") is not None
            and _overlap(recipe, suite, "retain") is None
        )
    except UserError:
        return False


def _is_here(suite: str) -> bool:
    """Whether the prompts need no download. An error message must not wait for a network."""
    names = resources.names("prompts")
    sets = [group.prompts for group in suites.load(suite).groups.values()]
    files = [resources.find("prompts", one) for one in sets if one in names]
    files.append(resources.find("eval", suite))
    return not any("hf://" in file.read_text(encoding="utf-8") for file in files)


def require_kept(recipe: Recipe | None, suite: Suite) -> None:
    """Check that a suite counts no erased concept as retained.

    Raises:
        UserError: The run erased several concepts, and the retain groups have a prompt of one. Or
        the prompts of the run cannot be read.
    """
    if recipe is None or len(recipe.forgotten) < 2:
        return
    try:
        is_own = _overlap(recipe, suite, "forget") is not None
        overlap = _overlap(recipe, suite, "retain") if is_own else None
    except UserError as error:
        raise UserError(
            f"the suite cannot be compared with the prompts that this run forgot: {error}"
        ) from None
    if overlap is not None:
        raise UserError(
            f"the suite counts {overlap!r} as retained, but it is in the forget set of this run; "
            "give one that does not (`concept-eraser list suites`), or a file of your own"
        )


def own_suites(model: Any) -> list[str]:
    """Return the paths of the suites that `erase CONCEPT` wrote into a run folder."""
    if not isinstance(model, str | Path) or recipe_of(model) is None:
        return []
    folder = Path(model)
    files = [folder / SUITE, *sorted((folder / SUITES).glob("*.yaml"))]
    return [str(file) for file in files if file.is_file()]


def _require_own_prompts(path: str) -> None:
    """Check that a suite of a run folder reads no file, since the folder may be a stranger's.

    Raises:
        UserError: The prompts of a group are a file.
    """
    for name, group in suites.load(path).groups.items():
        if isinstance(group.prompts, str) and group.prompts not in resources.names("prompts"):
            raise UserError(
                f"{path}: the prompts of {name!r} are a file ({quote(group.prompts)}); give the "
                "suite with --suite if you trust it"
            )


def own_suite(model: Any) -> str | None:
    """Return the path of the suite in a run folder; None if there is none, or several.

    Raises:
        UserError: The prompts of one of its groups are a file.
    """
    own_files = own_suites(model)
    if len(own_files) != 1:
        return None
    _require_own_prompts(own_files[0])
    return own_files[0]


def suite_of(model: Any) -> str:
    """Return the suite in the run folder, or the one with the name of the run's forget set.

    The bundled model and a model in memory have `tiny_star`.

    Raises:
        UserError: There is none, or there are several.
    """
    if (own_file := own_suite(model)) is not None:
        return own_file
    recipe = recipe_of(model)
    names = [objective.prompts for objective in recipe.forgotten] if recipe else []
    if len(names) > 1:
        suite_names = own_suites(model) or [
            name
            for name in resources.names("eval")
            if recipe and _is_here(name) and _measures(recipe, suites.load(name))
        ]
        raise UserError(
            (
                f"this run erased {len(names)} concepts, and a suite measures one; give one "
                "with --suite, and one after the other to see them all"
            )
            + (f", e.g. {', '.join(suite_names)}" if suite_names else "")
        )
    name = names[0] if names else None
    if isinstance(name, str) and name in resources.names("eval"):
        return name
    if recipe:
        raise UserError(
            f"no suite has the name of the forget set of this run ({name}); give one with "
            "--suite (`concept-eraser list suites`, or a file of your own)"
        )
    if isinstance(model, str | Path) and str(model) not in BUNDLED_MODELS:
        raise UserError(
            f"{model} is no run folder, so its suite is unknown; check the path, or give a suite "
            "with --suite (`concept-eraser list suites`, or a file of your own)"
        )
    return "tiny_star"


def suite_option(model: Any) -> list[str]:
    """Return the words `--suite SUITE` for a command on a model without a suite, else none.

    A run on labelled data needs no suite.
    """
    try:
        recipe = recipe_of(model)
        if recipe is None or recipe.target in recipes.PROMPTED:
            suite_of(model)
    except UserError:
        return ["--suite", "SUITE"]
    return []
