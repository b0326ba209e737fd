"""The numbers of a run on labelled data: accuracies, membership attacks, or reconstruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from concept_eraser.data.labelled import Labelled, open_data, rest_of, same_examples
from concept_eraser.evaluation.base import Evaluation, Result
from concept_eraser.evaluation.labelled import classification, reconstruction
from concept_eraser.evaluation.statistics import Interval
from concept_eraser.evaluation.suite import dumps
from concept_eraser.models.base import Loaded, ModelSource, onto_gpu
from concept_eraser.models.families.clip import Clip
from concept_eraser.models.loading import load_part, names_code
from concept_eraser.models.module import WEIGHTS
from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.keywords import LabelledData, LabelledSet
from concept_eraser.storage.manifest import require_intact
from concept_eraser.storage.readers import read_tensors
from concept_eraser.storage.writers import write_text
from concept_eraser.targets.labelled_data import open_named, select_rows
from concept_eraser.utils import provenance as environment
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError

FORGOTTEN_TEST = "test, forgotten classes"


@dataclass(frozen=True)
class LabelledEvaluation(Evaluation):
    """The numbers of a classifier, a CLIP model or a VAE on labelled data.

    Attributes:
        results: the metric "accuracy" or "psnr" on each set of examples, with its interval.
        environment: versions, commit, device and command line.
        recipe: the fingerprint of the run's recipe.
        target: "classifier", "clip" or "vae".
        measurements: "before" and "after" -> "accuracy" or "psnr" by set, "table", "membership".
        too_few: the sets of fewer than two examples, which are left out.
        refused: what was not measured, with the reason.

    Example:
        >>> import concept_eraser
        >>> evaluation = concept_eraser.evaluate("runs/classifier")
        >>> accuracy = evaluation.find("accuracy", "forget")
    """

    results: list[Result]
    environment: dict[str, Any]
    recipe: str
    target: str
    measurements: dict[str, dict[str, Any]]
    too_few: list[str]
    refused: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "target": self.target,
            "results": self.measurements,
            "too_few": self.too_few,
            **({"refused": self.refused} if self.refused else {}),
            "environment": self.environment,
        }

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        # a test set without the forgotten classes has no AUC: nan, which JSON does not have
        write_text(path, dumps(self.as_dict()), overwrite=overwrite)


def measure(
    run: Path,
    *,
    before: ModelSource | None = None,
    after: ModelSource | None = None,
    objects: Mapping[LabelledSet, LabelledData] | None = None,
    allow_pickle: bool = False,
    allow_code: bool = False,
) -> LabelledEvaluation:
    """Measure a run on the examples of its forget set and retain set, and on test examples.

    The models compute on the GPU if there is one. A model in memory stays there.

    Args:
        run: the folder of a run on labelled data.
        before: the model before the run, if it was in memory.
        after: the erased model, if it was in memory.
        objects: the data sets in memory by name ("forget", "retain", "test").
        allow_pickle: also load weights stored as pickles, which can execute code.
        allow_code: call a model that the run's recipe names as package.module:function.

    Returns:
        The accuracy or the PSNR on each set, with its interval, and the membership attacks.

    Raises:
        UserError: the data or a model are not available.
    """
    recipe = recipes.load_run(run)
    objects_by_name: dict[str, Any] = dict((objects or {}).items())
    permissions = {"allow_pickle": allow_pickle, "allow_code": allow_code}
    erased_model = _after(run, recipe, after, **permissions)
    rows_by_objective = select_rows(
        recipe, {k: v for k, v in objects_by_name.items() if k != "test"}
    )
    (data, forget), (other, retain) = (
        rows_by_objective["forget"],
        rows_by_objective["retain"] if "retain" in rows_by_objective else _rest(rows_by_objective),
    )
    test = (
        open_data(objects_by_name["test"]).with_classes(data.names)
        if "test" in objects_by_name
        else _test(recipe, data.names)
    )
    sets = {"forget": (data, forget), "retain": (other, retain)}
    if test is not None:
        sets["test"] = (test, torch.arange(len(test)))
    test_rows = None
    objective = recipe.forgotten[0]
    whole = objective.classes and objective.share is None and objective.indices is None
    if test is not None and whole:
        # the accuracy on a forgotten class should be low in the test set too
        is_forgotten = torch.isin(test.labels, data.labels[forget])
        test_rows = (~is_forgotten).nonzero()[:, 0]
        sets |= {
            "test": (test, test_rows),
            FORGOTTEN_TEST: (test, is_forgotten.nonzero()[:, 0]),
        }
    # a set of fewer than two examples has no interval
    few = sorted(name for name, (_, rows) in sets.items() if len(rows) < 2)
    sets = {name: value for name, value in sets.items() if name not in few}
    # without test examples of the forgotten classes only the AUC is missing
    needed = [name for name in few if name != FORGOTTEN_TEST]
    obstacle = "" if recipe.target == "vae" else _membership_obstacle(data, other, test, few=needed)
    measurements: dict[str, dict[str, Any]] = {}
    for when, model in (
        ("before", _before(recipe, before, **permissions)),
        ("after", erased_model),
    ):
        if model is None:
            continue
        onto_gpu(model)
        module = _module(model, data, recipe)
        if recipe.target == "vae":
            measurements[when] = {"psnr": reconstruction.intervals(module, sets)}
            continue
        measurements[when] = {"accuracy": classification.intervals(module, sets)}
        if test is not None and not obstacle:
            measurements[when]["table"] = asdict(
                classification.measure(
                    module, data, forget=forget, retain=retain, test=test, test_rows=test_rows
                )
            )
            rows = torch.arange(len(test)) if test_rows is None else test_rows
            members = classification.predict(module, data, retain)
            others = classification.predict(module, test, rows)
            targets = classification.predict(module, data, forget)
            measurements[when]["membership"] = classification.every_membership(
                members, others, targets
            )
    return LabelledEvaluation(
        results=_results(measurements),
        environment=environment.describe(),
        recipe=recipe.fingerprint,
        target=recipe.target,
        measurements=measurements,
        too_few=few,
        refused={"membership attacks": obstacle} if obstacle else {},
    )


def _membership_obstacle(
    data: Labelled, other: Labelled, test: Labelled | None, *, few: Sequence[str]
) -> str:
    """Return why no membership attack is possible, or "".

    Args:
        data: The data of the forget set.
        other: The data of the retain set.
        test: The test examples.
        few: The sets of fewer than two examples that the attacks need.
    """
    if test is None:
        return "there are no test examples"
    if few:
        return f"fewer than two examples in {', '.join(few)}"
    if not same_examples(other, data):
        return "the retain set is of other data than the forget set"
    return ""


def _results(measurements: Mapping[str, Mapping[str, Any]]) -> list[Result]:
    """Return the accuracies or PSNRs of all sets, in the form of results on prompts."""
    metric = "psnr" if "psnr" in measurements["after"] else "accuracy"
    before = measurements.get("before", {}).get(metric, {})
    return [
        Result(
            metric=metric,
            group=name,
            after=Interval(**value),
            better=_better(name),
            before=Interval(**before[name]) if name in before else None,
        )
        for name, value in measurements["after"][metric].items()
    ]


def _better(name: str) -> Literal["lower", "higher"]:
    """Return whether an accuracy or a PSNR on a set of examples should be "lower" or "higher"."""
    return "lower" if name == "forget" or name.endswith("forgotten classes") else "higher"


def _before(
    recipe: recipes.Recipe, model: ModelSource | None, *, allow_pickle: bool, allow_code: bool
) -> Loaded | None:
    """Return the original model.

    Returns None if the recipe names an object that was in memory and the caller passes none.
    """
    if model is not None:
        # the caller has named it
        return load_part(model, recipe.target, allow_pickle=allow_pickle, allow_code=True)
    if recipe.model.endswith("in memory") or recipe.model.startswith("a fresh "):
        return None
    return load_part(recipe.model, recipe.target, allow_pickle=allow_pickle, allow_code=allow_code)


def _after(
    run: Path,
    recipe: recipes.Recipe,
    model: ModelSource | None,
    *,
    allow_pickle: bool,
    allow_code: bool,
) -> Loaded:
    """Return the erased model: the caller's, the saved one, or the one of the recipe's function."""
    if model is not None:
        return load_part(model, recipe.target, allow_pickle=allow_pickle, allow_code=True)
    if names_code(recipe.model):
        original = load_part(recipe.model, recipe.target, allow_code=allow_code)
        file = run / resources.whole_model(original.family) / WEIGHTS
        require_intact(file)
        tensors = read_tensors(file)
        next(iter(original.parts.values())).load_state_dict(tensors)
        return original
    try:
        return load_part(str(run), recipe.target, allow_pickle=allow_pickle)
    except UserError as error:
        raise UserError(f"{error}. In Python: evaluate(run, after=<the erased model>)") from None


def _rest(rows: dict[str, tuple[Labelled, torch.Tensor]]) -> tuple[Labelled, torch.Tensor]:
    data, forget = rows["forget"]
    return data, rest_of(data, forget)


def _test(recipe: recipes.Recipe, names: tuple[str, ...]) -> Labelled | None:
    """Return the test split of the data to forget.

    It is that of a named set, or the subfolder `test`; else None.
    """
    objective = recipe.forgotten[0]
    try:
        test_data = open_named(objective.data, objective.options, "test")
    except UserError:
        return None
    own = Path(str(objective.data))
    return None if own.exists() and not (own / "test").is_dir() else test_data.with_classes(names)


def _module(model: Loaded, data: Labelled, recipe: recipes.Recipe) -> nn.Module:
    if isinstance(model, Clip):
        return model.zero_shot(data.names, recipe.templates)
    return model.parts[recipe.target]
